"""Changes of a model before and after `hf_deberta.optimize()`: refused, noticed, undone or kept.

Hooks inside a layer and adapters would be bypassed; weights and modules may change later; training undoes it.
"""

import copy
import pickle

import pytest
import torch
from test_optimize import TOLERANCE, difference, make_in_tree, make_inputs, make_model, outputs
from torch import nn

import hf_deberta
from hf_deberta.in_tree.encoder import prepared_encoders
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaLayer
from hf_deberta.serving import fused_layers

MODELS = {"ours": make_model, "v1": lambda: make_in_tree("v1"), "v2": lambda: make_in_tree("v2")}


class Adapter(nn.Module):
    """A low-rank adapter as PEFT writes it: it shows the weight of the layer that it wraps."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer = layer
        self.down, self.up = nn.Linear(layer.in_features, 2), nn.Linear(2, layer.out_features)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, states):
        return self.base_layer(states) + self.up(self.down(states))


class ScaledLinear(nn.Linear):
    def forward(self, states):
        return 2 * super().forward(states)


def adapt(layer):
    layer.attention.self.value_proj = Adapter(layer.attention.self.value_proj)


def replace_by_subclass(layer):
    layer.output.dense = ScaledLinear(layer.output.dense.in_features, layer.output.dense.out_features)


def hook_norm(layer):
    layer.output.LayerNorm.register_forward_hook(lambda *_: None)


def hook_dense(layer):
    layer.intermediate.dense.register_forward_hook(lambda module, inputs, output: 2 * output)


def hook_attention(layer):
    layer.attention.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize("change", [adapt, replace_by_subclass, hook_norm, hook_dense, hook_attention])
@pytest.mark.parametrize("version", ["ours", "v2"])
def test_modified_layers_are_refused(version, change):
    model = MODELS[version]()
    change(model.encoder.layer[1])
    with pytest.raises(ValueError, match=r"layer\.1.* was hooked, patched or replaced"):
        hf_deberta.optimize(model)


@pytest.mark.parametrize("hooked_first", [True, False])
def test_a_hooked_layer_is_called(hooked_first):
    """In models of Transformers it is not, and so it is refused."""
    model, inputs, seen = make_model(), make_inputs("equal"), []
    if not hooked_first:
        outputs(hf_deberta.optimize(model), inputs)
    model.encoder.layer[1].register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    outputs(hf_deberta.optimize(model) if hooked_first else model, inputs)
    assert len(seen) == 1
    model = make_in_tree("v2")
    model.encoder.layer[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooked"):
        hf_deberta.optimize(model)


def train_with_fused_adamw(encoder):
    """Trainer's default optimizer, whose writes autograd does not count."""
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3, fused=True)
    for weight in encoder.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    optimizer.zero_grad()


def write_rows_of_table(encoder):
    """As merging an adapter of the table: of short texts, only rows near distance 0 were trained."""
    encoder.rel_embeddings.weight.data[253:259] += torch.randn(6, 2) @ torch.randn(2, 48)


CHANGES = {
    "weight": lambda encoder: encoder.layer[1].output.dense.weight.mul_(2),
    "weight.data": lambda encoder: encoder.layer[1].output.dense.weight.data.add_(0.01),
    "weights by an optimizer": train_with_fused_adamw,
    "new module": lambda encoder: setattr(encoder.layer[1].intermediate, "dense", nn.Linear(48, 96)),
    "new layer": lambda encoder: setattr(encoder.layer, "1", copy.deepcopy(encoder.layer[2])),
    "new layers": lambda encoder: setattr(encoder, "layer", nn.ModuleList([encoder.layer[2], encoder.layer[0]])),
    "class of a layer": lambda encoder: encoder.layer[1].train().eval(),
    "class": lambda encoder: setattr(encoder.layer[1].intermediate.dense, "__class__", ScaledLinear),
    "hook": lambda encoder: hook_dense(encoder.layer[1]),
    "rows of the table": write_rows_of_table,
    "new table": lambda encoder: setattr(encoder, "rel_embeddings", nn.Embedding(512, 48)),
    "new weight of the table": lambda encoder: setattr(
        encoder.rel_embeddings, "weight", nn.Parameter(torch.randn(512, 48))
    ),
    "norm of the table": lambda encoder: encoder.LayerNorm.weight[:9].mul_(3),
    "hook of the table's norm": lambda encoder: encoder.LayerNorm.register_forward_hook(lambda *args: 2 * args[2]),
}
CHANGES_IN_TREE = "weights by an optimizer", "rows of the table", "new weight of the table", "new layer", "new layers"


@pytest.mark.parametrize(
    ("version", "change"),
    [*(("ours", change) for change in CHANGES), *(("v2", change) for change in CHANGES_IN_TREE)],
)
def test_changes_are_noticed(version, change, monkeypatch):
    """After the change, the plain layers compute, with a warning."""
    model, inputs, warnings = MODELS[version](), make_inputs("equal"), []
    monkeypatch.setattr(fused_layers.logger, "warning_once", warnings.append)
    outputs(hf_deberta.optimize(model), inputs)
    with torch.no_grad():
        CHANGES[change](model.encoder)
    expected = outputs(copy.deepcopy(model), inputs)
    assert torch.equal(outputs(model, inputs), expected)
    assert "call hf_deberta.optimize again" in warnings[-1]


@pytest.mark.parametrize("version", MODELS)
def test_an_adapter_merged_after_optimize(version, tmp_path):
    peft, inputs = pytest.importorskip("peft"), make_inputs("equal")
    model = MODELS[version]()
    projection = "in_proj" if hasattr(model.encoder.layer[0].attention.self, "in_proj") else "query_proj"
    config = peft.LoraConfig(target_modules=[projection, "dense"], init_lora_weights=False)
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path)
    expected = outputs(peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).merge_and_unload(), inputs)
    merged = hf_deberta.optimize(copy.deepcopy(model))
    merged = peft.PeftModel.from_pretrained(merged, tmp_path).merge_and_unload()
    assert difference(outputs(merged, inputs), expected) < TOLERANCE[torch.float32]
    assert difference(outputs(model, inputs), expected) > 0.1  # the adapter matters


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_are_not_prepared(duplicate):
    model, inputs = make_model(), make_inputs("equal")
    expected = outputs(model, inputs)
    twin = duplicate(hf_deberta.optimize(model, torch.int8))
    assert twin.encoder.fused_layers is None
    assert torch.equal(outputs(twin, inputs), expected)


def test_training_undoes_it():
    model, inputs = make_model(), make_inputs("equal")
    expected = outputs(model, inputs)
    hf_deberta.optimize(model, torch.int8).train()
    assert type(model.encoder) is HfDebertaEncoder
    assert all(type(layer) is HfDebertaLayer for layer in model.encoder.layer)
    assert torch.equal(outputs(model.eval(), inputs), expected)
    model = hf_deberta.optimize(make_in_tree("v2"))
    outputs(model, inputs)
    assert model.encoder in prepared_encoders
    outputs(model.train(), inputs)
    assert model.encoder not in prepared_encoders


def test_a_second_call_starts_with_the_present_weights():
    model, inputs = make_model(), make_inputs("equal")
    hf_deberta.optimize(model, torch.int8)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    plain = copy.deepcopy(model)
    expected = outputs(plain, inputs)
    assert difference(outputs(hf_deberta.optimize(model), inputs), expected) < TOLERANCE[torch.float32]
