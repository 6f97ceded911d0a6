"""Tiny checkpoints of three model families, and the scripts run in this process."""

import csv
import json
import runpy
import sys
from pathlib import Path

from datasets import Dataset
from transformers import BertConfig, BertModel, DebertaV2Config, DebertaV2Model

from hf_deberta import HfDebertaConfig, HfDebertaModel
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.fine_tuning.tasks.glue import Classification, GlueArguments, GlueTask
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.data_files import Source

ROOT = Path(__file__).parents[1]
CPU = ["--use_cpu", "--disable_tqdm", "true"]
RUN = [*CPU, "--per_device_train_batch_size", "8", "--learning_rate", "1e-3"]
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def save_models(folder: Path, texts: list[str], vocab_size: int = 300) -> None:
    """Save `ours`, `in_tree` and `bert`, each with a tokenizer of these texts."""
    tokenizer = train_tokenizer(texts, vocab_size, "bpe")
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    in_tree = {"pos_att_type": ["c2p", "p2c"], "relative_attention": True, "position_buckets": 8}
    models = {
        "ours": HfDebertaModel(HfDebertaConfig.from_preset("tiny", **words)),
        "in_tree": DebertaV2Model(DebertaV2Config(**TINY, **words, **in_tree, max_position_embeddings=64)),
        "bert": BertModel(BertConfig(**TINY, **words)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def run_script(script: str, *arguments: object) -> None:
    before, sys.argv = sys.argv, [str(ROOT / script), *map(str, arguments)]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        sys.argv = before


def results(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text())


def read_json_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_predicted_rows(folder: Path, name: str) -> list[dict]:
    """The lines of predictions_NAME.jsonl, after comparing them with the csv."""
    lines = read_json_lines(folder / f"{name}.jsonl")
    with open(folder / f"{name}.csv", encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    for line, row in zip(lines, rows, strict=True):
        labels = {f"probability_{label}": p for label, p in line.pop("probabilities", {}).items()}
        assert [*row] == [*line, *labels]
        for column, value in (line | labels).items():
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
            assert row[column] == ("" if value is None else text)
        line["probabilities"] = {label.removeprefix("probability_"): p for label, p in labels.items()}
    return lines


def write_json_lines(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def classification(
    splits: dict[str, Dataset],
    task: GlueTask,
    labels: tuple[str, ...] | None = None,
    label_column: str = "label",
    map_options: dict | None = None,
    sources: dict[str, Source] | None = None,
) -> Classification:
    """Return a task that has read these rows; `labels` are those of the model, in another order than the task's."""
    made = Classification(ModelArguments(demo=True), GlueArguments(label_column_name=label_column), None)
    made.own_task = lambda splits: task
    made.model_labels = labels or task.labels
    if map_options is not None:
        made.data_args.map_options = lambda description: map_options
    made.sources = sources or {split: Source(split) for split in splits}
    made.rows = made.read(splits)
    return made


def encode_texts(rows, split, task, tokenizer, max_length, labels, label_column="label", map_options=None) -> Dataset:
    return classification({split: rows}, task, labels, label_column, map_options).encode(split, tokenizer, max_length)
