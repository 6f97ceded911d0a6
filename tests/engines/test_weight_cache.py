"""Projected tables are computed once in inference, and again as soon as a weight has changed."""

import copy
import pickle

import pytest
import torch
from numerics import V1_ATTENTION, tiny_inputs, tiny_model
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from hf_deberta import HfDebertaModel
from hf_deberta.engines.weight_cache import WeightCache, _caches, can_cache, checksums
from hf_deberta.model.slots import reference_mode

INPUTS = tiny_inputs((9, 5, 7))


def record_projected_rows(model):
    """Return a list that grows with the number of rows in each call of the first layer's table projection."""
    rows = []
    attention = model.encoder.layer[0].attention.self
    attention.pos_dropout.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[0]))
    return rows


def eval_model(**fields):
    return tiny_model(HfDebertaModel, dtype=torch.float32, **fields).eval()


@pytest.mark.parametrize("fields", [{}, V1_ATTENTION, {"pos_att_type": ["p2c"]}], ids=["v2", "v1", "p2c"])
def test_the_table_is_projected_once_for_all_lengths(fields):
    model = eval_model(**fields)
    rows = record_projected_rows(model)
    with torch.no_grad():
        model(**INPUTS)
        model(torch.randint(1, 128, (1, 40)))
        model(torch.randint(1, 128, (2, 3)))
    assert rows == [2 * model.config.relative_span]
    model(**INPUTS)  # with gradients the rows in use are projected each time
    model.train()(**INPUTS)
    assert rows[1:] == [17, 17]


def state_dict_with(model, change):
    with torch.no_grad():
        return {name: change(tensor.clone()) for name, tensor in model.state_dict().items()}


def written_in_place(model):
    with torch.no_grad():
        model.encoder.layer[0].attention.self.key_proj.weight.add_(0.5)


def written_as_data(model):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.5)


def all_but_the_first_column_written_as_data(model):
    """Samples with an even spacing would all lie in the first column."""
    for layer in model.encoder.layer:
        layer.attention.self.key_proj.weight.data[:, 1:] *= 1.5


def row_written_as_data(model):
    model.encoder.rel_embeddings.weight.data[model.config.relative_span + 2] *= -3


def column_written_as_data(model):
    model.encoder.layer[0].attention.self.query_proj.weight.data[:, 5] += 1


def block_written_as_data(model):
    model.encoder.rel_embeddings.weight.data[3:9, 0:6] = 0


def value_written_as_data(model):
    model.encoder.layer[1].attention.self.key_proj.weight.data[5, 7] += 0.5


def row_negated_as_data(model):
    model.encoder.layer[1].attention.self.query_proj.weight.data[9].neg_()


def rows_exchanged_as_data(model):
    weight = model.encoder.layer[0].attention.self.key_proj.weight
    weight.data[:] = weight.data.flip(0).clone()


def parameter_replaced(model):
    layer = model.encoder.layer[0].attention.self
    layer.key_proj.weight = nn.Parameter(layer.key_proj.weight.detach() * 2)


def data_replaced(model):
    layer = model.encoder.layer[0].attention.self
    layer.query_proj.weight.data = layer.query_proj.weight.data * 2


CHANGES = {
    "load_state_dict": lambda model: model.load_state_dict(state_dict_with(model, lambda tensor: tensor * 1.5)),
    "in place": written_in_place,
    "all of .data": written_as_data,
    "most of .data": all_but_the_first_column_written_as_data,
    "a row of .data": row_written_as_data,
    "a column of .data": column_written_as_data,
    "a block of .data": block_written_as_data,
    "a value of .data": value_written_as_data,
    "a row of .data negated": row_negated_as_data,
    "rows of .data exchanged": rows_exchanged_as_data,
    "another parameter": parameter_replaced,
    "other data": data_replaced,
    "cast": lambda model: model.double(),
    "the table": lambda model: model.encoder.rel_embeddings.weight.data.mul_(2),
    "its norm": lambda model: nn.init.normal_(model.encoder.LayerNorm.weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_invalidates_the_cache(change):
    model = eval_model()
    with torch.no_grad():
        before = model(**INPUTS).last_hidden_state
        CHANGES[change](model)
        after = model(**INPUTS).last_hidden_state
    expected = model(**INPUTS).last_hidden_state  # not cached, because gradients are enabled
    torch.testing.assert_close(after, expected)
    assert change == "cast" or not torch.allclose(before.to(after.dtype), after)


@pytest.mark.parametrize("shape", [(768, 768), (512, 1024), (301, 257)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_checksums_change_with_every_write(shape, dtype):
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)

    def sums():
        return [part.clone() for part in checksums(weight)]

    def zero(block):
        block.zero_()

    def negate(block):
        block.neg_()

    def exchange(block):
        block.copy_(block.flip(0, 1).clone())

    blocks = [(slice(3, 4), slice(5, 6)), (slice(7, 8), slice(None)), (slice(None), slice(8, 9))]
    blocks += [(slice(100, shape[0] - 60), slice(0, 60)), (slice(None), slice(None)), (slice(40, 42), slice(70, 72))]
    for block in blocks:
        for write in (zero, negate, exchange):
            before, old = sums(), weight.clone()
            write(weight[block])
            assert torch.equal(weight, old) == all(map(torch.equal, before, sums()))
            weight.copy_(old)
            assert all(map(torch.equal, before, sums()))


@pytest.mark.parametrize("shape", [(5, 3), (1,), (16411,), (2, 16411), (7, 0)])
def test_checksums_of_small_and_odd_sizes(shape):
    storage = torch.zeros(torch.Size(shape).numel() + 1)
    weight = storage[1:].view(shape)  # not aligned to 8 bytes
    before = [part.clone() for part in checksums(weight)]
    for index in (0, weight.numel() // 2, weight.numel() - 1):
        if weight.numel():
            weight.view(-1)[index] = 1
            assert not all(map(torch.equal, before, checksums(weight)))
            weight.zero_()
    assert all(map(torch.equal, before, checksums(weight)))


def test_training_steps_between_evaluations():
    model = eval_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(3):
        with torch.no_grad():
            cached = model.eval()(**INPUTS).last_hidden_state
        torch.testing.assert_close(cached, model(**INPUTS).last_hidden_state)
        model.train()(**INPUTS).last_hidden_state[..., 0].sum().backward()
        optimizer.step()


def hooked(model):
    model.encoder.layer[1].attention.self.key_proj.register_forward_hook(lambda *_: None)


def adapted(model):
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["key_proj"]), model)


@pytest.mark.parametrize("modify", [hooked, adapted])
def test_results_of_modified_modules_are_not_cached(modify):
    if modify is adapted:
        pytest.importorskip("peft")
    model = eval_model()
    modify(model)
    rows = record_projected_rows(model.eval())
    with torch.no_grad():
        model(**INPUTS)
        model(**INPUTS)
    assert rows == [17, 17]


def test_inference_mode_and_autocast_do_not_leak():
    model = eval_model()
    expected = model(**INPUTS).last_hidden_state
    with torch.inference_mode():
        model(**INPUTS)
    with torch.no_grad():
        torch.testing.assert_close(model(**INPUTS).last_hidden_state, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(**INPUTS)
        torch.testing.assert_close(model(**INPUTS).last_hidden_state, expected)


def test_copies_pickles_and_state_dicts_contain_no_cache():
    model = eval_model()
    with torch.no_grad():
        expected = model(**INPUTS).last_hidden_state
    assert _caches[model.encoder]._entry is not None
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.encoder not in _caches
        with torch.no_grad():
            torch.testing.assert_close(twin(**INPUTS).last_hidden_state, expected)
    assert not [name for name in model.state_dict() if "weight_cache" in name]


def test_inputs_are_compared_by_identity():
    layer, calls = nn.Linear(2, 2), []
    weight_cache, table = WeightCache(), torch.zeros(3, 2)
    compute = lambda: calls.append(1) or len(calls)  # noqa: E731
    assert [weight_cache.get_or_compute((layer,), compute, table) for _ in range(2)] == [1, 1]
    assert weight_cache.get_or_compute((layer,), compute, table.clone()) == 2


def test_nothing_is_cached_in_training():
    layer = nn.Linear(2, 2).eval()
    assert not can_cache((layer,))  # gradients are enabled
    with torch.no_grad():
        assert can_cache((layer,))
        assert not can_cache((layer.train(),))


SPECIAL_CONTEXTS = {
    "reference mode": reference_mode,
    "FLOP counter": lambda: FlopCounterMode(display=False),
    "forward-mode differentiation": forward_ad.dual_level,
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("context", SPECIAL_CONTEXTS)
def test_nothing_is_cached_in_special_contexts(context):
    layer = nn.Linear(2, 2).eval()
    with torch.no_grad(), SPECIAL_CONTEXTS[context]():
        assert not can_cache((layer,))


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: lambda x: torch.jit.trace(f, x, check_trace=False)])
def test_nothing_is_cached_in_transforms_and_graphs(transform):
    layer, results = nn.Linear(2, 2).eval(), []
    with torch.no_grad():
        transform(lambda x: results.append(can_cache((layer,))) or x * 2)(torch.ones(3))
    assert results == [False]


@pytest.mark.parametrize("device, inference", [("meta", False), ("cpu", True)])
def test_nothing_is_cached_if_changes_cannot_be_detected(device, inference):
    with torch.inference_mode(inference):
        layer = nn.Linear(2, 2, device=device).eval()
    with torch.no_grad():
        assert not can_cache((layer,))


def test_a_table_with_dropout_is_not_cached():
    """As in Monte Carlo dropout: only the Dropout modules are in training mode."""
    model = eval_model(hidden_dropout_prob=0.3)
    for layer in model.encoder.layer:
        layer.attention.self.pos_dropout.train()
    with torch.no_grad():
        first, second = (model(**INPUTS).last_hidden_state for _ in range(2))
    assert not torch.allclose(first, second)


def test_dropout_follows_its_modules():
    for active in ("attention", "none"):
        model = eval_model(attention_probs_dropout_prob=0.3)
        for layer in model.encoder.layer:
            layer.attention.self.dropout.train(active == "attention")
        first, second = (model(**INPUTS).last_hidden_state for _ in range(2))
        assert torch.allclose(first, second) == (active == "none")
    model = eval_model(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert torch.equal(*(model(**INPUTS).last_hidden_state for _ in range(2)))


def test_replicas_of_data_parallel_cache_nothing():
    """Their weights are plain tensors, not parameters."""
    model = eval_model()
    with torch.no_grad():
        expected = model(**INPUTS).last_hidden_state
        for module in list(model.modules()):
            for name, parameter in list(module._parameters.items()):
                del module._parameters[name]
                setattr(module, name, None if parameter is None else parameter.detach())
        torch.testing.assert_close(model(**INPUTS).last_hidden_state, expected)


def test_a_training_pass_clears_the_cache():
    model = eval_model()
    with torch.no_grad():
        model(**INPUTS)
    model.train()(**INPUTS)
    attention = model.encoder.layer[0].attention.self
    assert model.encoder not in _caches and attention not in _caches
