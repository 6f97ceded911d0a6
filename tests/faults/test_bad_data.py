"""Damaged data files: each gives rows that are well formed, or one sentence that names the file.

A case takes good rows of a task, damages a field or the bytes of the file, and calls what the task's script calls
before it trains. Repeat a case: FAULTS_SEED=N pytest tests/faults/test_bad_data.py -k TASK
"""

import copy
import csv
import gzip
import io
import json
import os
import random
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from example_rows import official_squad, superglue_rows
from fault_cases import SEED, number_of_cases

from hf_deberta.demos import conll_text, house_rows, location_rows, review_rows
from hf_deberta.fine_tuning.run import read_rows
from hf_deberta.fine_tuning.task import Task
from hf_deberta.fine_tuning.tasks.glue import Classification
from hf_deberta.fine_tuning.tasks.ner import NamedEntities
from hf_deberta.fine_tuning.tasks.race import MultipleChoice
from hf_deberta.fine_tuning.tasks.squad import Squad
from hf_deberta.fine_tuning.tasks.superglue import SuperGlue
from hf_deberta.pretraining.corpus import Corpus, CorpusArguments
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.data_files import read_table
from hf_deberta.training.errors import InputError, input_errors

NUMBER_OF_ROWS = 6
VALUES: list[Any] = [
    None, "", " ", 5, -1, 2.5, True, float("nan"), 2**70, -(2**40), [], ["a", "b"], [["a"]], [1, None], {}, {"a": 1},
    {"text": ["a"]}, "x" * 3000, "Straße", "\u0000", "\u2028", "\ufeff", "None", "NaN", "2020-01-01", "D", "0",
    [{"text": "a"}], "a\nb", 'quote " and, comma', "\r", "tab\there",
    "a\u2028b\u2029c\u0085d", "\ud800", "a\udfffb",
]  # fmt: skip


# 1. Good rows

TEXT, OTHER = "The old man walked to a harbour .", "The wind waits for his friends ."
QUESTIONS = {"questions": ["Where ?", "Who ?"], "options": [["a", "b"], ["c", "d"]], "answers": ["A", "B"]}
ROWS: dict[str, dict] = {
    "race articles": {"article": TEXT, **QUESTIONS},
    "swag": {"sent1": TEXT, "sent2": "Then", "ending0": "it rains", "ending1": "it snows", "label": 1},
    "ner": {"tokens": ["Ann", "met", "Bob"], "ner_tags": ["B-PER", "O", "B-PER"]},
}


def rows_like(name: str) -> Callable[[random.Random], list[dict]]:
    return lambda rng: [copy.deepcopy(ROWS[name]) for _ in range(NUMBER_OF_ROWS)]


def demo_rows(make_rows: Callable[[int, int], Any]) -> Callable[[random.Random], Any]:
    return lambda rng: make_rows(NUMBER_OF_ROWS, rng.randrange(99))


# 2. What the scripts do before they train


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="module")
def tokenizer():
    trained = train_tokenizer([TEXT, OTHER] * 20, 300, "bpe")
    trained.add_prefix_space = True  # which named entities need
    return trained


def use(task_class: type[Task], length: int, **flags: Any) -> Callable:
    """Return a function that reads the rows of a file and encodes them, as `run_task` does before it trains."""

    def read_and_encode(path: Path, tokenizer: Any) -> Dataset:
        (path.parent / "config.json").write_text('{"model_type": "hf_deberta"}')
        model_args = task_class.model_arguments(str(path.parent))
        data_args = task_class.arguments(train_file=str(path), **flags)
        args = Namespace(do_train=True, do_predict=False, choose_actions=len, set_best_metric=len)
        task = task_class.class_for(data_args)(model_args, data_args, args)
        read_rows(task)
        if task_class is MultipleChoice and path.suffix not in (".csv", ".tsv"):  # where a list is text
            assert not any("['" in text for choices in task.rows["train"]["choices"] for text in choices)
        with input_errors(task.sources["train"]):
            return task.encode("train", tokenizer, length)

    return read_and_encode


def use_corpus(path: Path, tokenizer: Any) -> Dataset:
    arguments = CorpusArguments(train_file=[str(path)], text_column="sentence" if path.suffix != ".txt" else "text")
    corpus = Corpus(arguments, str(datasets.config.HF_DATASETS_CACHE))
    folder = path.parent / "out" / "_tokens"
    try:
        files = [corpus.token_file(split, tokenizer, folder) for split in corpus.splits]
    except InputError:
        assert (folder / "train/about.json").exists() or not (folder / "train/tokens.bin").exists()
        raise
    return Dataset.from_dict({"input_ids": [file.document(i).tolist() for file in files for i in range(len(file))]})


TABLES = ("jsonl", "json", "csv", "tsv", "parquet")
NESTED = ("jsonl", "json", "parquet")
USE_SQUAD = use(Squad, 2048, doc_stride=16, max_query_length=512)
USE_CHOICES, USE_ENTITIES, USE_TABLE = use(MultipleChoice, 8192), use(NamedEntities, 64), use(Classification, 512)
TASKS: dict[str, tuple[Callable, tuple[str, ...], Callable]] = {
    "squad": (demo_rows(house_rows), NESTED, USE_SQUAD),
    "squad articles": (lambda rng: official_squad(demo_rows(house_rows)(rng))["data"], ("data",), USE_SQUAD),
    "race": (demo_rows(location_rows), NESTED, USE_CHOICES),
    "race articles": (rows_like("race articles"), NESTED, USE_CHOICES),
    "swag": (rows_like("swag"), TABLES, USE_CHOICES),
    "ner": (rows_like("ner"), NESTED, USE_ENTITIES),
    "conll": (demo_rows(conll_text), ("txt",), USE_ENTITIES),
    "table": (demo_rows(review_rows), TABLES, USE_TABLE),
    "corpus table": (demo_rows(review_rows), TABLES, use_corpus),
    "corpus": (lambda rng: f"{TEXT}\n{OTHER}\n" * 5, ("txt",), use_corpus),
    **{
        name: (
            lambda rng, name=name: superglue_rows(name, NUMBER_OF_ROWS),
            NESTED if name in ("multirc", "wsc", "record") else TABLES,
            use(SuperGlue, 8192, task_name=name),
        )
        for name in ("boolq", "cb", "copa", "wic", "multirc", "wsc", "record")
    },
}


# 3. Damage


def nodes(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in nodes(item, (*path, key)))]


def damage_rows(rows: list, rng: random.Random) -> list:
    """Rows with one thing wrong."""
    rows = copy.deepcopy(rows)
    index = rng.randrange(len(rows))
    action = rng.choice((*["value"] * 4, "delete", "delete", "drop", "rename", "swap", "wrap", "repeat"))
    match action:
        case "value" | "delete":
            path = rng.choice([path for path in nodes(rows[index]) if path])
            parent = rows[index]
            for key in path[:-1]:
                parent = parent[key]
            if action == "delete":
                del parent[path[-1]]
            else:
                parent[path[-1]] = copy.deepcopy(rng.choice(VALUES))
        case "drop" | "rename":
            column = rng.choice(list(rows[0]))
            for row in rows:
                value = row.pop(column)
                if action == "rename":
                    row[column + rng.choice(("s", " ", "1", "\ufeff"))] = value
        case "swap":
            first, second = rng.choices(list(rows[0]), k=2)
            for row in rows:
                row[first], row[second] = row[second], row[first]
        case "wrap":
            rows[index] = rng.choice(([rows[index]], [], 5, "text", None, {"row": rows[index]}))
        case "repeat":
            rows.append(rows[index])
    return rows


def serialize(rows: Any, kind: str, folder: Path) -> bytes:
    if kind == "txt":
        return rows.encode()
    if kind == "data":
        return json.dumps({"version": "2", "data": rows}).encode()
    if kind == "json":
        return json.dumps(rows, indent=random.Random(len(str(rows))).choice((None, 1))).encode()
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "parquet":
        Dataset.from_list(rows).to_parquet(folder / "good.parquet")
        return (folder / "good.parquet").read_bytes()
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t" if kind == "tsv" else ",", lineterminator="\n",
                        quoting=csv.QUOTE_NONE if kind == "tsv" else csv.QUOTE_MINIMAL, escapechar="\\")  # fmt: skip
    writer.writerow(columns := list(rows[0]))
    writer.writerows([row.get(column, "") for column in columns] for row in rows)
    return text.getvalue().encode()


def replace_in_texts(rows: Any, old: str, new: str) -> Any:
    if isinstance(rows, str):
        return rows.replace(old, new)
    return json.loads(json.dumps(rows, separators=(",", ":")).replace(old, new))


OTHER_JSON = (
    *(b"[]", b"{}", b"null", b"null\nnull", b"[null]", b"5", b'"text"', b"[1, 2]", b"[[]]", b'{"data": []}'),
    *(b'{"data": [1]}', b'{"data": null}', b'{"data": {"paragraphs": []}}'),
    b'{"data": [{"paragraphs": [{"qas": [5]}]}]}',
)
INSERTED = (b"\0", b'"', b",", b"\t", b"\n", b"\n\n", b" ", "ß".encode("latin-1"), b"[" * 30000, b"\xa3\x07\xff")


def damage_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Damaged bytes, and the ending to add to the file's name."""
    place = rng.randrange(len(content))
    before, after = content[:place], content[place:]
    lines = content.splitlines(keepends=True)
    line = rng.randrange(len(lines))
    zipped = gzip.compress(content, mtime=0)  # without the time: a seed repeats the case
    insert = lambda: before + rng.choice(INSERTED) + after  # noqa: E731
    actions: dict[str, Callable[[], bytes]] = {
        "flip": lambda: before + bytes([after[0] ^ (1 << rng.randrange(8))]) + after[1:],
        "flips": lambda: bytes(byte ^ (rng.random() < 0.02) * rng.randrange(256) for byte in content),
        "cut": lambda: before,
        **dict.fromkeys(("insert", "insert once more", "insert again", "and again"), insert),
        "delete": lambda: before + after[rng.randrange(1, 9) :],
        "utf-16": lambda: content.decode("utf-8", "replace").encode("utf-16"),
        "bom": lambda: b"\xef\xbb\xbf" + content,
        "other line ends": lambda: content.replace(b"\n", rng.choice((b"\r\n", b"\r"))),
        "blank lines": lambda: b"\n \n\n" + content,
        "empty": lambda: rng.choice((b"", b"\n\n \n")),
        "first line": lambda: lines[0] + rng.choice((b"", content)),
        "lines shuffled": lambda: b"".join(rng.sample(lines, len(lines))),
        "line missing": lambda: b"".join(lines[:line] + lines[line + 1 :]),
        "nested object": lambda: b'{"a":' * 20000 + b"1" + b"}" * 20000 + b"\n" + content,
        "garbage": lambda: rng.randbytes(200),
        "array": lambda: b"[" + content + b"]",
        "other json": lambda: rng.choice(OTHER_JSON),
        "twice": lambda: content + content,
        "gzip": lambda: zipped,
        "cut gzip": lambda: zipped[: -rng.randrange(1, 40)],
        "damaged gzip": lambda: zipped[:20] + rng.randbytes(20) + zipped[40:],
        "no gzip": lambda: content,
    }
    action = rng.choice(list(actions))
    return actions[action](), ".gz" if "gzip" in action else ""


def attack(task: str, seed: int, folder: Path, tokenizer: Any) -> None:
    """Check that a damaged file is accepted, or refused by an InputError that names it."""
    rng = random.Random(f"{task} {seed}")
    make_rows, kinds, use = TASKS[task]
    kind, rows, suffix = rng.choice(kinds), make_rows(rng), ""
    if separator := rng.choice(("", "\u2028", "\u2029", "\u0085")):
        rows = replace_in_texts(rows, "e" if task == "conll" else " ", separator)
    if kind == "txt" or rng.random() < 0.4:
        content = serialize(rows, kind, folder)
        content, suffix = damage_bytes(content, rng)
    else:
        rows = damage_rows(rows, rng)
        try:
            content = serialize(rows, kind, folder)
        except Exception:  # rows that have no common type, or are no objects, cannot be written to this type of file
            kind = "jsonl" if kind != "data" else kind
            content = serialize(rows, kind, folder)
    path = folder / f"train{seed}.{'json' if kind == 'data' else kind}{suffix}"
    if separator and kind in NESTED[:2]:  # as it is, not escaped
        content = content.replace(f"\\u{ord(separator):04x}".encode(), separator.encode())
    path.write_bytes(content)
    try:
        features = use(path, tokenizer)
    except InputError as error:
        message = str(error)
        assert path.name in message, f"the file is not named: {message}"
        assert "\n" not in message, f"more than a line: {message}"
        return
    assert len(features) and all(len(ids) for ids in features["input_ids"]), "inputs are empty"
    assert kind == "data" or not re.search(rb"\\ud(800|fff)", content), "half of a surrogate pair"


CASES = number_of_cases(6, 300)


@pytest.mark.parametrize("task", TASKS)
def test_damaged_file(task, tmp_path, tokenizer):
    failures = []
    for seed in range(SEED, SEED + CASES):
        try:
            attack(task, seed, tmp_path, tokenizer)
        except Exception as error:
            failures.append(f"{task!r}, seed {seed}: {type(error).__name__}: {str(error)[:300]}")
    assert not failures, "\n".join(failures)


PIECES = ("2024-05-06T07:08:09Z", "2020-01-01", "007", "1.50", "NA", "a b", " ", "\r", "\n", '"', ",", "\u2028", "é")


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json"])
def test_texts_are_read_as_they_were_written(kind, tmp_path):
    """Also from a file that replaces another of the same time."""
    path = tmp_path / f"rows.{kind}"
    for seed in range(SEED, SEED + number_of_cases(20, 1000)):
        rng = random.Random(f"{kind} {seed}")
        pieces = PIECES if kind != "tsv" else [piece for piece in PIECES if piece != "\n"]
        texts = ["".join(rng.choices(pieces, k=rng.randrange(4))) for _ in range(rng.randrange(1, 5))]
        rows = [{"text": text, "end": "."} for text in texts]  # a carriage return at a line's end belongs to it
        if kind in ("csv", "tsv"):
            ends = {"lineterminator": rng.choice(("\n", "\r\n"))}
            file = io.StringIO(newline="")
            if kind == "csv":
                csv.writer(file, **ends).writerows([["text", "end"], *(row.values() for row in rows)])
            else:
                file.writelines(
                    "\t".join(row) + ends["lineterminator"] for row in [["text", "end"], *map(dict.values, rows)]
                )
            path.write_bytes(file.getvalue().encode())
        else:
            path.write_bytes(serialize(rows, kind, tmp_path))
        os.utime(path, (10**9, 10**9))
        found = read_table(path)["text"][:]
        assert found == [text or (None if kind in ("csv", "tsv") else "") for text in texts], f"{kind}, seed {seed}"
