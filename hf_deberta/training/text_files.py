"""Read text files row by row: csv, tsv, json, jsonl and txt, gzipped or not; an error names the file and the line.

A field of a csv or tsv file is the text that stands there, None if it is empty. Values of JSON keep their types.

>>> list(read_rows("reviews.csv"))
[{'text': 'A fine film.', 'label': '1'}, {'text': None, 'label': '0'}]
"""

import csv
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, cast

from hf_deberta.training.errors import InputError, describe, one_line

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)  # what gzip raises
DIALECTS: dict[str, dict[str, Any]] = {  # in tsv quotation marks are text, as in files of GLUE
    "csv": {"delimiter": ",", "strict": True},
    "tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None},
}
NEEDS_QUOTES = re.compile('[",\r\n]')  # in csv
CARRIAGE_RETURN = "\udc0d"  # stands for one inside a line, which csv.reader would end; no UTF-8 holds this character
# An escape in JSON; its group is half of a surrogate pair, which no text has.
ESCAPE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.")


def file_kind(file: str | Path) -> str:
    """Return the file type without .gz: "jsonl" for train.jsonl.gz."""
    return Path(Path(file).name.removesuffix(".gz")).suffix.removeprefix(".").lower()


# 1. Rows


def read_rows(file: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a csv, tsv, json or jsonl file."""
    return _csv_rows(file) if file_kind(file) in DIALECTS else _json_rows(file)


def read_documents(file: str | Path, sample_by: str = "line") -> Iterator[str]:
    """Yield the lines of a text file, its paragraphs (between blank lines), or the whole text ("document")."""
    if sample_by == "line":
        yield from read_lines(file)
    elif sample_by == "paragraph":
        yield from ("\n".join(lines) for is_text, lines in groupby(read_lines(file), bool) if is_text)
    else:
        yield "".join(line for _, line in text_lines(file)).replace("\r\n", "\n")


def read_lines(file: str | Path) -> Iterator[str]:
    """Yield the lines of a text file without line breaks and byte order mark."""
    for _, line in text_lines(file):
        yield line.rstrip("\r\n")


def read_json(file: str | Path) -> Any:
    """Return the content of a JSON file."""
    return parse_json("".join(line for _, line in _json_lines(file)), file)


def csv_records(file: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each row of a csv or tsv file, the header first, and the number of its first line.

    A carriage return ends a row only before a line feed, or if the file has no line feed. Blank lines are no rows, but
    they are empty fields of a tsv file with one column.
    """
    csv.field_size_limit(2**31 - 1)  # as large as Windows allows
    kind, lines = file_kind(file), (line for _, line in text_lines(file))
    first = next(lines)  # a file without lines is refused
    if first.endswith("\r\r\n"):  # Python's csv.writer on Windows, if the file was opened without newline=""
        lines = (line.replace("\r\r\n", "\n") for line in chain([first], lines))
        first = next(lines)
    if kind == "csv" and "," not in first and (separator := re.search("[;\t]", first)):
        raise InputError(
            f"{file}: fields of a csv file are separated by commas, and its header has {separator[0]!r} instead: write "
            "commas, or save it as .tsv with tabs"
        )
    parts = [first] if first.endswith("\n") else re.split("(?<=\r)", first)
    rows = csv.reader(map(_mark_carriage_returns, chain(parts, lines)), **DIALECTS[kind])
    number, columns = 1, 0
    try:
        for row in rows:
            if row or (columns == 1 and kind == "tsv"):
                columns = columns or len(row)
                yield number, [field.replace(CARRIAGE_RETURN, "\r") for field in row or [""]]
            number = rows.line_num + 1
    except csv.Error as error:
        raise InputError(f"{file}, line {number}: {error}: is a quotation mark missing?") from error


def csv_line(values: Iterable[Any], kind: str) -> str:
    """Return values as a row of csv or tsv without its line end, objects as JSON; in tsv, tabs become spaces."""
    fields = ["" if value is None else value if isinstance(value, str) else json.dumps(value) for value in values]
    if kind == "csv":
        fields = ['"' + text.replace('"', '""') + '"' if NEEDS_QUOTES.search(text) else text for text in fields]
    else:  # which has no quotes
        fields = [re.sub("[\t\n]+", " ", text) for text in fields]
    return DIALECTS[kind]["delimiter"].join(fields)


def _mark_carriage_returns(line: str) -> str:
    if "\r" not in line:
        return line
    text = line.removesuffix("\n").removesuffix("\r")
    return text.replace("\r", CARRIAGE_RETURN) + line[len(text) :]


def _csv_rows(file: str | Path) -> Iterator[dict[str, Any]]:
    records = csv_records(file)
    _, header = next(records, (0, []))
    names = [name or f"Unnamed: {number}" for number, name in enumerate(header)]  # as in pandas
    if len(set(names)) < len(names):
        raise InputError(f"{file}: the header has the column {max(names, key=names.count)!r} more than once")
    for number, fields in records:
        if len(fields) > len(names):
            raise InputError(f"{file}, line {number} has {len(fields)} fields, and the header {len(names)}")
        yield dict(zip_longest(names, (field or None for field in fields)))


def _json_rows(file: str | Path) -> Iterator[dict[str, Any]]:
    lines = ((number, line) for number, line in _json_lines(file) if line.strip())
    first = next(lines, (1, "[]"))
    text = first[1].strip()
    if text[0] != "[" if file_kind(file) == "jsonl" else text[0] + text[-1] == "{}":
        for number, line in chain([first], lines):
            yield require_object(parse_json(line.rstrip(), file, number), f"{file}, line {number}")
        return
    yield from json_objects(read_json(file), file)


def json_objects(document: Any, file: str | Path) -> Iterator[dict[str, Any]]:
    """Yield an object, or those of an array, in which a text is the value of the column "text"."""
    for number, row in enumerate(document if isinstance(document, list) else [document], 1):
        yield {"text": row} if isinstance(row, str) else require_object(row, f"{file}, row {number}")


def _json_lines(file: str | Path) -> Iterator[tuple[int, str]]:
    for number, line in text_lines(file):
        half = next((match[1] for match in ESCAPE.finditer(line) if match[1]), None) if "\\u" in line else None
        if half:
            raise InputError(f"{file}, line {number}: {half} is half of a surrogate pair, which no text has")
        yield number, line


def parse_json(text: str | bytes, file: str | Path, first_line: int = 1) -> Any:
    """Return what a JSON text holds; raise an InputError that names the file and the line of a mistake."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InputError(f"{file}, line {line}, column {error.colno}: not valid JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{file}, line {first_line}: {one_line(error)}") from error


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(fields)
    if len(row) < len(fields):
        names = [name for name, _ in fields]
        raise ValueError(f"an object has {max(names, key=names.count)!r} more than once")
    return row


def require_object(row: Any, place: str) -> dict[str, Any]:
    """Return a row of a JSON file, which must be an object."""
    if not isinstance(row, dict):
        raise InputError(f'{place} holds {describe(row)}; a row must be an object: {{"field": value, ...}}')
    return row


# 2. Files


def open_file(file: str | Path) -> BinaryIO:
    """Open a file, gzipped or not, for reading."""
    with open(file, "rb") as opened:
        is_gzip = Path(file).suffix == ".gz" or opened.read(2) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(file, "rb")) if is_gzip else open(file, "rb")


def text_lines(file: str | Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers, counted from 1, and lines of UTF-8 text without NUL; a file without any is refused."""
    number = 0
    try:
        with open_file(file) as opened:
            for number, line in enumerate(opened, 1):
                text = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).decode("utf-8")
                if "\0" in text:
                    raise InputError(
                        f"{file}, line {number}: a NUL byte, which no text has: the file is binary, damaged, or in "
                        "another encoding, such as UTF-16; convert it, or remove its NUL bytes with tr -d '\\000'"
                    )
                yield number, text
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


def hash_file(file: str | Path) -> str:
    """Return a hash of a file's content, read once in a process unless the file changes."""
    state = os.stat(file)
    return _hash_content(str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)


@lru_cache(maxsize=10_000)
def _hash_content(file: str, *_: int) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
