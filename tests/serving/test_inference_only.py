"""What `hf_deberta.optimize()` refuses, and what a converted model refuses: all that needs ordinary weights."""

import copy
import pickle
import re

import pytest
import torch
from test_optimize import TOLERANCE, difference, make_in_tree, make_inputs, make_model, outputs
from torch import nn

import hf_deberta

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


CHANGES = {
    "adapter": lambda layer: setattr(layer.attention.self, "value_proj", Adapter(layer.attention.self.value_proj)),
    "subclass": lambda layer: setattr(layer.output, "dense", ScaledLinear(96, 48)),
    "hook of a norm": lambda layer: layer.output.LayerNorm.register_forward_hook(lambda *_: None),
    "hook of a product": lambda layer: layer.intermediate.dense.register_forward_hook(lambda *_: None),
    "hook of a layer": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("version", ["ours", "v2"])
def test_modified_layers_are_refused(version, change):
    model = MODELS[version]()
    CHANGES[change](model.encoder.layer[1])
    with pytest.raises(ValueError, match=r"layer\.1.* was hooked, patched or replaced"):
        hf_deberta.optimize(model)


def inside(context, **options):
    def call(model, inputs):
        with context(**options):
            return outputs(model, inputs)

    return call


def disabled(model, inputs):
    hf_deberta.disable()
    return outputs(model, inputs)


def vmap(model, inputs):
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    return torch.func.vmap(lambda row: model(inputs_embeds=row[None])[0])(embeds)


def gradient_of_inputs(model, inputs):
    embeds = model.requires_grad_(False).get_input_embeddings()(inputs["input_ids"]).requires_grad_()
    model(inputs_embeds=embeds)[0].sum().backward()


CALLS = {
    "gradients": (lambda model, inputs: model(**inputs)[0].sum().backward(), "it has no gradients"),
    "gradients of inputs": (gradient_of_inputs, "it has no gradients"),
    "checkpointing": (lambda model, _: model.gradient_checkpointing_enable(), "it cannot be trained"),
    "state_dict": (lambda model, _: model.state_dict(), "its weights can neither be read nor saved"),
    "state_dict of a wrapper": (lambda model, _: nn.Sequential(model).state_dict(), "its weights can neither be read"),
    "state_dict of a layer": (lambda model, _: model.encoder.layer[0].state_dict(), "its weights can neither be read"),
    "deepcopy": (lambda model, _: copy.deepcopy(model), "it can neither be copied nor pickled"),
    "pickle": (lambda model, _: pickle.dumps(model), "it can neither be copied nor pickled"),
    "float16": (lambda model, _: model.half(), "it cannot be moved to torch.float16 on cpu"),
    "another device": (lambda model, _: model.to("meta"), "it cannot be moved to torch.float32 on meta"),
    "a layer in bfloat16": (lambda model, _: model.encoder.layer[0].bfloat16(), "it cannot be moved to torch.bfloat16"),
    "attentions": (lambda model, inputs: outputs(model, inputs, output_attentions=True), "it has no attention prob"),
    "autocast": (
        inside(torch.autocast, device_type="cpu", dtype=torch.bfloat16),
        "autocast has no effect on it: call it outside, and pass torch.bfloat16 to optimize()",
    ),
    "reference mode": (inside(hf_deberta.reference_mode), "it has no reference mode"),
    "export": (lambda model, inputs: torch.export.export(model, (), inputs, strict=False), "exported"),
    "trace": (lambda model, inputs: torch.jit.trace(model, tuple(inputs.values()), strict=False), "exported"),
    "compile": (lambda model, inputs: outputs(torch.compile(model, backend="eager"), inputs), "it can neither be comp"),
    "torch.func": (vmap, "nor transformed"),
    "second call": (lambda model, _: hf_deberta.optimize(model), "a second call has no weights"),
    "second call, a copy": (lambda model, _: hf_deberta.optimize(model, inplace=False), "a second call has no weights"),
}
CALLS_IN_TREE = {
    "disabled": (disabled, "it computes under enable() only (call that again)"),
    "other rows": (
        inside(hf_deberta.enable, clamp_relative_distance=True),
        "it computes under enable(clamp_relative_distance=False) only: call that again",
    ),
}


@pytest.mark.parametrize(
    ("version", "call"),
    [*((version, call) for version in MODELS for call in CALLS), *(("v2", x) for x in CALLS_IN_TREE)],
)
def test_what_needs_ordinary_weights_is_one_sentence(version, call):
    model, inputs = hf_deberta.optimize(MODELS[version]()), make_inputs("equal")
    function, reason = {**CALLS, **CALLS_IN_TREE}[call]
    with pytest.raises(RuntimeError, match=rf"prepared for inference by hf_deberta\.optimize.*{re.escape(reason)}"):
        function(model, inputs)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential])
@pytest.mark.parametrize("version", MODELS)
def test_a_refused_change_changes_nothing(version, wrap):
    """Embeddings come before the layers, and would be loaded or moved before these refuse it."""
    model, inputs = MODELS[version](), make_inputs("equal")
    state = {name: 2 * weight for name, weight in wrap(model).state_dict().items()}
    expected = outputs(hf_deberta.optimize(model), inputs)
    for change, message in (
        (lambda: wrap(model).load_state_dict(state, strict=False), "no weights can be loaded into it"),
        (lambda: wrap(model).half(), "it cannot be moved to torch.float16"),
        (lambda: wrap(model).to("meta"), "it cannot be moved to torch.float32 on meta"),
    ):
        with pytest.raises(RuntimeError, match=message):
            change()
        assert torch.equal(outputs(model, inputs), expected)


def test_embeddings_of_another_type_are_refused():
    model = hf_deberta.optimize(make_model())
    model.embeddings.half()
    with pytest.raises(RuntimeError, match="it reads states of float32 on the CPU, not of torch.float16 on cpu"):
        outputs(model, make_inputs("equal"))


@pytest.mark.parametrize("version", MODELS)
def test_nothing_is_saved(version, tmp_path):
    model = hf_deberta.optimize(MODELS[version]())
    with pytest.raises(RuntimeError, match="its weights can neither be read nor saved"):
        model.save_pretrained(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", MODELS)
def test_adapters_are_merged_before(version, tmp_path):
    """A model that refuses an adapter has no part of it afterwards, not in its head or its embeddings either."""
    peft, inputs = pytest.importorskip("peft"), make_inputs("equal")
    head = "ForSequenceClassification"
    model = make_model(getattr(hf_deberta, "HfDeberta" + head)) if version == "ours" else make_in_tree(version, head)
    targets = ["word_embeddings", "in_proj" if version == "v1" else "query_proj", "dense"]
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False)
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path)
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).merge_and_unload()
    expected = outputs(merged, inputs)
    assert difference(outputs(hf_deberta.optimize(merged), inputs), expected) < TOLERANCE[torch.float32]
    assert difference(outputs(model, inputs), expected) > 0.1  # the adapter matters
    expected = outputs(hf_deberta.optimize(model), inputs)
    for add in (
        lambda: peft.PeftModel.from_pretrained(model, tmp_path),
        lambda: peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)),
    ):
        with pytest.raises(RuntimeError, match="it takes no adapters"):
            add()
        assert torch.equal(outputs(model, inputs), expected)


@pytest.mark.parametrize("version", MODELS)
def test_what_changes_no_weight_is_allowed(version):
    """What pipelines and trainers call before they compute; hooks see the layers, and may replace their states."""
    model, inputs, seen = hf_deberta.optimize(MODELS[version]()), make_inputs("equal"), []
    expected = outputs(model, inputs)
    model.train().eval().to("cpu").float()
    assert next(model.encoder.parameters()).dtype == model.dtype == torch.float32
    handle = model.encoder.layer[1].register_forward_hook(lambda module, args, output: seen.append(output[0]))
    assert torch.equal(outputs(model, inputs), expected) and seen[0].shape == expected.shape
    handle.remove()
    model.encoder.layer[2].register_forward_hook(lambda module, args, output: (2 * output[0], None))
    assert torch.equal(outputs(model, inputs), 2 * expected)


@pytest.mark.parametrize(
    "model_class", [hf_deberta.HfDebertaForSequenceClassification, hf_deberta.HfDebertaForMaskedLM]
)
def test_a_head_is_trained_on_the_frozen_encoder(model_class):
    model, inputs = make_model(model_class), make_inputs("padded")
    model.deberta.requires_grad_(False)
    inputs["labels"] = torch.tensor([0, 1, 2, 0]) if hasattr(model, "pooler") else inputs["input_ids"]
    head = [weight for name, weight in model.named_parameters() if not name.startswith("deberta.")]
    expected = torch.autograd.grad(model(**inputs).loss, head, allow_unused=True)
    hf_deberta.optimize(model).train()  # as Trainer does before each step
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and not name.startswith("deberta."):
            module.p = 0.0
    gradients = torch.autograd.grad(model(**inputs).loss, head, allow_unused=True)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


def test_layers_cannot_be_left_out():
    model, inputs = hf_deberta.optimize(make_model(hf_deberta.HfDebertaForSequenceClassification)), make_inputs("equal")
    del model.deberta.encoder.layer[-1]
    with pytest.raises(RuntimeError, match="its last layers cannot be left out"):
        outputs(model, inputs)
