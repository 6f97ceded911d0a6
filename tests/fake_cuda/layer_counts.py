"""Counts of an encoder layer, the difference between a model of two layers and one of one, and of pretraining steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from counter import counting, simulated_cuda
from torch import nn
from transformers import BertConfig, BertModel, DebertaV2Config, DebertaV2Model

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaModel
from hf_deberta.pretraining.rtd_pretraining import HfDebertaForRtdPretraining, HfDebertaRtdConfig

Inputs = Callable[[int, int], dict[str, torch.Tensor]]  # from batch and length to the inputs of a model
BASE = {"vocab_size": 1000, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
V3 = {
    "relative_attention": True,
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
}


@dataclass
class LayerCounts:
    """What one layer or one step costs."""

    launches: int  # of PyTorch's operators
    triton_launches: int
    gigabytes: float  # read and written
    gflop: float

    def milliseconds(self) -> float:
        """Arithmetic at 600 TFLOP/s and 3.8 TB/s one after the other, to compare ratios. It is not a time."""
        return self.gflop / 600 + self.gigabytes / 3.8


def in_tree(layers: int) -> nn.Module:
    return DebertaV2Model(DebertaV2Config(**BASE, **V3, num_hidden_layers=layers))


def bert(layers: int) -> nn.Module:
    config = BertConfig(**BASE, num_hidden_layers=layers, max_position_embeddings=8192, attn_implementation="sdpa")
    return BertModel(config)


def ours(backend: str) -> Callable[[int], nn.Module]:
    def build(layers: int) -> nn.Module:
        model = HfDebertaModel(HfDebertaConfig.from_dict({**BASE, **V3, "num_hidden_layers": layers}))
        model.set_attn_implementation(backend)
        return model

    return build


PEERS = {"in-tree": in_tree, "bert": bert, "eager": ours("eager"), "sdpa": ours("sdpa"), "triton": ours("triton")}


def without_mask(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(batch, length, dtype=torch.long)}


def with_mask(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {**without_mask(batch, length), "attention_mask": torch.ones(batch, length, dtype=torch.long)}


def count_layer(
    peer: str,
    batch: int,
    length: int,
    training: bool,
    inputs: Inputs = without_mask,
    dtype: torch.dtype = torch.bfloat16,
) -> LayerCounts:
    """Return the counts of one layer, forward or in training forward and backward."""
    two, one = (count_model(peer, layers, inputs, (batch, length), training, dtype) for layers in (2, 1))
    return LayerCounts(*(getattr(two, field.name) - getattr(one, field.name) for field in fields(LayerCounts)))


def count_model(
    peer: str, layers: int, inputs: Inputs, shape: tuple[int, int], training: bool, dtype: torch.dtype
) -> LayerCounts:
    with simulated_cuda():
        with torch.device("cuda"), default_dtype(dtype):  # fake weights cannot be converted in place
            model: Any = PEERS[peer](layers).train(training)
            arguments = inputs(*shape)
        with counting() as counter, torch.set_grad_enabled(training):
            states = model(**arguments).last_hidden_state
            if training:
                states.sum().backward()
    return LayerCounts(counter.launches, counter.triton_launches, counter.bytes / 1e9, counter.flops / 1e9)


def count_step(objective: str, backend: str, batch: int, length: int, preset: str = "v3-base") -> LayerCounts:
    """Return the counts of forward and backward of "mlm" or "rtd" under autocast to bfloat16, 15 % of the words masked.

    Without the optimizer.
    """
    config = HfDebertaConfig.from_preset(preset)
    with simulated_cuda():
        with torch.device("cuda"):
            model: Any
            if objective == "mlm":
                model = HfDebertaForMaskedLM(config)
            else:
                model = HfDebertaForRtdPretraining(HfDebertaRtdConfig.from_discriminator(config))
            model.set_attn_implementation(backend)
            inputs = without_mask(batch, length)
            labels = torch.ones_like(inputs["input_ids"])
        with counting() as counter:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model.train()(**inputs, labels=labels, max_predictions_per_row=round(0.15 * length)).loss
            loss.backward()
    assert not counter.syncs
    return LayerCounts(counter.launches, counter.triton_launches, counter.bytes / 1e9, counter.flops / 1e9)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
