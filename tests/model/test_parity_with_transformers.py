"""In-tree classes and ours: the same weights give the same numbers, there and back again bit for bit."""

import json

import pytest
import torch
import transformers
from numerics import at_real_tokens, largest, tiny_inputs
from safetensors.torch import load_file, save_file

import hf_deberta
from hf_deberta import export_to_transformers
from hf_deberta.transformers_format import to_v1_layout

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
    "initializer_range": 0.15,
}
V2_ATTENTION = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
TYPES = {"position_biased_input": True, "type_vocab_size": 2, "pos_att_type": ["p2c"]}
NARROW = {"embedding_size": 24, "position_biased_input": True, "max_relative_positions": 64, "position_buckets": 16}
ABSOLUTE = {"relative_attention": False, "position_biased_input": True, "pos_att_type": None}
SHAPES = {
    "v1": (transformers.DebertaConfig, {}),
    "v1 with absolute positions and types": (transformers.DebertaConfig, TYPES),
    "v2": (transformers.DebertaV2Config, {**V2_ATTENTION, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "v3": (transformers.DebertaV2Config, V2_ATTENTION),
    "v3 narrow embedding": (transformers.DebertaV2Config, {**V2_ATTENTION, **NARROW}),
    "v2 own projections": (transformers.DebertaV2Config, {"position_buckets": 32, "pos_att_type": "c2p"}),
    "no relative attention": (transformers.DebertaV2Config, ABSOLUTE),
}
HEADS = ["Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM"]


def in_tree(shape, head, **extra):
    """A random in-tree model with every parameter away from its special value (zero biases, unit norms)."""
    config_class, fields = SHAPES[shape]
    torch.manual_seed(0)
    config = config_class(**{**SMALL, **fields, **extra})
    model_class = getattr(transformers, config_class.__name__.removesuffix("Config") + head)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "LayerNorm.weight")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def loaded(model_class, folder):
    """The model of a folder, which must hold every weight and no other."""
    model, report = model_class.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    return model.eval()


def ours(head, folder):
    return loaded(getattr(hf_deberta, f"HfDeberta{head}"), folder)


def batch(lengths=(37, 20, 5), types=False):
    inputs = tiny_inputs(lengths, vocab=99)
    return inputs | ({"token_type_ids": inputs["input_ids"] % 2} if types else {})


def outputs(model, inputs):
    with torch.no_grad():
        result = model(**inputs, output_hidden_states=True)
    names = [name for name in ("logits", "start_logits", "end_logits", "last_hidden_state") if name in result]
    return {name: result[name] for name in names} | {
        f"hidden_states.{i}": state for i, state in enumerate(result.hidden_states)
    }


def assert_same(theirs, mine, mask, atol=1e-5):
    assert theirs.keys() == mine.keys()
    for name, expected in theirs.items():
        assert largest(at_real_tokens(mine[name] - expected, mask)) < atol, name


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("unpadded_or_padded")
def test_in_tree_checkpoint_gives_in_tree_numbers(shape, head, tmp_path):
    if "narrow" in shape and head == "ForQuestionAnswering":
        pytest.skip("one head less is enough here")
    theirs = in_tree(shape, head)
    inputs = batch(types=theirs.config.type_vocab_size > 0)
    mine = ours(head, saved(theirs, tmp_path))
    assert_same(outputs(theirs, inputs), outputs(mine, inputs), inputs["attention_mask"])


@pytest.mark.parametrize("lengths", [(1,), (2, 1), (129, 7), (512, 300)], ids=str)
@pytest.mark.parametrize("shape", ["v1", "v2", "v3"])
def test_every_length_up_to_512(shape, lengths, tmp_path):
    theirs = in_tree(shape, "Model", initializer_range=0.05)
    inputs = batch(lengths=lengths)
    mine = ours("Model", saved(theirs, tmp_path))
    assert_same(outputs(theirs, inputs), outputs(mine, inputs), inputs["attention_mask"])


@pytest.mark.usefixtures("unpad_tiny_models")
def test_past_the_largest_distance_in_tree_reads_an_untrained_row(tmp_path, warnings_so_far):
    theirs = in_tree("v3", "Model", max_position_embeddings=64, position_buckets=16)
    inputs = batch(lengths=(150, 90))
    folder = saved(theirs, tmp_path)
    mine = ours("Model", folder)
    compatible = hf_deberta.HfDebertaModel.from_pretrained(folder, clamp_relative_distance=False).eval()
    assert_same(outputs(theirs, inputs), outputs(compatible, inputs), inputs["attention_mask"])
    difference = outputs(theirs, inputs)["last_hidden_state"] - outputs(mine, inputs)["last_hidden_state"]
    assert any("call from_pretrained with clamp_relative_distance" in message for message in warnings_so_far())
    assert difference[inputs["attention_mask"].bool()].abs().max() > 1e-2
    with torch.no_grad():  # the row that official code reads there
        theirs.encoder.rel_embeddings.weight[0] = theirs.encoder.rel_embeddings.weight[1]
    assert_same(outputs(theirs, inputs), outputs(mine, inputs), inputs["attention_mask"])


@pytest.mark.usefixtures("unpad_tiny_models")
def test_multiple_choice_v2(tmp_path):
    theirs, inputs = in_tree("v2", "ForMultipleChoice", type_vocab_size=2), batch(lengths=(9, 9, 6), types=True)
    inputs = {name: torch.stack([value, value.flip(0)], 1) for name, value in inputs.items()}
    mine = ours("ForMultipleChoice", saved(theirs, tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(mine(**inputs).logits, theirs(**inputs).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back_is_bit_equal(shape, head, tmp_path):
    theirs = in_tree(shape, head)
    mine = ours(head, saved(theirs, tmp_path / "in-tree"))
    mine.save_pretrained(tmp_path / "ours")
    again = ours(head, tmp_path / "ours")
    export_to_transformers(again, tmp_path / "back")
    back = loaded(type(theirs), tmp_path / "back")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name
    assert not list((tmp_path / "back").glob("*.py"))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == theirs.config.model_type and config["architectures"] == [type(theirs).__name__]
    inputs = batch(types=theirs.config.type_vocab_size > 0)
    assert_same(outputs(theirs, inputs), outputs(back, inputs), inputs["attention_mask"], atol=1e-12)


# ---- released files -------------------------------------------------------------------------------------


def released(tmp_path, shape="v3", prefix="deberta.", binary=False, extra=None):
    """A folder as released: official weight names, a decoder head, position embeddings, perhaps oddities."""
    fields = {"model_type": "deberta" if shape == "v1" else "deberta-v2", **SMALL, **SHAPES[shape][1]}
    model = hf_deberta.HfDebertaForMaskedLM(hf_deberta.HfDebertaConfig.from_dict(fields)).eval()
    weights = {name: value for name, value in model.state_dict().items() if ".decoder." not in name}
    if shape == "v1":
        weights = to_v1_layout(weights, 4)
    weights = {name.replace("deberta.", prefix): value.clone() for name, value in weights.items()}
    weights.update(extra or {})
    fields |= {"pos_att_type": "p2c|c2p", "padding_idx": 0}
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if binary:
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    return model, tmp_path


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("prefix", ["deberta.", "bert."])
@pytest.mark.parametrize("shape", ["v1", "v2", "v3"])
@pytest.mark.usefixtures("unpadded_or_padded")
def test_released_masked_lm(shape, prefix, binary, tmp_path):
    expected, folder = released(tmp_path, shape, prefix, binary)
    found = ours("ForMaskedLM", folder)
    assert found.config.emd_steps == 2
    inputs = batch()
    torch.testing.assert_close(found(**inputs).logits, expected(**inputs).logits, atol=0, rtol=0)


def test_stray_entries_of_released_files_are_ignored(tmp_path):
    stray = {
        "deberta.embeddings.word_embeddings._weight": torch.zeros(99, 32),
        "deberta.embeddings.position_embeddings._weight": torch.zeros(512, 32),
        "mask_predictions.dense.weight": torch.zeros(32, 32),
    }
    _, folder = released(tmp_path, extra=stray)
    ours("ForMaskedLM", folder)
    for head in ("Model", "ForQuestionAnswering"):
        _, report = getattr(hf_deberta, f"HfDeberta{head}").from_pretrained(folder, output_loading_info=True)
        assert not report["unexpected_keys"]
        assert all(key.startswith("qa_outputs") for key in report["missing_keys"])


def test_config_entry_of_a_v1_pickle(tmp_path):
    expected, folder = released(tmp_path, "v1", binary=True, extra={"config": {"hidden_size": 32}})
    found = ours("ForMaskedLM", folder)
    inputs = batch()
    assert torch.equal(found(**inputs).logits, expected(**inputs).logits)


def test_discriminator_loaded_for_masked_lm_warns(tmp_path, warnings_so_far):
    discriminator = hf_deberta.HfDebertaForPreTraining(hf_deberta.HfDebertaConfig(**SMALL)).state_dict()
    head = {name: tensor for name, tensor in discriminator.items() if name.startswith("mask_predictions.")}
    _, folder = released(tmp_path, extra=head)
    ours("ForMaskedLM", folder)
    ours("ForMaskedLM", folder)
    assert len([message for message in warnings_so_far() if "discriminator" in message]) == 1
    ours("ForPreTraining", folder)


def test_half_precision_files_load_in_the_dtype_asked_for(tmp_path):
    _, folder = released(tmp_path)
    weights = {name: value.half() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load = hf_deberta.HfDebertaModel.from_pretrained
    assert load(folder).dtype == torch.float32  # not what the file happens to be stored in
    assert load(folder, dtype=torch.float16).dtype == torch.float16
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    assert load(folder).dtype == torch.float16


def test_untied_in_tree_masked_lm_is_refused_rather_than_wrong(tmp_path):
    theirs = in_tree("v3", "ForMaskedLM", tie_word_embeddings=False)
    torch.nn.init.normal_(theirs.cls.predictions.decoder.bias)
    folder = saved(theirs, tmp_path)
    with pytest.raises(ValueError, match="drop the latter from the file and give the former its name"):
        ours("ForMaskedLM", folder)
    weights = load_file(folder / "model.safetensors")
    weights["cls.predictions.bias"] = weights.pop("cls.predictions.decoder.bias")  # as the error says
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    inputs = batch()
    with torch.no_grad():
        found, expected = (model(**inputs).logits for model in (ours("ForMaskedLM", folder), theirs))
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-4, rtol=1e-4)
