"""Rows that a tiny untrained model learns in a few dozen steps."""

import random

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
