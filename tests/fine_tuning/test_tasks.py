"""What all tasks share, and a sixth task in one class, examples/own_task.py."""

import sys
from argparse import Namespace

import numpy as np
import pytest
from datasets import Dataset
from fine_tuning_models import CPU, read_predicted_rows, results, run_script, save_models, write_json_lines
from own_task import Urgency

from hf_deberta.demos import review_rows
from hf_deberta.fine_tuning import run
from hf_deberta.fine_tuning.run import run_task
from hf_deberta.fine_tuning.splits import DataArguments
from hf_deberta.fine_tuning.task import LabelPredictions
from hf_deberta.fine_tuning.tasks.glue import Classification
from hf_deberta.fine_tuning.tasks.ner import NamedEntities
from hf_deberta.fine_tuning.tasks.race import ChoiceArguments, MultipleChoice
from hf_deberta.fine_tuning.tasks.squad import Squad
from hf_deberta.fine_tuning.tasks.superglue import SuperGlue
from hf_deberta.training.errors import InputError


@pytest.mark.parametrize("flag", ["max_train_samples", "max_eval_samples", "max_predict_samples", "pad_to_multiple_of"])
def test_numbers_are_positive(flag):
    for number in (0, -5):
        with pytest.raises(InputError, match=f"--{flag} must be at least 1, not {number}"):
            DataArguments(**{flag: number})
    assert getattr(DataArguments(**{flag: 1}), flag) == 1


@pytest.mark.parametrize(
    ("task", "flags", "name"),
    [
        (Classification, {"task_name": "MNLI"}, "mnli"),
        (Classification, {"task_name": None}, "own"),
        (Squad, {"task_name": None, "version_2_with_negative": None}, "squad"),
        (Squad, {"task_name": None, "version_2_with_negative": True}, "squad_v2"),
        (Squad, {"task_name": "squad_v2", "version_2_with_negative": None}, "squad_v2"),
        (MultipleChoice, {"task_name": "race_high"}, "race"),
        (MultipleChoice, {"task_name": "RACE-high"}, "race"),
        (MultipleChoice, {"task_name": "anli"}, "anli"),
        (MultipleChoice, {"task_name": None}, "own"),
        (NamedEntities, {"task_name": "CoNLL-2003"}, "conll2003"),
        (NamedEntities, {"task_name": None}, "ner"),
        (SuperGlue, {"task_name": "ReCoRD"}, "record"),
    ],
)
def test_the_task_in_the_table_of_recipes(task, flags, name):
    assert task.recipe_name(Namespace(**flags)) == name


def test_inputs_are_not_pushed_to_the_hub(tmp_path):
    """--push_to_hub uploads the folder, in which the texts of the rows are not meant to be."""
    task = MultipleChoice(None, ChoiceArguments(), Namespace(push_to_hub=True))
    task.original_rows = {"test": Dataset.from_dict({"article": ["secret", "text"]})}
    task.write_predictions(tmp_path, "test", LabelPredictions(np.array([[0.0, 1.0], [1.0, 0.0]]), ("A", "B")))
    assert [(line["index"], line["prediction"]) for line in read_predicted_rows(tmp_path, "predictions")] == [
        (0, "B"),
        (1, "A"),
    ]
    assert all("secret" not in path.read_text() for path in tmp_path.iterdir())


@pytest.mark.slow
def test_inputs_are_checked_before_the_model_loads(tmp_path, monkeypatch):
    save_models(tmp_path, [row["sentence"] for row in review_rows(20, 0)])
    file = write_json_lines(tmp_path / "train.jsonl", [{"text": "a film", "label": x} for x in ("yes", "no")])
    monkeypatch.setattr(run, "load_model", lambda *args, **fields: pytest.fail("the model was loaded"))
    with pytest.raises(SystemExit, match="--max_seq_length must be at least 5"):
        run_script("run_glue.py", "--model_name_or_path", tmp_path / "ours", "--train_file", file, "--max_seq_length",
                   3, "--output_dir", tmp_path / "out", *CPU)  # fmt: skip


@pytest.mark.slow
def test_a_sixth_task(tmp_path, monkeypatch):
    """The class in examples/own_task.py trains, evaluates and predicts."""
    rows = [
        {"subject": row["sentence"], "body": "a film", "label": ("low", "high")[row["label"]]}
        for row in review_rows(40, 0)
    ]
    save_models(tmp_path, [row["subject"] for row in rows])
    for split, some in {"train": rows[:24], "validation": rows[24:32], "test": rows[32:]}.items():
        write_json_lines(tmp_path / f"{split}.jsonl", some)
    words = ["--model_name_or_path", tmp_path / "ours", "--data_dir", tmp_path, *CPU, "--max_steps", 2]
    monkeypatch.setattr(sys, "argv", ["own_task.py", *map(str, words), "--output_dir", str(tmp_path / "out")])
    run_task(Urgency)
    assert {"eval_accuracy", "predict_accuracy", "predict_loss"} <= results(tmp_path / "out").keys()
    lines = read_predicted_rows(tmp_path / "out", "predictions_test")
    assert [line["subject"] for line in lines] == [row["subject"] for row in rows[32:]]
    assert {line["prediction"] for line in lines} <= {"low", "high"}
    with pytest.raises(SystemExit) as stopped:
        monkeypatch.setattr(sys, "argv", ["own_task.py", "--help"])
        run_task(Urgency)
    assert stopped.value.code == 0
