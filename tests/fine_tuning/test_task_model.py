"""The longest input of a model, and labels by name."""

from types import SimpleNamespace

import pytest
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification, HfDebertaModel
from hf_deberta.fine_tuning.task_model import ModelArguments, label_fields, labels_in_order, load_model, longest_input


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (BertConfig(max_position_embeddings=48), 48),
        (HfDebertaConfig.from_preset("tiny", max_position_embeddings=48), 200),
        (HfDebertaConfig.from_preset("tiny", max_position_embeddings=48, position_biased_input=True), 48),
    ],
)
def test_positions_that_end_are_the_longest_input(config, most, caplog):
    tokenizer, asked = SimpleNamespace(model_max_length=10**9), SimpleNamespace(max_seq_length=200)
    assert longest_input(asked, tokenizer, config) == most
    assert ("is more than the model takes: 48" in caplog.text) == (most == 48)
    assert longest_input(asked, SimpleNamespace(model_max_length=30), config) == 30


def test_labels_are_found_by_name(tmp_path, caplog):
    args = ModelArguments(str(tmp_path))
    HfDebertaConfig(**label_fields(["NO", "Yes"])).save_pretrained(tmp_path)
    assert labels_in_order(("yes", "no"), args) == ("no", "yes") and not caplog.text
    assert labels_in_order(("good", "bad"), args) == ("good", "bad")
    assert "calls its labels NO, Yes; they are taken for good, bad" in caplog.text


BOTH = (HfDebertaForSequenceClassification, AutoModelForSequenceClassification)


@pytest.mark.parametrize("family", ["ours", "bert"])
def test_which_weights_of_the_head_are_new(tmp_path, family):
    """Of a base those of the classifier, of a model of the task none; all of it after another task."""
    bert = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=100)
    base = HfDebertaModel(HfDebertaConfig.from_preset("tiny")) if family == "ours" else BertModel(bert)
    base.save_pretrained(tmp_path / "base")
    model = load_model(ModelArguments(str(tmp_path / "base")), *BOTH, num_labels=3)
    assert {"classifier.weight", "classifier.bias"} <= set(model.new_weights)
    assert not [name for name in model.new_weights if name.startswith(("deberta.", "bert."))]
    model.save_pretrained(tmp_path / "tuned")
    assert load_model(ModelArguments(str(tmp_path / "tuned")), *BOTH, num_labels=3).new_weights == []
    for labels in (["a", "b"], ["a", "b", "c"]):
        args = ModelArguments(intermediate=str(tmp_path / "tuned"))
        assert "classifier.weight" in load_model(args, *BOTH, **label_fields(labels)).new_weights


def test_another_configuration_is_for_a_deberta(tmp_path):
    bert = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=100)
    BertModel(bert).save_pretrained(tmp_path)
    args = ModelArguments(str(tmp_path), config_name=str(tmp_path))
    with pytest.raises(ValueError, match=r"--config_name .* is for a DeBERTa, which .* is not: leave it out"):
        load_model(args, *BOTH)
