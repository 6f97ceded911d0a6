"""Write models as files for other runtimes: ONNX Runtime and OpenVINO.

>>> from hf_deberta.export import to_onnx, to_openvino
>>> to_onnx(model, "model.onnx")
>>> to_openvino(model, "model.xml")
"""

from hf_deberta.export.onnx_file import to_onnx
from hf_deberta.export.openvino_file import to_openvino

__all__ = ["to_onnx", "to_openvino"]
