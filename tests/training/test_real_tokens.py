"""The number of real tokens in each batch: training without padding, as on a GPU, is training with it."""

from typing import Any

import torch
from tiny_trainers import CLASS_ROWS, collate_padded, fine_tuning_arguments
from transformers import BertConfig, BertForSequenceClassification

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.fine_tuning.trainer import FineTuningTrainer
from hf_deberta.training.real_tokens import CountingCollator, RealTokensMixin, count_real_tokens

ROWS = [{"input_ids": [1, 5, 6, 2]}, {"input_ids": [1, 2]}]


def test_the_collator_counts():
    batch = CountingCollator(collate_padded)(ROWS)
    assert batch["num_real_tokens"] == 6 and list(batch) == ["input_ids", "attention_mask", "num_real_tokens"]
    assert CountingCollator(lambda rows: {"input_ids": torch.ones(2, 3)})(ROWS).keys() == {"input_ids"}


def test_rows_that_are_not_counted():
    assert count_real_tokens(torch.tensor([[[1, 1], [1, 0]], [[1, 1], [1, 1]]])) == 7  # choices
    assert count_real_tokens(torch.tensor([[1, 1], [0, 1]])) is None  # padded on the left
    assert count_real_tokens(torch.tensor([[1, 1], [0, 0]])) is None  # an empty row
    assert count_real_tokens(None) is None


def deberta() -> HfDebertaForSequenceClassification:
    return HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny"))


def trainer_of(model: Any, folder: Any, **fields: Any) -> FineTuningTrainer:
    return FineTuningTrainer(model, fine_tuning_arguments(folder, **fields), collate_padded, CLASS_ROWS)


def test_models_that_take_the_number(tmp_path):
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bert = BertForSequenceClassification(BertConfig(vocab_size=128, **small))
    assert trainer_of(bert, tmp_path).data_collator is collate_padded
    trainer = trainer_of(deberta(), tmp_path)
    for batches in (trainer.get_train_dataloader(), trainer.get_eval_dataloader(CLASS_ROWS)):
        assert {batch["num_real_tokens"] for batch in batches} == {24}


def test_trainers_that_split_batches_after_they_are_collated(tmp_path, monkeypatch):
    dispatched = trainer_of(deberta(), tmp_path, accelerator_config={"dispatch_batches": True})
    assert dispatched.data_collator is collate_padded
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", 2)
    assert trainer_of(deberta(), tmp_path).data_collator is collate_padded
    assert issubclass(FineTuningTrainer, RealTokensMixin)
