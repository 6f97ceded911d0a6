"""Fine-tune on a task of your own: how urgent is a mail? The subject is never truncated.

    python examples/own_task.py --model_name_or_path microsoft/deberta-v3-base --train_file mails.jsonl --output_dir out

Columns: subject, body, label (low or high). A task is one class with these methods; what it does not define is that of
classification in hf_deberta/fine_tuning/task.py.
"""

from typing import Any

import numpy as np
from datasets import Dataset

from hf_deberta.fine_tuning.run import run_task
from hf_deberta.fine_tuning.task import Task
from hf_deberta.training.data_files import require_columns, require_texts
from hf_deberta.training.errors import input_errors

LABELS = ("low", "high")


class Urgency(Task):
    default_length = 256

    def read(self, splits: dict[str, Dataset]) -> dict[str, Dataset]:
        self.labels = LABELS
        for split, rows in splits.items():
            with input_errors(self.sources[split]):  # an error names the file and the row
                require_columns(rows, ["subject", "body"] if split == "test" else ["subject", "body", "label"], split)
                require_texts(rows, ["subject", "body"], self.sources[split])
        return splits

    def targets(self, split: str) -> Any:
        rows = self.rows[split]
        return np.array([*map(LABELS.index, rows["label"][:])]) if "label" in rows.column_names else None

    def batch_encoder(self, split: str, tokenizer: Any, length: int) -> Any:
        return lambda rows: tokenizer(rows["subject"], rows["body"], truncation="only_second", max_length=length)


if __name__ == "__main__":
    run_task(Urgency)
