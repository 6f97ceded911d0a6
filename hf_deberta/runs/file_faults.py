"""Find the line and column at fault in a data file: encoding, JSON, csv, gzip, parquet.

>>> check_file("reviews.jsonl")
InputError: reviews.jsonl, line 2, column 16: the byte 0xdf is not UTF-8 text: convert the file, e.g. iconv -f ...
"""

import csv
import gzip
import json
import re
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow
import pyarrow.parquet

from hf_deberta.runs.errors import InputError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
# More brackets in one line than this may be nested so deeply that pyarrow's parser overflows the stack and crashes.
MAX_UNCHECKED_BRACKETS = 1000
BINARY_FORMATS = {  # by the first bytes of a file
    b"PAR1": "a parquet file: rename it to .parquet",
    b"PK\x03\x04": "a zip file or an Excel workbook: unzip it, or save its table as csv",
}
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)  # what gzip raises
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair; no text has it
TYPE_NAMES = {
    str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object",
    type(None): "null",
}  # fmt: skip


def file_kind(file: str | Path) -> str:
    """Return the file type without .gz: "jsonl" for train.jsonl.gz."""
    return Path(Path(file).name.removesuffix(".gz")).suffix.removeprefix(".").lower()


def require_file(file: str | Path) -> None:
    """Require that a file exists, is readable and is not empty."""
    path = Path(file)
    if path.is_dir():
        raise InputError(f"{file} is a folder: name a file in it")
    if not path.exists():
        raise InputError(f"there is no file {file}")
    try:
        with open(path, "rb") as opened:
            empty = not opened.read(1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    if empty:
        raise InputError(f"{file} is empty")


def check_file(file: str | Path) -> None:
    """Raise an InputError if a parquet file is damaged, or a text file (json, csv, txt, ...) is not plain UTF-8."""
    require_file(file)
    if file_kind(file) == "parquet":
        _check_parquet(file)
        return
    is_json = file_kind(file) in ("json", "jsonl")
    is_lines = is_json and is_json_lines(file)
    first = b""
    for number, line in _binary_lines(file):
        _decode(line, file, number)
        if is_json:
            first = first or line.strip()
            may_be_deep = is_lines and line.count(b"[") + line.count(b"{") > MAX_UNCHECKED_BRACKETS
            if may_be_deep or _is_null_row(line, first):
                _require_object(_parse_json(line, file, number), file, f"line {number}")
    if is_json and not is_lines:
        _check_json_rows(file, types=False)


def _is_null_row(line: bytes, first: bytes) -> bool:
    """True if a line of JSON lines holds null, on which pyarrow's parser may crash."""
    return line.strip() == b"null" and first[:1] not in b"["


def read_lines(file: str | Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text file, gzipped or not, without line breaks and byte order mark."""
    for number, line in _binary_lines(file):
        yield _decode(line, file, number).rstrip("\r\n")


def read_json(file: str | Path) -> Any:
    """Return the content of a JSON file, gzipped or not. Its text may begin with a byte order mark."""
    return _parse_json(b"".join(line for _, line in _checked_lines(file)), file)


def line_of_row(file: str | Path, row: int) -> str:
    """Return where row number `row`, counted from 0, stands in a file: "line 17", or "row 16" if it has no lines."""
    rows = _numbered_rows(file)
    if rows is not None:
        for index, number in enumerate(rows):
            if index == row:
                return f"line {number}"
    return f"row {row + 1}"


def count_rows(file: str | Path) -> int | None:
    """Return the number of rows; None if the file type does not tell without reading it as a table."""
    if file_kind(file) == "parquet":
        return pyarrow.parquet.read_metadata(str(file)).num_rows
    rows = _numbered_rows(file)
    return None if rows is None else sum(1 for _ in rows)


def explain_failure(file: str | Path) -> InputError | None:
    """Return what is wrong with a file that could not be read as a table, or None if the fault is not in its text."""
    if not Path(file).is_file():
        return None
    try:
        check_file(file)
        kind = file_kind(file)
        if kind in ("json", "jsonl"):
            _check_json_rows(file)
        elif kind in ("csv", "tsv"):
            _check_fields(file)
    except InputError as fault:
        return fault
    return None


def one_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def shorten(value: Any, length: int = 80) -> str:
    """Return the repr of a value, cut to `length` characters."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


# Bytes and text


def _binary_lines(file: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers, counted from 1, and lines."""
    require_file(file)
    number = 0
    try:
        with _open(file) as opened:
            for number, line in enumerate(opened, 1):
                yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    except DAMAGED as error:
        raise InputError(
            f"{file} is damaged after line {number} ({one_line(error)}): it is no complete gzip file; compress or "
            "download it again"
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error


def _open(file: str | Path) -> BinaryIO:
    """Open a file, gzipped or not, for reading."""
    with open(file, "rb") as opened:
        is_gzip = Path(file).suffix == ".gz" or opened.read(2) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(file, "rb")) if is_gzip else open(file, "rb")


def _checked_lines(file: str | Path) -> Iterator[tuple[int, bytes]]:
    for number, line in _binary_lines(file):
        _decode(line, file, number)
        yield number, line


def _decode(line: bytes, file: str | Path, number: int) -> str:
    """Return the line as text. Bytes that are not UTF-8, NUL, and the beginning of a binary file are an InputError."""
    if number == 1 and line[:4] in BINARY_FORMATS:
        raise InputError(f"{file} is {BINARY_FORMATS[line[:4]]}")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode("utf-8")) + 1
        encoding = "utf-16" if line.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
        raise InputError(
            f"{file}, line {number}, column {column}: the byte 0x{line[error.start]:02x} is not UTF-8 text; convert "
            f"the file, e.g. iconv -f {encoding} -t utf-8"
        ) from error
    if "\0" in text:
        raise InputError(
            f"{file}, line {number}, column {text.index(chr(0)) + 1}: a NUL byte, which no text has: the file is "
            "binary, damaged, or in another encoding, such as UTF-16; convert it, or remove its NUL bytes with "
            "tr -d '\\000'"
        )
    return text


# Parquet


def _check_parquet(file: str | Path) -> None:
    try:
        with _open(file) as opened:
            table = pyarrow.parquet.ParquetFile(opened)
            for batch in table.iter_batches():
                batch.validate(full=True)
            is_empty = table.metadata.num_rows == 0
    except (pyarrow.ArrowException, OSError, *DAMAGED) as error:
        raise InputError(f"{file} is damaged, or is no parquet file: {one_line(error)}") from error
    if is_empty:
        raise InputError(f"{file} has no rows: leave it out")


# JSON


def _parse_json(text: bytes, file: str | Path, line: int | None = None) -> Any:
    """Parse one JSON value. Faults are an InputError; `line` is its line if it stands on one."""
    place = str(file) if line is None else f"{file}, line {line}"
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = error.lineno if line is None else line
        raise InputError(f"{file}, line {line}, column {error.colno}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise InputError(
            f"{place}: the JSON is nested too deeply, more than {sys.getrecursionlimit()} levels"
        ) from error
    except (_RepeatedKey, ValueError) as error:  # a ValueError: an integer of thousands of digits
        raise InputError(f"{place}: {one_line(error)}") from error


class _RepeatedKey(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKey(f"an object has the key {max(keys, key=keys.count)!r} more than once")
    return record


def is_json_lines(file: str | Path) -> bool:
    """True if each line is a row: the first line is a complete object, or at least the file is called .jsonl."""
    first = next((line for _, line in _binary_lines(file) if line.strip()), b"").strip()
    if first.startswith(b"["):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return file_kind(file) == "jsonl"


def _require_object(row: Any, file: str | Path, place: str) -> None:
    if not isinstance(row, dict):
        value = "null" if row is None else f"{type_name(row)}, {shorten(row)},"
        raise InputError(f'{file}, {place} holds {value} and must be an object: {{"field": value, ...}}')


def _check_json_rows(file: str | Path, types: bool = True) -> None:
    """Raise an InputError if a row is not an object or, unless `types` is False, if a field has different types."""
    first_types: dict[str, tuple[str, str]] = {}
    for place, row in _json_rows(file):
        _require_object(row, file, place)
        for path, value in _leaves(row):
            if SURROGATE.search(path + value if isinstance(value, str) else path):
                path = path.encode("utf-8", "backslashreplace").decode()
                raise InputError(f"{file}, {place}: {path} has half of a surrogate pair, which no text has")
            kind = type_name(value)
            other, other_place = first_types.setdefault(path, (kind, place))
            if types and kind != other:
                raise InputError(
                    f"{file}, {place}: {path} holds {kind}, {shorten(value)}, but {other} in {other_place}"
                )


def _json_rows(file: str | Path) -> Iterator[tuple[str, Any]]:
    if is_json_lines(file):
        for number, line in _binary_lines(file):
            if line.strip():
                yield f"line {number}", _parse_json(line, file, number)
    else:
        document = read_json(file)
        rows = document if isinstance(document, list) else [document]
        if rows and all(isinstance(row, str) for row in rows):
            rows = [{"text": row} for row in rows]  # as `datasets` reads a list of texts
        for index, row in enumerate(rows):
            yield f"row {index + 1}", row


def _leaves(row: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of fields, lists and the values in them; without nulls, which fit every type."""
    pending = deque([("", row)])
    while pending:
        path, value = pending.popleft()
        if path and value is not None:
            yield path, value
        if isinstance(value, dict):
            pending.extend((f"{path}.{key}" if path else key, item) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend((f"{path}[]", item) for item in value)


def type_name(value: Any) -> str:
    return TYPE_NAMES.get(type(value), type(value).__name__)


# csv and tsv


def _csv_reader(file: str | Path) -> Any:
    csv.field_size_limit(2**31 - 1)  # the largest on Windows
    lines = (line.decode("utf-8") for _, line in _binary_lines(file))
    if file_kind(file) == "tsv":
        return csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    return csv.reader(lines, strict=True)


def _records(file: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the fields of each record, the header included. Blank lines are no records."""
    reader, start = _csv_reader(file), 1
    try:
        for fields in reader:
            if len(fields) > 1 or (fields and fields[0].strip()):
                yield start, fields
            start = reader.line_num + 1
    except csv.Error as error:
        reason = "a quotation mark is never closed" if "unexpected end" in str(error) else str(error)
        raise InputError(f"{file}, line {start}: {reason}") from error


def check_header(file: str | Path, names: Sequence[str]) -> None:
    """Raise an InputError if the column names of a csv or tsv file show that its format is another."""
    own, other, other_kind = ("tabs", ",", "csv") if file_kind(file) == "tsv" else ("commas", "\t", "tsv")
    first = names[0] if names else ""
    if first.lstrip("[ ").startswith("{"):
        raise InputError(f"{file} begins with {shorten(first)}: if its rows are JSON, rename it to .jsonl")
    separators = [separator for separator in (other, ";") if len(names) == 1 and separator in first]
    if separators:
        rename = f", or rename it to .{other_kind}" if separators[0] == other else ""
        raise InputError(
            f"{file} has one column, {shorten(first)}: is it separated by {separators[0]!r}? Write it with "
            f"{own}{rename}"
        )


def _check_fields(file: str | Path) -> None:
    """Raise an InputError if the header repeats a name, or a record has more fields than the header."""
    records = _records(file)
    first, header = next(records, (1, []))
    check_header(file, header)
    if repeated := [name for name in header if header.count(name) > 1]:
        raise InputError(f"{file}, line {first}: the header has the column {repeated[0]!r} more than once")
    for line, fields in records:
        if len(fields) > len(header):
            raise InputError(f"{file}, line {line} has {len(fields)} fields, but the header has {len(header)}")


def _numbered_rows(file: str | Path) -> Iterator[int] | None:
    """Yield the first line of each row; None if rows do not begin at lines of their own."""
    kind = file_kind(file)
    try:
        if kind in ("csv", "tsv"):
            return (line for index, (line, _) in enumerate(_records(file)) if index > 0)
        if kind in ("json", "jsonl") and is_json_lines(file):
            return (number for number, line in _binary_lines(file) if line.strip())
    except InputError:
        return None
    return None
