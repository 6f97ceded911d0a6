"""What is wrong in a data file that `datasets` reads without a complaint, crashes on, or does not locate.

>>> check_file("reviews.jsonl")
InputError: reviews.jsonl, line 2: 'utf-8' codec can't decode byte 0xdf in position 15: ...; convert the file, ...
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow
import pyarrow.parquet

from hf_deberta.training.errors import InputError, one_line

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
# More brackets in one line than this may be nested so deeply that pyarrow's parser overflows the stack and crashes.
MAX_UNCHECKED_BRACKETS = 1000
NULL_ELEMENT = re.compile(rb"(^|[\[,])\s*null\b")  # an element of an array, perhaps one of an inner array
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)  # what gzip raises
# An escape in JSON; its group is half of a surrogate pair, which no text has, and which `datasets` may drop.
ESCAPE = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.")
TYPE_NAMES = {
    str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object",
    type(None): "null",
}  # fmt: skip


def file_kind(file: str | Path) -> str:
    """Return the file type without .gz: "jsonl" for train.jsonl.gz."""
    return Path(Path(file).name.removesuffix(".gz")).suffix.removeprefix(".").lower()


def check_file(file: str | Path) -> None:
    """Raise an InputError if a parquet file is damaged, or a text file (json, csv, txt, ...) is not plain UTF-8."""
    if file_kind(file) == "parquet":
        return _check_parquet(file)
    is_json, first, may_have_null_rows = file_kind(file) in ("json", "jsonl"), b"", False
    for number, line in _binary_lines(file):
        if is_json:
            first = first or line.strip()
            if line.count(b"[") + line.count(b"{") > MAX_UNCHECKED_BRACKETS:
                _check_depth(line, file, number)
            if first[:1] == b"[":
                may_have_null_rows |= b"null" in line and NULL_ELEMENT.search(line) is not None
            elif line.strip() == b"null" or first[:4] == b"null":  # pyarrow may crash on such a row
                require_object(None, f"{file}, line {number}")
            half = next((match[1] for match in ESCAPE.finditer(line) if match[1]), None) if b"\\u" in line else None
            if half:
                raise InputError(
                    f"{file}, line {number}: {half.decode()} is half of a surrogate pair, which no text has"
                )
    if may_have_null_rows:
        _check_null_rows(file)


def read_lines(file: str | Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text file, gzipped or not, without line breaks and byte order mark."""
    for _, line in _binary_lines(file):
        yield line.decode("utf-8").rstrip("\r\n")


def read_json(file: str | Path) -> Any:
    """Return the content of a JSON file, gzipped or not. Its text may begin with a byte order mark."""
    check_file(file)
    return _parse_file(file)


def raise_fault(files: Iterable[str | Path]) -> None:
    """Raise an InputError for the first file that could not be read because of its text, if there is one."""
    for file in files:
        check_file(file)
        if file_kind(file) in ("json", "jsonl"):
            _check_json(file)


def _check_json(file: str | Path) -> None:
    """Raise an InputError if a row is not valid JSON, or not an object."""
    first = next((line for _, line in _binary_lines(file) if line.strip()), b"")
    try:
        by_line = file_kind(file) == "jsonl" or isinstance(json.loads(first), dict)
    except ValueError:
        by_line = False
    if not by_line or first.startswith(b"["):
        document = read_json(file)
        for row, value in enumerate(document if isinstance(document, list) else [document]):
            require_object(value, f"{file}, row {row + 1}")
    for number, line in _binary_lines(file) if by_line else ():
        if line.strip():
            require_object(parse_json(line, file, number), f"{file}, line {number}")


def shorten(value: Any, length: int = 80) -> str:
    """Return the repr of a value, cut to `length` characters."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


def describe(value: Any) -> str:
    """Return the value and its type, for a message: "a number, 5"."""
    return "null" if value is None else f"{TYPE_NAMES.get(type(value), type(value).__name__)}, {shorten(value)}"


def open_file(file: str | Path) -> BinaryIO:
    """Open a file, gzipped or not, for reading."""
    with open(file, "rb") as opened:
        is_gzip = Path(file).suffix == ".gz" or opened.read(2) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(file, "rb")) if is_gzip else open(file, "rb")


def _binary_lines(file: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers, counted from 1, and lines of UTF-8 text without NUL; a file without any is refused."""
    number = 0
    try:
        with open_file(file) as opened:
            for number, line in enumerate(opened, 1):
                line.decode("utf-8")
                if b"\0" in line:
                    raise InputError(
                        f"{file}, line {number}: a NUL byte, which no text has: the file is binary, damaged, or in "
                        "another encoding, such as UTF-16; convert it, or remove its NUL bytes with tr -d '\\000'"
                    )
                yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    except UnicodeDecodeError as error:
        raise InputError(f"{file}, line {number}: {error}; convert the file, e.g. iconv -f latin1 -t utf-8") from error
    except DAMAGED as error:
        raise InputError(
            f"{file} is damaged after line {number} ({one_line(error)}): it is no complete gzip file; compress or "
            "download it again"
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    if number == 0:
        raise InputError(f"{file} is empty")


def _check_parquet(file: str | Path) -> None:
    try:
        with open_file(file) as opened:
            for batch in pyarrow.parquet.ParquetFile(opened).iter_batches():
                batch.validate(full=True)
    except (pyarrow.ArrowException, OSError, *DAMAGED) as error:
        raise InputError(f"{file} cannot be read as parquet: {one_line(error)}") from error


def _parse_file(file: str | Path) -> Any:
    return parse_json(b"".join(line for _, line in _binary_lines(file)), file)


def parse_json(text: bytes, file: str | Path, first_line: int = 1) -> Any:
    """Return what a JSON text holds; raise an InputError that names the file and the line of a mistake."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InputError(f"{file}, line {line}, column {error.colno}: not valid JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{file}, line {first_line}: {one_line(error)}") from error


def _check_null_rows(file: str | Path) -> None:
    """Raise an InputError if a row of an array is null, unless the others are texts; pyarrow may crash on it."""
    rows = _parse_file(file)
    if None in rows and not all(isinstance(row, str | None) for row in rows):
        require_object(None, f"{file}, row {rows.index(None) + 1}")


def _check_depth(line: bytes, file: str | Path, number: int) -> None:
    try:
        json.loads(line)
    except RecursionError as error:
        raise InputError(f"{file}, line {number}: the JSON is nested too deeply") from error
    except ValueError:  # a part of a document, or a fault that the reader reports
        pass


def require_object(row: Any, place: str) -> None:
    """Raise an InputError if a row of a JSON file is not an object."""
    if not isinstance(row, dict):
        raise InputError(f'{place} holds {describe(row)}; a row must be an object: {{"field": value, ...}}')
