"""Write a model as OpenVINO files, FILE.xml and FILE.bin."""

import shutil
import tempfile
from pathlib import Path

import torch

from hf_deberta.export.onnx_file import to_onnx
from hf_deberta.model.pretrained_model import HfDebertaPreTrainedModel


def to_openvino(
    model: HfDebertaPreTrainedModel, file: str | Path, *, packed: bool = False, dtype: torch.dtype = torch.float32
) -> Path:
    """Write the model to OpenVINO's two files and return the path of the .xml."""
    import openvino

    file = Path(file)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        graph = openvino.convert_model(to_onnx(model, Path(folder) / "model.onnx", packed=packed))
        openvino.save_model(graph, Path(folder) / file.name, compress_to_fp16=False)
        shutil.move(Path(folder) / Path(file.name).with_suffix(".bin"), file.with_suffix(".bin"))
        shutil.move(Path(folder) / file.name, file)
    return file
