"""Ensembles: averages of scores, the table, and files of scores."""

import json
from argparse import Namespace

import numpy as np
import pytest
from datasets import Dataset

from hf_deberta.fine_tuning.ensemble import average_scores, read_scores, write_ensemble, write_scores
from hf_deberta.fine_tuning.splits import hash_rows
from hf_deberta.fine_tuning.task import LabelLogits, Task
from hf_deberta.training.errors import InputError


def test_averages_of_all_kinds_of_scores():
    assert average_scores([[{"a": 1.0}, {"x": 0.5}], [{"b": 1.0}, {"x": 0.25}]]) == [{"a": 0.5, "b": 0.5}, {"x": 0.375}]
    values = average_scores([LabelLogits(np.array(numbers), None).scores() for numbers in ([1.0, -2.0], [2.0, 0.0])])
    assert LabelLogits.from_scores(values, None).values.tolist() == [1.5, -1.0]
    with pytest.raises(InputError, match="scores of yes; this task is a regression"):
        LabelLogits.from_scores(average_scores([[{"value": 3.0}], [{"yes": 1.0}]]), None)


@pytest.mark.parametrize("multi_label", [False, True])
def test_logits_have_the_probabilities(multi_label):
    scores = [{"no": 0.9, "yes": 0.1}, {"no": 0.2, "yes": 0.8}]
    logits = LabelLogits.from_scores(scores, ["yes", "no"], multi_label)  # another order
    assert logits.labels == ("yes", "no") and logits.best() == ([["no"], ["yes"]] if multi_label else ["no", "yes"])
    np.testing.assert_allclose(logits.probabilities(), [[0.1, 0.9], [0.8, 0.2]], rtol=1e-6)
    assert [row == pytest.approx(expected) for row, expected in zip(logits.scores(), scores, strict=True)]
    assert np.isfinite(LabelLogits.from_scores([{"yes": 1.0}], ["yes", "no"], multi_label).values).all()
    with pytest.raises(InputError, match="scores of maybe; the labels are yes, no"):
        LabelLogits.from_scores([{"maybe": 1.0}], ["yes", "no"], multi_label)


class YesOrNo(Task):
    """Labels of the validation rows are yes; `write` keeps what would be written."""

    def __init__(self, rows: dict[str, Dataset], row_hashes: dict[str, str] | None = None) -> None:
        flags = Namespace(do_eval=True, do_predict=True, push_to_hub=False, row_hashes=row_hashes or {})
        super().__init__(None, None, flags)
        self.rows, self.labels, self.written = rows, ("yes", "no"), {}

    def write(self, folder, split, predicted):
        self.written[split] = predicted


def test_the_ensemble_corrects_its_members(tmp_path, capsys):
    """Three runs that are wrong in one row each, and sure where they are right."""
    for run in range(3):
        rows = [{"yes": 0.4, "no": 0.6} if row == run else {"yes": 0.9, "no": 0.1} for row in range(3)]
        write_scores(tmp_path / f"run{run}", "validation", rows)
        write_scores(tmp_path / f"run{run}", "test", rows[:2])
    task = YesOrNo(
        {"validation": Dataset.from_dict({"label": [0] * 3}), "test": Dataset.from_dict({"text": ["a"] * 2})}
    )
    write_ensemble(tmp_path / "out", {f"run{run}": tmp_path / f"run{run}" for run in range(3)}, task)
    metrics = json.loads((tmp_path / "out" / "ensemble.json").read_text())["metrics"]["validation"]
    assert [metrics[f"run{run}"]["accuracy"] for run in range(3)] == [pytest.approx(2 / 3)] * 3
    assert (
        metrics["ensemble"]["accuracy"] == 1
        and list(task.written) == ["test"]
        and len(task.written["test"].values) == 2
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["ensemble", "1.0000"] and lines[-2].split() == ["run2", "0.6667"]
    again = read_scores(tmp_path / "out", "test", 2)  # an ensemble may be a member of another
    assert again[0]["yes"] == pytest.approx((0.4 + 0.9 + 0.9) / 3, rel=1e-5)


def test_scores_that_do_not_fit(tmp_path):
    with pytest.raises(InputError, match=r"no .*scores_test.jsonl: .*--do_eval and --do_predict"):
        read_scores(tmp_path, "test", 2)
    write_scores(tmp_path, "test", [{"a": 1.0, "b": 1e-12}])
    assert read_scores(tmp_path, "test", 1) == [{"a": 1.0}]
    write_scores(tmp_path, "test", separated := [{"a\u2028b\u2029c\x85d": 1.0}])  # ends of lines for str.splitlines
    assert read_scores(tmp_path, "test", 1) == separated
    with pytest.raises(InputError, match="the scores of 1 rows or words, and the test split has 2"):
        read_scores(tmp_path, "test", 2)
    (tmp_path / "scores_test.jsonl").write_text('{"rows": null}\n{"yes": 0.')
    with pytest.raises(InputError, match=r"scores_test.jsonl is damaged: .*; evaluate and predict"):
        read_scores(tmp_path, "test", 2)
    for line in ("[1]", *(f'{{"a": {score}}}' for score in ("NaN", "1e999", "1" + "0" * 400, '"3"', "null", "[1]"))):
        (tmp_path / "scores_test.jsonl").write_text(f'{{"rows": null}}\n{line}\n')
        with pytest.raises(InputError, match="damaged: .*; evaluate and"):
            read_scores(tmp_path, "test", 1)


def test_only_scores_of_the_same_rows_are_averaged(tmp_path):
    """In the same order, with labels or without."""
    rows = Dataset.from_list([{"text": f"row {n}", "label": n} for n in range(3)])
    variants = (rows, rows.remove_columns("label"), rows.select([2, 1, 0]))
    own, unlabelled, reordered = (hash_rows({"test": table}, "label")["test"] for table in variants)
    assert own == unlabelled != reordered
    task = YesOrNo({"test": rows.remove_columns("label")}, {"test": own})
    runs, scores = {name: tmp_path / name for name in ("one", "two")}, [{"yes": 1.0}] * 3
    write_scores(runs["one"], "test", scores, own)
    write_scores(runs["two"], "test", scores, own)
    write_ensemble(tmp_path / "out", runs, task)
    assert read_scores(tmp_path / "out", "test", 3, own) == scores
    for other in (reordered, None):
        write_scores(runs["two"], "test", scores, other)
        with pytest.raises(InputError, match="two/scores_test.* split has 3 others, or the same in another order"):
            write_ensemble(tmp_path / "out", runs, task)
