"""A graph compiled for inference takes rows of the cached projections, and notices each change of a weight."""

import gc

import pytest
import torch
from numerics import V1_ATTENTION, graphs_may_have_operators, tiny_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_deberta import HfDebertaModel
from hf_deberta.model import compiled_table
from hf_deberta.model.compiled_table import can_call_operators, project_table
from hf_deberta.model.fast_path_guards import reference_mode

LENGTHS = (7, 12, 16, 17, 23, 33, 40, 60)  # on both sides of the table's span


@pytest.fixture(autouse=True)
def empty_caches():
    torch.compiler.reset()
    compiled_table._caches.clear()


def ids(length):
    return torch.randint(1, 128, (2, length))


def eval_model(**fields):
    return tiny_model(HfDebertaModel, dtype=torch.float32, **fields).eval()


def compiled(model, **options):
    """Return the compiled model and the counter of its graphs."""
    counter = CompileCounterWithBackend("eager")
    return torch.compile(model, backend=counter, fullgraph=True, **options), counter


def calls_of_operator(counter):
    return sum(str(node.target).endswith("project_table.default") for node in counter.graphs[-1].graph.nodes)


@pytest.mark.parametrize("fields", [{}, V1_ATTENTION, {"pos_att_type": ["p2c"]}], ids=["v2", "v1", "p2c"])
@graphs_may_have_operators
@torch.no_grad()
def test_few_graphs_for_all_lengths(fields):
    model = eval_model(**fields)
    call, counter = compiled(model)
    for length in LENGTHS:
        inputs = ids(length)
        torch.testing.assert_close(call(inputs)[0], model(inputs)[0], atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 3  # the first graph, and at most two more
    assert calls_of_operator(counter) == model.config.num_hidden_layers * len(model.config.pos_att_type)


@graphs_may_have_operators
@torch.no_grad()
def test_each_table_is_projected_once():
    model = eval_model()
    call, _ = compiled(model)
    for length in LENGTHS:
        call(ids(length))
    caches = [cache for _, cache in compiled_table._caches.values()]
    results = [cache._entry.result for cache in caches]
    call(ids(9))
    assert len(caches) == 2 * model.config.num_hidden_layers
    assert all(cache._entry.result is result for cache, result in zip(caches, results, strict=True))


CHANGES = {
    "in place": lambda model: model.encoder.layer[0].attention.self.key_proj.weight.add_(0.5),
    "as data": lambda model: model.encoder.layer[1].attention.self.query_proj.weight.data.mul_(-2),
    "the table": lambda model: model.encoder.rel_embeddings.weight.data[:, :3].mul_(-3),
    "its norm": lambda model: nn.init.normal_(model.encoder.LayerNorm.weight),
    "load_state_dict": lambda model: model.load_state_dict(eval_model(seed=1).state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changed_weights_are_noticed(change):
    model, inputs = eval_model(), ids(9)
    call, counter = compiled(model)
    old = call(inputs)[0]
    CHANGES[change](model)
    expected = model(inputs)[0]
    assert not torch.allclose(expected, old, atol=1e-4)
    torch.testing.assert_close(call(inputs)[0], expected, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1


@torch.no_grad()
def test_other_weights_in_a_functional_call():
    model, inputs = eval_model(), ids(9)
    call, _ = compiled(model)
    call(inputs)
    weights = {name: weight * 1.5 for name, weight in model.named_parameters()}
    expected = torch.func.functional_call(model, weights, inputs)[0]
    found = torch.func.functional_call(call, {f"_orig_mod.{name}": weight for name, weight in weights.items()}, inputs)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["gradients", "training", "autocast", "hook", "reference mode"])
def test_other_graphs_project_their_tables_themselves(case):
    model, inputs = eval_model(), ids(9)
    if case == "training":
        model.train()
    if case == "hook":
        for layer in model.encoder.layer:
            layer.attention.self.key_proj.register_forward_hook(lambda *_: None)
    call, counter = compiled(model)
    with torch.set_grad_enabled(case == "gradients"), torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        if case == "reference mode":
            with reference_mode():
                call(inputs)
        else:
            call(inputs)
    assert calls_of_operator(counter) == 0


@torch.no_grad()
def test_exported_graphs_do_not_call_the_operator():
    graph = torch.export.export(eval_model(), (ids(9),), strict=False).graph
    assert not any("project_table" in str(node.target) for node in graph.nodes)
    assert not can_call_operators((nn.Linear(2, 2).eval(),))  # outside of a compiler


def operator_inputs(heads=2, rows=5, **options):
    table = [torch.randn(8, 6, **options), torch.randn(6, **options), torch.randn(6, **options)]
    return table, [torch.randn(4, 6, **options), torch.randn(4, **options)], 1e-7, heads, 0.5, 2, rows


def test_operator():
    """Its result is new, its shape that of the fake function, and weights of inference mode, too, are computed."""
    inputs = operator_inputs()
    torch.library.opcheck(project_table, inputs)
    table, layer, epsilon, *_ = inputs
    states = nn.functional.layer_norm(table[0], (6,), *table[1:], eps=epsilon)
    expected = nn.functional.linear(states, *layer)[2:7].unflatten(-1, (2, 2)).transpose(0, 1) * 0.5
    torch.testing.assert_close(project_table(*inputs), expected)
    project_table(*inputs).zero_()
    torch.testing.assert_close(project_table(*inputs), expected)
    with torch.inference_mode():
        of_inference = operator_inputs()
        first = project_table(*of_inference)
        of_inference[1][1].add_(1)
        torch.testing.assert_close(project_table(*of_inference), first + 0.5)


def test_caches_of_freed_weights_are_dropped():
    for _ in range(5):
        project_table(*operator_inputs())
        gc.collect()
    assert len(compiled_table._caches) == 1


def test_the_same_weights_with_another_epsilon_and_other_heads():
    table, norm, weight = torch.randn(6, 8) / 1000, [torch.ones(8), torch.zeros(8)], torch.randn(16, 8)
    for epsilon, heads in [(1e-7, 2), (1e-2, 2), (1e-2, 4)]:
        result = compiled_table.project_table([table, *norm], [weight], epsilon, heads, 1.0, 0, 6)
        expected = torch.layer_norm(table, (8,), *norm, epsilon) @ weight.T
        torch.testing.assert_close(result, expected.unflatten(-1, (heads, -1)).transpose(0, 1))
