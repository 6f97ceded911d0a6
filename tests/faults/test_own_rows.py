"""Random tables of a user's own rows: either a task that reads real text columns, or an error that names the place."""

import math
import random
import string

import datasets
import pyarrow
import pytest
from datasets import Dataset
from datasets.table import InMemoryTable
from fault_cases import number_of_cases
from fine_tuning_models import encode_texts
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_deberta.fine_tuning.tasks import glue
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.errors import InputError

MAX_LENGTH = 24
WORDS = ["the", "a", "cat", "dog", "house", "film", "good", "runs", "sleeps", "7", "Ünïcode", "世界", "🙂"]
NAMES = ["text", "premise", "hypothesis", "sentence1", "sentence2", "label", "verdict", "id", "key", "user_id", "idx",
         "a b", "", "Ü", "input_ids", "labels", "attention_mask", "token_type_ids", "0"]  # fmt: skip
LETTERS = st.characters(codec="utf-8", exclude_characters="\0")  # datasets takes no \0 in the name of a column
TEXTS = {
    "sentence": lambda r, i: " ".join(r.choices(WORDS, k=r.randint(2, 9))),
    "one word": lambda r, i: r.choice(WORDS),
    "long": lambda r, i: "very long " * r.choice([1, 50, 400]),
    "blank": lambda r, i: r.choice(["", " ", "\n", "a text", "\u00a0", "a\u2028b\u2029c\x85d"]),
    "strange": lambda r, i: "".join(r.choices(["\x00", "\u202e", "\ufeff", "a", " ", "é", "👩‍🚀", "[SEP]"], k=5)),
}
OTHERS = {
    "code": lambda r, i: f"row{i}",
    "uuid": lambda r, i: f"{r.getrandbits(128):032x}",
    "distinct word": lambda r, i: "".join(r.choices(string.ascii_lowercase, k=12)),
    "integer": lambda r, i: i,
    "float": lambda r, i: r.choice([0.5, math.nan, math.inf, -1.0]),
    "list": lambda r, i: ["a", "text"],
    "dict": lambda r, i: {"a": "text"},
    "bytes": lambda r, i: b"a text",
    "null": lambda r, i: None,
    "mixed": lambda r, i: r.choice([1, "a text", None, [2]]),
}
LABELS = {
    "integer": lambda r, i: r.randrange(3),
    "name": lambda r, i: r.choice(["yes", "no", "maybe", "yes ", "Yes"]),
    "flag": lambda r, i: r.random() < 0.5,
    "float": lambda r, i: r.choice([0.5, 1.0, 2.5]),
    "bad float": lambda r, i: r.choice([0.5, math.nan, math.inf]),
    "one value": lambda r, i: "yes",
    "different": lambda r, i: f"label {i}",
    "list": lambda r, i: r.sample(["red", "old", "big"], k=r.randrange(3)),
    "number list": lambda r, i: [r.randrange(3) for _ in range(r.randrange(3))],
    "bad list": lambda r, i: r.choice([["red"], [None], [""], ["red", "red"]]),
    "float list": lambda r, i: [0.0, 1.0],
    "dict": lambda r, i: {"a": 1},
    "blank": lambda r, i: r.choice(["", " ", "yes", "no"]),
    "minus one": lambda r, i: r.choice([-1, 0, 1]),
    "odd cell": lambda r, i: str(i / 4) if i else r.choice(["nan", "NA", "null", "None", "-", "1,5"]),
    "separators": lambda r, i: r.choice(["a\u2028b", "a\u2029b", "a\x85b"]),
    "bytes": lambda r, i: r.choice([b"x", b"y"]),
    "null": lambda r, i: None,
    "mixed": lambda r, i: r.choice([1, "yes", None, [2]]),
}
GOOD_LABELS = ("integer", "name", "flag", "float", "list", "number list", "minus one")


@pytest.fixture(scope="module", autouse=True)
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(WORDS)] * 5, 300, "bpe")


@st.composite
def tables(draw) -> dict:
    """The kinds of the columns, how many rows, which splits lack what, and a seed for the values."""
    names = draw(st.lists(st.sampled_from(NAMES) | st.text(LETTERS, max_size=8), min_size=1, max_size=5, unique=True))
    kinds = st.sampled_from([*TEXTS, *OTHERS])
    return {
        "columns": {names[0]: draw(st.sampled_from([*TEXTS])), **{name: draw(kinds) for name in names[1:]}},
        "label": draw(st.sampled_from([*GOOD_LABELS, *GOOD_LABELS, *GOOD_LABELS, *LABELS, None])),
        "label_column": draw(st.sampled_from(["label", "label", "label", "verdict", names[-1]])),
        "gaps": draw(st.sampled_from(["none", "none", "none", "texts", "labels"])),
        "rows": draw(st.sampled_from([12, 12, 3, 1])),
        "other_split": draw(st.sampled_from(["validation", "test", "test_matched"])),
        "damage": draw(
            st.sampled_from([None, None, None, None, None, "no label", "no column", "new label", "lists", "numbers"])
        ),
        "text_column_names": draw(
            st.none() | st.none() | st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)
        ),
        "regression": draw(st.sampled_from([None, None, None, True, False])),
        "seed": draw(st.integers(0, 2**16)),
    }


def make_rows(table: dict, salt: int, damage: str | None = None) -> Dataset:
    random_values = random.Random(table["seed"] + salt)
    columns = {
        name: [(TEXTS | OTHERS)[kind](random_values, i) for i in range(table["rows"])]
        for name, kind in table["columns"].items()
    }
    if table["label"] is not None:
        make_label = LABELS[table["label"]]
        columns[table["label_column"]] = [make_label(random_values, i) for i in range(table["rows"])]
    damaged = table["label_column"] if table["gaps"] == "labels" else next(iter(columns))
    if table["gaps"] != "none" and damaged in columns:
        columns[damaged] = [None if random_values.random() < 0.3 else value for value in columns[damaged]]
    if damage == "no label":
        columns.pop(table["label_column"], None)
    elif damage == "no column":
        columns.pop(next(iter(columns)))
    elif damage in ("new label", "lists", "numbers"):
        value = {"new label": "never seen", "lists": ["never seen"], "numbers": 5}[damage]
        columns[table["label_column"]] = [value] * table["rows"]
    table_of_rows = InMemoryTable.from_pydict(columns or {"left": ["a text"] * table["rows"]})
    return Dataset(table_of_rows, fingerprint="not computed, which is slow")


def check_task(task: glue.GlueTask, rows: Dataset, table: dict) -> None:
    """The columns hold text, and no identifiers; the labels are those of the rows."""
    assert 1 <= len(task.columns) <= 2 and len(set(task.columns)) == len(task.columns)
    assert table["label"] != "odd cell" or table["regression"] is not None or table["rows"] == 1
    assert table["label_column"] not in task.columns or table["text_column_names"]
    if not table["text_column_names"]:
        for name in task.columns:
            assert rows.features[name].dtype == "string", name
            assert table["columns"][name] not in ("code", "uuid"), name
            assert any(text and text.strip() for text in rows[name]), name
        if len(task.columns) == 2 and len(rows) > 3 and set(task.columns) != set(glue.SENTENCE_COLUMNS):
            assert all(table["columns"][name] != "distinct word" for name in task.columns)
    if task.labels is None:
        assert not task.multi_label
    else:
        assert len(set(task.labels)) == len(task.labels) >= (1 if task.multi_label else 2)
        assert all(label.strip() for label in task.labels)


def check_inputs(inputs: Dataset, rows: Dataset, split: str, task: glue.GlueTask) -> None:
    """One input for each row, in their order, and targets that the loss accepts."""
    assert len(inputs) == len(rows) and set(inputs.column_names) <= {
        "input_ids", "attention_mask", "token_type_ids", "labels"
    }  # fmt: skip
    assert all(2 <= len(ids) <= MAX_LENGTH for ids in inputs["input_ids"])
    if "labels" not in inputs.column_names:
        assert split.startswith("test")
    elif task.labels is None:
        assert all(map(math.isfinite, inputs["labels"]))
    elif task.multi_label:
        assert all(len(row) == len(task.labels) and set(row) <= {0.0, 1.0} for row in inputs["labels"])
    else:
        lowest = -1 if split.startswith("test") else 0
        assert all(lowest <= label < len(task.labels) for label in inputs["labels"])


def check_message(error: InputError, split: str, rows: Dataset) -> None:
    """The message is one readable sentence that names the split, and a column or what to do about it."""
    message = str(error)
    assert f"{split} rows" in message and len(message) < 1500, message
    assert any(repr(name) in message for name in rows.column_names) or "column" in message or "--" in message, message


@settings(max_examples=number_of_cases(200, 3000))
@given(table=tables())
def test_random_tables(tokenizer, tally, table):
    """A task and its inputs, or an InputError that names split and column. Anything else fails."""
    try:
        train, other = make_rows(table, 0), make_rows(table, 1, table["damage"])
    except (pyarrow.lib.ArrowException, TypeError):  # no table holds such rows
        return tally.refused("rows that no table holds")
    split, rows = "train", train
    try:
        task = glue.infer_task({"train": train}, table["label_column"], table["regression"], table["text_column_names"])
        check_task(task, train, table)
        for split, rows in (("train", train), (table["other_split"], other)):
            options = {"batched": True, "load_from_cache_file": False, "new_fingerprint": "not computed, which is slow"}
            column = table["label_column"]
            inputs = encode_texts(rows, split, task, tokenizer, MAX_LENGTH, task.labels, column, options)
            check_inputs(inputs, rows, split, task)
    except InputError as error:
        check_message(error, split, rows)
        return tally.refused("own rows, refused in one sentence")
    tally.held("own rows, read as a task")
