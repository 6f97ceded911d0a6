"""Replace each row of a nested dataset, such as an article with its questions, by several flat rows."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from datasets import Dataset


def expand_rows(
    rows: Dataset, expand: Callable[[dict[str, Any]], Iterable[dict[str, Any]]], columns: Sequence[str], **options: Any
) -> Dataset:
    """Return the rows that `expand` makes of each row; they have the keys `columns`.

    Args:
        options: of `Dataset.map`.

    >>> articles = Dataset.from_dict({"text": ["Rome is old."], "questions": [["What is?", "Is it?"]]})
    >>> expand_rows(articles, lambda row: ({"question": question} for question in row["questions"]), ["question"])[1]
    {'question': 'Is it?'}
    """

    def expand_batch(batch: dict[str, list]) -> dict[str, list]:
        nested = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
        flat = [row for nested_row in nested for row in expand(nested_row)]
        return {column: [row[column] for row in flat] for column in columns}

    return rows.map(expand_batch, **{**options, "batched": True, "remove_columns": rows.column_names})
