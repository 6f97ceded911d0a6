"""`hf-deberta ensemble`: average the predictions of several runs for the same rows, and compare them with the labels.

    hf-deberta ensemble out/seed-* --output_dir out/ensemble

Reads the predictions*.jsonl that the fine-tuning scripts write for test rows, for tasks with probabilities:
classification, also with several labels, and multiple choice. Writes files of the same form, and ensemble.json.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset
from pandas import DataFrame

from hf_deberta.fine_tuning.task import LabelPredictions
from hf_deberta.fine_tuning.tasks.submission import write_predicted_rows
from hf_deberta.metrics import compute_metric
from hf_deberta.training.data_files import read_table
from hf_deberta.training.errors import InputError
from hf_deberta.training.json_files import write_json
from hf_deberta.training.run_identity import content_hash

PREDICTIONS = ["prediction", "probabilities"]  # columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs with predictions*.jsonl")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to write")
    parser.add_argument("--label_column_name", default="label", help="column of the labels, if any (default: label)")
    parser.add_argument("--labels", nargs="+", default=[], help="names of labels that are numbers, from 0 on")


def main(args: argparse.Namespace) -> int:
    """Average the predictions, write them, and print the metrics of the runs and of the ensemble."""
    files = sorted(path.name for path in args.runs[0].glob("predictions*.jsonl"))
    if not files or len(set(args.runs)) < 2:
        raise InputError(f"name two runs or more with predictions*.jsonl, not {' '.join(map(str, args.runs))}")
    metrics: dict[str, dict] = {}
    for file in files:
        tables = {str(run): read_table(run / file) for run in args.runs}
        require_same_rows(tables, file)
        first = tables[str(args.runs[0])]
        rows, labels = first.remove_columns(PREDICTIONS), (*first.features["probabilities"],)
        multi_label = isinstance(first[0]["prediction"], list)
        probabilities = {
            run: np.array([[row[label] for label in labels] for row in table["probabilities"]])
            for run, table in tables.items()
        }
        probabilities["ensemble"] = np.mean([*probabilities.values()], axis=0)
        predictions = {run: LabelPredictions(values, labels, multi_label) for run, values in probabilities.items()}
        targets = read_targets(rows, args.label_column_name, labels, args.labels)
        if targets is None:
            print(f"{file}: no metrics, as no --label_column_name has the label of each row")
        else:
            metrics[file] = {}
            for run, of_run in predictions.items():
                chosen = of_run.chosen()
                counted = multi_label | chosen.any(0) | targets.any(0)  # f1 of one label each leaves out absent classes
                both = {"predictions": chosen[:, counted], "references": targets[:, counted]}
                metrics[file][run] = compute_metric("glue", "multi_label", **both)
            print(file, DataFrame(metrics[file]).T.to_string(float_format="%.4f"), sep="\n")
        write_predicted_rows(args.output_dir / file.removesuffix(".jsonl"), rows, predictions["ensemble"].columns())
    write_json(args.output_dir / "ensemble.json", {"runs": [*map(str, args.runs)], "metrics": metrics})
    print(f"wrote the mean of {len(args.runs)} runs to {args.output_dir}: {', '.join(files)}")
    return 0


def require_same_rows(tables: Mapping[str, Dataset], file: str) -> None:
    """Require that the predictions of all runs have probabilities of the same labels, for the same rows."""
    first, expected = "", None
    for run, table in tables.items():
        if not set(PREDICTIONS) <= set(table.column_names):
            raise InputError(f"{run}/{file} has no probabilities: name runs of classification or multiple choice")
        content = sorted(table.features["probabilities"]), content_hash(table.remove_columns(PREDICTIONS))
        first, expected = first or run, expected or content
        if content != expected:
            raise InputError(
                f"{run}/{file} has other rows or labels than {first}/{file}, or another order: predict the same file "
                "with models of the same labels"
            )


def read_targets(rows: Dataset, column: str, labels: Sequence[str], names: Sequence[str]) -> np.ndarray | None:
    """Return 1 for each label that a row has, otherwise 0; None if a row has none, or -1, as GLUE hides labels.

    Args:
        names: of the labels that are numbers in the rows. LABEL_0, LABEL_1, ... are known.
    """
    if unknown := set(names) - set(labels):
        raise InputError(f"--labels {', '.join(sorted(unknown))}: the predictions are {', '.join(labels)}")
    if column not in rows.column_names:
        return None
    numbers = {label: number for number, label in enumerate(labels)}
    numbers |= {label.removeprefix("LABEL_"): number for label, number in numbers.items()}
    numbers |= {str(number): numbers[name] for number, name in enumerate(names)}
    targets = np.zeros((len(rows), len(labels)), int)
    for row, value in enumerate(rows[column]):
        for label in value if isinstance(value, list) else [value]:
            if label in (None, -1):
                return None
            if str(label) not in numbers:
                raise InputError(
                    f"row {row + 1} has the label {label!r} in the column {column!r}, and the predictions are "
                    f"{', '.join(labels)}: name another --label_column_name, or with --labels the names of 0, 1, ..."
                )
            targets[row, numbers[str(label)]] = 1
    return targets
