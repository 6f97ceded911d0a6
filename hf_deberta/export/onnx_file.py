"""Write a model as an ONNX file, for ONNX Runtime and whatever else reads ONNX."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_deberta.export.graph import GraphModel
from hf_deberta.model.pretrained_model import HfDebertaPreTrainedModel

OPSET = 20  # the first with Gelu


def to_onnx(
    model: HfDebertaPreTrainedModel,
    file: str | Path,
    *,
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the model to an ONNX file and return its path.

    Inputs are `input_ids` and `attention_mask` [B, N], of any batch size and length. With `packed` they are `input_ids`
    [1, T], a row of documents, and their boundaries `cu_seq_lens_q` [documents + 1]: no time is spent on padding but in
    attention. With `dtype=torch.int8`, weights have 7 bits, with a scale per output channel, and ONNX Runtime quantizes
    activations as it runs. Weights beyond 2 GB go to a second file, FILE.data.

    >>> from hf_deberta.export import to_onnx
    >>> to_onnx(model, "model.onnx")
    >>> session = onnxruntime.InferenceSession("model.onnx")
    >>> session.run(["logits"], {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()})
    """
    check_dtype(dtype)
    file = Path(file)
    with temporary_folder(file) as folder:
        program = onnx_program(model, packed)
        if dtype == torch.float32:
            program.save(folder / file.name)
        else:
            with tempfile.TemporaryDirectory(dir=folder) as inner:
                program.save(Path(inner) / "float32.onnx")
                quantize(Path(inner) / "float32.onnx", folder / file.name)
    return file


def onnx_program(model: HfDebertaPreTrainedModel, packed: bool) -> Any:
    """The model as a torch.onnx.ONNXProgram."""
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


def searchsorted(sequence: Any, values: Any, right: bool = False, **options: Any) -> Any:
    """Translate torch.searchsorted: for each value, the count of numbers in the sequence before it.

    The values [..., T] are compared with all numbers of the sequence [..., D].
    """
    from onnx import TensorProto
    from onnxscript import opset20

    op: Any = opset20  # its signatures do not allow lists, which its functions take
    values, sequence = op.Unsqueeze(values, [-1]), op.Unsqueeze(sequence, [-2])
    before = op.GreaterOrEqual(values, sequence) if right else op.Greater(values, sequence)
    return op.ReduceSum(op.Cast(before, to=TensorProto.INT64), [-1], keepdims=0)


def quantize(source: Path, target: Path) -> None:
    """Give the dense layers of an ONNX file int8 weights; embeddings and position tables stay float32.

    Weights have 7 bits: with 8, processors without VNNI cut off sums of products (benchmarks/log.md).
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        source,
        target,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        reduce_range=True,
        use_external_data_format=len(list(source.parent.iterdir())) > 1,
    )


def check_dtype(dtype: torch.dtype) -> None:
    """Raise a ValueError for types that files cannot have."""
    if dtype not in (torch.float32, torch.int8):
        raise ValueError(f"dtype must be float32 or int8, not {dtype}")


@contextmanager
def temporary_folder(file: Path) -> Iterator[Path]:
    """Give a folder beside `file`; its files are renamed to the file's folder when the block ends without an error.

    `file` itself is renamed last, so that it is never there without the files that belong to it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f"{file.name}.unfinished") as name:
        folder = Path(name)
        yield folder
        for path in sorted(folder.iterdir(), key=lambda path: path.name == file.name):
            os.replace(path, file.parent / path.name)
