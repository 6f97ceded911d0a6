"""Rows that a tiny untrained model learns in a few dozen steps, official rows, and text to pretrain on."""

import random
from pathlib import Path

from hf_deberta.demos import match_rows

CORPUS_WORDS = "the old man walked slowly down to a quiet harbour where small boats wait for wind and his friends"
WORDS = ("a", "the", "film", "plot", "cast", "is", "was", "quite", "and", "so")
NAMES = ("Ann", "Lee", "Rome", *".,:'()!")
# of 32 random pairs of MNLI's validation set, in word pieces
MNLI_LENGTHS = [40, 27, 33, 39, 75, 68, 85, 81, 33, 33, 64, 53, 13, 34, 45, 81]
MNLI_LENGTHS += [85, 31, 59, 68, 34, 45, 36, 51, 37, 32, 16, 67, 30, 64, 37, 101]
PASSAGE = "Ann met Bob in old Rome , it rained and the dog was wet ."


def sentiment_rows(count: int, seed: int) -> list[dict]:
    """Sentences of 5 to 8 words, one of them `good` or `bad`, which is the label."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        words, label = rng.choices(WORDS, k=rng.randrange(4, 8)), rng.randrange(2)
        words.insert(rng.randrange(len(words)), ("bad", "good")[label])
        rows.append({"sentence": " ".join(words), "label": label})
    return rows


def write_corpus(path: Path, lines: int = 150, seed: int = 0) -> Path:
    """Write lines of 3 to 59 words."""
    rng = random.Random(seed)
    text = (" ".join(rng.choices(CORPUS_WORDS.split(), k=rng.randrange(3, 60))) for _ in range(lines))
    path.write_text("\n".join(text), encoding="utf-8")
    return path


def official_squad(rows: list[dict]) -> dict:
    """Rows in the format of the official files."""
    paragraphs = []
    for row in rows:
        answers = [dict(zip(row["answers"], pair, strict=True)) for pair in zip(*row["answers"].values(), strict=True)]
        question = {"id": row["id"], "question": row["question"], "answers": answers, "is_impossible": not answers}
        paragraphs.append({"context": row["context"], "qas": [question]})
    return {"version": "v2.0", "data": [{"title": "houses", "paragraphs": paragraphs}]}


def superglue_rows(name: str, number: int, labelled: bool = True) -> list[dict]:
    """Official rows of a task."""
    rows = match_rows(number, 0) if name == "record" else [{**superglue_row(name, n), "idx": n} for n in range(number)]
    for row in [] if labelled else rows:
        if name == "record":
            del row["qas"][0]["answers"]
        for part in row["passage"]["questions"][0]["answers"] if name == "multirc" else [row]:
            part.pop("label", None)
    return rows


def superglue_row(name: str, n: int) -> dict:
    label, old, dogs = n % 2 == 0, "Rome is old", ("he", "she")[n % 2] + f" met {n // 2} dogs"
    spans = {"start1": 0, "end1": 3, "start2": 4, "end2": 7}
    nouns = {"span1_text": "Ann", "span1_index": 0, "span2_text": "it", "span2_index": 7}
    answers = [{"text": text, "idx": 2 * n + i, "label": 1 - i} for i, text in enumerate(("Rome", "Bob"))]
    pair_labels = ("entailment", "not_entailment")
    choices = {"choice1": "dog wet", "choice2": PASSAGE, "question": ("cause", "effect")[n % 2]}
    pair = {"premise": dogs, "hypothesis": old, "label": pair_labels[n % 2]}
    return {
        "boolq": {"question": "is Rome old", "passage": PASSAGE, "label": label},
        "cb": {"premise": PASSAGE, "hypothesis": old, "label": ("entailment", "contradiction", "neutral")[n % 3]},
        "axb": {"sentence1": dogs, "sentence2": old, "label": pair_labels[n % 2]},
        "rte": pair,
        "axg": pair,
        "copa": {"premise": "it rained", **choices, "label": n % 2},
        "wic": {"word": "dog", "sentence1": "dog was wet", "sentence2": "the dog", **spans, "label": label},
        "wsc": {"text": PASSAGE, "target": nouns, "label": label},
        "multirc": {"passage": {"text": PASSAGE, "questions": [{"question": "who", "idx": n, "answers": answers}]}},
    }[name]
