"""Rows of a task from files, folders and data sets."""

import json

import pytest
from datasets import Dataset, DatasetDict

from hf_deberta.training.splits import DataArguments, read_splits, require_columns

ROWS = [{"sentence": "a b", "label": 0}, {"sentence": "c", "label": 1}, {"sentence": "d", "label": 1}]


def write(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_files_of_every_kind(tmp_path):
    rows = Dataset.from_list(ROWS)
    rows.to_csv(tmp_path / "a.csv")
    rows.to_csv(tmp_path / "a.tsv", sep="\t")
    rows.to_parquet(tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl")
    for kind in ("csv", "tsv", "parquet", "jsonl"):
        found = read_splits(DataArguments(train_file=str(tmp_path / f"a.{kind}")))
        assert [found["train"][i] for i in range(3)] == ROWS, kind


def test_a_folder(tmp_path):
    for name in ("train.jsonl", "validation_matched.jsonl", "test.jsonl", "README.md", "trainer.txt"):
        write(tmp_path / name)
    found = read_splits(DataArguments(data_dir=str(tmp_path)))
    assert set(found) == {"train", "validation_matched", "test"}
    write(tmp_path / "own.jsonl", ROWS[:1])
    found = read_splits(DataArguments(data_dir=str(tmp_path), train_file=str(tmp_path / "own.jsonl")))
    assert len(found["train"]) == 1


def test_other_names_of_validation(tmp_path):
    write(tmp_path / "dev.jsonl")
    assert set(read_splits(DataArguments(data_dir=str(tmp_path)))) == {"validation"}
    write(tmp_path / "validation.jsonl")
    with pytest.raises(ValueError, match="both the split 'validation'"):
        read_splits(DataArguments(data_dir=str(tmp_path)))


def test_a_data_set(tmp_path):
    (tmp_path / "set").mkdir()
    DatasetDict(train=Dataset.from_list(ROWS))["train"].to_parquet(tmp_path / "set" / "train.parquet")
    found = read_splits(DataArguments(dataset_name=str(tmp_path / "set")))
    assert len(found["train"]) == 3
    assert len(read_splits(DataArguments(), hub=(str(tmp_path / "set"), None))["train"]) == 3


def test_limits(tmp_path):
    path = write(tmp_path / "a.jsonl")
    args = DataArguments(train_file=path, validation_file=path, test_file=path, max_train_samples=1, max_eval_samples=2)
    assert {name: len(rows) for name, rows in read_splits(args).items()} == {"train": 1, "validation": 2, "test": 3}
    assert len(read_splits(DataArguments(train_file=path, max_train_samples=99))["train"]) == 3


def test_bad_input(tmp_path):
    path = write(tmp_path / "a.jsonl")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "header.csv").write_text("sentence,label\n")
    (tmp_path / "folder").mkdir()
    cases = [
        ({}, "say which data"),
        ({"train_file": str(tmp_path / "nowhere.jsonl")}, "there is no file"),
        ({"train_file": str(tmp_path / "empty.jsonl")}, "is empty"),
        ({"train_file": str(tmp_path / "header.csv")}, "has no rows"),
        ({"train_file": str(tmp_path / "a.xml")}, "is none of"),
        ({"train_file": path, "dataset_name": "x"}, "not both"),
        ({"data_dir": str(tmp_path / "nowhere")}, "not a folder"),
        ({"data_dir": str(tmp_path / "folder")}, "holds no file"),
    ]
    for fields, said in cases:
        with pytest.raises((ValueError, OSError), match=said):
            read_splits(DataArguments(**fields))


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="the train rows have no column 'question'; they have sentence, label"):
        require_columns(Dataset.from_list(ROWS), ["sentence", "question"], "train")
