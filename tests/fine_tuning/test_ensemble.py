"""`hf-deberta ensemble`: means of the predictions of runs, their metrics, and runs that do not fit."""

import json

import pytest
from datasets import Dataset
from fine_tuning_models import read_predicted_rows

from hf_deberta.__main__ import main
from hf_deberta.fine_tuning.tasks.submission import write_predicted_rows


def write_run(folder, probabilities, labels=None, several=False, name="predictions_own"):
    rows = {"text": [f"text {number}" for number in range(len(probabilities))]} | ({"label": labels} if labels else {})
    best = [[label for label in row if row[label] > 0.5] if several else max(row, key=row.get) for row in probabilities]
    write_predicted_rows(folder / name, Dataset.from_dict(rows), {"prediction": best, "probabilities": probabilities})
    return str(folder)


def run_ensemble(folder, runs, *flags):
    assert main(["ensemble", *runs, "--output_dir", str(folder / "out"), *flags]) == 0
    return json.loads((folder / "out" / "ensemble.json").read_text())["metrics"]


@pytest.mark.parametrize(("first", "flags"), [("yes", []), (1, ["--labels", "no", "yes"]), ("LABEL_1", []), (1, [])])
def test_the_ensemble_corrects_its_members(tmp_path, capsys, first, flags):
    """Three runs that are wrong in one row each, and sure where they are right; the order of labels may differ."""
    yes, no = ("LABEL_1", "LABEL_0") if not flags and first != "yes" else ("yes", "no")
    runs = []
    for run in range(3):
        rows = [{yes: 0.4, no: 0.6} if row == run else {no: 0.1, yes: 0.9} for row in range(3)]
        rows = [dict(reversed(row.items())) for row in rows] if run == 1 else rows
        runs.append(write_run(tmp_path / f"run{run}", rows, [first] * 3))
    metrics = run_ensemble(tmp_path, runs, *flags)["predictions_own.jsonl"]
    assert [metrics[run]["accuracy"] for run in runs] == [pytest.approx(2 / 3)] * 3
    assert set(metrics["ensemble"].values()) == {1} and "ensemble 1.0000" in " ".join(capsys.readouterr().out.split())
    lines = read_predicted_rows(tmp_path / "out", "predictions_own")
    assert [(line["text"], line["prediction"]) for line in lines] == [(f"text {number}", yes) for number in range(3)]
    assert lines[0]["probabilities"] == pytest.approx({yes: (0.4 + 0.9 + 0.9) / 3, no: (0.6 + 0.1 + 0.1) / 3})


def test_several_labels(tmp_path):
    first = write_run(tmp_path / "a", [{"x": 0.9, "y": 0.2}, {"x": 0.1, "y": 0.4}], [["x", "y"], []], several=True)
    second = write_run(tmp_path / "b", [{"x": 0.2, "y": 0.9}, {"x": 0.1, "y": 0.8}], [["x", "y"], []], several=True)
    metrics = run_ensemble(tmp_path, [first, second])["predictions_own.jsonl"]["ensemble"]
    lines = read_predicted_rows(tmp_path / "out", "predictions_own")
    assert [line["prediction"] for line in lines] == [["x", "y"], ["y"]]
    assert metrics == pytest.approx({"f1_micro": 0.8, "f1_macro": (1 + 2 / 3) / 2, "accuracy": 0.5})


@pytest.mark.parametrize("labels", [None, [-1, -1], [None, None]])
def test_rows_without_labels(tmp_path, labels, capsys):
    runs = [write_run(tmp_path / name, [{"yes": 0.9, "no": 0.1}] * 2, labels) for name in "ab"]
    assert run_ensemble(tmp_path, runs) == {}
    assert "no metrics, as no --label_column_name" in capsys.readouterr().out


def test_runs_that_do_not_fit(tmp_path):
    rows = [{"yes": 0.9, "no": 0.1}, {"yes": 0.3, "no": 0.7}]
    first = write_run(tmp_path / "a", rows, ["yes", "no"])
    write_predicted_rows(tmp_path / "c" / "predictions_own", Dataset.from_dict({"a": [1]}), {"prediction": [1.5]})
    for runs, message in (
        ([first], "name two runs or more"),
        ([first, first], "name two runs or more"),
        ([str(tmp_path), first], "name two runs or more"),
        ([first, str(tmp_path)], "predictions_own.jsonl"),
        ([first, str(tmp_path / "c")], "c/predictions_own.jsonl has no probabilities"),
        ([first, write_run(tmp_path / "b", rows[:1], ["yes"])], "b/predictions_own.jsonl has other rows or labels"),
        ([first, write_run(tmp_path / "b", rows, ["no", "yes"])], "b/predictions_own.jsonl has other rows or labels"),
        ([first, write_run(tmp_path / "b", [{"yes": 1.0, "maybe": 0.0}] * 2, ["yes", "no"])], "has other rows or"),
        ([first, write_run(tmp_path / "d", rows, ["yes", "no"]), "--labels", "maybe"], "--labels maybe: the predic"),
        ([write_run(tmp_path / name, rows, [1, 0]) for name in "ef"], "row 1 has the label 1 .*--labels the names"),
    ):
        with pytest.raises(SystemExit, match=message):
            run_ensemble(tmp_path, runs)
    assert not (tmp_path / "out").exists()
