"""Tiny models with every head, inputs for them, and the error of another runtime's outputs."""

from collections.abc import Callable, Iterable

import pytest
import torch

import hf_deberta
from hf_deberta import HfDebertaConfig, HfDebertaPreTrainedModel

PACKED_HEADS = (
    "HfDebertaModel",
    "HfDebertaForSequenceClassification",
    "HfDebertaForTokenClassification",
    "HfDebertaForQuestionAnswering",
    "HfDebertaForMaskedLM",
    "HfDebertaForPreTraining",
    "HfDebertaForCausalLM",
)
HEADS = (*PACKED_HEADS, "HfDebertaForMultipleChoice", "HfDebertaForEntityChoice")
LENGTHS = ((1,), (2, 1), (5, 1, 60, 2))
SHAPES = ((1, 1), (1, 2), (2, 7), (3, 60))  # the tiny model's tables saturate at 47


def make_model(head: str, **fields) -> HfDebertaPreTrainedModel:
    torch.manual_seed(0)
    config = HfDebertaConfig.from_preset("tiny", num_labels=3, **fields)
    model = getattr(hf_deberta, head)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # so that position terms and masks matter
    return model


def make_shallow_model(head: str) -> HfDebertaPreTrainedModel:
    """A tiny model with one layer, as exporting takes seconds a layer; two where the mask decoder reads the first."""
    return make_model(head, **({} if head == "HfDebertaForMaskedLM" else {"num_hidden_layers": 1, "emd_steps": 0}))


def padded_inputs(model: HfDebertaPreTrainedModel, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A batch with padding on the right in the first row, and on the left in the last."""
    batch, length = shape
    shape = (batch, 3, length) if type(model).__name__ == "HfDebertaForMultipleChoice" else shape
    mask = torch.ones(shape, dtype=torch.long)
    if length > 2:
        mask[0, ..., -2:] = 0
        mask[-1, ..., :1] = 0
    inputs = {"input_ids": torch.randint(5, 99, shape), "attention_mask": mask}
    if model.config.type_vocab_size > 0:
        inputs["token_type_ids"] = torch.randint(0, 2, shape)
    if type(model).__name__ == "HfDebertaForEntityChoice":
        inputs["entity_indices"] = torch.randint(0, length, (batch, 2, 3))
    return inputs


def packed_inputs(model: HfDebertaPreTrainedModel, lengths: Iterable[int]) -> dict[str, torch.Tensor]:
    """A row of documents with these lengths."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = {"input_ids": torch.randint(5, 99, (1, int(bounds[-1]))), "cu_seq_lens_q": bounds}
    if model.config.type_vocab_size > 0:
        inputs["token_type_ids"] = torch.randint(0, 2, inputs["input_ids"].shape)
    return inputs


def run_onnx(file) -> Callable:
    session = pytest.importorskip("onnxruntime").InferenceSession(file)
    return lambda inputs: session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})


def assert_agrees(model: HfDebertaPreTrainedModel, run: Callable, inputs: dict[str, torch.Tensor]) -> None:
    assert largest_error(model, run, inputs) < 1e-5  # float32 sums in another order


@torch.no_grad()
def largest_error(model: HfDebertaPreTrainedModel, run: Callable, inputs: dict[str, torch.Tensor]) -> float:
    """The largest difference of an output at real tokens, in units of the outputs' size where that is above 1."""
    expected = [value for value in model(**inputs).values() if torch.is_tensor(value)]
    largest, mask = 0.0, inputs.get("attention_mask")
    for actual, exact in zip(map(torch.as_tensor, run(inputs)), expected, strict=True):
        assert actual.shape == exact.shape
        difference = (actual - exact).abs() / exact.abs().max().clamp(min=1)
        if mask is not None and exact.shape[:2] == mask.shape:
            difference = difference[mask.bool()]
        largest = max(largest, float(difference.max()))
    return largest
