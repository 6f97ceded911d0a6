"""Projected tables are computed once in inference; tests/faults/test_weight_cache.py changes their weights."""

import copy
import pickle

import pytest
import torch
from numerics import V1_ATTENTION, tiny_inputs, tiny_model
from test_guards import SITUATIONS
from torch import nn

from hf_deberta import HfDebertaModel
from hf_deberta.engines.weight_cache import _entries, can_cache, checksums, from_weight_cache
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
    assert model.encoder not in _entries and model.encoder.layer[0].attention.self not in _entries
    model.train()(**INPUTS)
    assert rows[1:] == [17, 17]


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


def hook_a_projection(attention):
    attention.key_proj.register_forward_hook(lambda *_: None)


def train_its_dropout(attention):
    """As in Monte Carlo dropout: only the Dropout modules are in training mode."""
    attention.pos_dropout.train()


@pytest.mark.parametrize("change", [hook_a_projection, train_its_dropout])
def test_results_of_modified_modules_are_not_cached(change):
    model = eval_model(hidden_dropout_prob=0.3)
    change(model.encoder.layer[0].attention.self)
    rows = record_projected_rows(model)
    with torch.no_grad():
        states = [model(**INPUTS).last_hidden_state for _ in range(2)]
    assert rows == [17, 17]
    assert torch.allclose(*states) == (change is hook_a_projection)


@pytest.mark.parametrize("context", [torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)])
def test_inference_mode_and_autocast_do_not_leak(context):
    model = eval_model()
    expected = model(**INPUTS).last_hidden_state
    with torch.no_grad():
        with context:
            model(**INPUTS)
        torch.testing.assert_close(model(**INPUTS).last_hidden_state, expected)


@pytest.mark.parametrize("training, p", [(False, 0.3), (True, 0.3), (True, 0.0)])
def test_dropout_follows_its_modules(training, p):
    model = eval_model(attention_probs_dropout_prob=0.3)
    for layer in model.encoder.layer:
        layer.attention.self.dropout.train(training).p = p
    assert torch.equal(*(model(**INPUTS).last_hidden_state for _ in range(2))) == (not training or p == 0)


def test_copies_pickles_and_state_dicts_contain_no_cache():
    model = eval_model()
    with torch.no_grad():
        expected = model(**INPUTS).last_hidden_state
    assert model.encoder in _entries
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.encoder not in _entries
        with torch.no_grad():
            torch.testing.assert_close(twin(**INPUTS).last_hidden_state, expected)
    assert not [name for name in model.state_dict() if "weight_cache" in name]


def test_other_inputs_and_another_epsilon_are_noticed():
    layer, table, other, calls = nn.LayerNorm(2).eval(), torch.zeros(3, 2), torch.zeros(3, 2), []
    compute = lambda: calls.append(1) or len(calls)  # noqa: E731
    with torch.no_grad():
        assert [from_weight_cache(layer, (layer,), compute, each) for each in (table, table, other)] == [1, 1, 2]
        layer.eps = 0.1
        assert from_weight_cache(layer, (layer,), compute, other) == 3


def test_nothing_is_cached_in_training_or_reference_mode():
    layer = nn.Linear(2, 2).eval()
    assert not can_cache((layer,))  # gradients are enabled
    with torch.no_grad():
        assert can_cache((layer,))
        with reference_mode():
            assert not can_cache((layer,))
        assert not can_cache((layer.train(),))


@pytest.mark.parametrize("situation", SITUATIONS)
def test_nothing_is_cached_in_transforms_graphs_and_modes(situation):
    call, guards = SITUATIONS[situation]
    layer, results = nn.Linear(2, 2).eval(), []
    with torch.no_grad():
        call(lambda x: results.append(can_cache((layer,))) or x * 2, torch.ones(3))
    assert results == [guards <= {"can_read_values"}]


@pytest.mark.parametrize("device, inference", [("meta", False), ("cpu", True)])
def test_nothing_is_cached_if_changes_cannot_be_detected(device, inference):
    with torch.inference_mode(inference):
        layer = nn.Linear(2, 2, device=device).eval()
    with torch.no_grad():
        assert not can_cache((layer,))
