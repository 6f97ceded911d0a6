"""The demonstration of run_race.py: where is Ann, judging by two things that she sees?"""

import random
from pathlib import Path
from typing import Any

from hf_deberta.demos.model_and_rows import write_model_and_rows

LOCATIONS = {
    "kitchen": ("pan", "stove", "knife", "oven"),
    "harbour": ("boat", "sail", "anchor", "rope"),
    "school": ("desk", "chalk", "pupil", "lesson"),
    "farm": ("cow", "barn", "tractor", "hay"),
}


def write_race_demo(folder: Path) -> dict[str, Any]:
    """Write a tiny model and rows in the format of RACE; return the flags that use them."""
    splits = {"train": location_rows(2000, 0), "validation": location_rows(200, 1), "test": location_rows(50, 2)}
    texts = [text for row in splits["train"] for text in (row["article"], row["question"], *row["options"])]
    flags = {"max_seq_length": 64, "learning_rate": 3e-3, "num_train_epochs": 4.0}
    return flags | write_model_and_rows(folder, texts, splits, vocab_size=358)


def location_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Articles that name two things, and a question with four locations as options."""
    rng, rows = random.Random(seed), []
    for index in range(count):
        location, options = rng.choice(list(LOCATIONS)), list(LOCATIONS)
        rng.shuffle(options)
        first, second = rng.sample(LOCATIONS[location], 2)
        row = {
            "example_id": f"{rng.choice(('middle', 'high'))}{index}.txt",
            "article": f"ann sees a {first} beside a {second} .",
            "question": "where is she ?",
            "options": [f"at the {name}" for name in options],
            "answer": "ABCD"[options.index(location)],
        }
        rows.append(row)
    return rows
