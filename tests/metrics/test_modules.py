"""The metrics as functions and as modules of `evaluate`: loaded by path without network, fed by two processes."""

import doctest
import importlib
import os
import socket

os.environ["HF_EVALUATE_OFFLINE"] = "1"

import evaluate
import pytest
from two_processes import fork_two, run_script

import hf_deberta
from hf_deberta.metrics import NAMES, compute_metric

GOLDS = {"text": ["Rome", "old Rome"], "answer_start": [0, 4]}
ANSWERS = [{"id": str(x), "answers": {name: values[:x] for name, values in GOLDS.items()}} for x in range(3)]
TEXTS = [{"id": str(x), "prediction_text": text} for x, text in enumerate(["Paris", "the Rome!", "new Rome"])]
TAGS = [["B-PER", "O"], ["B-LOC", "I-LOC", "O"], []]
CASES = {
    ("glue", "mrpc"): {"predictions": [1, 0, 1], "references": [1, 1, 1]},
    ("glue", "stsb"): {"predictions": [0.5, 2.5, 4.0], "references": [1.0, 2.0, 5.0]},
    ("glue", "multi_label"): {"predictions": [[1, 0], [0, 1], [1, 1]], "references": [[1, 0], [1, 1], [0, 1]]},
    ("super_glue", "cb"): {"predictions": [2, 1, 0], "references": [2, 2, 0]},
    ("super_glue", "multirc"): {
        "predictions": [{"idx": {"answer": x, "paragraph": 0, "question": x // 2}, "prediction": 1} for x in range(3)],
        "references": [1, 0, 1],
    },
    ("super_glue", "record"): {
        "predictions": [{"idx": {"passage": 0, "query": x}, "prediction_text": "old Rome"} for x in range(3)],
        "references": [{"idx": {"passage": 0, "query": x}, "answers": ["Rome", "Paris"]} for x in range(3)],
    },
    ("super_glue", "axg"): {"predictions": [0, 1, 0], "references": [0, 0, 1], "pairs": ["a", "b", "a"]},
    ("squad", None): {"predictions": TEXTS, "references": [{"id": str(x), "answers": GOLDS} for x in range(3)]},
    ("squad_v2", None): {
        "predictions": [{**row, "no_answer_probability": 0.5 * int(row["id"])} for row in TEXTS],
        "references": ANSWERS,
    },
    ("named_entities", None): {"predictions": TAGS, "references": [["B-PER", "O"], ["B-LOC", "O", "O"], []]},
    ("multiple_choice", None): {"predictions": [0, 3, 1], "references": [0, 2, 1]},
    ("multiple_choice", "race"): {"predictions": [0, 3], "references": [0, 2], "ids": ["high1", "middle1"]},
}


def test_every_metric_has_a_case():
    assert {name for name, _ in CASES} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    """Of the functions."""
    results = doctest.testmod(importlib.import_module(f"hf_deberta.metrics.{name}"))
    assert results.failed == 0 and results.attempted


def test_example_of_the_package():
    """It loads a module by its path."""
    assert doctest.testmod(hf_deberta.metrics).failed == 0


@pytest.mark.parametrize(("name", "configuration"), CASES)
def test_modules_equal_their_functions(name, configuration, tmp_path):
    """Values, name, and the inputs in the help of `evaluate`."""
    rows = CASES[name, configuration]
    metric = evaluate.load(hf_deberta.metrics.path(name), configuration, cache_dir=str(tmp_path))
    metric.add_batch(**rows)
    assert metric.compute() == compute_metric(name, configuration, **rows)
    assert metric.name == name and all(f"{column}: " in metric.inputs_description for column in rows)


@pytest.mark.parametrize(("name", "configuration"), CASES)
def test_inputs_of_different_lengths(name, configuration):
    rows = CASES[name, configuration]
    with pytest.raises((ValueError, IndexError)):
        compute_metric(name, configuration, **(rows | {"predictions": rows["predictions"][:1]}))


def one_of_two(rank, folder):
    """The first process has one row, the second the others, in a batch each."""

    def refuse(*_):
        raise ConnectionError("the metrics need no network")

    socket.socket.connect = refuse
    for (name, configuration), rows in CASES.items():
        options = {"num_process": 2, "process_id": rank, "experiment_id": "two", "cache_dir": str(folder)}
        metric = evaluate.load(hf_deberta.metrics.path(name), configuration, **options)
        for row in range(1, len(rows["predictions"])) if rank else (0,):
            metric.add_batch(**{column: values[row : row + 1] for column, values in rows.items()})
        result = metric.compute()
        expected = compute_metric(name, configuration, **rows) if rank == 0 else None
        assert result == pytest.approx(expected), (name, configuration, result, expected)


@pytest.mark.slow
def test_two_processes(tmp_path):
    run_script(__file__, tmp_path)


def test_unknown_names():
    with pytest.raises(ValueError, match="no metric 'bleu': choose one of glue, "):
        hf_deberta.metrics.path("bleu")
    for name, configuration in {"glue": None, "super_glue": "mrpc", "multiple_choice": "swag"}.items():
        with pytest.raises(ValueError, match=f"metric {name} has no configuration .*: choose one of "):
            evaluate.load(hf_deberta.metrics.path(name), configuration)


if __name__ == "__main__":
    fork_two(one_of_two)
