"""Data and a tiny untrained model for the `--demo` flag of each fine-tuning script."""

import json
import random
from itertools import permutations
from pathlib import Path
from typing import Any

from transformers import set_seed

from hf_deberta import HfDebertaConfig, HfDebertaModel
from hf_deberta.pretraining.tokenizer_training import train_tokenizer

SYLLABLES = ("ba", "dor", "fel", "gan", "ki", "lum", "mor", "nes", "pra", "rit", "sol", "tav", "ven", "zu")  # of names


def write_model_and_rows(
    folder: Path, texts: list[str], splits: dict[str, list[dict]], vocab_size: int = 400
) -> dict[str, Any]:
    """Write a tiny model, a tokenizer trained on `texts`, and a JSON Lines file per split.

    Returns the flags that make a fine-tuning script use them. The texts must have pieces for `vocab_size` tokens.
    """
    model = folder / "model"
    tokenizer = train_tokenizer(texts, vocab_size, "bpe")
    config = HfDebertaConfig.from_preset(
        "tiny", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=64, intermediate_size=256
    )
    set_seed(0)
    tokenizer.save_pretrained(model)
    HfDebertaModel(config).save_pretrained(model)
    flags = {"model_name_or_path": str(model)}
    for split, rows in splits.items():
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        flags[f"{split}_file"] = str(path)
    return flags


# run_glue.py: was a film critic pleased?

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


# run_squad.py: questions about houses, some of them without an answer

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


# run_ner.py: invented names of people, places and companies

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


# run_race.py: where is Ann, judging by two things that she sees?

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


# run_superglue.py: ReCoRD questions about invented matches, who won and who lost


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
        winner, loser = rng.sample(["".join(pair).title() for pair in permutations(SYLLABLES[:8], 2)], 2)
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
