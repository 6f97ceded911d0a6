"""The search keeps its trials, takes the best of them, and trains the saved model with its parameters."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("optuna", reason="needs pip install optuna")
import search

from hf_deberta import HfDebertaForSequenceClassification

LEARNING_RATES = (1e-7, 1e-2)


def test_accuracy():
    logits = np.array([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [1.0, 0.0]])
    outputs = SimpleNamespace(predictions=logits, label_ids=np.array([0, 1, 1, 0]))
    assert search.accuracy(outputs) == {"accuracy": 0.75}


@pytest.mark.slow  # the database of optuna and four trainings
def test_search(tiny_model, sentiment, monkeypatch, capsys):
    scores = iter([0.8, 0.1, 0.6, 0.9])  # of a trial and of the last training, twice
    monkeypatch.setattr(search, "accuracy", lambda outputs: {"accuracy": next(scores)})
    flags = ["--model", str(tiny_model), *sentiment, "--epochs", "1", "--trials", "1"]
    flags += ["--learning_rates", *map(str, LEARNING_RATES)]
    first = search.main(flags)
    best = search.main(flags)
    assert next(scores, None) is None
    assert best.objective == 0.8 and best.hyperparameters == first.hyperparameters
    assert LEARNING_RATES[0] <= best.hyperparameters["learning_rate"] <= LEARNING_RATES[1]
    assert 0 <= best.hyperparameters["warmup_steps"] <= 0.2
    assert capsys.readouterr().out.count("best of all trials: accuracy 0.800") == 2
    used = torch.load("search/best/training_args.bin", weights_only=False)
    assert {name: getattr(used, name) for name in best.hyperparameters} == best.hyperparameters
    assert HfDebertaForSequenceClassification.from_pretrained("search/best").num_labels == 2
