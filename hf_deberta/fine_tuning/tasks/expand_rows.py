"""Read what tasks need of rows: flat rows of nested ones, such as the questions of an article, values, numbers."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import pyarrow
from datasets import Dataset, Features, Value

from hf_deberta.training.data_files import Source, check_rows
from hf_deberta.training.errors import TYPE_NAMES, InputError, describe, input_errors, one_line

ORIGINAL_ROW = "original row"  # a column while rows are expanded
WHOLE, DECIMAL = re.compile("[+-]?[0-9]+"), re.compile(r"[+-]?[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?", re.IGNORECASE)


def expand_rows(
    rows: Dataset,
    source: Source,
    expand: Callable[[dict[str, Any]], Iterable[dict[str, Any]]],
    columns: Sequence[str],
    **options: Any,
) -> tuple[Dataset, Source]:
    """Return the rows that `expand` makes of each row, with the keys `columns`, and where they come from.

    Args:
        expand: raises an InputError, as `read_as` does, if the row is not in the expected format.
        options: of `Dataset.map`.

    >>> articles = Dataset.from_dict({"text": ["Rome is old."], "questions": [["What is?", "Is it?"]]})
    >>> questions = lambda row: ({"question": question} for question in row["questions"])
    >>> expand_rows(articles, Source("train"), questions, ["question"])[0][1]
    {'question': 'Is it?'}
    """

    def expand_batch(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        flat: list[dict[str, Any]] = []
        for index, *values in zip(indices, *batch.values(), strict=True):
            flat += ({**row, ORIGINAL_ROW: index} for row in expand(dict(zip(batch, values, strict=True))))
        return {column: [row[column] for row in flat] for column in (*columns, ORIGINAL_ROW)}

    options |= {"batched": True, "with_indices": True, "remove_columns": rows.column_names}
    if "features" in options:
        options["features"] = Features({**options["features"], ORIGINAL_ROW: Value("int64")})
    with input_errors(source):
        try:
            with all_bad_rows(rows, lambda row: list(expand(row))):
                flat_rows = rows.map(expand_batch, **options)
        except (pyarrow.ArrowException, OverflowError) as error:
            reason = one_line(error)
            raise InputError(f"a field has values of different types, or a too large number: {reason}") from error
        if len(flat_rows) == 0:
            raise InputError(f"the rows hold no {columns[0]}, only empty lists")
        numbers = [source.numbers[row] for row in flat_rows[ORIGINAL_ROW]]
    return flat_rows.remove_columns(ORIGINAL_ROW), replace(source, numbers=numbers)


@contextmanager
def all_bad_rows(rows: Dataset, check: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """Raise an InputError in a row as a RowError of all rows for which `check` raises one."""
    try:
        yield
    except InputError:
        check_rows(rows, check)
        raise


def read_as(value: Any, shape: Any, place: str = "") -> Any:
    """Return the fields of a row that a shape names, after checking that they are there and have its types.

    Args:
        shape: a type or a union of types, [shape] for a list, {"name": shape} for an object. The field "name?" may be
            null or missing.
        place: where the value stands, such as "passage.questions[2]"; empty for a whole row.

    >>> read_as({"text": "Rome", "ids": [3, 4.0]}, {"text": str, "ids": [int], "label?": bool | int})
    {'text': 'Rome', 'ids': [3, 4], 'label': None}
    """
    kinds: tuple[type, ...] = get_args(shape) or (shape if isinstance(shape, type) else type(shape),)
    if int in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)  # a float in another row makes floats of all
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = {**TYPE_NAMES, int: "a whole number"}
        actual = "null or missing" if value is None else describe(value)
        expected = " or ".join(dict.fromkeys(names[kind] for kind in kinds))
        raise InputError(f"{place or 'the row'} must be {expected}, not {actual}")
    content: Any = value
    if isinstance(shape, list):
        return [read_as(item, shape[0], f"{place}[{index}]") for index, item in enumerate(content)]
    if isinstance(shape, dict):
        fields = {}
        for key, field in shape.items():
            name = key.removesuffix("?")
            is_absent = key.endswith("?") and content.get(name) is None
            fields[name] = None if is_absent else read_as(content.get(name), field, f"{place}.{name}".removeprefix("."))
        return fields
    return content


def number_type(rows: Dataset, column: str) -> str | None:
    """Return int64 or float64 if all fields of a column of texts are such numbers; 007 and +1 are texts."""
    texts = [text for text in rows[column] if text is not None]
    if all(re.fullmatch("-?(0|[1-9][0-9]{0,17})", text) for text in texts):  # fits into 64 bits
        return "int64"
    if all(map(DECIMAL.fullmatch, texts)) and not all(map(WHOLE.fullmatch, texts)):
        return "float64"
    return None


def with_numbers(rows: Dataset, columns: Iterable[str], source: Source) -> Dataset:
    """Return rows with numbers in those of the columns of csv and tsv files where `number_type` finds some."""
    if not source.is_csv:
        return rows
    kinds = {name: number_type(rows, name) for name in columns if name in rows.column_names}
    features = rows.features.copy()
    features.update({name: Value(kind) for name, kind in kinds.items() if kind is not None})
    return rows if features == rows.features else rows.cast(features)
