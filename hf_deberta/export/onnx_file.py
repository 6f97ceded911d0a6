"""Write a model as an ONNX file.

The file holds float32, or int8 weights per channel with activations that ONNX Runtime quantizes as it goes.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from hf_deberta.export.graph import GraphModel
from hf_deberta.model.pretrained_model import HfDebertaPreTrainedModel

OPSET = 20  # the first with Gelu


def to_onnx(
    model: HfDebertaPreTrainedModel, file: str | Path, *, packed: bool = False, dtype: torch.dtype = torch.float32
) -> Path:
    """Write the model to an ONNX file and return its path."""
    file = Path(file)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        unfinished = Path(folder) / file.name
        onnx_program(model, packed).save(unfinished)
        shutil.move(unfinished, file)
    return file


def onnx_program(model: HfDebertaPreTrainedModel, packed: bool = False) -> Any:
    """The model as torch.onnx.ONNXProgram."""
    graph = GraphModel(model, packed)
    inputs, dynamic_shapes = graph.example_inputs()
    with torch.no_grad():
        program = torch.export.export(graph, inputs, dynamic_shapes=(dynamic_shapes,), strict=False)
        return torch.onnx.export(
            program,
            input_names=graph.input_names,
            output_names=graph.output_names,
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table={torch.ops.aten.searchsorted.Tensor: searchsorted},
            verbose=False,
        )


def searchsorted(sequence, values, out_int32: bool = False, right: bool = False, side=None, sorter=None):
    """torch.searchsorted for `document_numbers`: the count of boundaries [D] at or before each value [T]."""
    from onnxscript import opset20 as op

    before = op.GreaterOrEqual(op.Unsqueeze(values, [-1]), sequence)
    return op.ReduceSum(op.Cast(before, to=7), [-1], keepdims=0)
