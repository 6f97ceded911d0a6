"""The demonstration of run_ner.py: invented names of people, places and companies."""

import random
from pathlib import Path
from typing import Any

from hf_deberta.demos.model_and_rows import write_model_and_rows

SYLLABLES = ("ba", "dor", "fel", "gan", "ki", "lum", "mor", "nes", "pra", "rit", "sol", "tav", "ven", "zu")
PATTERNS = {"PER": "Mr {} said", "LOC": "in {} today", "ORG": "of {} shares"}


def write_ner_demo(folder: Path) -> dict[str, Any]:
    """Write a tiny model and CoNLL files; return the flags that use them."""
    flags: dict[str, Any] = {"max_seq_length": 64, "per_device_train_batch_size": 8, "learning_rate": 2e-3}
    for seed, (split, sentences) in enumerate({"train": 2000, "validation": 200, "test": 100}.items()):
        path = folder / f"{split}.txt"
        path.write_text(conll_text(sentences, seed), encoding="utf-8")
        flags[f"{split}_file"] = str(path)
    blocks = Path(flags["train_file"]).read_text(encoding="utf-8").strip().split("\n\n")
    texts = [" ".join(line.split(" ")[0] for line in lines.split("\n")) for lines in blocks]
    texts = [text for text in texts if text != "-DOCSTART-"]
    return {**flags, **write_model_and_rows(folder, texts, {})}


def conll_text(count: int, seed: int) -> str:
    """Sentences in CoNLL columns, five to a document. The words around a name determine its type."""
    rng, lines = random.Random(seed), []
    for index in range(count):
        if index % 5 == 0:
            lines += ["-DOCSTART- O", ""]
        for kind in rng.sample(sorted(PATTERNS), 2):
            name = ["".join(rng.choices(SYLLABLES, k=2)).title() for _ in range(rng.choice((1, 1, 2)))]
            before, after = PATTERNS[kind].split("{}")
            tags = [f"B-{kind}", f"I-{kind}"][: len(name)]
            lines += [f"{word} O" for word in before.split()]
            lines += [f"{word} {tag}" for word, tag in zip(name, tags, strict=True)]
            lines += [f"{word} O" for word in after.split()]
        lines += [". O", ""]
    return "\n".join(lines) + "\n"
