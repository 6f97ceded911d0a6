"""Rows of files, the file and row in errors, and required columns and texts."""

import gzip
import json
from dataclasses import replace

import pytest

from hf_deberta.training.data_files import (
    Source,
    check_rows,
    read_table,
    require_columns,
    require_texts,
)
from hf_deberta.training.errors import InputError, RowError, input_errors, name_rows
from hf_deberta.training.text_files import csv_line, csv_records, read_documents, read_json, read_lines, read_rows


def write(tmp_path, name: str, rows: list | str | bytes) -> str:
    path = tmp_path / name
    text = rows if isinstance(rows, str | bytes) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # bytes and text
        ("a.jsonl", b'{"a": "x"}\n{"a": "\xdf"}', "a.jsonl, line 2: .* byte 0xdf in position 7.*iconv -f latin1"),
        ("a.csv", "ü,b\n".encode() + b"\xe4", "a.csv, line 2: .* byte 0xe4"),
        ("a.tsv", b"a\tb\nc\0\td\n", "a.tsv, line 2: a NUL byte"),
        ("a.csv", b"PAR1\0\0", "a.csv, line 1: a NUL byte.*binary"),
        ("a.csv.gz", b"no gzip", "a.csv.gz is damaged after line 0 .*no complete gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"a": "xyz"}\n' * 999, mtime=0)[:-9], r"a.jsonl.gz is damaged after line \d+ "),
        ("a.parquet", b"PAR1 and no more", "a.parquet: .*[Pp]arquet"),
        ("a.jsonl", "", "a.jsonl is empty"),
        # rows on which pyarrow's reader crashes, and text that it would drop
        ("a.jsonl", "null\nnull\n", "a.jsonl, line 1 holds null; a row must be an object"),
        ("a.jsonl", '{"a": 1}\nnull\n', "a.jsonl, line 2 holds null"),
        ("a.jsonl", 'null {"a": 1}', "a.jsonl, line 1, column 6: not valid JSON"),
        ("a.json", '[null, {"a": 1}]', "a.json, row 1 holds null; a row must be an object"),
        ("a.json", '[\n{"a": [null]},\n  null\n]', "a.json, row 2 holds null"),
        ("a.jsonl", '{"a": 1}\n{"a":' + "[" * 30000 + "]" * 30000 + "}\n", "a.jsonl, line 2: .* (recursion|nested)"),
        ("a.json", '[{"a": 1},\n{"a": ["x\\ud800x"]}]', r"a.json, line 2: \\ud800 is half of a surrogate pair"),
        ("a.json", '[{"a\\udfff": 1}]', r"a.json, line 1: \\udfff is half"),
        # JSON
        ("a.jsonl", '{"a": "x"}\n\n{"a": 2,}\n', "a.jsonl, line 3, column [89]: not valid JSON: "),
        ("a.jsonl", '{"a": 1}\n[2]\n', r"a.jsonl, line 2 holds a list, \[2\]; a row must be"),
        ("a.json", '[{"a": 1},\n{"a" 2}]', "a.json, line 2, column 6: not valid JSON"),
        ("a.json", '[{"a": 1},\n5]', "a.json, row 2 holds a number, 5; a row must be"),
        ("a.jsonl", '{"a": 1, "a": 2}\n', "a.jsonl, line 1: an object has 'a' more than once"),
        ("a.jsonl", '{"a": 18446744073709551616}\n', "a.jsonl: '18446744073709551616' has a number beyond 64"),
        ("a.jsonl", '{"a": 1}\n{"a": 2\n{"a": 3}\n', "a.jsonl, line 2, column 8: not valid JSON"),
        # csv and tsv
        ("a.csv", "text;label\nx, y;1\n", "a.csv: fields of a csv file .* has ';' instead"),
        ("a.csv", "a,b\nx,1\nz,2,3\n", "a.csv, line 3 has 3 fields, and the header 2"),
        ("a.csv", 'a,b\nx,1\ny,"2\nz,3\n', "a.csv, line 3: .*end of data: is a quotation mark missing"),
        ("a.csv", 'a,b\n"x"y,1\n', "a.csv, line 2: .*',' expected after '\"'"),
        ("a.tsv", "a\tb\ta\nx\t1\t2\n", "a.tsv: the header has the column 'a' more than once"),
        ("a.csv", "\n\n", "a.csv"),
        ("a.xlsx", "x", "a.xlsx is none of jsonl, json, csv"),
    ],
)
def test_bad_tables(tmp_path, name, content, message, caplog):
    with pytest.raises(InputError, match=message) as raised:
        read_table(write(tmp_path, name, content))
    assert "\n" not in str(raised.value) and str(raised.value).count(name) == 1
    assert name == "a.parquet" or not caplog.text  # `datasets` logs an error that it raises


def test_files_that_are_no_files(tmp_path, monkeypatch):
    for path in (tmp_path / "nowhere.csv", tmp_path):
        with pytest.raises(InputError, match=str(path)):
            read_table(path)
    path = write(tmp_path, "a.csv", "a,b")

    def denied(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)  # root may read every file
    with pytest.raises(InputError, match="a.csv: .*Permission denied"):
        read_table(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"])
def test_good_files(tmp_path, name):
    content = '\ufeff{"a": "ü\\\\ud800 \\ud83d\\ude00"}\r\n\r\n' if "json" in name else '\ufeffa,b\r\n"x\r\ny",1\r\n'
    content = content.replace(",", "\t") if "tsv" in name else content
    path = write(tmp_path, name, content)
    zipped = write(tmp_path, f"{name}.gz", gzip.compress(content.encode()))
    rows = {
        "a.csv": [{"a": "x\r\ny", "b": "1"}], "a.tsv": [{"a": '"x', "b": None}, {"a": 'y"', "b": "1"}],
        "a.txt": ["a,b", '"x', 'y",1'],
    }.get(name, [{"a": "ü\\ud800 😀"}])  # fmt: skip
    for file in (path, zipped):
        assert list(read_documents(file) if name == "a.txt" else read_rows(file)) == rows
    assert list(read_lines(zipped)) == list(read_lines(path)) and "\ufeff" not in "".join(read_lines(path))


@pytest.mark.parametrize("content", ["%s", '{"version": 1,\n"data": %s}', '[{"a": 1},\n{"a": 2, "b": %s}]'])
def test_a_json_document_with_thousands_of_rows_in_a_line(tmp_path, content):
    path = write(tmp_path, "a.json", content % json.dumps([{"a": [1]}] * 2000))
    assert read_json(path) == json.loads(content % json.dumps([{"a": [1]}] * 2000))
    deep = write(tmp_path, "deep.json", content % ("[" * 200_000 + "]" * 200_000))
    with pytest.raises(InputError, match="deep.json.* (recursion|nested too deeply)"):
        read_json(deep)


def test_rows_are_written_once_for_a_content(tmp_path):
    files = [write(tmp_path, name, "a\nx\n")[0:] for name in ("a.csv", "b.csv")]
    first, second = map(read_table, files)
    assert first.cache_files == second.cache_files and first._fingerprint == second._fingerprint
    assert read_table(write(tmp_path, "a.tsv", "a\nx\n")).cache_files != first.cache_files


def test_values_of_json_stay_what_they_are(tmp_path):
    """Dates are texts; a type that only later rows show is that of all; values of several types stay as they are."""
    rows: list[dict] = [{"a": "2024-05-06T07:08:09Z", "b": {"d": "2024-05-06"}} for _ in range(1000)]
    rows += [{"a": "x", "b": {"c": [1]}, "e": 2}, {"a": None, "e": 2.5}]
    table = read_table(write(tmp_path, "a.jsonl", rows))
    assert table.column_names == ["a", "b", "e"]
    assert table["a"][0] == "2024-05-06T07:08:09Z" and table["b"][0] == {"d": "2024-05-06", "c": None}
    assert list(table)[-2:] == [{"a": "x", "b": {"d": None, "c": [1]}, "e": 2.0}, {"a": None, "b": None, "e": 2.5}]
    mixed = [5, "5", True, None, 2.5, ["2024-05-06"], {"c": "x"}, 2**60]
    nested = [{"c": [True]}, {"c": [2.5]}], [{"c": True, "d": 2.5}, {"c": False, "d": 1.0}]
    for values in nested:
        given = [{"a": value} for value in values]
        assert repr([*read_table(write(tmp_path, "a.jsonl", given))]) == repr(given)
    for values in (mixed, [True, 2.5], [1, 2**63], [2**60 + 1, *[2.5] * 1000]):
        given = [{"a": value} for value in values]
        found = read_table(write(tmp_path, "a.json", json.dumps(given)))["a"][:]
        assert list(zip(map(type, found), found, strict=True)) == list(zip(map(type, values), values, strict=True))


@pytest.mark.parametrize(("name", "text", "rows"), [
    ("a.csv", "a,b\nx\ry,1\r\n\nz,\n", [["x\ry", "1"], ["z", None]]),
    ("a.csv", 'a,b\n"x\r\ny",1\n"\r",2\r', [["x\r\ny", "1"], ["\r", "2"]]),
    ("a.tsv", "a\tb\r\n\rx\r\r\t1\r\r\n", [["\rx\r\r", "1\r"]]),
    ("a.csv", 'a,b\r\r\nx,1\r\r\n"y\r\r\n\rz",2\r\r\n', [["x", "1"], ["y\n\rz", "2"]]),  # written on Windows
    ("a.csv", "a,b\rx,1\ry,2\r", [["x", "1"], ["y", "2"]]),  # as Excel for Mac may write it
    ("a.tsv", "\na\n\nx\n\n", [[None], ["x"], [None]]),  # each line is a row
    ("a.csv", "a\n\nx\n\"\"\n", [["x"], [None]]),  # csv.writer quotes an empty field
    ("a.csv", "a,b,c\nNA,None,2024-05-06\n007,x\n", [["NA", "None", "2024-05-06"], ["007", "x", None]]),
])  # fmt: skip
def test_fields_and_rows_of_csv(tmp_path, name, text, rows):
    assert [list(row.values()) for row in read_table(write(tmp_path, name, text))] == rows


def test_rows_are_written_as_they_are_read(tmp_path):
    files = {
        "a.csv": [["a", "b"], ['x, "y"', "one\r\ntwo"], ["\r", "\n"], [" z ", ""]],
        "a.tsv": [["a", "b"], ['x, "y"', "one\rtwo"], [" z ", ""]],
    }
    for name, rows in files.items():
        file = write(tmp_path, name, "".join(f"{csv_line(row, name[2:])}\n" for row in rows))
        assert [fields for _, fields in csv_records(file)] == rows
    assert csv_line([None, {"c": [1]}], "csv") == ',"{""c"": [1]}"'
    assert csv_line(["one\ttwo\n\tthree", {"c": "\t"}], "tsv") == 'one two three\t{"c": "\\t"}'


def test_places_of_rows():
    """Rows keep their numbers in the files if others are left out; the first file with some of them is named."""
    source = Source("train", {"a.csv": 2, "b.csv": 4, "c.csv": 2})
    assert source() == "a.csv, b.csv, c.csv" and source.is_csv
    assert source([0, 2, 3]) == "a.csv, rows 1, ... (3 in all)"
    left = replace(source, numbers=[1, 3, 5, 5, 7])
    assert left([1, 2, 3, 4]) == "b.csv, rows 2, 4, ... (3 in all)" and left([4]) == "c.csv, row 2"
    assert Source("train")([0]) == "train row 1" and not Source("train").is_csv


def test_errors_name_their_file_and_row_once(tmp_path):
    where = Source("train", {f"{tmp_path}/a.csv": 2})
    with pytest.raises(InputError, match=r"^[^:]*a.csv, row 2: it is wrong$"), input_errors("b"), input_errors(where):
        raise RowError({1: "it is\n wrong"})
    for message in ("it is wrong", f"{tmp_path}/a.csv: it is wrong"):
        with pytest.raises(InputError, match=r"^[^:]*a.csv: it is wrong$"), input_errors(where):
            raise InputError(message)
    assert str(RowError({1: "it is wrong"})) == "row 2: it is wrong"


def test_errors_in_many_rows():
    wrong = dict.fromkeys(range(6, 40), "wrong") | {2: "odd", 50: "odd"}
    assert str(RowError(wrong)) == "rows 3, 51: odd; 34 more rows have other mistakes"
    del wrong[2]
    numbers = ", ".join(map(str, range(7, 17)))
    assert str(RowError(wrong)) == f"rows {numbers}, ... (34 in all): wrong; 1 more row has another mistake"
    assert name_rows([*range(1, 11)]) == "rows 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"


def test_all_rows_are_checked():
    def check(row):
        if row != "x":
            raise InputError(f"not {row}")

    check_rows(["x", "x"], check)
    with pytest.raises(RowError) as caught:
        check_rows(["y", "x", "z"], check)
    assert caught.value.problems == {0: "not y", 2: "not z"}


def test_required_columns(tmp_path):
    rows = read_table(write(tmp_path, "a.csv", "a,b\nx,y\n"))
    require_columns(rows, ["a"], "train")
    with pytest.raises(InputError, match=r"the train rows have no column 'c'; they have a, b"):
        require_columns(rows, ["a", "c"], "train")


@pytest.mark.parametrize("value", [None, 5, ["x"], {"x": 1}, True])
def test_texts_of_json_are_texts(tmp_path, value):
    rows = read_table(write(tmp_path, "a.jsonl", [{"a": "x"}, {"a": value}]))
    with pytest.raises(RowError, match="row 2: the a must be text, not "):
        require_texts(rows, ["a"], Source("train"))


def test_fields_of_csv_may_be_long(tmp_path):
    assert len(read_table(write(tmp_path, "a.csv", "a\n" + "x" * 200_000 + "\n"))["a"][0]) == 200_000


def test_texts_of_csv_may_be_digits_or_empty(tmp_path, caplog):
    rows = read_table(write(tmp_path, "a.csv", "a,b\n1,x\n2,\n"))
    require_texts(rows, ["a", "b"], Source("train", {"a.csv": 2}))
    assert "1 of 2 train rows have an empty b: " in caplog.text and "a.csv, row 2" in caplog.text
