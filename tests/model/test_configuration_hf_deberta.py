"""Configuration: presets, checks, and the translation of official and in-tree files."""

import dataclasses
import json
import re

import golden_cases
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from hf_deberta import PRESETS, HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaModel

MILLION = 10**6


def count_parameters(config, model_class=HfDebertaModel):
    """Return the number of parameters of the word embedding, and of everything else."""
    with torch.device("meta"):
        model = model_class(config)
    words = model.get_input_embeddings().weight.numel()
    return words, sum(parameter.numel() for parameter in model.parameters()) - words


# ---- presets -----------------------------------------------------------------------------------------------------

# layers, hidden size, heads, vocabulary size, published million parameters: of the word embedding and the rest, or all
PUBLISHED = {
    "v1-base": (12, 768, 12, 50265, 134),
    "v1-large": (24, 1024, 16, 50265, 390),
    "v1-xlarge": (48, 1024, 16, 50265, 750),
    "v2-xlarge": (24, 1536, 24, 128100, 900),
    "v2-xxlarge": (48, 1536, 24, 128100, 1500),
    "v3-xsmall": (12, 384, 6, 128100, (48, 22)),
    "v3-small": (6, 768, 12, 128100, (98, 44)),
    "v3-base": (12, 768, 12, 128100, (98, 86)),
    "v3-large": (24, 1024, 16, 128100, (131, 304)),
    "mdeberta-v3-base": (12, 768, 12, 251000, (190, 86)),
}


@pytest.mark.parametrize("name", sorted({*PRESETS, *PUBLISHED} - {"tiny"}))
def test_published_sizes(name):
    config = HfDebertaConfig.from_preset(name)
    *sizes, millions = PUBLISHED[name]
    assert sizes == [config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.vocab_size]
    assert config.intermediate_size == 4 * config.hidden_size
    words, rest = (count / MILLION for count in count_parameters(config))
    if isinstance(millions, tuple):
        assert (words, rest) == pytest.approx(millions, rel=0.03)
    else:
        assert words + rest == pytest.approx(millions, rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_fields(name):
    config = HfDebertaConfig.from_preset(name)
    v1, v2 = name.startswith("v1"), name.startswith("v2")
    assert config.share_att_key is not v1 and config.attention_key_bias is not v1
    assert config.norm_rel_ebd == ("none" if v1 else "layer_norm")
    assert config.relative_span == (512 if v1 else 16 if name == "tiny" else 256)
    assert config.conv_kernel_size == (3 if v2 else 0)
    assert config.attention_terms == 3 and config.emd_steps == 2 and config.uses_mask_decoder
    assert HfDebertaConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_only_the_masked_language_model_has_position_embeddings():
    config = HfDebertaConfig.from_preset("tiny")
    head = 32 * 32 + 32 + 2 * 32 + 128  # dense, LayerNorm, a bias per token
    assert count_parameters(config, HfDebertaForMaskedLM)[1] - count_parameters(config)[1] == 64 * 32 + head


def test_overrides_do_not_change_the_preset():
    before = json.dumps(PRESETS)
    config = HfDebertaConfig.from_preset("v2-xlarge", num_hidden_layers=2, vocab_size=100, num_labels=7)
    assert (config.num_hidden_layers, config.vocab_size, config.num_labels, config.conv_act) == (2, 100, 7, "gelu")
    assert json.dumps(PRESETS) == before


def test_unknown_preset_is_an_error():
    with pytest.raises(ValueError, match=r"'v4-base'.* v1-base, .*, tiny$"):
        HfDebertaConfig.from_preset("v4-base")


# ---- checks ------------------------------------------------------------------------------------------------------

# field -> values that it may not have; the error names both
INVALID = {
    "vocab_size": (0, True, 10**12),
    "hidden_size": (-8, "wide"),
    "num_hidden_layers": (10_001,),
    "num_attention_heads": (0, 7),
    "intermediate_size": (0, 10**500),
    "norm_rel_ebd": ("batch_norm",),
    "max_position_embeddings": (0,),
    "position_buckets": (1, 126),
    "emd_steps": (-1, 1001),
    "conv_kernel_size": (4, -1),
    "conv_groups": (5, 0),
    "token_classifier": ("crf",),
    "hidden_dropout_prob": (1.0,),
    "attention_probs_dropout_prob": (-0.1,),
    "pooler_dropout": (2,),
    "cls_dropout": (1, float("nan")),
    "layer_norm_eps": (0.0, float("nan")),
    "initializer_range": (float("inf"), -1),
    "pad_token_id": (-1, 128),
    "type_vocab_size": (-1,),
    "hidden_act": ("bogus",),
    "pooler_hidden_act": ("bogus",),
    "conv_act": ("bogus",),
    "problem_type": ("bogus",),
    "num_labels": (0, 10**12, 2.5, True),
}
INVALID_TOGETHER = [
    ({"num_hidden_layers": 0, "emd_steps": 0}, "num_hidden_layers .*not 0"),
    ({"num_hidden_layers": 1}, "num_hidden_layers is 1; set emd_steps=0"),
    ({"embedding_size": 0, "emd_steps": 0}, "embedding_size .*not 0"),
    ({"embedding_size": 16}, r"embedding_size \(16\) .*hidden_size \(32\); set emd_steps=0"),
    ({"attention_head_size": 16}, "attention_head_size .*not 16; leave it out"),
    ({"pooler_hidden_size": 16}, "pooler_hidden_size .*not 16; leave it out"),
    ({"pos_att_type": ["c2p", "c2c"]}, "pos_att_type .*not 'c2c'"),
    ({"pos_att_type": "p2c|c2p|p2c"}, r"pos_att_type .*\['p2c', 'c2p', 'p2c'\]"),
    ({"max_relative_positions": 8}, "position_buckets .*below 7, .*not 16; .*max_relative_positions"),
    ({"max_relative_positions": 10**9}, "max_distance .*not 1000000000"),
    ({"id2label": {}}, "num_labels .*id2label is empty"),
]


TINY = {"model_type": "hf_deberta", **PRESETS["tiny"]}


def written(folder, fields):
    (folder / "config.json").write_text(json.dumps({**TINY, **fields}))
    return folder


def refuses(folder, fields, message):
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        HfDebertaConfig.from_preset("tiny", **fields)
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        HfDebertaConfig.from_pretrained(written(folder, fields))


@pytest.mark.parametrize("field", INVALID)
def test_error_names_the_field_and_its_value(field, tmp_path):
    for value in INVALID[field]:
        refuses(tmp_path, {field: value}, f"{field}.*{re.escape(str(value))}")


@pytest.mark.parametrize("fields, message", INVALID_TOGETHER, ids=str)
def test_fields_that_do_not_fit_together(fields, message, tmp_path):
    refuses(tmp_path, fields, message)


def test_the_number_of_labels_is_checked_when_it_is_set():
    config = HfDebertaConfig.from_preset("tiny", num_labels=3)
    config.num_labels = 5
    assert config.num_labels == len(config.id2label) == len(config.label2id) == 5
    assert HfDebertaConfig(num_labels=np.int64(4)).num_labels == 4
    with pytest.raises(ValueError, match="num_labels .*not 0"):
        config.num_labels = 0


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "not a valid JSON file"),
        ('{"vocab_size": 12', "not a valid JSON file"),
        ("{}", "has no config.json, or an empty one"),
        (None, "has no config.json, or an empty one"),
    ],
)
@pytest.mark.parametrize("model_class", [HfDebertaConfig, HfDebertaModel])
def test_a_file_that_is_not_a_configuration(text, message, model_class, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(OSError, match=message):
        model_class.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "./no", "no/such/folder"])
def test_a_folder_that_does_not_exist(name):
    with pytest.raises(OSError, match=f"there is no folder {name}"):
        HfDebertaModel.from_pretrained(name)


def test_unknown_attention_backend():
    with pytest.raises(ValueError, match='"bogus"` is not supported: choose one of auto, eager, sdpa, triton'):
        HfDebertaModel(HfDebertaConfig.from_preset("tiny", attn_implementation="bogus"))


@pytest.mark.parametrize(
    "pos_att_type, terms",
    [
        (" P2C | c2p ", ["p2c", "c2p"]),
        ("none", []),
        (None, []),
        (("p2p",), ["p2p"]),
        (["none"], []),
    ],
    ids=repr,
)
def test_forms_of_pos_att_type(pos_att_type, terms):
    config = HfDebertaConfig(pos_att_type=pos_att_type)
    assert config.pos_att_type == terms and config.attention_terms == 1 + len(terms)


def test_derived_values():
    config = HfDebertaConfig.from_preset("tiny", max_relative_positions=32, attention_head_size=8)
    assert (config.max_distance, config.relative_span) == (32, 16)
    assert HfDebertaConfig.from_preset("tiny", position_buckets=-1).relative_span == 64
    assert not HfDebertaConfig.from_preset("tiny", position_biased_input=True).uses_mask_decoder
    assert not HfDebertaConfig.from_preset("tiny", emd_steps=0).uses_mask_decoder


def test_docstring_has_every_field_and_its_default():
    for field in dataclasses.fields(HfDebertaConfig):
        if field.name in HfDebertaConfig.__annotations__:
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            default = json.dumps(default) if isinstance(default, str | list) else repr(default)
            line = rf"\n +{field.name} \(.*, {re.escape(default)}\): ."
            assert re.search(line, HfDebertaConfig.__doc__), (field.name, default)


# ---- official and in-tree files -----------------------------------------------------------------------------------

NOT_MODELS = ("case10_ngram_mask", "case11_log_buckets")
OFFICIAL_FILES = sorted(path.stem for path in golden_cases.FOLDER.glob("case*.json") if path.stem not in NOT_MODELS)
OFFICIAL_DEFAULTS = {
    "position_buckets": -1,
    "share_att_key": False,
    "norm_rel_ebd": "none",
    "conv_kernel_size": 0,
    "max_relative_positions": -1,
    "type_vocab_size": 0,
    "position_biased_input": True,
    "relative_attention": False,
    "clamp_relative_distance": True,
    "pos_att_type": ["c2p"],
}


def official_configs():
    for case in OFFICIAL_FILES:
        config = golden_cases.official_config(case)
        parts = {"": config}
        if "generator" in config:
            parts = {name: config[name] for name in ("generator", "discriminator")}
        for name, fields in parts.items():
            yield pytest.param(fields, id=f"{case} {name}".strip())


@pytest.mark.parametrize("official", list(official_configs()))
def test_official_file_is_translated(official):
    assert "model_type" not in official
    before = json.dumps(official)
    config = HfDebertaConfig.from_dict(official)
    assert json.dumps(official) == before
    assert config.model_type == "hf_deberta"
    renamed = {"padding_idx": "pad_token_id"}
    for key, value in official.items():
        if key == "pos_att_type":
            value = [] if value in ("none", None) else value.split("|")
        if key == "norm_rel_ebd":
            value = value.lower()
        if key != "pooling":
            assert getattr(config, renamed.get(key, key)) == value, key
    for key in OFFICIAL_DEFAULTS.keys() - official.keys():
        assert getattr(config, key) == OFFICIAL_DEFAULTS[key], key
    assert config.emd_steps == (0 if official.get("embedding_size", 32) != 32 else 2)
    pooling = official.get("pooling", {})
    assert config.pooler_dropout == pooling.get("dropout", 0)
    assert config.pooler_hidden_act == pooling.get("hidden_act", official["hidden_act"])


def test_official_file_without_keys_has_official_defaults():
    config = HfDebertaConfig.from_dict({"vocab_size": 50265})
    for key, value in OFFICIAL_DEFAULTS.items():
        assert getattr(config, key) == value, key
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (768, 12, 12)


IN_TREE = {
    "deberta": (
        transformers.DebertaConfig(relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False),
        {"share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none", "attention_key_bias": False},
    ),
    "deberta with fields of v2, which it ignores": (
        transformers.DebertaConfig(relative_attention=True, position_buckets=256, share_att_key=True),
        {"share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none", "pos_att_type": []},
    ),
    "deberta-v2 with defaults": (
        transformers.DebertaV2Config(num_labels=5),
        {"hidden_size": 1536, "num_hidden_layers": 24, "relative_attention": False, "num_labels": 5},
    ),
}


@pytest.mark.parametrize("source", ["dictionary", "file", "non-default keys"])
@pytest.mark.parametrize("name", IN_TREE)
def test_in_tree_configuration_is_translated(name, source, tmp_path):
    in_tree, expected = IN_TREE[name]
    if source == "file":
        in_tree.save_pretrained(tmp_path)
        config = HfDebertaConfig.from_pretrained(tmp_path)
    else:
        config = HfDebertaConfig.from_dict(in_tree.to_dict() if source == "dictionary" else in_tree.to_diff_dict())
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
    same += ("layer_norm_eps", "max_position_embeddings", "type_vocab_size", "relative_attention", "pad_token_id")
    same += ("position_biased_input", "max_relative_positions", "hidden_dropout_prob", "pooler_hidden_act")
    for key in same:
        assert getattr(config, key) == getattr(in_tree, key), key
    for key, value in expected.items():
        assert getattr(config, key) == value, key
    assert config.model_type == "hf_deberta" and config.emd_steps == 2
    assert not hasattr(config, "legacy")


@pytest.mark.parametrize(
    "architectures, steps",
    [
        (["DebertaV2ForMaskedLM"], 0),
        (["DebertaForMaskedLM"], 0),
        (["DebertaV2ForSequenceClassification"], 2),
        (None, 2),
        ([], 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", ["deberta", "deberta-v2"])
def test_only_in_tree_masked_language_models_have_no_decoder(model_type, architectures, steps):
    fields = {"model_type": model_type, "architectures": architectures}
    assert HfDebertaConfig.from_dict(fields).emd_steps == steps
    assert HfDebertaConfig.from_dict({**fields, "emd_steps": 1}).emd_steps == 1
    assert HfDebertaConfig.from_dict({**fields, "num_hidden_layers": 1}).emd_steps == 0


def test_round_trip_of_every_field(tmp_path):
    config = HfDebertaConfig.from_preset(
        "tiny",
        pos_att_type=["c2p", "p2p"],
        share_att_key=False,
        clamp_relative_distance=False,
        emd_steps=3,
        sparse_prediction=False,
        conv_kernel_size=5,
        conv_groups=2,
        cls_dropout=0.25,
        token_classifier="projection",
        tie_word_embeddings=False,
        id2label={0: "no", 1: "yes"},
        problem_type="single_label_classification",
    )
    config.save_pretrained(tmp_path)
    again = HfDebertaConfig.from_pretrained(tmp_path)
    actual, expected = again.to_dict(), config.to_dict()
    assert {key: actual[key] for key in expected if actual[key] != expected[key]} == {}
    assert again.id2label == {0: "no", 1: "yes"}
    assert HfDebertaConfig.from_pretrained(tmp_path, emd_steps=1).emd_steps == 1
    automatic = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(automatic) is HfDebertaConfig and automatic.to_diff_dict() == again.to_diff_dict()


def test_another_architecture_is_an_error(tmp_path):
    bert = transformers.BertConfig()
    bert.save_pretrained(tmp_path)
    for load in (HfDebertaConfig.from_pretrained, HfDebertaModel.from_pretrained):
        with pytest.raises(ValueError, match="hf_deberta, deberta and deberta-v2, not 'bert'"):
            load(tmp_path)
    for fields, reason in ((bert.to_dict(), "bert"), ({"model_type": "deberta", "talking_head": True}, "talking")):
        with pytest.raises(ValueError, match=reason):
            HfDebertaConfig.from_dict(fields)
