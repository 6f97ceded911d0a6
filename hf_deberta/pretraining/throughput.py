"""How much work a training step is, and what share of a device's peak it reaches (MFU).

The work counted is that of the matrix products of the model as the paper has it, three times the forward pass. What
an implementation does besides, or saves, is not counted: so two implementations can be compared.
"""

import time

import torch

from hf_deberta.model.configuration_hf_deberta import HfDebertaConfig
from hf_deberta.model.dense import dense

# dense peaks in operations per second, from the makers' data sheets, of the first that a device's name contains
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
    tokens: int,
    context: float,
    predicted: int,
    vocabulary: int | None = None,
) -> float:
    """Operations of a forward and a backward pass of the masked-language model.

    Args:
        tokens: tokens of the batch.
        context: keys that a token sees on average: the length of its document.
        predicted: positions decoded and scored.
        vocabulary: words scored; `config.vocab_size`, or 0 for a model without a language-model head.

    >>> training_operations(HfDebertaConfig(), tokens=4096, context=512, predicted=614) / 1e12   # base size
    5.1...
    """
    width, inner = config.hidden_size, config.intermediate_size
    vocabulary = config.vocab_size if vocabulary is None else vocabulary
    terms = len(config.pos_att_type) if config.relative_attention else 0
    keys_and_values = 2 * 2 * width * width
    of_queries = 2 * (2 * width * width + 2 * width * inner)  # query and output projections, feed-forward
    # scores and their sum over values, and a product of as many numbers per position term
    attending = 2 * (2 + terms) * context * width
    layers = config.num_hidden_layers
    decoded = 0
    if vocabulary and config.uses_mask_decoder:
        layers -= 1
        decoded = tokens * keys_and_values + predicted * config.emd_steps * (of_queries + attending)
    encoder = layers * tokens * (keys_and_values + of_queries + attending)
    head = predicted * 2 * (width * width + width * vocabulary) if vocabulary else 0
    return 3 * (encoder + decoded + head)


def peak_operations(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second at best: of the data sheet, or measured with a large product where it is not known."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        for known, peak in BF16_PEAKS.items():
            if known in name:
                return peak
    return measured_peak(device, dtype)


def measured_peak(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """Of the best of a few products of large matrices, as a layer of the models does them; draws no random numbers."""
    layer = torch.nn.utils.skip_init(torch.nn.Linear, size, size, bias=False, device=device, dtype=dtype)
    torch.nn.init.ones_(layer.weight)
    states = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    with torch.no_grad():
        for _ in range(5):
            began = time.perf_counter()
            dense(layer, states)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
