"""Bad rows of each task: an error lists them, counted from 1, and --skip_bad_rows leaves them out."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from hf_deberta.demos import house_rows, location_rows, match_rows
from hf_deberta.fine_tuning.run import read_rows
from hf_deberta.fine_tuning.task import Task
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.fine_tuning.tasks.glue import Classification
from hf_deberta.fine_tuning.tasks.ner import NamedEntities
from hf_deberta.fine_tuning.tasks.race import ANLI_COLUMNS, MultipleChoice
from hf_deberta.fine_tuning.tasks.squad import Squad, SquadModelArguments
from hf_deberta.fine_tuning.tasks.superglue import Record, SuperGlue
from hf_deberta.training.errors import InputError

REVIEWS = [{"text": f"a film, number {n}", "label": ("bad", "good")[n % 2]} for n in range(6)]
WORDS = [{"tokens": ["Ann", "left"], "ner_tags": ["B-PER", "O"]} for _ in range(6)]
PAIRS = [{"premise": "It rained.", "hypothesis": "It is wet.", "label": "neutral"} for _ in range(6)]
ENDINGS = [{"sent1": "It", "sent2": "is", "ending0": "wet", "ending1": "dry", "label": n % 2} for n in range(6)]


def write(folder: Path, name: str, rows: list[dict], bad: dict[int, dict] | None = None) -> Path:
    rows = [{**row, **(bad or {}).get(number, {})} for number, row in enumerate(rows, 1)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def read(folder: Path, task_class: type[Task], skip_bad_rows: bool = True, **flags: str) -> Task:
    """Return a task that has read the files train, validation and test of a folder, as far as they are there."""
    (folder / "config.json").write_text('{"model_type": "deberta-v2"}')
    model_args = (SquadModelArguments if task_class is Squad else ModelArguments)(str(folder))
    data_args = task_class.arguments(data_dir=str(folder), skip_bad_rows=skip_bad_rows, **flags)
    args = Namespace(do_train=True, do_predict=True, choose_actions=len, set_best_metric=len)
    task = task_class(model_args, data_args, args)
    read_rows(task)
    return task


CASES = {  # the rows, and what is wrong in some
    "unknown label": (Classification, {"task_name": "mnli"}, PAIRS, {"label": "perhaps"}, "'perhaps'; known are"),
    "no label": (Classification, {}, REVIEWS, {"label": None}, "no label in the column 'label'"),
    "no number": (
        Classification, {"task_name": "stsb"},
        [{"sentence1": "a", "sentence2": "b", "label": "1.5"} for _ in range(6)], {"label": "two"}, "'two'; the",
    ),
    "no label among several": (
        Classification, {}, [{"text": "a b", "label": ["x"]} for _ in range(6)], {"label": [""]}, "an empty label in",
    ),
    "words without labels": (NamedEntities, {}, WORDS, {"tokens": ["Ann"]}, "there are 1 words and 2 labels"),
    "no text": (SuperGlue, {"task_name": "cb"}, PAIRS, {"premise": None}, "the premise must be text, not null"),
    "no label of a pair": (SuperGlue, {"task_name": "cb"}, PAIRS, {"label": None}, "no label in the column 'label'"),
    "no choice": (MultipleChoice, {}, ENDINGS, {"label": 2}, "2; known are A, B, or 0 to 1"),
    "few choices": (MultipleChoice, {}, location_rows(6, 0), {"options": ["x", "y"], "answer": "B"}, "2 choices, but"),
    "no article": (MultipleChoice, {}, location_rows(6, 0), {"article": None}, "the article must be text, not null"),
    "no answers": (Squad, {}, house_rows(6, 0), {"answers": None}, "the row has no answers"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_rows_of_each_task(tmp_path, caplog, case):
    task_class, flags, rows, bad, problem = CASES[case]
    for split in ("train", "validation"):
        write(tmp_path, f"{split}.jsonl", rows, {2: bad, 5: bad} if split == "train" else {})
    with pytest.raises(InputError) as error:
        read(tmp_path, task_class, skip_bad_rows=False, **flags)
    place = f"{tmp_path}/train.jsonl, rows 2, 5: "
    assert str(error.value).startswith(place) and problem in str(error.value)
    assert str(error.value).endswith("; --skip_bad_rows leaves out such rows")
    task = read(tmp_path, task_class, **flags)
    assert f"2 of 6 train rows are left out: {place}" in caplog.text
    assert (len(task.rows["train"]), len(task.rows["validation"])) == (4, 6)


def test_metrics_select_a_checkpoint_only_if_the_validation_rows_have_them(tmp_path):
    """Otherwise training would fail at its first evaluation."""
    answered = [row for row in house_rows(20, 0) if row["answers"]["text"]]
    for split, rows in {"train": house_rows(20, 0), "validation": answered}.items():
        write(tmp_path, f"{split}.jsonl", rows)
    names = read(tmp_path, Squad).metric_names
    assert "HasAns_f1" in names and "NoAns_f1" not in names
    write(tmp_path, "train.jsonl", WORDS, {1: {"ner_tags": ["B-PER", "B-LOC"]}})
    write(tmp_path, "validation.jsonl", WORDS)
    task = read(tmp_path, NamedEntities, return_entity_level_metrics=True)
    assert "PER_f1" in task.metric_names and "LOC_f1" not in task.metric_names


def test_several_mistakes(tmp_path, caplog):
    """One message has those of all splits. Each kind is counted; rows keep their numbers in the file."""
    write(tmp_path, "train.jsonl", REVIEWS)
    write(tmp_path, "validation.jsonl", REVIEWS, {1: {"label": None}, 3: {"label": "?"}, 4: {"text": " "}})
    write(tmp_path, "train.jsonl", REVIEWS, {2: {"label": None}})
    with pytest.raises(InputError, match="train.jsonl, row 2: no label .*validation.jsonl, row 1: no .*row 3: unknown"):
        read(tmp_path, Classification, skip_bad_rows=False)
    write(tmp_path, "train.jsonl", REVIEWS)
    task = read(tmp_path, Classification)
    assert task.rows["validation"]["text"][:] == [REVIEWS[number]["text"] for number in (1, 4, 5)]
    for left, number, problem in (6, 4, "no text in"), (5, 1, "no label in"), (4, 3, "unknown labels in"):
        place = f"{tmp_path}/validation.jsonl, row {number}"
        assert f"1 of {left} validation rows are left out: {place}: {problem}" in caplog.text


def test_classes_in_a_csv_stay_classes(tmp_path):
    """A missing number makes decimals of a column, which would be the targets of a regression."""
    (tmp_path / "train.csv").write_text("text,label\nred hat,1\nold hat,\nbig hat,0\n")
    assert read(tmp_path, Classification).labels == ("LABEL_0", "LABEL_1")
    (tmp_path / "train.csv").write_text(f"{','.join(ANLI_COLUMNS)},label\na,b,c,d,1\na,b,c,d,\na,b,c,d,2\n")
    assert read(tmp_path, MultipleChoice).targets("train").tolist() == [0, 1]


def test_marks_of_documents_are_rows_of_the_file(tmp_path, caplog):
    mark = {"tokens": ["-DOCSTART-"], "ner_tags": ["O"]}
    write(tmp_path, "train.jsonl", WORDS)
    write(tmp_path, "validation.jsonl", [mark, WORDS[0], mark, *WORDS[1:]], {5: {"ner_tags": ["B-LOC", "O"]}})
    task = read(tmp_path, NamedEntities)
    assert "row 5: labels that the training data does not have: B-LOC" in caplog.text
    assert "; test rows need none" in caplog.text
    assert len(task.rows["validation"]) == len(task.original_rows["validation"]) == 5


def test_rows_that_cannot_be_left_out(tmp_path):
    """Test rows, and all rows."""
    write(tmp_path, "train.jsonl", PAIRS)
    write(tmp_path, "test.jsonl", PAIRS, {3: {"label": "perhaps"}})
    with pytest.raises(InputError, match="test.jsonl, row 3: .*; --skip_bad_rows is for training and validation rows"):
        read(tmp_path, Classification, task_name="mnli")
    with pytest.raises(InputError, match="test.jsonl, row 3: .*--label_column_name$"):
        read(tmp_path, Classification, skip_bad_rows=False, task_name="mnli")
    with pytest.raises(InputError, match="test.jsonl, row 3: .*remove the column$"):  # there is no such flag
        read(tmp_path, SuperGlue, skip_bad_rows=False, task_name="cb")
    (tmp_path / "test.jsonl").unlink()
    write(tmp_path, "validation.jsonl", PAIRS, {n: {"label": "perhaps"} for n in range(1, 7)})
    with pytest.raises(InputError, match="rows 1, 2, 3, 4, 5, 6: .*; no row of 6 would be left"):
        read(tmp_path, Classification, task_name="mnli")


def test_rows_made_of_a_bad_row(tmp_path, caplog):
    """All questions of a passage are left out if one is bad; rows after it keep their numbers in the file."""
    passages = match_rows(5, 0)
    for number in (1, 3):
        passages[number]["qas"] = [*passages[number]["qas"], {**passages[number]["qas"][0], "answers": []}]
    passages[0] = {**passages[0], "qas": 5}
    write(tmp_path, "train.jsonl", passages)
    task = read(tmp_path, Record, task_name="record")
    assert f"1 of 5 train rows are left out: {tmp_path}/train.jsonl, row 1: qas must be a list" in caplog.text
    assert f"2 of 4 train rows are left out: {tmp_path}/train.jsonl, rows 2, 4: the row has no answers" in caplog.text
    assert len(task.rows["train"]) == len(passages[2]["qas"]) + len(passages[4]["qas"])
