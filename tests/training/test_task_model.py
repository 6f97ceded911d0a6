"""The longest input of a model, and labels by name."""

from types import SimpleNamespace

import pytest
from transformers import BertConfig

from hf_deberta import HfDebertaConfig
from hf_deberta.training.task_model import ModelArguments, label_fields, labels_in_order, longest_input


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
