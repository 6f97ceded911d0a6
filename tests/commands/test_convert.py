"""`hf-deberta convert`: round trips through each format keep every weight."""

import json

import pytest
import torch
from transformers import AutoModel

import hf_deberta
from hf_deberta import HfDebertaConfig
from hf_deberta.__main__ import main
from hf_deberta.commands.any_checkpoint import load_checkpoint
from hf_deberta.commands.convert import WRITERS
from hf_deberta.pretraining.tokenizer_training import train_tokenizer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def save(folder, class_name: str, preset: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = getattr(hf_deberta, class_name)(HfDebertaConfig.from_preset(preset, **SIZES, vocab_size=300))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # biases and norms too
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("to", WRITERS)
@pytest.mark.parametrize(
    ("class_name", "preset"),
    [
        ("HfDebertaForMaskedLM", "v3-base"),
        ("HfDebertaForMaskedLM", "v1-base"),
        ("HfDebertaForPreTraining", "v3-base"),
        ("HfDebertaForSequenceClassification", "v2-xlarge"),
        ("HfDebertaModel", "v1-base"),
    ],
)
@pytest.mark.filterwarnings("ignore:Transformers has no enhanced mask decoder")
def test_round_trip(to, class_name, preset, tmp_path, capsys):
    model = save(tmp_path / "ours", class_name, preset)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "other"), "--to", to]) == 0
    assert "wrote" in capsys.readouterr().out
    architecture = ["--architecture", class_name] if to == "official" and "Class" in class_name else []
    main(["convert", str(tmp_path / "other"), str(tmp_path / "back"), "--to", "hf_deberta", *architecture])
    back = load_checkpoint(str(tmp_path / "back"))
    assert type(back) is type(model)
    weights = back.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight), name


def test_official_files(tmp_path):
    """Names and fields that Microsoft's code reads: fused attention in v1, position terms as one text."""
    save(tmp_path / "ours", "HfDebertaForMaskedLM", "v1-base")
    main(["convert", str(tmp_path / "ours"), str(tmp_path / "official"), "--to", "official"])
    weights = torch.load(tmp_path / "official" / "pytorch_model.bin", weights_only=True)
    layer = "deberta.encoder.layer.0.attention.self."
    assert {
        layer + name for name in ("in_proj.weight", "q_bias", "v_bias", "pos_proj.weight", "pos_q_proj.bias")
    } <= set(weights)
    assert "lm_predictions.lm_head.dense.weight" in weights
    fields = json.loads((tmp_path / "official" / "config.json").read_text())
    assert fields["pos_att_type"] == "c2p|p2c" and fields["model_type"] == "deberta" and "architectures" not in fields
    assert type(load_checkpoint(str(tmp_path / "official"))).__name__ == "HfDebertaForMaskedLM"


def test_transformers_reads_the_folder_and_the_tokenizer(tmp_path):
    model = save(tmp_path / "ours", "HfDebertaModel", "v3-base")
    train_tokenizer(["a few words and some more"] * 5, 300, "bpe").save_pretrained(tmp_path / "ours")
    main(["convert", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "transformers"])
    theirs = AutoModel.from_pretrained(tmp_path / "theirs")
    assert type(theirs).__name__ == "DebertaV2Model" and (tmp_path / "theirs" / "tokenizer.json").exists()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(ids).last_hidden_state, model.eval()(ids).last_hidden_state)


def test_what_cannot_be_converted(tmp_path):
    save(tmp_path / "ours", "HfDebertaModel", "v3-base")
    with pytest.raises(SystemExit, match="is not an empty folder"):
        main(["convert", str(tmp_path / "ours"), str(tmp_path / "ours"), "--to", "official"])
    with pytest.raises(SystemExit, match="no class HfBert: .*HfDebertaForMaskedLM"):
        main(["convert", str(tmp_path / "ours"), str(tmp_path / "x"), "--to", "official", "--architecture", "HfBert"])
    with pytest.raises(SystemExit, match="has no weights for .* of HfDebertaForMaskedLM"):
        words = ["--to", "official", "--architecture", "HfDebertaForMaskedLM"]
        main(["convert", str(tmp_path / "ours"), str(tmp_path / "x"), *words])
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(SystemExit, match="its model type is bert"):
        main(["inspect", str(tmp_path / "bert")])


def test_official_files_of_a_head_that_is_not_named(tmp_path):
    save(tmp_path / "ours", "HfDebertaForSequenceClassification", "v3-base")
    main(["convert", str(tmp_path / "ours"), str(tmp_path / "official"), "--to", "official"])
    words = ["convert", str(tmp_path / "official"), str(tmp_path / "back"), "--to", "hf_deberta"]
    with pytest.raises(SystemExit, match=r"weights of another head than HfDebertaModel has, classifier\.bias"):
        main(words)
    main([*words, "--architecture", "HfDebertaForSequenceClassification"])
