"""Rows of files, the file and line in errors, and required columns and texts."""

import json
import logging
import zipfile

import pytest
from datasets import Dataset, load_dataset

from hf_deberta.fine_tuning.splits import DataArguments, read_splits
from hf_deberta.runs.data_files import (
    RowError,
    explain_bad_files,
    load_files,
    locate_errors,
    place_of_row,
    read_table,
    require_columns,
    require_texts,
    set_source,
)
from hf_deberta.runs.errors import InputError


def write(tmp_path, name: str, rows: list | str) -> str:
    path = tmp_path / name
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": "x"}\n{"a": \n', "a.jsonl, line 2, column 1: not valid JSON"),
        ("a.csv", "a,b\nx,y,z\nx,y,z\n", "a.csv, line 2 has 3 fields, but the header has 2"),  # pandas takes an index
        ("a.csv", "a,a\nx,y\n", "a.csv, line 1: the header has the column 'a' more than once"),
        ("a.csv", "\n\n", "a.csv"),
        ("a.parquet", "no parquet", "a.parquet is damaged, or is no parquet file"),
        ("a.csv.gz", "no gzip", "a.csv.gz is damaged after line 0"),
    ],
)
def test_bad_tables(tmp_path, name, text, message, caplog):
    with pytest.raises(InputError, match=message) as raised:
        read_table(write(tmp_path, name, text))
    assert "\n" not in str(raised.value) and not caplog.text


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_empty_parts_of_several_files(tmp_path, kind):
    text = "word\n" if kind == "txt" else [{"text": "word"}]
    files = [write(tmp_path, f"part-0.{kind}", ""), write(tmp_path, f"part-1.{kind}", text)]
    assert load_files(kind, files)["text"][:] == ["word"]
    with pytest.raises(InputError, match=r"part-0\.\w+ is empty"):
        load_files(kind, files[:1])


def test_names_that_look_like_patterns(tmp_path):
    assert read_table(write(tmp_path, "a[1]*.jsonl", [{"a": "x"}]))["a"][:] == ["x"]


@pytest.mark.parametrize("line", [b'{"a": "\xdf"}', b"null"], ids=["latin1", "null"])
def test_a_file_that_datasets_has_read_before_is_checked_all_the_same(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "x"}\n' + line)
    load_dataset("json", data_files=[str(tmp_path / "a.jsonl")])
    with pytest.raises(InputError, match="a.jsonl, line 2"):
        read_table(tmp_path / "a.jsonl")


def test_other_exceptions_name_the_file():
    with pytest.raises(InputError, match="cannot read a.csv, b.csv: no columns"), explain_bad_files(["a.csv", "b.csv"]):
        raise AttributeError("no columns\nat all")
    with pytest.raises(MemoryError), explain_bad_files(["a.csv"]):
        raise MemoryError


def test_place_of_row(tmp_path):
    rows = read_table(write(tmp_path, "a.jsonl", [{"a": "x"}, {"a": "y"}]))
    assert place_of_row(rows, 1, "train") == f"{tmp_path}/a.jsonl, line 2"
    mapped = rows.map(lambda row: row).select(range(1)).rename_column("a", "b")
    assert place_of_row(mapped, 0, "train") == f"{tmp_path}/a.jsonl, line 1"
    assert place_of_row(Dataset.from_dict({"a": [1]}), 0, "train") == "train row 1"
    assert place_of_row(set_source(rows, ["me/mine"]), 0, "train") == "me/mine, train row 1"


def test_rows_of_several_files(tmp_path):
    for number, rows in enumerate(([{"a": "x"}], [{"a": "y"}, {"a": None}])):
        write(tmp_path, f"train-0000{number}-of-00002.jsonl", rows)
    rows = read_splits(DataArguments(data_dir=str(tmp_path)))["train"]
    message = "train-00001-of-00002.jsonl, line 2: the a must be text, not null"
    with pytest.raises(InputError, match=message), locate_errors(rows, "train"):
        require_texts(rows, ["a"], "train")


def test_locate_errors(tmp_path):
    rows = read_table(write(tmp_path, "a.csv", "a\nx\ny\n"))
    with pytest.raises(InputError, match=r"^.*a.csv, line 3: it is wrong$"), locate_errors(rows, "train"):
        raise RowError(1, "it is wrong")
    with pytest.raises(InputError, match=r"^[^:]*a.csv: it is wrong$"), locate_errors(rows, "train"):
        raise InputError("it is wrong")
    with pytest.raises(InputError, match=r"^[^:]*a.csv: it is wrong$"), locate_errors(rows, "train"):  # once
        raise InputError(f"{tmp_path}/a.csv: it is wrong")
    assert str(RowError(1, "it is wrong")) == "row 2: it is wrong"


def test_required_columns_name_the_file(tmp_path):
    rows = read_table(write(tmp_path, "a.csv", "a,b\nx,y\n"))
    with pytest.raises(InputError, match=r"the train rows .*a.csv. have no column 'c'; they have a, b"):
        require_columns(rows, ["a", "c"], "train")


@pytest.mark.parametrize("value", [None, 5, ["x"], {"x": 1}, True])
def test_texts_of_json_are_texts(tmp_path, value):
    rows = read_table(write(tmp_path, "a.jsonl", [{"a": "x"}, {"a": value}]))
    with pytest.raises(RowError, match="row 2: the a must be text, not "):
        require_texts(rows, ["a"], "train")


def test_texts_of_csv_may_be_digits_or_empty(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    rows = read_table(write(tmp_path, "a.csv", "a,b\n1,x\n2,\n"))
    require_texts(rows, ["a", "b"], "train")
    assert "1 of 2 train rows have an empty b, the first of them" in caplog.text and "a.csv, line 3" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "sentence;label\nx;1\n",
            "one column, 'sentence;label': is it separated by ';'. Write it with co",
        ),
        ("a.csv", "sentence;label\nx, y, z;1\nx;1\n", "is it separated by ';'. Write it with commas$"),
        ("a.csv", "sentence\tlabel\nx\t1\n", r"separated by '\\t'. Write it with commas, or rename it to .tsv$"),
        ("a.tsv", "sentence,label\nx,1\n", "separated by ','. Write it with tabs, or rename it to .csv$"),
        ("a.csv", '{"sentence": "a", "label": 1}\n' * 2, "rows are JSON, rename it to .jsonl$"),
        ("a.csv", '{"sentence": "a"}\n{"sentence": "b, c"}\n', "rows are JSON, rename it to .jsonl$"),
        ("a.tsv", '[{"sentence": "a"},\n{"sentence": "b"}]\n', "rows are JSON, rename it to .jsonl$"),
    ],
)
def test_a_file_of_another_format_than_its_name_says(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_table(tmp_path / name)


def test_files_with_one_column(tmp_path):
    for name, text in (("a.csv", '"a, b"\nx;y\n'), ("a.tsv", "text\nx; y, z\n"), ("b.csv", "text\n{x}\n")):
        (tmp_path / name).write_text(text)
        assert len(read_table(tmp_path / name)) == 1


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json"])
def test_binary_files_with_the_name_of_a_text_file(tmp_path, kind):
    Dataset.from_dict({"text": ["x"]}).to_parquet(tmp_path / f"parquet.{kind}")
    with pytest.raises(InputError, match=f"parquet.{kind} is a parquet file: rename it to .parquet"):
        read_table(tmp_path / f"parquet.{kind}")
    with zipfile.ZipFile(tmp_path / f"book.{kind}", "w") as book:
        book.writestr("sheet.xml", "<x/>")
    with pytest.raises(InputError, match=f"book.{kind} is a zip file or an Excel workbook: unzip it"):
        read_table(tmp_path / f"book.{kind}")
