"""`hf_deberta.optimize(model, runtime="openvino")`: the same numbers, for batches that OpenVINO can compute."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

import pytest
import torch
from test_optimize import (
    TOLERANCE,
    check_same_outputs,
    count_computations,
    difference,
    make_inputs,
    make_model,
    outputs,
)

import hf_deberta
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaLayer
from hf_deberta.serving import choices, fused_layers, openvino_layers
from hf_deberta.serving.optimized_model import OptimizedEmbeddings

pytest.importorskip("openvino")
optimize_module = importlib.import_module("hf_deberta.serving.optimize")  # the name is a function in the package
ON_ONE_THREAD = OptimizedEmbeddings.embed_on_one_thread


def optimized(model, dtype=torch.float32):
    return hf_deberta.optimize(model, dtype, runtime="openvino")


def test_a_batch_with_a_row_of_padding():
    model, inputs = make_model(), make_inputs("equal")
    inputs["attention_mask"] = torch.ones(4, 37)
    inputs["attention_mask"][2] = 0
    expected = outputs(model, inputs)
    for dtype in (torch.float32, torch.int8):
        result = outputs(optimized(model, dtype), inputs)
        assert difference(result[[0, 1, 3]], expected[[0, 1, 3]]) < TOLERANCE[dtype] and result.isfinite().all()


@pytest.mark.parametrize("kept", [True, 0, 1, 2, -1, [0, -1]], ids=str)
def test_hidden_states_between_layers(kept):
    model, inputs = make_model(), make_inputs("equal")
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=kept)
        with count_computations() as counts:
            result = optimized(model)(**inputs, output_hidden_states=kept)
    assert counts()[0] == 2
    for states, expected_states in zip(result.hidden_states, expected.hidden_states, strict=True):
        assert (states is None) == (expected_states is None)
        assert states is None or difference(states, expected_states) < TOLERANCE[torch.float32]
    assert difference(result.last_hidden_state, expected.last_hidden_state) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("cores", "pinned"), [(1, False), (2, True), (3, False)])
def test_settings_of_openvino(cores, pinned, monkeypatch):
    """Pinned threads of several processes would share cores, and memory must not grow with each new length."""
    monkeypatch.setattr(openvino_layers, "available_cores", lambda: cores)
    openvino = optimized(make_model()).encoder.fused_layers.openvino
    with mock.patch.object(openvino_layers, "openvino_core") as core:
        openvino.compile(range(1), None, 2)
    settings = core.return_value.compile_model.call_args.args[2]
    assert settings["ENABLE_CPU_PINNING"] is pinned and settings["CPU_RUNTIME_CACHE_CAPACITY"] == 256


def test_there_is_one_core():
    """A Core that ends after a later one leaves no stack for signal handlers, which ends the process."""
    assert openvino_layers.openvino_core() is openvino_layers.openvino_core()


@pytest.mark.parametrize(("runtime", "largest"), [("openvino", 4 * 4 * 37**2 - 1), ("torch", 2**24)])
def test_large_batches_and_those_for_torch_are_computed_by_fused_layers(runtime, largest, monkeypatch):
    """OpenVINO needs more memory for many attention scores."""
    monkeypatch.setattr(openvino_layers, "MAX_SCORES_NUMEL", largest)
    with count_computations() as counts:
        check_same_outputs(make_model(), make_inputs("equal"), runtime=runtime)
    assert counts()[0] == 0


def test_fused_weights_are_made_when_they_are_used():
    """And results of OpenVINO are not overwritten by its next call."""
    model = optimized(make_model())
    layers = model.encoder.fused_layers.layers
    first = outputs(model, make_inputs("equal"))
    before = first.clone()
    outputs(model, make_inputs("equal"))
    assert torch.equal(first, before)
    assert not any("output" in vars(layer) for layer in layers)
    outputs(model, make_inputs("structured"))
    assert all("output" in vars(layer) for layer in layers)


@pytest.mark.parametrize(
    ("faster", "most"),
    [((False,), 0), ((True, False), 64), ((True, True, False), 256), ((True, True, True), choices.UNLIMITED_TOKENS)],
)
def test_the_faster_runtime_is_chosen(faster, most, monkeypatch):
    answers = iter(faster)
    monkeypatch.setattr(choices, "openvino_is_faster", lambda *_: next(answers))
    fused = hf_deberta.optimize(make_model()).encoder.fused_layers
    assert fused.max_openvino_tokens == most
    assert all(("output" in vars(layer)) == (most != choices.UNLIMITED_TOKENS) for layer in fused.layers)


def test_tokens_decide_between_runtimes(monkeypatch):
    model = optimized(make_model())
    model.encoder.fused_layers.max_openvino_tokens = 4 * 37
    with count_computations() as counts:
        outputs(model, make_inputs("equal"))
        outputs(model, make_inputs("long"))
    assert counts()[0] == 2


def test_timing_gives_a_choice():
    """Not which one: that depends on the processor. The next random numbers do not depend on the choice."""
    model, random_state = make_model(), torch.get_rng_state()
    choices.bfloat16_attention_ratio.cache_clear()
    fused = hf_deberta.optimize(model, torch.int8).encoder.fused_layers
    assert fused.max_openvino_tokens in (0, 64, 256, choices.UNLIMITED_TOKENS)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("last_turn", "limit", "ratio"),
    [([9, 9, 9, 2, 2, 2], 3, 4.5), ([1, 1, 1, 2, 2, 2], 3, 0.5), ([], 0, 9)],
    ids=["OpenVINO is slower", "OpenVINO is faster", "no turn begins after the limit"],
)
def test_median_of_the_turns_decides(last_turn, limit, ratio, monkeypatch):
    """The first turn, in which OpenVINO compiles, and one turn in which the processor was slow do not count."""
    seconds = iter([9, 9, 9, 1, 1, 1, *[1, 3, 5, 2, 4, 6], *last_turn])
    monkeypatch.setattr(choices, "call_time", lambda call: next(seconds))
    monkeypatch.setattr(choices, "MAX_SECONDS_OF_TURNS", limit)
    assert choices.time_ratio(outputs, outputs, turns=3) == ratio


@pytest.mark.parametrize(("ratio", "answer"), [(1.04, True), (1.06, False)])
def test_openvino_may_be_a_little_slower(ratio, answer, monkeypatch):
    monkeypatch.setattr(choices, "time_ratio", lambda *_: ratio)
    openvino = optimized(make_model()).encoder.fused_layers.openvino
    assert choices.openvino_is_faster(openvino, range(1), (1, 32)) is answer


def test_without_openvino(monkeypatch):
    monkeypatch.setattr(fused_layers, "has_openvino", lambda: False)
    monkeypatch.setattr(optimize_module, "has_openvino", lambda: False)
    check_same_outputs(make_model(), make_inputs("equal"))
    for options in ({"runtime": "openvino"}, {"shapes": [(1, 5)]}):
        with pytest.raises(ImportError, match="pip install openvino"):
            hf_deberta.optimize(make_model(), **options)


def test_a_broken_openvino_is_not_used(monkeypatch):
    broken = ModuleType("openvino")
    broken.__spec__ = ModuleSpec("openvino", None)
    monkeypatch.setitem(sys.modules, "openvino", broken)
    monkeypatch.delitem(sys.modules, "openvino.opset13", raising=False)
    monkeypatch.setattr(openvino_layers.logger, "warning_once", mock.Mock())
    assert not openvino_layers.has_openvino.__wrapped__()
    (message,) = openvino_layers.logger.warning_once.call_args.args
    assert "PyTorch computes all batches" in message and "opset13" in message


RELU, CONVOLUTION = {"hidden_act": "relu"}, {"preset": "v2-xlarge"}


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (RELU, {"runtime": "openvino"}, "use runtime='torch'"),
        (CONVOLUTION, {"runtime": "openvino"}, "use runtime='torch'"),
        (RELU, {"shapes": [(1, 5)]}, "shapes are for encoders with GELU"),
        ({}, {"shapes": [(1, 5)], "runtime": "torch"}, "leave out runtime='torch' or shapes"),
        ({}, {"shapes": [(9, 99), (1, 5)]}, r"shapes \[\(9, 99\)\] would need much memory"),
        *(({}, {"shapes": shapes}, "must be pairs") for shapes in ([512], [(1,)], [(0, 5)], [(1, 5.0)], ["ab"])),
    ],
    ids=str,
)
def test_what_openvino_cannot_compute_is_refused(settings, options, message, monkeypatch):
    monkeypatch.setattr(openvino_layers, "MAX_SCORES_NUMEL", 1000)
    model = make_model(**settings)
    with pytest.raises(ValueError, match=message):
        hf_deberta.optimize(model, **options)
    assert type(model.encoder) is HfDebertaEncoder and type(model.encoder.layer[0]) is HfDebertaLayer


@pytest.mark.parametrize("settings", [RELU, CONVOLUTION], ids=str)
def test_other_layers_are_for_torch(settings):
    assert hf_deberta.optimize(make_model(**settings)).encoder.fused_layers.openvino is None


@pytest.mark.parametrize(("batch", "tokens", "parts"), [(1, 37, 1), (1, 300, 2), (3, 300, 4), (4, 600, 0)])
def test_embeddings_of_short_texts_are_computed_on_one_thread(batch, tokens, parts):
    """Operations on at most 32768 numbers wake no threads, and LayerNorm is such operations."""
    model = make_model(preset="v1-base", hidden_size=128, embedding_size=128, position_biased_input=True)
    inputs = {"input_ids": torch.randint(5, 90, (batch, tokens)), "attention_mask": torch.ones(batch, tokens)}
    inputs["attention_mask"][0, 5:9] = 0
    inputs["token_type_ids"] = torch.randint(0, 2, (batch, tokens))
    model.config.unpad_inputs = False
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=[0]).hidden_states[0]
    optimized(model)
    parts_of = mock.patch.object(OptimizedEmbeddings, "embed_on_one_thread", autospec=True, side_effect=ON_ONE_THREAD)
    with parts_of as calls, torch.no_grad():
        result = model(**inputs, output_hidden_states=[0]).hidden_states[0]
    assert len(calls.mock_calls) == parts
    assert all(call.args[1].shape[:2].numel() * 128 <= 32768 for call in calls.mock_calls)
    assert difference(result, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("model_class", [hf_deberta.HfDebertaModel, hf_deberta.HfDebertaForSequenceClassification])
def test_shapes_have_graphs_of_their_own(model_class, dtype):
    model = make_model(model_class)
    ids = torch.randint(5, 100, (3, 9))
    padded = {"input_ids": ids[:2], "attention_mask": torch.arange(9) >= torch.tensor([[0], [4]])}
    with_mask = {"input_ids": ids[:2, :5], "attention_mask": torch.ones(2, 5)}
    batches = [{"input_ids": ids[:2]}, {"input_ids": ids}, with_mask, padded]
    expected = [outputs(model, batch) for batch in batches]
    hf_deberta.optimize(model, dtype, runtime="openvino", shapes=[(2, 9), (2, 5)])
    for batch, states in zip(batches, expected, strict=True):
        real = batch["attention_mask"].bool() if "attention_mask" in batch and states.dim() == 3 else ...
        assert difference(outputs(model, batch)[real], states[real]) < TOLERANCE[dtype]
    requests = model.base_model.encoder.fused_layers.openvino.requests
    first = range(3 if model is model.base_model else 2)  # a classifier needs one state of the last layer
    assert {(first, (2, 9)), (first, (2, 5))} <= set(requests)
    assert {shape for part, shape in requests if part != first} <= {None}


@pytest.mark.parametrize(
    "indices, graphs",
    [([0, 1], {(range(2), None), (range(2, 3), None)}), ([0, 3], {(range(3), (2, 9))})],
    ids=["between layers", "last"],
)
def test_hidden_states_of_a_shape(indices, graphs):
    """The graph of a shape has the last states alone."""
    model = make_model(num_hidden_layers=3)
    inputs = {"input_ids": torch.randint(5, 100, (2, 9)), "output_hidden_states": indices}
    with torch.no_grad():
        expected = model(**inputs).hidden_states
        result = hf_deberta.optimize(model, runtime="openvino", shapes=[(2, 9)])(**inputs).hidden_states
    assert set(model.encoder.fused_layers.openvino.requests) == graphs
    assert [i for i, states in enumerate(result) if states is not None] == indices
    assert all(difference(result[i], expected[i]) < TOLERANCE[torch.float32] for i in indices)


def test_openvino_computes_shapes_that_are_slower_otherwise(monkeypatch):
    monkeypatch.setattr(fused_layers, "choose_max_openvino_tokens", lambda *layers: 0)
    model = hf_deberta.optimize(make_model(), shapes=[[1, 6]])
    for tokens, calls_expected in ((6, 1), (7, 0)):
        with count_computations() as counts:
            outputs(model, {"input_ids": torch.full((1, tokens), 7)})
        assert counts()[0] == calls_expected
