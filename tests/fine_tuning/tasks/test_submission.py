"""Prediction files, and the zip of a submission."""

import csv
import json
import sys
import zipfile
from datetime import datetime

import pytest
from datasets import Dataset

from hf_deberta.fine_tuning.tasks.submission import (
    submission_command,
    write_lines,
    write_predicted_rows,
    zip_submission,
)
from hf_deberta.training.data_files import read_table
from hf_deberta.training.errors import InputError

NAMES = ["CoLA.tsv", "MNLI-m.tsv", "RTE.tsv"]


@pytest.fixture
def folders(tmp_path):
    for name in NAMES[:2]:
        write_lines(tmp_path / name[:2] / name, ["index\tprediction", "0\t1"])
    return [tmp_path / "Co", tmp_path / "MN"]


def test_predictions_with_the_rows(tmp_path):
    """The columns of the rows come first, whatever they are called, and texts survive the csv."""
    times = [datetime(2026, 1, 1, 8), None]
    given = {"text": ['a "b", c\rd', "é\ne"], "tags": [["é"], []], "prediction": ["old", ""], "probability_yes": [1, 2]}
    given |= {"input_prediction": [3, 4], "time": times, "probabilities": ["p", "q"]}
    predicted = {
        "prediction": ["no", "yes"],
        "probabilities": [{"no": 0.75, "yes": 0.25}, {"no": 0.5, "yes": float("nan")}],
    }
    write_predicted_rows(tmp_path / "predictions_v1.5", Dataset.from_dict(given), predicted)
    names = ["text", "tags", "input_input_prediction", "input_probability_yes", "input_prediction", "time"]
    names += ["input_probabilities", "prediction"]
    first, second = map(json.loads, (tmp_path / "predictions_v1.5.jsonl").read_text("utf-8").split("\n")[:-1])
    assert [*first] == [*second] == [*names, "probabilities"]
    values = [given["text"][0], ["é"], "old", 1, 3, "2026-01-01 08:00:00", "p", "no", predicted["probabilities"][0]]
    assert [*first.values()] == values and second["time"] is None
    assert second["probabilities"] == {"no": 0.5, "yes": None}  # NaN is no JSON
    with open(tmp_path / "predictions_v1.5.csv", encoding="utf-8", newline="") as file:
        header, row, _ = csv.reader(file)
    assert header == [*names, "probability_no", "probability_yes"]
    assert row == [given["text"][0], '["é"]', *map(str, values[2:8]), "0.75", "0.25"]
    assert read_table(tmp_path / "predictions_v1.5.csv")["text"][:] == given["text"]
    assert not list(tmp_path.glob("*.unfinished"))


def test_predictions_without_probabilities(tmp_path):
    rows = Dataset.from_dict({"probabilities": [{"a": 1}], "probability": [2]})
    write_predicted_rows(tmp_path / "out", rows, {"prediction": ["x"], "probability": [0.5]})
    assert (tmp_path / "out.csv").read_text().splitlines() == [
        "probabilities,input_probability,prediction,probability",
        '"{""a"": 1}",2,x,0.5',
    ]
    with pytest.raises(ValueError, match="zip"):  # another number of rows
        write_predicted_rows(tmp_path / "out", rows, {"prediction": ["x", "y"]})


def test_zip_of_the_files_that_exist(folders, tmp_path):
    assert zip_submission(tmp_path / "all.zip", folders, NAMES) == ["RTE.tsv"]
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        assert archive.namelist() == NAMES[:2]
        assert archive.read("CoLA.tsv") == b"index\tprediction\n0\t1\n"


def test_duplicate_and_missing_files(folders, tmp_path):
    with pytest.raises(InputError, match="CoLA.tsv and .*CoLA.tsv both exist"):
        zip_submission(tmp_path / "all.zip", [folders[0], folders[0]], NAMES)
    with pytest.raises(InputError, match="none of CoLA.tsv, MNLI-m.tsv, RTE.tsv is in"):
        zip_submission(tmp_path / "all.zip", [tmp_path], NAMES)
    assert not (tmp_path / "all.zip").exists()


def test_command(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["glue", str(tmp_path / "all.zip"), *map(str, folders)])
    submission_command("glue", NAMES)
    assert "RTE.tsv" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["glue", str(tmp_path / "all.zip"), str(tmp_path)])
    with pytest.raises(SystemExit, match="glue: none of"):
        submission_command("glue", NAMES)
    monkeypatch.setattr(sys, "argv", ["glue"])
    with pytest.raises(SystemExit, match="usage: python -m hf_deberta.fine_tuning.tasks.glue SUB"):
        submission_command("glue", NAMES)
