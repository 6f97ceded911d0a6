"""Read texts of 512 to 4,096 tokens with a DeBERTa that was fine-tuned on at most 512: a needle question, entities.

    python benchmarks/long_texts.py --model deberta-v3-xsmall --text held_out_book.txt --conll conll2003
    python benchmarks/long_texts.py --model extended/discriminator --tokenizer deberta-v3-xsmall ...
    python benchmarks/long_texts.py --seeds 0    # only prints the table in docs/long_texts.md, from the csv

- needle: a question, then a book with four sentences "The password of NAME is NUMBER." at random places. Measured is
  the exact match of the answer. In training, one question of five has no answer.
- entities: the types of words in CoNLL-2003, whose documents are merged to long rows. Measured is the F1 of the words
  in the last 384 tokens. They are the same words at each length; only the text before them grows.

Each text is read as one row; as one row with the rows of the position table that Transformers uses past 512 tokens; and
for the needle in windows of 512 tokens. Fine-tuned models are kept in --work_dir, and results that
results/long_texts.csv has are skipped.
"""

import argparse
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from table import RESULTS, grouped, markdown, mean_and_deviation, read_rows
from timing import record_runs
from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerBase, get_linear_schedule_with_warmup

import hf_deberta
from hf_deberta.model.losses import IGNORED
from hf_deberta.question_answering import QuestionAnswerer

TEXTS = {512: 24, 1024: 24, 2048: 16, 4096: 12}  # how many are read, by tokens
READINGS = ("one row", "one row, Transformers' positions", "windows of 512")
TRAINED_LENGTH, MIN_LENGTH, TAIL = 512, 64, 384  # tokens
BATCH, LEARNING_RATE = 4, 2e-4
NAMES = ["Alice", "Bruno", "Clara", "David", "Erika", "Felix", "Greta", "Henry"]
NAMES += ["Irene", "Jacob", "Karla", "Louis", "Maria", "Nadia", "Oscar", "Paula"]
NO_ANSWER_SHARE = 0.2
TYPES = ("O", "PER", "LOC", "ORG", "MISC")
Inputs = dict[str, list[int]]


class Needle:
    """Questions about facts in a book. Half of the book's sentences are for training, half for evaluation."""

    model_class, num_labels = hf_deberta.HfDebertaForQuestionAnswering, 2

    def __init__(self, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        sentences = re.split(r"(?<=[.!?]) +|\n+", args.text.read_text(encoding="utf-8"))
        sentences = [sentence for sentence in sentences if sentence.strip()]
        counts = map(len, tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"])
        pairs = [*zip(sentences, counts, strict=True)]
        self.sentences = {"train": pairs[: len(pairs) // 2], "validation": pairs[len(pairs) // 2 :]}

    def draw(self, draw: random.Random, split: str, length: int, answered: bool = True) -> tuple[str, str, str]:
        """Return a question, a text of at most so many tokens with it, and the answer or ""."""
        names = draw.sample(NAMES, 4)
        numbers = [str(draw.randrange(1000, 10000)) for _ in names]
        facts = [f"The password of {name} is {number}." for name, number in zip(names, numbers, strict=True)]
        asked = names[0] if answered else draw.choice([name for name in NAMES if name not in names])
        question = f"What is the password of {asked}?"
        room = length - len(self.tokenizer(question, " ".join(facts))["input_ids"])
        sentences = self.sentences[split]
        chosen = []
        for sentence, count in sentences[draw.randrange(len(sentences) // 2) :]:
            room -= count
            if room < 0:
                break
            chosen.append(sentence)
        for fact in facts:
            chosen.insert(draw.randrange(len(chosen) + 1), fact)
        return question, " ".join(chosen), numbers[0] if answered else ""

    def training_row(self, draw: random.Random, length: int) -> Inputs:
        question, text, answer = self.draw(draw, "train", length, draw.random() >= NO_ANSWER_SHARE)
        row = self.tokenizer(question, text, truncation="only_second", max_length=length)
        start, end = 0, 0  # [CLS]: no answer
        if answer:
            first = text.index(f"{answer}.")
            start, end = (row.char_to_token(place, sequence_index=1) for place in (first, first + len(answer) - 1))
        return {"input_ids": row["input_ids"], "start_positions": start, "end_positions": end}

    def evaluate(self, model: Any, length: int, in_windows: bool) -> float:
        """Return the share of answers that are exact."""
        draw, answer_question = random.Random(length), QuestionAnswerer(model, self.tokenizer)
        correct = 0
        for _ in range(TEXTS[length]):
            question, text, answer = self.draw(draw, "validation", length)
            size = TRAINED_LENGTH if in_windows else length
            correct += answer_question(question, text, max_seq_len=size)["answer"].strip(".") == answer
        return correct / TEXTS[length]


class Entities:
    """Types of words in news of many documents, of which a row holds as many as fit."""

    model_class, num_labels = hf_deberta.HfDebertaForTokenClassification, len(TYPES)

    def __init__(self, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.words: dict[str, list[tuple[str, int, int]]] = {}  # with type and number of tokens
        for split in ("train", "valid"):
            lines = (args.conll / f"{split}.txt").read_text(encoding="utf-8").splitlines()
            columns = [line.split() for line in lines if line.strip() and not line.startswith("-DOCSTART-")]
            words = [first for first, *_ in columns]
            encoded = tokenizer(words, is_split_into_words=True, add_special_tokens=False, verbose=False)
            tokens = Counter(encoded.word_ids())
            types = [TYPES.index(last.rpartition("-")[2]) for *_, last in columns]
            self.words[split] = [*zip(words, types, map(tokens.__getitem__, range(len(words))), strict=True)]

    def row(self, split: str, end: int, length: int) -> Inputs:
        """Return the words before `end` that fit, with the labels of their first tokens."""
        start, room = end, length - self.tokenizer.num_special_tokens_to_add()
        while start > 0 and (room := room - self.words[split][start - 1][2]) >= 0:
            start -= 1
        words = self.words[split][start:end]
        row = self.tokenizer([word for word, *_ in words], is_split_into_words=True, verbose=False)
        numbers = row.word_ids()
        labels = [
            IGNORED if number is None or number == earlier else words[number][1]
            for earlier, number in zip([None, *numbers], numbers, strict=False)
        ]
        return {"input_ids": row["input_ids"], "labels": labels}

    def training_row(self, draw: random.Random, length: int) -> Inputs:
        return self.row("train", draw.randrange(length, len(self.words["train"])), length)

    def evaluate(self, model: Any, length: int, in_windows: bool) -> float:
        """Return the F1 of the types of the words in the last tokens of each text."""
        draw = random.Random(0)
        right = predicted = labelled = 0
        for _ in range(TEXTS[max(TEXTS)]):  # the same words at each length
            row = self.row("valid", draw.randrange(max(TEXTS), len(self.words["valid"])), length)
            with torch.inference_mode():
                best = model(torch.tensor([row["input_ids"]])).logits[0, -TAIL:].argmax(-1)
            labels = torch.tensor(row["labels"][-TAIL:])
            right += int(((best == labels) & (labels > 0)).sum())
            predicted += int(((best > 0) & (labels != IGNORED)).sum())
            labelled += int((labels > 0).sum())
        return 2 * right / (predicted + labelled)


TASKS: dict[str, Callable[..., Any]] = {"needle": Needle, "entities": Entities}
METRICS = {"needle": "exact match", "entities": "F1 of words"}


def fine_tune(model: Any, task: Any, seed: int, steps: int) -> None:
    """Train on rows of MIN_LENGTH to TRAINED_LENGTH tokens, in bfloat16. Word embeddings stay as they are."""
    torch.manual_seed(seed)
    model.train().deberta.embeddings.requires_grad_(False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    draw, collator = random.Random(seed), DataCollatorForTokenClassification(task.tokenizer)
    for step in range(steps):
        lengths = [round(MIN_LENGTH * (TRAINED_LENGTH / MIN_LENGTH) ** draw.random()) for _ in range(BATCH)]
        batch = collator([task.training_row(draw, length) for length in lengths])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"  step {step + 1}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(), help="folder of the checkpoint")
    parser.add_argument("--tokenizer", type=Path, help="folder of its tokenizer; default: --model")
    parser.add_argument("--name", help="name of the checkpoint in the result file; default: that of the folder")
    parser.add_argument("--text", type=Path, help="a book for the needles")
    parser.add_argument("--conll", type=Path, help="folder with train.txt and valid.txt of CoNLL-2003")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--work_dir", type=Path, default=Path(tempfile.gettempdir()) / "long_texts")
    args = parser.parse_args()
    setting = f"{args.steps} steps of {BATCH} rows of {MIN_LENGTH} to {TRAINED_LENGTH} tokens, {LEARNING_RATE:g}"
    runs = [
        {"checkpoint": args.name or args.model.name, "task": task, "seed": str(seed), "setting": setting}
        | {"reading": reading, "tokens": str(length)}
        for seed in range(1, args.seeds + 1)
        for reading in READINGS
        for task in TASKS
        for length in TEXTS
        if reading == READINGS[0] or (length > TRAINED_LENGTH and (task, reading) != ("entities", READINGS[2]))
    ]
    record_runs("long_texts.csv", runs, lambda run: [measure(args, run)], again=False)
    print(table())


def measure(args: argparse.Namespace, run: dict[str, str]) -> dict[str, str]:
    """Fine-tune unless --work_dir has the model, and read the texts of one length."""
    tokenizer = hf_deberta.HfDebertaTokenizer.from_pretrained(args.tokenizer or args.model)
    task = TASKS[run["task"]](args, tokenizer)
    folder = args.work_dir / "-".join([run["checkpoint"], run["task"], run["seed"], str(args.steps)])
    if not folder.exists():
        torch.manual_seed(int(run["seed"]))  # of the new head
        model = task.model_class.from_pretrained(args.model, num_labels=task.num_labels, ignore_mismatched_sizes=True)
        fine_tune(model, task, int(run["seed"]), args.steps)
        model.save_pretrained(folder)
    clamp = run["reading"] != READINGS[1]
    model = task.model_class.from_pretrained(folder, clamp_relative_distance=clamp).eval()
    value = task.evaluate(model, int(run["tokens"]), run["reading"] == READINGS[2])
    return {"metric": METRICS[run["task"]], "value": f"{value:.4f}"}


def table() -> str:
    """Return mean values, and the deviation over several seeds, by length."""
    lines = []
    by = ("task", "checkpoint", "reading", "setting")
    for key, rows in sorted(grouped(read_rows(RESULTS / "long_texts.csv"), by).items()):
        values = [[float(row["value"]) for row in rows if row["tokens"] == str(length)] for length in TEXTS]
        cells = [mean_and_deviation(each, digits=2) if each else "-" for each in values]
        lines.append([f"{key[0]}, {METRICS[key[0]]}", *key[1:3], str(max(map(len, values))), *cells])
    return markdown(["task", "checkpoint", "read as", "seeds", *map(str, TEXTS)], lines, 3)


if __name__ == "__main__":
    main()
