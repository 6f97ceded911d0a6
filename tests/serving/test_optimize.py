"""`hf_deberta.optimize()`: the same numbers, from layers that own the weights."""

import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from numerics import needs_onednn_bfloat16
from test_parity_with_transformers import in_tree
from torch import nn

import hf_deberta
from hf_deberta.in_tree.encoder import present_options
from hf_deberta.serving import fused_attention, fused_linear
from hf_deberta.serving import optimize as optimize_file
from hf_deberta.serving.fused_attention import MAX_TOKENS_IN_ONE_PRODUCT, FusedAttention
from hf_deberta.serving.fused_layer import FusedLayer, output_sizes
from hf_deberta.serving.fused_linear import FusedLinear, Int8Linear

SMALL = {
    "hidden_size": 48,
    "embedding_size": 48,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 200,
    "num_labels": 3,
    "max_position_embeddings": 700,
    "initializer_range": 0.2,  # so that positions and heads matter
}
HEADS = (
    hf_deberta.HfDebertaModel,
    hf_deberta.HfDebertaForMaskedLM,
    hf_deberta.HfDebertaForSequenceClassification,
    hf_deberta.HfDebertaForTokenClassification,
    hf_deberta.HfDebertaForQuestionAnswering,
    hf_deberta.HfDebertaForPreTraining,
    hf_deberta.HfDebertaForCausalLM,
)
# largest difference, as a part of the largest number: of rounding to 24, 8 and 7 bits in some products
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 5e-2, torch.int8: 0.3}
BFLOAT16 = pytest.param(torch.bfloat16, marks=needs_onednn_bfloat16)
DTYPES = [torch.float32, BFLOAT16, torch.int8]


def make_model(model_class=hf_deberta.HfDebertaModel, preset="v3-base", **settings):
    return model_class(hf_deberta.HfDebertaConfig.from_preset(preset, **{**SMALL, **settings})).eval()


def make_inputs(case: str) -> dict[str, torch.Tensor]:
    batch, tokens = {"one token": (1, 1), "long": (1, 600), "packed": (1, 37)}.get(case, (4, 37))
    inputs = {"input_ids": torch.randint(5, 200, (batch, tokens))}
    position = torch.arange(tokens)
    if case == "padded":
        inputs["attention_mask"] = (position < torch.tensor([37, 9, 20, 9])[:, None]).long()
    elif case == "padded on the left":
        inputs["attention_mask"] = (position >= torch.tensor([0, 1, 2, 1])[:, None]).long()
    elif case == "structured":
        inputs["attention_mask"] = torch.ones(batch, tokens, tokens).tril().long()
    elif case == "packed":
        inputs["cu_seq_lens_q"] = torch.tensor([0, 5, 10, 37])
    return inputs


@torch.no_grad()
def outputs(model, inputs, **kwargs) -> torch.Tensor:
    return model(**inputs, **kwargs)[0]


def difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


def check_same_outputs(model, inputs, dtype=torch.float32, tokens=...):
    """Optimize the model: the outputs of these tokens stay the same."""
    expected = outputs(model, inputs)
    result = outputs(hf_deberta.optimize(model, dtype), inputs)
    assert difference(result[tokens], expected[tokens]) < TOLERANCE[dtype]


def real_tokens(inputs):
    """LayerNorm makes noise large in states of padding, which are 0."""
    mask = inputs.get("attention_mask", torch.ones(1))
    return mask.bool() if mask.dim() == 2 else ...


def count_fused_layers():
    """A context in which calls of fused layers are counted."""
    return mock.patch.object(FusedLayer, "compute", autospec=True, side_effect=FusedLayer.compute)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["equal", "one token", "padded", "padded on the left", "structured", "packed", "long"])
@pytest.mark.usefixtures("unpad_tiny_models")
@pytest.mark.parametrize("preset", ["v1-base", "v2-xlarge", "v3-base"])
def test_hidden_states_are_the_same(preset, case, dtype):
    inputs = make_inputs(case)
    with count_fused_layers() as layers:
        check_same_outputs(make_model(preset=preset), inputs, dtype, real_tokens(inputs))
    assert layers.call_count == 3


@pytest.mark.parametrize("model_class", HEADS, ids=lambda model_class: model_class.__name__)
@pytest.mark.parametrize("case", ["equal", "padded"])
def test_heads_give_the_same(case, model_class):
    with count_fused_layers() as layers:
        check_same_outputs(make_model(model_class), make_inputs(case))
    assert layers.call_count == 3


@pytest.mark.parametrize("terms", [["p2c", "c2p"], ["c2p"], ["p2c"], ["p2c", "c2p", "p2p"], []])
@pytest.mark.parametrize("case", ["equal", "padded"])
def test_all_position_terms_in_any_order(case, terms):
    check_same_outputs(make_model(pos_att_type=terms), make_inputs(case))


@pytest.mark.parametrize(
    "settings", [{"relative_attention": False}, {"num_hidden_layers": 1, "emd_steps": 0}, {"emd_steps": 0}], ids=str
)
@pytest.mark.parametrize("model_class", [hf_deberta.HfDebertaModel, hf_deberta.HfDebertaForMaskedLM])
@pytest.mark.parametrize("case", ["equal", "padded"])
def test_other_architectures(case, model_class, settings):
    check_same_outputs(make_model(model_class, **settings), make_inputs(case))


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("activation", ["relu", "prelu"])  # the second has parameters
def test_other_activations(activation, dtype):
    inputs = make_inputs("padded")
    model = make_model(hf_deberta.HfDebertaForMaskedLM, hidden_act=activation)
    check_same_outputs(model, inputs, dtype, tokens=real_tokens(inputs))


def test_layers_with_the_same_weights():
    model = make_model()
    model.encoder.layer[1] = model.encoder.layer[2] = model.encoder.layer[0]
    check_same_outputs(model, make_inputs("equal"))


def test_a_batch_with_a_row_of_padding():
    model, inputs = make_model(), make_inputs("equal")
    inputs["attention_mask"] = torch.ones(4, 37)
    inputs["attention_mask"][2] = 0
    expected = outputs(model, inputs)
    for dtype in (torch.float32, torch.int8):
        result = outputs(hf_deberta.optimize(model, dtype, inplace=False), inputs)
        assert difference(result[[0, 1, 3]], expected[[0, 1, 3]]) < TOLERANCE[dtype] and result.isfinite().all()


def test_tables_grow_with_the_longest_text_and_serve_shorter_ones():
    model = make_model()
    cases = [{"input_ids": torch.randint(5, 200, (2, tokens))} for tokens in (3, 100, 65, 128, 129, 7)]
    expected = [outputs(model, inputs) for inputs in cases]
    hf_deberta.optimize(model)
    for inputs, states in zip(cases, expected, strict=True):
        assert difference(outputs(model, inputs), states) < TOLERANCE[torch.float32]
    attention = model.encoder.layer[0].attention
    assert attention.tables.shape[2] == 2 * MAX_TOKENS_IN_ONE_PRODUCT[torch.float32] + 1


def test_many_documents_are_computed_in_parts(monkeypatch):
    monkeypatch.setattr("hf_deberta.serving.fused_attention.MAX_POSITION_TERMS_NUMEL", 1)
    attend, product = FusedAttention.attend_equal_short_texts, FusedLinear.__call__
    counting_attention = mock.patch.object(FusedAttention, attend.__name__, autospec=True, side_effect=attend)
    counting_products = mock.patch.object(FusedLinear, "__call__", autospec=True, side_effect=product)
    with counting_attention as attentions, counting_products as products:
        check_same_outputs(make_model(), make_inputs("padded on the left"))
    assert attentions.call_count == 3 * 4 and products.call_count == 3 * 4  # layers, rows; layers, products of a layer


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.int8], ids=str)
def test_feed_forward_networks_in_blocks(dtype, monkeypatch):
    model, inputs = hf_deberta.optimize(make_model(), dtype), make_inputs("equal")
    expected = outputs(model, inputs)
    monkeypatch.setattr("hf_deberta.serving.fused_layer.MAX_FEED_FORWARD_ROWS", 64)
    assert difference(outputs(model, inputs), expected) < TOLERANCE[dtype] / 2


@pytest.mark.parametrize("version", ["ours", "v1", "v2"])
def test_a_converted_copy_owns_its_numbers(version):
    model, inputs = make_model().train() if version == "ours" else make_in_tree(version).train(), make_inputs("equal")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    converted = hf_deberta.optimize(model, inplace=False)
    assert model.training and not converted.training and type(converted) is type(model)
    state = model.state_dict()
    assert list(before) == list(state) and all(torch.equal(before[name], state[name]) for name in before)
    expected = outputs(converted, inputs)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    assert torch.equal(outputs(converted, inputs), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_original_weights_are_freed(dtype):
    """Nothing that is left of the model reads those of a layer, either."""
    model = make_model()
    weights = {name: weakref.ref(weight) for name, weight in model.encoder.named_parameters()}
    layer = model.encoder.layer[1]
    expected = outputs(hf_deberta.optimize(model, dtype), inputs := make_inputs("equal"))
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(1)
    assert torch.equal(outputs(model, inputs), expected)
    del layer, weight
    gc.collect()
    assert [name for name, weight in weights.items() if weight() is not None] == []
    attention = weakref.ref(model.encoder.layer[1].attention)
    del model
    assert attention() is None  # by counts of references: the memory of a model that is replaced is free at once


def test_threads():
    model, cases = hf_deberta.optimize(make_model()), [make_inputs(case) for case in ("equal", "padded", "long")] * 4
    expected = [outputs(model, inputs) for inputs in cases]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda inputs: outputs(model, inputs), cases))
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("inplace", [True, False])
def test_a_model_answers_in_a_fork(inplace):
    """As under `gunicorn --preload`: OpenMP waits forever for threads that it had before the fork."""
    code = f"""
import os, signal, torch, hf_deberta
model = hf_deberta.HfDebertaModel(hf_deberta.HfDebertaConfig.from_preset("tiny"))
model = hf_deberta.optimize(model, inplace={inplace})
child = os.fork()
if not child:
    signal.alarm(20)
    with torch.inference_mode():
        assert model(torch.ones(8, 60, dtype=torch.int64))[0].isfinite().all()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "2"}, check=True, timeout=120)


def test_a_wrapper_with_two_encoders():
    wrapper, inputs = nn.ModuleDict({"first": make_model(), "second": make_in_tree("v2")}), make_inputs("padded")
    real = real_tokens(inputs)
    expected = [outputs(model, inputs)[real] for model in wrapper.values()]
    results = [outputs(model, inputs)[real] for model in hf_deberta.optimize(wrapper).values()]
    for result, states in zip(results, expected, strict=True):
        assert 0 < difference(result, states) < TOLERANCE[torch.float32]
    with pytest.raises(RuntimeError, match="prepared for inference"):
        wrapper.state_dict()


def test_tables_that_another_thread_replaces():
    attention = hf_deberta.optimize(make_model()).encoder.layer[0].attention
    short = attention.laid_out_tables(64)

    class Raced(FusedAttention):
        def __setattr__(self, name, value):
            super().__setattr__(name, short if name == "tables" else value)

    attention.__class__ = Raced
    assert attention.window(100).shape[2] == 200


@pytest.mark.parametrize("preset", ["v1-base", "v3-base"])
def test_other_default_types(preset):
    model, inputs = make_model(preset=preset, hidden_act="prelu"), make_inputs("padded on the left")
    hf_deberta.optimize(model)
    expected = outputs(model, inputs)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(outputs(model, inputs), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("model_class", [hf_deberta.HfDebertaModel, hf_deberta.HfDebertaForMaskedLM])
def test_hidden_states_of_all_layers(model_class):
    model, inputs = make_model(model_class), make_inputs("equal")
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states
    with torch.inference_mode():
        result = hf_deberta.optimize(model)(**inputs, output_hidden_states=True).hidden_states
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=2e-5)


def make_in_tree(version: str, head: str = "Model"):
    shape = {"v1": "v1", "v2": "v3"}[version]
    return in_tree(shape, head, **SMALL, position_biased_input=True, max_relative_positions=512)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_in_tree_models(version, dtype):
    model, inputs = make_in_tree(version), make_inputs("padded")
    real = real_tokens(inputs)
    expected = outputs(model, inputs)[real]
    hf_deberta.optimize(model, dtype)
    with count_fused_layers() as layers, torch.no_grad():
        result = outputs(model, inputs)
        states = model(**inputs, output_hidden_states=True).hidden_states
    assert layers.call_count == 6
    assert len(states) == 4 and torch.equal(states[-1], result)
    assert 0 < difference(result[real], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("options", [{}, {"clamp_relative_distance": True}], ids=str)
def test_an_in_tree_model_outlives_the_block_that_enabled_it(options):
    with hf_deberta.enable(**options):
        model, inputs = hf_deberta.optimize(make_in_tree("v2")), make_inputs("equal")
        expected = outputs(model, inputs)
    assert torch.equal(outputs(model, inputs), expected)


def test_optimize_enables_with_the_default_options_after_a_call_that_ended():
    with hf_deberta.enable("eager"):
        pass
    hf_deberta.optimize(make_in_tree("v2"))
    assert present_options() == ("auto", False)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda model: hf_deberta.optimize(model, torch.float16), "dtype must be one of"),
        (lambda model: hf_deberta.optimize(model.bfloat16()), "pass a float32 model .* model.float"),
        (
            lambda model: hf_deberta.optimize(SimpleNamespace(model=model)),
            "SimpleNamespace has no .* pipeline its model",
        ),
        (lambda model: hf_deberta.optimize(nn.Linear(2, 2)), "Linear has no DeBERTa encoder"),
    ],
)
def test_what_cannot_be_prepared(prepare, message):
    with pytest.raises(ValueError, match=message):
        prepare(make_model())


def test_caches_of_onednn_are_limited_unless_the_user_limits_them(monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    hf_deberta.optimize(make_model())
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256" and os.environ["LRU_CACHE_CAPACITY"] == "7"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_answers_do_not_depend_on_other_texts(dtype):
    model, inputs = hf_deberta.optimize(make_model(), dtype), make_inputs("equal")
    alone = torch.cat([outputs(model, {"input_ids": ids[None]}) for ids in inputs["input_ids"]])
    assert difference(outputs(model, inputs), alone) < TOLERANCE[dtype] / 10


def test_without_onednn_bfloat16_and_vnni(monkeypatch):
    monkeypatch.setattr(optimize_file, "has_onednn_linear", lambda: False)
    with pytest.raises(RuntimeError, match="oneDNN"):
        hf_deberta.optimize(make_model())
    monkeypatch.undo()
    monkeypatch.setattr(optimize_file, "has_onednn_bfloat16", lambda: False)
    with pytest.raises(RuntimeError, match="no products in bfloat16; take torch.float32 or torch.int8"):
        hf_deberta.optimize(make_model(), torch.bfloat16)
    monkeypatch.setattr(fused_linear, "onednn_int8_linear", lambda *_: torch.tensor([[64 * 32767 / 2]]))
    assert fused_linear.weight_levels.__wrapped__() == 64
    integers, scale = fused_linear.int8_weight(torch.tensor([[-2.0, 1.0]]), 64)
    assert integers.tolist() == [[-64, 32]] and scale.item() == 1 / 32


def make_linear(layer, dtype, with_gelu):
    weights = layer.weight, layer.bias
    return Int8Linear(*weights, with_gelu) if dtype == torch.int8 else FusedLinear(*weights, dtype, with_gelu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("also", ["nothing", "gelu", "residual"])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_fused_linear(rows, also, dtype):
    layer, states = nn.Linear(40, 24), torch.randn(rows, 40)
    residual = torch.randn(rows, 24) if also == "residual" else None
    before = None if residual is None else residual.clone()
    linear = make_linear(layer, dtype, with_gelu=also == "gelu")
    with torch.no_grad():
        expected, result = layer(states), linear(states, residual)
    if residual is not None:
        expected += residual
        assert result.dtype == torch.float32 and torch.equal(residual, before)
    expected = nn.functional.gelu(expected) if also == "gelu" else expected
    assert difference(result.float(), expected) < TOLERANCE[dtype] / 10 + 1e-6


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("lowest", [None, -0.17])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_by_row(bias, lowest, residual):
    """A row of large numbers costs the other rows nothing, of which one is constant and one negative.

    The largest weight and state have products of which a pair does not fit into 16 bits, where processors without VNNI
    add them.
    """
    layer, states = nn.Linear(40, 24, bias=bias), torch.randn(9, 40)
    states[3] *= 1000
    states[5:8] = torch.tensor([[0.0], [1.0], [-1.0]])
    if lowest is not None:
        states = nn.functional.gelu(states)
    other = torch.randn(9, 24) if residual else None
    with torch.no_grad():
        layer.weight[0] = layer.weight.max()
        linear = Int8Linear(layer.weight, layer.bias, lowest=lowest)
        expected = layer(states) + (0 if other is None else other)
        error = (linear(states, other) - expected).abs().amax(1)
    assert error[3] < 15 and error[[0, 1, 2, 4, 5, 6, 7, 8]].max() < 0.03


def test_int8_of_inputs_that_are_always_large():
    """A few inputs of a LayerNorm are a hundred times as large as the others, whose part of the product remains."""
    norm, layer = nn.LayerNorm(256), nn.Linear(256, 24)
    with torch.no_grad():
        norm.weight[:3] = 100
        norm.bias[1] = 300
        layer.weight[:, :3] = 0
        states = norm(torch.randn(9, 256))
        expected = layer(states)
        sizes = output_sizes(norm)
        plain, scaled = (Int8Linear(layer.weight, layer.bias, sizes=x) for x in (None, sizes))
        assert (scaled(states) - expected).abs().max() < 0.1 * (plain(states) - expected).abs().max()
        torch.testing.assert_close(sizes[[0, 5]], torch.tensor([100.0, 1.0]))


def test_timing_gives_a_choice():
    """Not which one: that depends on the processor. The next random numbers do not depend on the choice."""
    random_state = torch.get_rng_state()
    fused_attention.bfloat16_attention_ratio.cache_clear()
    assert fused_attention.attention_dtype(torch.int8) in (torch.float32, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("last_turn", "limit", "ratio"),
    [([[9, 9, 9], [2, 2, 2]], 3, 4.5), ([[1, 1, 1], [2, 2, 2]], 3, 0.5), ([], 0, 9)],
    ids=["slower", "faster", "no turn begins after the limit"],
)
def test_median_of_the_turns_decides(last_turn, limit, ratio, monkeypatch):
    """The first turn, in which oneDNN compiles, and one turn in which the processor was slow do not count."""
    seconds = iter([[9, 9, 9], [1, 1, 1], [1, 3, 5], [2, 4, 6], *last_turn])
    monkeypatch.setattr(fused_attention.timeit, "repeat", lambda *args, **kwargs: next(seconds))
    monkeypatch.setattr(fused_attention, "MAX_SECONDS_OF_TURNS", limit)
    monkeypatch.setattr(fused_attention, "MAX_TURNS", 3)
    assert fused_attention.bfloat16_attention_ratio.__wrapped__(1) == ratio
