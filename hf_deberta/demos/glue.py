"""The demonstration of run_glue.py: was a film critic pleased?"""

import random
from pathlib import Path
from typing import Any

from hf_deberta.demos.model_and_rows import write_model_and_rows

GOOD = ["lovely", "brilliant", "warm", "witty", "moving", "fresh", "gentle", "clever", "honest", "charming"]
BAD = ["dull", "clumsy", "loud", "empty", "bitter", "stale", "hollow", "tired", "awkward", "cheap"]
SUBJECTS = ["film", "story", "plot", "cast", "music", "script", "ending", "picture", "scene", "voice"]


def write_glue_demo(folder: Path) -> dict[str, Any]:
    """Write a tiny model and rows in the format of SST-2; return the flags that use them."""
    splits = {"train": review_rows(3000, 0), "validation": review_rows(300, 1)}
    splits["test"] = [{"sentence": row["sentence"]} for row in review_rows(50, 2)]
    texts = [row["sentence"] for row in splits["train"]]
    return {"task_name": "sst2", "max_seq_length": 48, **write_model_and_rows(folder, texts, splits, vocab_size=396)}


def review_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Reviews with three adjectives; the label is 1 if two of them are good, 0 if two are bad."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        label = rng.randrange(2)
        words = rng.choices((BAD, GOOD)[label], k=2) + rng.choices((GOOD, BAD)[label], k=1)
        rng.shuffle(words)
        first, second, third = rng.sample(SUBJECTS, 3)
        text = f"the {first} is {words[0]} , the {second} {words[1]} and its {third} rather {words[2]}"
        rows.append({"sentence": text, "label": label})
    return rows
