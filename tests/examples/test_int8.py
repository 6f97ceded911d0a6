"""The example of int8: a trained classifier keeps its labels."""

import int8
from example_rows import sentiment_rows
from fine_tuning_models import write_json_lines
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

from hf_deberta import HfDebertaForSequenceClassification, HfDebertaTokenizer


def train_classifier(encoder: str, folder: str) -> None:
    tokenizer = HfDebertaTokenizer.from_pretrained(encoder)
    rows = [{**tokenizer(row["sentence"]), "label": row["label"]} for row in sentiment_rows(320, 1)]
    model = HfDebertaForSequenceClassification.from_pretrained(encoder, num_labels=2)
    settings = TrainingArguments(
        folder, max_steps=50, learning_rate=3e-3, per_device_train_batch_size=32, save_strategy="no", disable_tqdm=True
    )
    Trainer(model, settings, DataCollatorWithPadding(tokenizer), rows, processing_class=tokenizer).train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_labels_agree(tiny_model, tmp_path, capsys):
    train_classifier(str(tiny_model), "classifier")
    rows = sentiment_rows(50, 3)
    file = write_json_lines(tmp_path / "rows.jsonl", rows)
    flags = ["--model", "classifier", "--rows", str(file), "--columns", "sentence", "--max_rows", "40"]
    labels, rounded = int8.main(flags)
    same = int((labels == rounded).sum())
    right = sum(found == row["label"] for found, row in zip(labels.tolist(), rows, strict=False))
    assert len(labels) == 40 and right >= 38 and same >= 38
    assert f"40 rows: {same} with the same label ({same / 40:.1%});" in capsys.readouterr().out
