"""Rows that a tiny untrained model learns in a few dozen steps, and text to pretrain on."""

import random
from pathlib import Path

CORPUS_WORDS = "the old man walked slowly down to a quiet harbour where small boats wait for wind and his friends"
WORDS = ("a", "the", "film", "plot", "cast", "is", "was", "quite", "and", "so")
NAMES = ("Ann", "Lee", "Rome", *".,:'()!")


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
