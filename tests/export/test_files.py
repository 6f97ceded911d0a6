"""Files of ONNX and OpenVINO give the model's outputs in their runtimes, for any batch size and length."""

import re
from pathlib import Path

import numpy
import pytest
import torch
from export_cases import (
    HEADS,
    LENGTHS,
    PACKED_HEADS,
    SHAPES,
    assert_agrees,
    largest_error,
    make_model,
    make_shallow_model,
    packed_inputs,
    padded_inputs,
    run_onnx,
)

from hf_deberta.export import onnx_file, to_onnx, to_openvino
from hf_deberta.export.__main__ import main

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")
CORE = openvino.Core()  # kept: the end of an earlier Core would leave later signals without a stack (benchmarks/log.md)
pytest.importorskip("onnxscript")
# every head once, and once packed and once padded what differs there; test_graph has all of them
CASES = [
    *((head, False) for head in HEADS if head not in ("HfDebertaModel", "HfDebertaForPreTraining")),
    *((head, True) for head in PACKED_HEADS if head not in ("HfDebertaForQuestionAnswering",)),
]


@pytest.fixture(scope="module", autouse=True)
def each_graph_is_made_once():
    """To make a graph takes seconds. All models of a head have the same weights here."""
    programs, make = {}, onnx_file.onnx_program

    def make_once(model, packed):
        if (type(model), packed) not in programs:
            programs[type(model), packed] = make(model, packed)
        return programs[type(model), packed]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_file, "onnx_program", make_once)
        yield


def run_openvino(file, precision="f32"):
    compiled = CORE.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": precision})

    def run(inputs):
        results = compiled({name: tensor.numpy() for name, tensor in inputs.items()})
        return [results[output] for output in compiled.outputs]

    return run


def inputs_of(model, packed):
    if packed:
        return [packed_inputs(model, lengths) for lengths in LENGTHS]
    return [padded_inputs(model, shape) for shape in SHAPES]


def constant_products(file):
    """Names of the products of an ONNX file with no operand that depends on the input."""
    graph = onnx.load(file).graph
    varies = {value.name for value in graph.input}
    products = []
    for node in graph.node:
        if varies & set(node.input):
            varies |= set(node.output)
        elif node.op_type in ("MatMul", "Gemm", "Conv"):
            products.append(node.name)
    return products


@pytest.mark.slow
@pytest.mark.parametrize("head, packed", CASES)
def test_every_head(head, packed, tmp_path):
    model, folder = make_shallow_model(head), tmp_path / "new"
    file = to_onnx(model, folder / "model.onnx", packed=packed)
    xml = to_openvino(model, folder / "a.xml", packed=packed)
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "a.xml", "model.onnx"]
    in_onnx, in_openvino, in_bfloat16 = run_onnx(file), run_openvino(xml), run_openvino(xml, "bf16")
    for inputs in inputs_of(model, packed):
        assert_agrees(model, in_onnx, inputs)
        assert_agrees(model, in_openvino, inputs)
        assert largest_error(model, in_bfloat16, inputs) < 0.1  # where the processor has no bfloat16: float32
    assert constant_products(file) == []


@pytest.mark.parametrize(
    "runtime, packed",
    [("onnx", False), pytest.param("openvino", True, marks=pytest.mark.slow)],
)
def test_the_command_writes_int8(runtime, packed, tmp_path, capsys):
    if runtime == "openvino":
        pytest.importorskip("nncf")
    model = make_shallow_model("HfDebertaForTokenClassification")
    model.save_pretrained(tmp_path / "saved")
    file = tmp_path / ("model.onnx" if runtime == "onnx" else "model.xml")
    command = ["--model", tmp_path / "saved", "--to", runtime, "--output", file, "--dtype", "int8"]
    command += ["--packed"] if packed else []
    assert main([str(word) for word in command]) == 0
    started, *_, done = capsys.readouterr().out.splitlines()
    assert started.startswith(f"Writing {file}: {model.num_parameters():,} parameters")
    megabytes = sum(path.stat().st_size for path in tmp_path.glob("model.*")) / 1e6
    assert done.startswith(f"Wrote {file}, {megabytes:,.0f} MB. Run it: ")
    assert ('"cu_seq_lens_q": boundaries' in done) == packed
    run = run_onnx(file) if runtime == "onnx" else run_openvino(file)
    for inputs in inputs_of(model, packed):
        assert 1e-6 < largest_error(model, run, inputs) < 0.1
    if runtime == "onnx":
        types = [node.op_type for node in onnx.load(file).graph.node]
        layers = model.config.num_hidden_layers
        assert (
            types.count("MatMulInteger") == 5 * layers + 1
        )  # two of attention, its output, two of feed-forward; the head
        assert types.count("MatMul") == 4 * layers  # attention and position terms: products of activations
        weights = [onnx.numpy_helper.to_array(each) for each in onnx.load(file).graph.initializer]
        # two products with 255 must fit into 16 bits, in which processors without VNNI add them
        assert max(abs(weight.astype(int)).max() for weight in weights if weight.dtype == "int8" and weight.ndim) <= 64


def test_errors(tmp_path, capsys):
    model = make_model("HfDebertaModel")
    for export in (to_openvino, to_onnx):
        with pytest.raises(ValueError, match="float32 or int8"):
            export(model, tmp_path / "model.xml", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"\.xml"):
        to_openvino(model, tmp_path / "model.bin")
    model.save_pretrained(tmp_path / "saved")
    arguments = ["--model", str(tmp_path / "saved"), "--to", "openvino", "--output", str(tmp_path / "model.bin")]
    assert main(arguments) == 2
    assert ".xml" in capsys.readouterr().err
    assert [path.name for path in Path(tmp_path).iterdir()] == ["saved"]


def test_a_failed_export_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "model.onnx"
    file.write_text("old")

    def fail(*arguments):
        raise RuntimeError("no space")

    monkeypatch.setattr(onnx_file, "onnx_program", fail)
    with pytest.raises(RuntimeError):
        to_onnx(make_model("HfDebertaModel"), file)
    assert file.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.slow
def test_snippets_of_the_documentation_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_shallow_model("HfDebertaForSequenceClassification")
    to_onnx(model, "model.onnx")
    to_openvino(model, "model.xml")
    session = onnxruntime.InferenceSession(to_onnx(model, "packed.onnx", packed=True))

    def tokenizer(texts, padding=False, return_tensors=None):
        rows = [[ord(letter) for letter in text] for text in texts]
        if not padding:
            return {"input_ids": rows}
        width = max(map(len, rows))
        padded = [row + [0] * (width - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        return {name: numpy.array(value) for name, value in (("input_ids", padded), ("attention_mask", mask))}

    results = []
    page = Path(__file__).parents[2] / "docs" / "export.md"
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(snippets) == 3
    for snippet in snippets:
        names = {"tokenizer": tokenizer, "texts": ["ABC", "DEFGH"], "session": session}
        names |= {"onnxruntime": onnxruntime, "openvino": openvino, "numpy": numpy}
        exec(compile(snippet, page.name, "exec"), names)
        results.append(torch.as_tensor(names["logits"]))
    for logits in results[1:]:
        torch.testing.assert_close(logits, results[0], atol=1e-4, rtol=1e-4)
