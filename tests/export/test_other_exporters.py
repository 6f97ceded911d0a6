"""Exporters of PyTorch and Transformers work on the default attention, for other batch sizes and lengths too."""

import pytest
import torch
from export_cases import assert_agrees, make_model, make_shallow_model, padded_inputs, run_onnx
from numerics import V1_ATTENTION

HEAD = "HfDebertaForSequenceClassification"


class Logits(torch.nn.Module):
    """A classifier as a function of two tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def example(model):
    """Inputs to export with, and their dynamic axes."""
    inputs = tuple(padded_inputs(model, (3, 7)).values())
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    return inputs, (axes, axes)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"conv_kernel_size": 3}, V1_ATTENTION], ids=["v3", "v2", "v1"])
def test_torch_export(fields):
    model = make_model(HEAD, **fields)
    inputs, axes = example(model)
    with torch.no_grad():
        exported = torch.export.export(Logits(model), inputs, dynamic_shapes=axes, strict=False).module()
    for shape in ((3, 2), (2, 9), (5, 60), (1, 600)):
        assert_agrees(model, lambda inputs: [exported(*inputs.values())], padded_inputs(model, shape))


@pytest.mark.slow
def test_exporter_of_transformers(tmp_path):
    exporters = pytest.importorskip("transformers.exporters")  # Transformers 5.17 has none
    pytest.importorskip("onnxscript")
    model = make_shallow_model(HEAD)
    config = exporters.OnnxConfig(dynamic=True)
    exporters.OnnxExporter().export(model, padded_inputs(model, (3, 7)), config).save_pretrained(tmp_path)
    run = run_onnx(tmp_path / "model.onnx")
    for shape in ((2, 9), (3, 60)):
        assert_agrees(model, run, padded_inputs(model, shape))
