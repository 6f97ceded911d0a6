"""The demonstration of run_squad.py: questions about houses, some of them without an answer."""

import random
from pathlib import Path
from typing import Any

from hf_deberta.demos.model_and_rows import write_model_and_rows

# Each question, the sentence that answers it, and the possible answers.
FACTS = {
    "where ?": ("it is in {} .", ("rome", "paris", "old london", "new york", "oslo", "lima")),
    "which colour ?": ("walls are {} .", ("red", "dark green", "blue", "white", "light grey", "yellow")),
    "who ?": ("home of {} .", ("a baker", "an old sailor", "a teacher", "nobody", "a tall painter")),
}


def write_squad_demo(folder: Path) -> dict[str, Any]:
    """Write a tiny model and rows in the format of SQuAD 2.0; return the flags that use them."""
    splits = {"train": house_rows(2000, 0), "validation": house_rows(200, 1), "test": house_rows(50, 2)}
    texts = [text for row in splits["train"] for text in (row["context"], row["question"])]
    flags = {"max_seq_length": 64, "doc_stride": 16, "learning_rate": 3e-3, "num_train_epochs": 4.0}
    return flags | write_model_and_rows(folder, texts, splits, vocab_size=371)


def house_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Contexts that state two of three facts about a house, and a question about any of the three."""
    rng, rows = random.Random(seed), []
    for index in range(count):
        stated, question = rng.sample(list(FACTS), 2), rng.choice(list(FACTS))
        answers = {fact: rng.choice(FACTS[fact][1]) for fact in stated}
        context = " ".join(FACTS[fact][0].format(answers[fact]) for fact in stated)
        texts = [answers[question]] if question in answers else []
        starts = [context.index(f" {text} ") + 1 for text in texts]
        row = {"id": f"{seed}-{index}", "context": context, "question": question}
        rows.append({**row, "answers": {"text": texts, "answer_start": starts}})
    return rows
