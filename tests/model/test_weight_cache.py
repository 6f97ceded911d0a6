"""Projected tables are computed once while a model serves, and never outlive the weights they came from."""

import copy
import pickle

import pytest
import torch
from numerics import V1_ATTENTION, tiny_inputs, tiny_model
from torch import nn

from hf_deberta import HfDebertaModel
from hf_deberta.model.weight_cache import WeightCache, can_cache

INPUTS = tiny_inputs((9, 5, 7))


def projected(model):
    """Rows that the first layer's key projection was given, call by call."""
    given = []
    attention = model.encoder.layer[0].attention.self
    attention.pos_dropout.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].shape[0]))
    return given


def serving(**fields):
    return tiny_model(HfDebertaModel, dtype=torch.float32, **fields).eval()


@pytest.mark.parametrize("fields", [{}, V1_ATTENTION, {"pos_att_type": ["p2c"]}], ids=["v2", "v1", "p2c"])
def test_once_for_any_length(fields):
    model = serving(**fields)
    calls = projected(model)
    with torch.no_grad():
        model(**INPUTS)
        model(torch.randint(1, 128, (1, 40)))
        model(torch.randint(1, 128, (2, 3)))
    assert calls == [2 * model.config.relative_span]
    model(**INPUTS)  # with gradients: rows in use, anew
    model.train()(**INPUTS)
    assert calls[1:] == [17, 17]


def state_dict_with(model, change):
    with torch.no_grad():
        return {name: change(tensor.clone()) for name, tensor in model.state_dict().items()}


def in_place(model):
    with torch.no_grad():
        model.encoder.layer[0].attention.self.key_proj.weight.add_(0.5)


def past_autograd(model):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.5)


def partly_past_autograd(model):
    """All but the first column, in which evenly spaced samples would all stand."""
    for layer in model.encoder.layer:
        layer.attention.self.key_proj.weight.data[:, 1:] *= 1.5


def a_row_past_autograd(model):
    model.encoder.rel_embeddings.weight.data[model.config.relative_span + 2] *= -3


def a_column_past_autograd(model):
    model.encoder.layer[0].attention.self.query_proj.weight.data[:, 5] += 1


def replaced(model):
    layer = model.encoder.layer[0].attention.self
    layer.key_proj.weight = nn.Parameter(layer.key_proj.weight.detach() * 2)


def new_data(model):
    layer = model.encoder.layer[0].attention.self
    layer.query_proj.weight.data = layer.query_proj.weight.data * 2


CHANGES = {
    "load_state_dict": lambda model: model.load_state_dict(state_dict_with(model, lambda tensor: tensor * 1.5)),
    "in place": in_place,
    "past autograd": past_autograd,
    "partly past autograd": partly_past_autograd,
    "a row past autograd": a_row_past_autograd,
    "a column past autograd": a_column_past_autograd,
    "another parameter": replaced,
    "other data": new_data,
    "cast": lambda model: model.double(),
    "the table": lambda model: model.encoder.rel_embeddings.weight.data.mul_(2),
    "its norm": lambda model: nn.init.normal_(model.encoder.LayerNorm.weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_counts(change):
    model = serving()
    with torch.no_grad():
        before = model(**INPUTS).last_hidden_state
        CHANGES[change](model)
        found = model(**INPUTS).last_hidden_state
    expected = model(**INPUTS).last_hidden_state  # nothing remembered: gradients are on
    torch.testing.assert_close(found, expected)
    assert change == "cast" or not torch.allclose(before.to(found.dtype), found)


def test_training_steps_between_evaluations():
    model = serving()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(3):
        with torch.no_grad():
            found = model.eval()(**INPUTS).last_hidden_state
        torch.testing.assert_close(found, model(**INPUTS).last_hidden_state)
        model.train()(**INPUTS).last_hidden_state[..., 0].sum().backward()
        optimizer.step()


def hooked(model):
    model.encoder.layer[1].attention.self.key_proj.register_forward_hook(lambda *_: None)


def adapted(model):
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["key_proj"]), model)


@pytest.mark.parametrize("touch", [hooked, adapted])
def test_touched_modules_are_computed_each_time(touch):
    if touch is adapted:
        pytest.importorskip("peft")
    model = serving()
    touch(model.eval())
    calls = projected(model.eval())
    with torch.no_grad():
        model(**INPUTS)
        model(**INPUTS)
    assert calls == [17, 17]


def test_under_inference_mode_and_autocast():
    model = serving()
    expected = model(**INPUTS).last_hidden_state
    with torch.inference_mode():
        model(**INPUTS)
    with torch.no_grad():
        torch.testing.assert_close(model(**INPUTS).last_hidden_state, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(**INPUTS)
        torch.testing.assert_close(model(**INPUTS).last_hidden_state, expected)


def test_copies_and_pickles_start_empty_and_weights_alone_are_saved():
    model = serving()
    with torch.no_grad():
        expected = model(**INPUTS).last_hidden_state
    assert model.encoder.weight_cache._entry is not None
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.encoder.weight_cache._entry is None
        with torch.no_grad():
            torch.testing.assert_close(twin(**INPUTS).last_hidden_state, expected)
    assert not [name for name in model.state_dict() if "weight_cache" in name]


def test_others_are_compared_as_objects():
    layer, calls = nn.Linear(2, 2), []
    weight_cache, table = WeightCache(), torch.zeros(3, 2)
    compute = lambda: calls.append(1) or len(calls)  # noqa: E731
    assert [weight_cache.get_or_compute((layer,), compute, table) for _ in range(2)] == [1, 1]
    assert weight_cache.get_or_compute((layer,), compute, table.clone()) == 2


def test_when_nothing_may_be_remembered():
    layer = nn.Linear(2, 2).eval()
    assert not can_cache((layer,))  # gradients are on
    with torch.no_grad():
        assert can_cache((layer,))
        assert not can_cache((layer.train(),))


def test_dropout_of_the_table_alone_is_not_remembered():
    """Monte Carlo dropout: the model serves, its Dropout modules do not."""
    model = serving(hidden_dropout_prob=0.3)
    for layer in model.encoder.layer:
        layer.attention.self.pos_dropout.train()
    with torch.no_grad():
        first, second = (model(**INPUTS).last_hidden_state for _ in range(2))
    assert not torch.allclose(first, second)


def test_dropout_follows_its_modules():
    for which in ("attention", "none"):
        model = serving(attention_probs_dropout_prob=0.3)
        for layer in model.encoder.layer:
            layer.attention.self.dropout.train(which == "attention")
        first, second = (model(**INPUTS).last_hidden_state for _ in range(2))
        assert torch.allclose(first, second) == (which == "none")
    model = serving(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert torch.equal(*(model(**INPUTS).last_hidden_state for _ in range(2)))


def test_replicas_hold_no_parameters_and_remember_nothing():
    """As those of DataParallel, whose weights are plain tensors."""
    model = serving()
    with torch.no_grad():
        expected = model(**INPUTS).last_hidden_state
        for module in list(model.modules()):
            for name, parameter in list(module._parameters.items()):
                del module._parameters[name]
                setattr(module, name, None if parameter is None else parameter.detach())
        torch.testing.assert_close(model(**INPUTS).last_hidden_state, expected)


def test_a_training_pass_forgets():
    model = serving()
    with torch.no_grad():
        model(**INPUTS)
    model.train()(**INPUTS)
    attention = model.encoder.layer[0].attention.self
    assert model.encoder.weight_cache._entry is None and attention.weight_cache._entry is None
