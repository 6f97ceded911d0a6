"""The line and column at fault in a data file, and the line of a row."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from hf_deberta.runs.errors import InputError
from hf_deberta.runs.file_faults import (
    check_file,
    count_rows,
    explain_failure,
    file_kind,
    line_of_row,
    read_json,
    read_lines,
)


def write(tmp_path, name: str, content: str | bytes):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\nStra\xdfe\n", r"a.txt, line 2, column 5: the byte 0xdf is not UTF-8 text; .*iconv -f latin1"),
        ("a.csv", "ü,b\n".encode() + b"\xe4", r"a.csv, line 2, column 1: the byte 0xe4"),
        ("a.csv", "ü ä".encode() + b"\xe4", r"a.csv, line 1, column 4: the byte 0xe4"),  # a column is a character
        ("a.txt", "a b".encode("utf-16"), "line 1, column 1: .*iconv -f utf-16"),
        ("a.tsv", b"a\tb\nc\0\td\n", "a.tsv, line 2, column 2: a NUL byte"),
        ("a.jsonl", '{"a": 1}\n{"a":' + "[" * 5000 + "]" * 5000 + "}\n", "a.jsonl, line 2: .* nested too deeply"),
        ("a.jsonl", "null\nnull\n", "a.jsonl, line 1 holds null and must be an object"),
        ("a.json", "[null, null]", "a.json, row 1 holds null and must be an object"),
        ("a.txt.gz", b"plain", r"a.txt.gz is damaged after line 0 .*no complete gzip file"),
        ("a.txt.gz", gzip.compress(b"a\nb\n" * 999, mtime=0)[:-9], r"a.txt.gz is damaged after line \d+ "),
        ("a.parquet", b"PAR1 and no more", "a.parquet is damaged, or is no parquet file"),
        ("a.txt", b"", "a.txt is empty"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    with pytest.raises(InputError, match=message):
        check_file(write(tmp_path, name, content))


def test_files_that_are_no_files(tmp_path):
    with pytest.raises(InputError, match="there is no file .*nowhere.csv"):
        check_file(tmp_path / "nowhere.csv")
    with pytest.raises(InputError, match="is a folder: name a file in it"):
        check_file(tmp_path)


def test_a_file_without_permission(tmp_path, monkeypatch):
    path = write(tmp_path, "a.csv", "a,b")

    def denied(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)  # root may read every file
    with pytest.raises(InputError, match="cannot read .*a.csv: Permission denied"):
        check_file(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": 2,}\n', "a.jsonl, line 3, column 9: not valid JSON: "),
        ("a.jsonl", '{"a": 1}\n[2]\n', r"a.jsonl, line 2 holds a list, \[2\], and must be an object"),
        ("a.jsonl", '{"a": 1, "a": 2}\n', "a.jsonl, line 1: an object has the key 'a' more than once"),
        ("a.jsonl", '{"a": {"b": 1}}\n{"a": {"b": "x"}}\n', "line 2: a.b holds text, 'x', but a number in line 1"),
        ("a.jsonl", '{"a": "\\ud800"}\n', "line 1: a has half of a surrogate pair"),
        ("a.json", '[{"a": 1},\n{"a": ["\\ud800x"]}]', r"row 2: a\[\] has half of a surrogate pair"),
        ("a.json", '[{"a\\ud800": 1}]', r"row 1: a\\ud800 has half of a surrogate pair"),
        ("a.json", '["\\ud800"]', "row 1: text has half of a surrogate pair"),
        ("a.json", '[{"a": 1},\n{"a" 2}]', "a.json, line 2, column 6: not valid JSON"),
        ("a.json", '[{"a": 1},\n5]', "a.json, row 2 holds a number, 5, and must be an object"),
        ("a.csv", 'a,b\n"x\ny",1\nz,2,3\n', "a.csv, line 4 has 3 fields, but the header has 2"),
        ("a.csv", 'a,b\nx,1\ny,"2\nz,3\n', "a.csv, line 3: a quotation mark is never closed"),
        ("a.tsv", "a\tb\ta\nx\t1\t2\n", "a.tsv, line 1: the header has the column 'a' more than once"),
    ],
)
def test_faults_of_tables(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    if not name.endswith(".json"):  # of a JSON array all of the text is checked before it is read
        check_file(path)
    assert explain_failure(path) is not None
    with pytest.raises(InputError, match=message):
        raise explain_failure(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"])
def test_good_files(tmp_path, name):
    content = '\ufeff{"a": "ü"}\r\n\r\n' if "json" in name else '\ufeffa,b\r\n"x\r\ny",1\r\n'
    content = content.replace(",", "\t") if "tsv" in name else content
    path = write(tmp_path, name, content)
    check_file(path)
    assert explain_failure(path) is None
    zipped = write(tmp_path, f"{name}.gz", gzip.compress(path.read_bytes()))
    check_file(zipped)
    assert list(read_lines(zipped)) == list(read_lines(path)) and "\ufeff" not in "".join(read_lines(path))


@pytest.mark.parametrize("content", ["%s", '{"version": 1,\n"data": %s}', '[{"a": 1},\n{"a": 2, "b": %s}]'])
def test_a_json_document_with_thousands_of_rows_in_a_line(tmp_path, content):
    path = write(tmp_path, "a.json", content % json.dumps([{"a": [1]}] * 2000))
    check_file(path)
    deep = write(tmp_path, "deep.json", content % ("[" * 5000 + "]" * 5000))
    with pytest.raises(InputError, match="deep.json.* nested too deeply"):
        check_file(deep)


def test_a_json_file_with_a_byte_order_mark(tmp_path):
    assert read_json(write(tmp_path, "a.json", '\ufeff{"data": []}')) == {"data": []}
    with pytest.raises(InputError, match="a.json, line 2, column 1: not valid JSON"):
        read_json(write(tmp_path, "a.json", "{\n"))


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": 2}\n', ["line 1", "line 3"]),
        ("a.csv", 'a,b\n\n"x\ny",1\nz,2\n', ["line 3", "line 5"]),
        ("a.tsv", 'a\tb\n"x\t1\nz\t2\n', ["line 2", "line 3"]),
        ("a.json", '[{"a": 1},\n{"a": 2}]', ["row 1", "row 2"]),
    ],
)
def test_line_of_row(tmp_path, name, content, lines):
    path = write(tmp_path, name, content)
    assert [line_of_row(path, row) for row in range(2)] == lines
    assert count_rows(path) == (None if name == "a.json" else 2)


def test_rows_of_a_parquet_file(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2, 3]}), path)
    check_file(path)
    assert count_rows(path) == 3 and line_of_row(path, 1) == "row 2"


def test_file_kinds():
    assert [file_kind(name) for name in ("a.CSV", "b.jsonl.gz", "c/d")] == ["csv", "jsonl", ""]
