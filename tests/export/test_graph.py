"""The graph copy of every head gives the model's outputs, before any runtime sees it."""

import pytest
import torch
from export_cases import HEADS, PACKED_HEADS, SHAPES, largest_error, make_model, packed_inputs, padded_inputs

from hf_deberta.export.graph import GraphModel

TOLERANCE = 1e-5  # float32 sums in another order
FIELDS = {
    "v3": {},
    "v1": {"share_att_key": False, "position_buckets": 0, "norm_rel_ebd": "none"},
    "no clamp": {"clamp_relative_distance": False},
    "all terms": {"pos_att_type": ["c2p", "p2c", "p2p"]},
    "c2p": {"pos_att_type": ["c2p"]},
    "p2c and p2p": {"pos_att_type": ["p2c", "p2p"]},
    "no relative positions": {"relative_attention": False, "pos_att_type": [], "position_biased_input": True},
    "convolution": {"conv_kernel_size": 3},
    "token types": {"type_vocab_size": 2},
}


def run(graph):
    return lambda inputs: graph(*inputs.values())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_padded_batches(head, shape):
    model = make_model(head)
    assert largest_error(model, run(GraphModel(model)), padded_inputs(model, shape)) < TOLERANCE


@pytest.mark.parametrize("head", PACKED_HEADS)
@pytest.mark.parametrize("lengths", [(1,), (2, 1), (5, 1, 60, 2)], ids=str)
@torch.no_grad()
def test_packed_rows(head, lengths):
    model = make_model(head)
    assert largest_error(model, run(GraphModel(model, packed=True)), packed_inputs(model, lengths)) < TOLERANCE


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("head", ["HfDebertaModel", "HfDebertaForSequenceClassification"])
@torch.no_grad()
def test_configurations(head, fields):
    model = make_model(head, **fields)
    assert largest_error(model, run(GraphModel(model)), padded_inputs(model, (3, 50))) < TOLERANCE
    assert largest_error(model, run(GraphModel(model, packed=True)), packed_inputs(model, (40, 1, 7))) < TOLERANCE


def test_the_model_is_not_changed():
    model = make_model("HfDebertaForMaskedLM").train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    GraphModel(model)
    assert model.training and classes == [type(module) for module in model.modules()]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_models_that_cannot_be_exported():
    with pytest.raises(TypeError, match="Linear"):
        GraphModel(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"float\(\)"):
        GraphModel(make_model("HfDebertaModel").half())
    with pytest.raises(ValueError, match="packed=False"):
        GraphModel(make_model("HfDebertaForMultipleChoice"), packed=True)
