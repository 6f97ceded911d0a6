"""The search takes the best learning rate, keeps its trials, and saves the best model."""

import pytest

pytest.importorskip("optuna", reason="needs pip install optuna")
import optuna
import search

from hf_deberta import HfDebertaForSequenceClassification


@pytest.mark.slow  # the database of optuna and four trainings
def test_search(tiny_model, sentiment, tmp_path, capsys):
    flags = ["--model", str(tiny_model), *sentiment, "--epochs", "1", "--learning_rates", "1e-7", "1e-2"]
    search.main([*flags, "--trials", "1"])
    best = search.main([*flags, "--trials", "1"])
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path}/search/trials.db")
    assert len(study.trials) == 2 and best.hyperparameters == study.best_params
    assert best.objective == max(trial.value for trial in study.trials if trial.value is not None)
    assert f"accuracy {best.objective:.3f}" in capsys.readouterr().out
    assert HfDebertaForSequenceClassification.from_pretrained("search/best").num_labels == 2
