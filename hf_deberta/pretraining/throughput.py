"""Tokens per second, and model FLOPs utilization (MFU): the operations of training as a share of the device's peak.

Counts the matrix products of the model as the paper defines it, three times the forward pass. Other work of an
implementation, and work that it saves, is not counted, so that implementations can be compared.
"""

import re
import time
from typing import Any

import torch
from transformers import TrainerCallback

from hf_deberta.model.configuration_hf_deberta import HfDebertaConfig
from hf_deberta.model.losses import IGNORED

# Dense peaks in operations per second, from the makers' data sheets. The first name that a device's name contains wins;
# no digit may follow it, as in "RTX A1000".
BF16_PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "NVIDIA L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


def training_operations(
    config: HfDebertaConfig,
    tokens: float,
    context_length: float,
    predictions: float,
    vocab_size: int | None = None,
) -> float:
    """Return the operations of a forward and a backward pass of the masked-language model.

    Args:
        tokens: number of tokens in the batch.
        context_length: number of keys per query: the mean length of a token's document.
        predictions: number of positions that are decoded and scored.
        vocab_size: `config.vocab_size` by default; 0 for a model without a language-model head.

    >>> training_operations(HfDebertaConfig(), tokens=4096, context_length=512, predictions=614) / 1e12   # base size
    5.1...
    """
    width, inner = config.hidden_size, config.intermediate_size
    vocab_size = config.vocab_size if vocab_size is None else vocab_size
    terms = len(config.pos_att_type or ()) if config.relative_attention else 0
    keys_and_values = 2 * 2 * width * width
    queries_and_feed_forward = 2 * (2 * width * width + 2 * width * inner)  # with the output projection
    # scores, the weighted sum of values, and one product of the same size per position term
    attention = 2 * (2 + terms) * context_length * width
    layers = config.num_hidden_layers
    decoder = 0.0
    if vocab_size and config.uses_mask_decoder:
        layers -= 1
        decoder = tokens * keys_and_values + predictions * config.emd_steps * (queries_and_feed_forward + attention)
    encoder = layers * tokens * (keys_and_values + queries_and_feed_forward + attention)
    head = predictions * 2 * (width * width + width * vocab_size) if vocab_size else 0
    return 3 * (encoder + decoder + head)


def rtd_training_operations(
    generator: HfDebertaConfig, discriminator: HfDebertaConfig, tokens: float, context_length: float, predictions: float
) -> float:
    """Return the operations of a forward and a backward pass of generator and discriminator."""
    head = 3 * 2 * tokens * discriminator.hidden_size**2
    generation = training_operations(generator, tokens, context_length, predictions)
    return generation + training_operations(discriminator, tokens, context_length, 0, vocab_size=0) + head


def peak_operations(device: torch.device) -> float | None:
    """Return the device's bfloat16 peak in operations per second if its data sheet is known."""
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for name, peak in BF16_PEAKS.items() if re.search(rf"{name}(?!\d)", device_name)), None)


class ThroughputMeter(TrainerCallback):
    """Counts tokens and measures the time of training between two logs, without the time of evaluating and saving."""

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id
        self.counts = torch.zeros(2, dtype=torch.long)  # real tokens, predicted tokens
        self.started = self.last_step = time.perf_counter()

    def add(self, batch: dict[str, torch.Tensor]) -> None:
        real, has_label = batch["input_ids"].ne(self.pad_token_id), batch["labels"].ne(IGNORED)
        counts = torch.stack([real.sum(), has_label.sum()])
        self.counts = self.counts.to(counts.device) + counts

    def read_and_reset(self) -> tuple[float, torch.Tensor]:
        """Return the seconds and counts [2] since the last call."""
        now, counts = time.perf_counter(), self.counts
        seconds, self.started = now - self.started, now
        self.counts = torch.zeros_like(counts)
        return seconds, counts

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.last_step = time.perf_counter()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Leave out the time since the last step, which was spent evaluating or saving."""
        now = time.perf_counter()
        self.started += now - max(self.last_step, self.started)
        self.last_step = now

    on_save = on_evaluate
