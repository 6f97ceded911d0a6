"""Average the predictions of several runs of a task: of several seeds, or of any finished runs.

Each run writes the scores of its validation and test rows to `scores_SPLIT.jsonl`, a hash of the rows in the first line
and an object for each row (for each word in named-entity recognition):

    {"rows": "5d41402abc4b2a76"}                    only scores of the same rows in the same order are averaged
    {"entailment": 0.98, "not_entailment": 0.02}    the probabilities of labels; of choices by their number
    {"Rome": 0.7, "in Rome": 0.2, "": 0.1}          of answers (SQuAD), where "" is no answer; of entities (ReCoRD)
    {"value": 3.2}                                  a number (regression)

The scores of an ensemble are their means over the runs. What a run left out, such as an answer that is not among its
best, has the score 0 there. `python run_x.py --num_seeds 5 ...` writes an ensemble of its seeds to OUTPUT_DIR/ensemble;
`python run_x.py --ensemble RUN RUN ... --output_dir OUT` that of finished runs to OUT, for the same rows.

    >>> average_scores([[{"yes": 1.0}], [{"yes": 0.5, "no": 0.5}]])
    [{'yes': 0.75, 'no': 0.25}]
"""

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from pandas import DataFrame
from transformers.utils import logging

from hf_deberta.fine_tuning.task import Scores, Task, is_validation, prediction_splits
from hf_deberta.fine_tuning.tasks.submission import write_json_lines
from hf_deberta.training.errors import InputError
from hf_deberta.training.json_files import write_json
from hf_deberta.training.text_files import read_lines

LEAST_SCORE = 1e-9  # smaller ones are not written

logger = logging.get_logger(__name__)


def write_ensemble(folder: Path, runs: dict[str, Path], task: Task) -> None:
    """Average the scores of runs, named as in the table that is printed; write predictions and ensemble.json."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    evaluated = [split for split in task.rows if is_validation(split)] if task.args.do_eval else []
    for split in [*evaluated, *(prediction_splits(task) if task.args.do_predict else [])]:
        rows_hash, rows = task.args.row_hashes.get(split), task.number_of_scores(split)
        members = [read_scores(run, split, rows, rows_hash) for run in runs.values()]
        averaged = average_scores(members)
        if task.has_labels(split):
            by_run = dict(zip((*runs, "ensemble"), (*members, averaged), strict=True))
            results[split] = {
                name: task.metrics(split, task.from_scores(split, scores)) for name, scores in by_run.items()
            }
        write_scores(folder, split, averaged, rows_hash)
        if not is_validation(split):
            task.write_predictions(folder, split, task.from_scores(split, averaged))
    write_json(folder / "ensemble.json", {"runs": {name: str(run) for name, run in runs.items()}, "metrics": results})
    for split, metrics in results.items():
        table = DataFrame(metrics).T.to_string(float_format="%.4f")
        print(f"\nThe ensemble of {len(runs)} runs, {split}", table, sep="\n")
    logger.info(f"Predictions of the ensemble of {', '.join(runs)} are in {folder}")


def average_scores(members: Sequence[Scores]) -> Scores:
    """The means of the scores of each row over the runs, in the order of the first run's names."""
    averaged = []
    for rows in zip(*members, strict=True):
        names = dict.fromkeys(name for row in rows for name in row)
        averaged.append({name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names})
    return averaged


def write_scores(folder: Path, split: str, scores: Scores, rows_hash: str | None = None) -> None:
    rows = ({name: float(f"{x:.9g}") for name, x in row.items() if abs(x) >= LEAST_SCORE} for row in scores)
    write_json_lines(folder / f"scores_{split}.jsonl", [{"rows": rows_hash}, *rows])


def read_scores(folder: Path, split: str, rows: int, rows_hash: str | None = None) -> Scores:
    """Return the scores of a run, which must be those of so many rows with this hash."""
    file = folder / f"scores_{split}.jsonl"
    if not file.is_file():
        raise InputError(
            f"there is no {file}: --ensemble takes folders of runs that evaluated the validation rows and predicted "
            "the test rows. For a model without this file, run the script with --model_name_or_path, --do_eval and "
            "--do_predict, and name its --output_dir"
        )
    try:
        header, *scores = [json.loads(line, parse_int=float) for line in read_lines(file)]
        found = header["rows"]
        if not all(isfinite(score) for row in scores for score in row.values()):
            raise ValueError("a score is not a finite number")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        raise InputError(f"{file} is damaged: {reason}; evaluate and predict that run again") from None
    if len(scores) != rows or found != rows_hash:
        others = " others, or the same in another order" if len(scores) == rows else ""
        raise InputError(
            f"{file} has the scores of {len(scores):,} rows or words, and the {split} split has {rows:,}{others}: an "
            "ensemble is for the rows that its runs evaluated and predicted; evaluate and predict that run on these"
        )
    return scores
