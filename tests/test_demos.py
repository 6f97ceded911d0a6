"""Demonstrations: the rows are learnable, and the same in every run."""

import pytest
from fine_tuning_models import CPU, results, run_script

from hf_deberta.demos import conll_text, house_rows, location_rows, match_rows, review_rows


@pytest.mark.parametrize("make", [review_rows, house_rows, location_rows, match_rows, conll_text])
def test_rows_depend_on_the_seed_alone(make):
    assert make(30, 1) == make(30, 1) != make(30, 2)


DEMONSTRATIONS = {  # the metrics of a model that has learned, and a file with its number of lines
    "run_glue.py": ({"eval_accuracy": 0.9}, "SST-2.tsv", 51),
    "run_ner.py": ({"eval_f1": 0.9, "predict_f1": 0.9}, "predictions_test.txt", None),
    "run_race.py": ({"eval_accuracy": 0.9, "predict_accuracy_high": 0.9}, "predict_results.txt", 51),
    "run_squad.py": ({"eval_exact": 80, "predict_HasAns_total": 0}, "predict_predictions.json", 52),
    "run_superglue.py": ({"eval_exact_match": 0.9}, "ReCoRD.jsonl", 50),
}


@pytest.mark.parametrize("learns", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["runs", "learns"])
@pytest.mark.parametrize("script", DEMONSTRATIONS)
def test_demonstrations(script, learns, tmp_path):
    """Each of the 50 rows has a prediction."""
    minima, file, lines = DEMONSTRATIONS[script]
    words = (
        ["--num_train_epochs", 1] * (script == "run_glue.py")
        if learns
        else ["--max_steps", 2, "--max_train_samples", 64]
    )
    run_script(script, "--demo", *CPU, *words, "--output_dir", tmp_path)
    metrics = results(tmp_path)
    assert all(metrics[name] > minimum if learns else name in metrics for name, minimum in minima.items()), metrics
    assert lines in (None, len((tmp_path / file).read_text(encoding="utf-8").splitlines()))
