"""ONNX Runtime and OpenVINO as peers: graphs of in-tree and of this package, each with its fastest settings.

A peer is a runtime and the source of its graph. "in-tree" is exported by torch.onnx.export, "ours" by
hf_deberta.export.to_openvino. Threads are as many as PyTorch's. The settings of a type are timed one after another on
the inputs, and the fastest stay:

- all types: graphs for any shape, or compiled for the shape of the inputs.
- bfloat16: OpenVINO alone.
- int8, ONNX Runtime: weights per channel, activations quantized dynamically.
- int8, OpenVINO: weights per channel, with activations in bfloat16, or in float32 and quantized dynamically.
"""

import tempfile
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_deberta.export import to_openvino

RUNTIMES = ("onnxruntime in-tree", "openvino in-tree", "openvino ours")
MODULES = {"onnxruntime": ("onnx", "onnxruntime"), "openvino": ("onnx", "openvino", "nncf")}
AXES = {0: "batch", 1: "tokens"}  # names of the sizes that inputs may have
TRIAL_CALLS = 15  # calls of each setting; the fastest counts
WHOLE_ROW = 1 << 20  # group size of OpenVINO's dynamic quantization: one scale for each row
F32, BF16 = {"INFERENCE_PRECISION_HINT": "f32"}, {"INFERENCE_PRECISION_HINT": "bf16"}
OPENVINO_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "float32": {"float32": F32},
    "bfloat16": {"bfloat16": BF16},
    "int8": {
        "int8 weights, bfloat16": {**BF16, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0},
        "int8 weights, dynamic activations": {**F32, "DYNAMIC_QUANTIZATION_GROUP_SIZE": WHOLE_ROW},
    },
}
Run = Callable[[dict[str, Any]], Any]  # from inputs as arrays to the first output
Shape = tuple[int, ...] | None  # of the inputs; None: any


@dataclass(frozen=True)
class Runner:
    """A compiled graph with the call of a model: keyword inputs, a tuple with the first output."""

    run: Run
    settings: str

    def __call__(self, **inputs: torch.Tensor) -> tuple[torch.Tensor]:
        inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
        return (torch.from_numpy(self.run({name: value.numpy() for name, value in inputs.items()})),)


class FirstOutput(nn.Module):
    """A model as a function of ids and mask: hidden states, or the logits of a classifier."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


class Graphs:
    """Exported graphs for any batch size and length. Each is written once; the folder is deleted with the object."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="graphs-")

    def file(self, runtime: str, source: str, model: Any, int8: bool) -> Path:
        """The graph in float32, or with int8 weights per channel: ours in OpenVINO's format, in-tree's in ONNX."""
        write, suffix = (to_openvino, "xml") if source == "ours" else (write_onnx, "onnx")
        plain = self.written(f"{source}.{suffix}", write, model)
        if not int8:
            return plain
        quantize, suffix = (quantize_onnx, "onnx") if runtime == "onnxruntime" else (quantize_openvino, "xml")
        return self.written(f"{source}-int8.{suffix}", quantize, plain)

    def written(self, name: str, write: Callable[[Any, Path], object], source: Any) -> Path:
        file = Path(self.folder.name) / name
        if not file.exists():
            write(source, file)
        return file


def write_onnx(model: Any, file: Path) -> None:
    """Export by TorchScript: the graph of torch.export was no faster in either runtime, and takes longer to write."""
    ids = torch.randint(5, model.config.vocab_size, (2, 48))
    torch.onnx.export(
        FirstOutput(model),
        (ids, torch.ones_like(ids)),
        str(file),
        input_names=["input_ids", "attention_mask"],
        output_names=["output"],
        dynamic_axes={"input_ids": AXES, "attention_mask": AXES, "output": {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )


def quantize_onnx(source: Path, file: Path) -> None:
    """Activations are quantized dynamically."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, file, per_channel=True, weight_type=QuantType.QInt8, reduce_range=True)


@cache
def openvino_core() -> Any:
    """The one Core: the end of an earlier one would leave later signals without a stack (benchmarks/log.md)."""
    import openvino

    return openvino.Core()


def quantize_openvino(source: Path, file: Path) -> None:
    import nncf
    import openvino

    graph = openvino_core().read_model(source)
    graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_SYM)
    openvino.save_model(graph, file, compress_to_fp16=False)


def fastest_runner(peer: str, model: Any, inputs: dict[str, Any], dtype: str, graphs: Graphs) -> Runner:
    """Return the runner of a peer with the settings that are fastest for these inputs and give finite numbers."""
    runners = list(all_runners(peer, model, tuple(inputs["input_ids"].shape), dtype, graphs))
    # OpenVINO in bfloat16 rounds the lowest number of in-tree's mask to -inf
    runners = [runner for runner in runners if runner(**inputs)[0].isfinite().all()]
    return min(runners, key=lambda runner: min(timeit.repeat(partial(runner, **inputs), number=1, repeat=TRIAL_CALLS)))


def all_runners(peer: str, model: Any, shape: Shape, dtype: str, graphs: Graphs) -> Iterator[Runner]:
    """Yield a runner for each setting of a peer and type; without a shape, only those for any shape."""
    runtime, source = peer.split()
    if runtime == "onnxruntime" and dtype == "bfloat16":
        raise ValueError("ONNX Runtime has no matrix products in bfloat16 on x86 processors")
    file = graphs.file(runtime, source, model, dtype == "int8")
    shapes = {"any shape": None} if shape is None else {"any shape": None, "fixed shapes": shape}
    if runtime == "onnxruntime":
        for name, sizes in shapes.items():
            yield Runner(onnxruntime_session(file, sizes), name)
        return
    for setting, options in OPENVINO_SETTINGS[dtype].items():
        for name, sizes in shapes.items():
            yield Runner(openvino_request(file, sizes, options), f"{name}, {setting}")


def onnxruntime_session(file: Path, shape: Shape) -> Run:
    """Threads spin within a run and stop after it, so that they do not slow other peers."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for name, size in zip(AXES.values(), shape or (), strict=False):
        options.add_free_dimension_override_by_name(name, size)
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


def openvino_request(file: Path, shape: Shape, options: dict[str, Any]) -> Run:
    """One request for low latency, with inputs and outputs that are not copied."""
    core = openvino_core()
    graph = core.read_model(file)
    if shape is not None:
        graph.reshape({port.get_any_name(): list(shape) for port in graph.inputs})
    threads = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    request = core.compile_model(graph, "CPU", threads | options).create_infer_request()
    return lambda inputs: request.infer(inputs, share_inputs=True, share_outputs=True)[0]
