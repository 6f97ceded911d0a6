"""Replace each row of a nested dataset, such as an article with its questions, by several flat rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow
from datasets import Dataset

from hf_deberta.training.data_files import set_source, source_files
from hf_deberta.training.errors import InputError, RowError, one_line
from hf_deberta.training.file_faults import TYPE_NAMES, describe


def expand_rows(
    rows: Dataset, expand: Callable[[dict[str, Any]], Iterable[dict[str, Any]]], columns: Sequence[str], **options: Any
) -> Dataset:
    """Return the rows that `expand` makes of each row; they have the keys `columns`.

    Args:
        expand: raises an InputError, as `require_field` does, if the row is not in the expected format.
        options: of `Dataset.map`.

    >>> articles = Dataset.from_dict({"text": ["Rome is old."], "questions": [["What is?", "Is it?"]]})
    >>> expand_rows(articles, lambda row: ({"question": question} for question in row["questions"]), ["question"])[1]
    {'question': 'Is it?'}
    """

    def expand_batch(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        flat: list[dict[str, Any]] = []
        for index, *values in zip(indices, *batch.values(), strict=True):
            try:
                flat += expand(dict(zip(batch, values, strict=True)))
            except InputError as error:
                raise RowError(index, str(error)) from error
        return {column: [row[column] for row in flat] for column in columns}

    options |= {"batched": True, "with_indices": True, "remove_columns": rows.column_names}
    try:
        flat_rows = rows.map(expand_batch, **options)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise InputError(f"a field has values of different types, or a too large number: {one_line(error)}") from error
    if len(flat_rows) == 0:
        raise InputError(f"the rows hold no {columns[0]}, only empty lists")
    return set_source(flat_rows, source_files(rows)) if source_files(rows) else flat_rows


def require_field(record: Any, name: str, *kinds: type, place: str = "") -> Any:
    """Return a field of an object, after checking that it is there and has one of these types.

    Args:
        place: where the object stands, such as "passage.questions[2]"; empty for a whole row.
    """
    if not isinstance(record, dict):
        raise InputError(f"{place or 'the row'} must be an object with {name!r}, not {describe(record)}")
    path = f"{place}.{name}" if place else name
    value = record.get(name)
    names = {**TYPE_NAMES, int: "a whole number"}
    expected = " or ".join(dict.fromkeys(names[kind] for kind in kinds))
    if name not in record or value is None:
        raise InputError(f"{path} is missing; it must be {expected}")
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)  # a float in another row makes floats of all
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise InputError(f"{path} must be {expected}, not {describe(value)}")
    return value


def items_of(record: Any, name: str, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each item of a field that is a list."""
    path = f"{place}.{name}" if place else name
    for index, item in enumerate(require_field(record, name, list, place=place)):
        yield f"{path}[{index}]", item


def require_items(record: Any, name: str, *kinds: type) -> list:
    """Return a field that is a list, after checking the type of its items."""
    return [require_field({path: item}, path, *kinds) for path, item in items_of(record, name)]
