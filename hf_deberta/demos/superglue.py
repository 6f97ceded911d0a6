"""The demonstration of run_superglue.py: ReCoRD questions about invented matches, who won and who lost."""

import itertools
import random
from pathlib import Path
from typing import Any

from hf_deberta.demos.model_and_rows import write_model_and_rows

SYLLABLES = ("ba", "dor", "fel", "gan", "ki", "lum", "mor", "nes")


def write_superglue_demo(folder: Path) -> dict[str, Any]:
    """Write a tiny model and rows in the official format of ReCoRD; return the flags that use them."""
    splits = {"train": match_rows(2000, 0), "validation": match_rows(200, 1), "test": match_rows(50, 2)}
    for row in splits["test"]:
        del row["qas"][0]["answers"]
    texts = [row["passage"]["text"] + " " + row["qas"][0]["query"] for row in splits["train"]]
    flags = {"task_name": "record", "max_seq_length": 64, "num_train_epochs": 3.0}
    return {**flags, **write_model_and_rows(folder, texts, splits)}


def match_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Passages about a match between two teams, each with one question about the winner or the loser."""
    rng, rows = random.Random(seed), []
    for index in range(count):
        winner, loser = rng.sample(["".join(pair).title() for pair in itertools.permutations(SYLLABLES, 2)], 2)
        sentences = [f"{winner} beat {loser} .", f"it rained in {rng.choice(('spring', 'autumn'))} ."]
        text = " ".join(rng.sample(sentences, 2))
        entities = {
            name: {"start": text.index(name), "end": text.index(name) + len(name) - 1} for name in (winner, loser)
        }
        verb, answer = rng.choice((("won", winner), ("lost", loser)))
        answers = [{**entities[answer], "text": answer}]
        question = {"query": f"@placeholder {verb} .", "idx": index, "answers": answers}
        rows.append({"idx": index, "passage": {"text": text, "entities": list(entities.values())}, "qas": [question]})
    return rows
