"""The graph copy of every head gives the model's outputs, before any runtime sees it."""

import pytest
import torch
from export_cases import HEADS, LENGTHS, PACKED_HEADS, SHAPES, assert_agrees, make_model, packed_inputs, padded_inputs

from hf_deberta import export_to_transformers
from hf_deberta.export.graph import GraphModel

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


def assert_graph_agrees(model, inputs, packed=False):
    graph = GraphModel(model, packed)
    assert_agrees(model, lambda inputs: graph(*inputs.values()), inputs)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_padded_batches(head, shape):
    model = make_model(head)
    assert_graph_agrees(model, padded_inputs(model, shape))


@pytest.mark.parametrize("head", PACKED_HEADS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@torch.no_grad()
def test_packed_rows(head, lengths):
    model = make_model(head)
    assert_graph_agrees(model, packed_inputs(model, lengths), packed=True)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("head", ["HfDebertaModel", "HfDebertaForSequenceClassification"])
@torch.no_grad()
def test_configurations(head, fields):
    model = make_model(head, **fields)
    assert_graph_agrees(model, padded_inputs(model, (3, 50)))
    assert_graph_agrees(model, packed_inputs(model, (40, 1, 7)), packed=True)


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


def test_adapters_must_be_merged_before(tmp_path):
    """The graph reads weights of projections, and would leave LoRA out."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query_proj", "dense"], init_lora_weights=False)
    adapted = peft.get_peft_model(make_model("HfDebertaForSequenceClassification"), config).eval()
    for export in (GraphModel, lambda model: export_to_transformers(model, tmp_path / "exported")):
        with pytest.raises(ValueError, match="query_proj has an adapter: .* merge_and_unload"):
            export(adapted.base_model.model)
    inputs = padded_inputs(adapted, (2, 7))
    with torch.no_grad():
        expected, merged = adapted(**inputs).logits, adapted.merge_and_unload()
        torch.testing.assert_close(GraphModel(merged)(*inputs.values())[0], expected, atol=1e-4, rtol=1e-4)
