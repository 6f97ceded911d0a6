"""Exporters of PyTorch and Transformers work on the default attention, for other batch sizes and lengths too."""

import pytest
import torch
from export_cases import SHAPES, largest_error, make_model, make_shallow_model, padded_inputs

TOLERANCE = 1e-5  # float32 sums in another order
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


def test_torch_export():
    model = make_model(HEAD)
    inputs, axes = example(model)
    with torch.no_grad():
        exported = torch.export.export(Logits(model), inputs, dynamic_shapes=axes, strict=False).module()
    for shape in ((2, 9), (5, 60)):
        error = largest_error(model, lambda inputs: [exported(*inputs.values())], padded_inputs(model, shape))
        assert error < TOLERANCE, shape


@pytest.mark.slow
def test_torch_onnx_export(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make_shallow_model(HEAD)
    inputs, axes = example(model)
    with torch.no_grad():
        program = torch.onnx.export(
            Logits(model), inputs, dynamic_shapes=axes, dynamo=True, input_names=["input_ids", "attention_mask"]
        )
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for shape in SHAPES:
        inputs = padded_inputs(model, shape)
        values = {name: tensor.numpy() for name, tensor in inputs.items()}
        assert largest_error(model, lambda _, values=values: session.run(None, values), inputs) < TOLERANCE, shape


@pytest.mark.slow
def test_exporter_of_transformers(tmp_path):
    exporters = pytest.importorskip("transformers.exporters")  # Transformers 5.17 has none
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make_shallow_model(HEAD)
    config = exporters.OnnxConfig(dynamic=True)
    exporters.OnnxExporter().export(model, padded_inputs(model, (3, 7)), config).save_pretrained(tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for shape in ((2, 9), (3, 60)):
        inputs = padded_inputs(model, shape)
        values = {name: tensor.numpy() for name, tensor in inputs.items()}
        assert largest_error(model, lambda _, values=values: session.run(None, values), inputs) < TOLERANCE, shape
