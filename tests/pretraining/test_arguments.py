"""What the flags of both pretraining scripts are made into."""

import sys
from types import SimpleNamespace

import pytest

from hf_deberta import HfDebertaConfig
from hf_deberta.pretraining.arguments import (
    NewModelArguments,
    PretrainingArguments,
    check,
    parse_overrides,
    rows_of,
    run_with_arguments,
)
from hf_deberta.pretraining.corpus import Corpus, CorpusArguments
from hf_deberta.pretraining.tokenizer_training import train_tokenizer

LINES = ["the old man walked slowly down to a quiet harbour"] * 20
TOKENIZER = train_tokenizer(LINES, 290, "bpe")
WORDS = len(TOKENIZER)


def test_overrides():
    text = "hidden_size=256, pos_att_type=c2p|p2c,relative_attention=false,attn_implementation=eager"
    expected = {"hidden_size": 256, "pos_att_type": "c2p|p2c", "relative_attention": False}
    assert parse_overrides(text) == {**expected, "attn_implementation": "eager"}
    assert parse_overrides(None) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden_size=3", r"unknown field hiden_size \(do you mean hidden_size or .*; HfDebertaConfig"),
        ("zzz=3", "unknown field zzz; HfDebertaConfig documents all"),
        ("emd_steps", "takes name=value,name=value and not 'emd_steps'"),
    ],
)
def test_misspelt_overrides(text, message):
    """Said as soon as the flags are read, whatever the model is made of."""
    with pytest.raises(ValueError, match=message):
        NewModelArguments(config_overrides=text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"label_smoothing_factor": 0.1},
            "--label_smoothing_factor 0.1 is not supported: the losses here are those of",
        ),
        ({"train_sampling_strategy": "sequential"}, "--train_sampling_strategy sequential is not supported: the order"),
        ({"train_sampling_strategy": "group_by_length"}, "--train_sampling_strategy group_by_length is not supported"),
    ],
)
def test_what_of_trainer_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        PretrainingArguments(str(tmp_path), **fields)
    assert PretrainingArguments(str(tmp_path), use_cpu=True).device.type == "cpu"


def test_words_and_padding_are_the_tokenizers_unless_asked_for():
    plain, wider = NewModelArguments("tiny"), NewModelArguments("tiny", config_overrides="vocab_size=320")
    assert plain.new_config(TOKENIZER, 16).vocab_size == WORDS
    assert wider.new_config(TOKENIZER, 16).vocab_size == 320


@pytest.mark.parametrize(
    ("fields", "length", "causal", "message"),
    [
        ({}, 65, False, "more than the 64 absolute positions"),
        ({"emd_steps": 0, "position_biased_input": True}, 65, False, "more than the 64 absolute positions"),
        ({}, 9, False, "a row needs 10 tokens at least"),
        ({"vocab_size": WORDS - 1}, 16, False, f"the tokenizer has {WORDS} tokens and the model knows {WORDS - 1}"),
        ({"conv_kernel_size": 3}, 16, True, "add --config_overrides conv_kernel_size=0, or take --objective mlm"),
    ],
)
def test_what_does_not_go_together(fields, length, causal, message):
    config = HfDebertaConfig.from_preset("tiny", **{"vocab_size": WORDS, **fields})
    with pytest.raises(ValueError, match=message):
        check(config, TOKENIZER, length, causal)


def test_what_goes_together():
    check(HfDebertaConfig.from_preset("tiny", vocab_size=WORDS, conv_kernel_size=3), TOKENIZER, 64)
    relative = HfDebertaConfig.from_preset("tiny", vocab_size=WORDS, emd_steps=0)
    check(relative, TOKENIZER, 1000, causal=True)  # knows no absolute positions


def test_one_process_tokenises_again(tmp_path):
    """Each of the others, which come together after it, reads what it wrote."""
    (tmp_path / "corpus.txt").write_text("\n".join(LINES), encoding="utf-8")
    args = CorpusArguments(train_file=[str(tmp_path / "corpus.txt")], overwrite_cache=True, max_seq_length=16)
    corpus, about = Corpus(args, str(tmp_path / "cache")), tmp_path / "out" / "_tokens" / "train" / "about.json"
    written = []
    for writes in (True, False, True):
        given = SimpleNamespace(should_save=writes, output_dir=str(tmp_path / "out"), seed=0)
        assert len(rows_of(corpus, TOKENIZER, None, given)["train"])
        written.append(about.stat().st_mtime_ns)
    assert written[0] == written[1] != written[2]


def test_flags_of_evaluation_matter_where_the_best_model_is_kept(tmp_path, monkeypatch):
    said = {"max_eval_samples": 5, "eval_strategy": "steps", "eval_steps": 4.0, "save_steps": 4.0}
    words = ["script", "--train_file", "a", "--output_dir", str(tmp_path), "--learning_rate", "0.1", "--use_cpu"]
    words += [str(word) for name, value in said.items() for word in (f"--{name}", value)]
    for best in ("false", "true"):
        monkeypatch.setattr(sys, "argv", [*words, "--load_best_model_at_end", best])
        found = run_with_arguments(
            (CorpusArguments, PretrainingArguments), lambda corpus, training: training.identifying_flags
        )
        assert {name: value for name, value in found.items() if name in said} == (said if best == "true" else {})
        assert found["learning_rate"] == 0.1


def test_which_checkpoint_is_said_in_the_help():
    help = PretrainingArguments.__dataclass_fields__["resume_from_checkpoint"].metadata["help"]
    assert "each time the command is given" in help
