"""Write a model as OpenVINO files, FILE.xml and FILE.bin."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from hf_deberta.export.onnx_file import check_dtype, temporary_folder, to_onnx
from hf_deberta.model.pretrained_model import HfDebertaPreTrainedModel


def to_openvino(
    model: HfDebertaPreTrainedModel,
    file: str | Path,
    *,
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the model to FILE.xml, and its weights to FILE.bin beside it; return the path of the .xml.

    Inputs and `packed` are those of `to_onnx`. With `dtype=torch.int8`, weights have 8 bits, with a scale per output
    channel. bfloat16 is a setting of OpenVINO, not of the file:

    >>> from hf_deberta.export import to_openvino
    >>> file = to_openvino(model, "model.xml")
    >>> compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    >>> compiled({"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()})["logits"]
    """
    check_dtype(dtype)
    import openvino

    file = Path(file)
    if file.suffix != ".xml":
        raise ValueError(f"an OpenVINO file must end with .xml, not {file.name}")
    with temporary_folder(file) as folder, tempfile.TemporaryDirectory(dir=folder) as inner:
        graph = openvino.convert_model(to_onnx(model, Path(inner) / "model.onnx", packed=packed))
        if dtype == torch.int8:
            graph = with_int8_weights(graph)
        openvino.save_model(graph, folder / file.name, compress_to_fp16=False)
    return file


def with_int8_weights(graph: Any) -> Any:
    """The graph with int8 weights in dense layers; embeddings and position tables stay float32."""
    import nncf

    return nncf.compress_weights(
        graph, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=nncf.IgnoredScope(types=["Gather"])
    )
