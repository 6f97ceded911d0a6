"""What the pretraining scripts make of the flags they share."""

from types import SimpleNamespace

import pytest

from hf_deberta import HfDebertaConfig
from hf_deberta.pretraining.arguments import NewModelArguments, check_model_fits, make_rows, parse_overrides
from hf_deberta.pretraining.corpus import Corpus, CorpusArguments
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.errors import InputError

LINES = ["the old man walked slowly down to a quiet harbour"] * 20
TOKENIZER = train_tokenizer(LINES, 290, "bpe")
VOCAB_SIZE = len(TOKENIZER)


def test_overrides():
    text = "hidden_size=256, pos_att_type=c2p|p2c,relative_attention=false,attn_implementation=eager"
    expected = {"hidden_size": 256, "pos_att_type": "c2p|p2c", "relative_attention": False}
    assert parse_overrides(text) == {**expected, "attn_implementation": "eager"}
    assert parse_overrides(None) == {}


def test_vocabulary_size_is_the_tokenizers_unless_overridden():
    plain, wider = NewModelArguments("tiny"), NewModelArguments("tiny", config_overrides="vocab_size=320")
    assert plain.new_config(TOKENIZER, 16).vocab_size == VOCAB_SIZE
    assert wider.new_config(TOKENIZER, 16).vocab_size == 320


def test_model_that_fits():
    check_model_fits(HfDebertaConfig.from_preset("tiny", vocab_size=VOCAB_SIZE, conv_kernel_size=3), TOKENIZER, 64)
    relative = HfDebertaConfig.from_preset("tiny", vocab_size=VOCAB_SIZE, emd_steps=0)
    check_model_fits(relative, TOKENIZER, 1000, causal=True)  # it has no absolute positions


def test_overwrite_cache_tokenizes_in_one_process(tmp_path):
    """The other processes read what it wrote."""
    (tmp_path / "corpus.txt").write_text("\n".join(LINES), encoding="utf-8")
    args = CorpusArguments(train_file=[str(tmp_path / "corpus.txt")], overwrite_cache=True, max_seq_length=16)
    corpus, about = Corpus(args, str(tmp_path / "cache")), tmp_path / "out" / "_tokens" / "train" / "about.json"
    written = []
    for writes in (True, False, True):
        training_args = SimpleNamespace(should_save=writes, output_dir=str(tmp_path / "out"), seed=0)
        assert len(make_rows(corpus, TOKENIZER, None, training_args)["train"])
        written.append(about.stat().st_mtime_ns)
    assert written[0] == written[1] != written[2]


def test_a_folder_that_does_not_exist(tmp_path):
    arguments = NewModelArguments()
    for name in (str(tmp_path / "nowhere"), "no/such/folder", "./x"):
        with pytest.raises(InputError, match=f"there is no folder {name}"):
            arguments.load_config(name)
    with pytest.raises(InputError, match="nosuchfolder: We"):
        arguments.load_config("nosuchfolder")


def test_another_number_of_positions_keeps_the_relative_ones(tmp_path):
    HfDebertaConfig.from_preset("tiny").save_pretrained(tmp_path)
    longer = "max_position_embeddings=128"
    with pytest.raises(InputError, match="also the largest relative distance of .*: add max_relative_positions=64"):
        NewModelArguments(config_overrides=longer).load_config(str(tmp_path))
    for harmless in ("max_position_embeddings=64", f"{longer},relative_attention=false,pos_att_type=none"):
        NewModelArguments(config_overrides=harmless).load_config(str(tmp_path))
    config = NewModelArguments(config_overrides=f"{longer},max_relative_positions=64").load_config(str(tmp_path))
    assert (config.max_position_embeddings, config.max_distance) == (128, 64)
