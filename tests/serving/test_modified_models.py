"""`hf_deberta.optimize()` refuses layers that it would bypass: hooked ones and adapters. Training undoes it."""

import pytest
import torch
import transformers
from torch import nn

import hf_deberta
from hf_deberta.in_tree.encoder import prepared_encoders
from hf_deberta.serving import optimize as optimize_module


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


def make_model():
    return hf_deberta.HfDebertaModel(hf_deberta.HfDebertaConfig.from_preset("tiny")).eval()


def adapt(layer):
    layer.attention.self.value_proj = Adapter(layer.attention.self.value_proj)


def replace_by_subclass(layer):
    layer.output.dense = ScaledLinear(layer.output.dense.in_features, layer.output.dense.out_features)


def hook_norm(layer):
    layer.output.LayerNorm.register_forward_hook(lambda *_: None)


def hook_attention(layer):
    layer.attention.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize("change", [adapt, replace_by_subclass, hook_norm, hook_attention])
def test_modified_layers_are_refused(change):
    model = make_model()
    change(model.encoder.layer[1])
    with pytest.raises(ValueError, match=r"layer\.1.* was hooked, patched or replaced"):
        hf_deberta.optimize(model)


@torch.no_grad()
def test_hooks_of_whole_layers_run():
    model, calls, ids = make_model(), [], torch.randint(5, 90, (2, 7))
    model.encoder.layer[0].register_forward_hook(lambda *_: calls.append(1))
    hf_deberta.optimize(model)(ids)
    assert len(calls) == 1


@torch.no_grad()
def test_training_undoes_it_in_models_of_transformers():
    settings = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.DebertaV2Config(**settings, intermediate_size=64, relative_attention=True)
    model, ids = transformers.DebertaV2Model(config).eval(), torch.randint(5, 90, (2, 7))
    model.encoder.layer[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooked"):
        hf_deberta.optimize(model)
    model.encoder.layer[0]._forward_hooks.clear()
    hf_deberta.optimize(model)
    try:
        model(ids)
        assert model.encoder in prepared_encoders
        model.train()(ids)
        assert model.encoder not in prepared_encoders
    finally:
        hf_deberta.disable()


def test_without_onednn(monkeypatch):
    monkeypatch.setattr(optimize_module, "has_onednn_linear", lambda: False)
    with pytest.raises(RuntimeError, match="oneDNN"):
        hf_deberta.optimize(make_model())
