"""See what the enhanced mask decoder (EMD) is for, in about two minutes and without a network.

    make demo                    # on a small made-up language, in which the place of a word decides the word
    make demo TEXT=my.txt        # on your own text: UTF-8, one sentence or paragraph per line

Without make: `pip install -e '.[demo]'`, then `python demo.py [--text my.txt]`.

Two tiny models are pretrained on the same sentences, with the same masks, steps and seed: one with the enhanced mask
decoder and one without. Everything but the model class is plain Transformers: `Trainer`, the data collator for masked
language modelling, `pipeline("fill-mask")`, the Auto classes. `demo_output/` gets the loss curves and the model.

WHY THE MADE-UP LANGUAGE NEEDS ABSOLUTE POSITIONS

The paper explains EMD with "a new store opened beside the new mall". Mask both nouns: around each stands "new", and
relative attention sees the same thing twice. Where in the sentence the noun stands tells them apart. The language here
says only that. Each of its sentences is

    ... the new NOUN opened ... beside a new NOUN ...

with any number of random adverbs at the dots, and NOUN is "store" if it is an odd word of its sentence (the 1st, 3rd,
5th), "mall" if it is an even one, as in the paper's sentence (words 3 and 8). Since the numbers of adverbs are random,
no word nearby and no distance to another noun's surroundings tells odd from even: only the number of words from the
start does.

The enhanced mask decoder is told that number. Relative attention has to work it out, and here sees distances up to 3
words only; everything further is "far left" or "far right", as the ends of a long text are for any model. Words that
are a few steps from [CLS] could still find out where they are, passing it on from layer to layer; the others could
at best estimate it, from how much of their attention [CLS] gets, and an estimate does not tell odd from even.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaTokenizer

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

SPECIAL_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
MASKED, IGNORED = 0.15, -100

NOUNS = ["mall", "store"]  # the noun of even places, the noun of odd ones
ADVERBS = (
    "today yesterday again here there soon often gladly lately quietly suddenly finally slowly nearby downtown early "
    "late twice once maybe surely simply boldly calmly proudly quickly indoors outside upstairs abroad"
).split()
MOST_ADVERBS = 10
SENTENCES, HELD_OUT = 6000, 500
PAPER = "a new [MASK] opened beside the new [MASK]"
PROMPTS = [PAPER, f"today {PAPER}", f"today once again here {PAPER}", f"{' '.join(ADVERBS[:9])} {PAPER}"]
PLACES = [(3, 6), (7, 12), (13, 18), (19, 24), (25, 28)]

LEAST_LINES, LEAST_CHARACTERS, MOST_CHARACTERS = 50, 10_000, 5_000_000
LONGEST = 64  # tokens in a row, [CLS] and [SEP] included
MOST_HELD_OUT = 500


@dataclass
class Material:
    """What a pair of models is trained on and asked."""

    tokenizer: HfDebertaTokenizer
    train: list[dict]  # input_ids
    held_out: list[dict]  # input_ids with [MASK] in them, and labels
    prompts: list[str]
    right: list[list[str]]  # the words masked in each prompt
    model: dict  # fields of HfDebertaConfig
    training: dict  # fields of TrainingArguments


# 1. The made-up language


def toy_sentence(rng: random.Random) -> str:
    words: list[str] = []

    def add_adverbs() -> None:
        words.extend(rng.choices(ADVERBS, k=rng.randint(0, MOST_ADVERBS)))

    def add_noun() -> None:
        words.extend([rng.choice(["a", "the"]), "new"])
        words.append(NOUNS[(len(words) + 1) % 2])

    add_adverbs()
    add_noun()
    words.append("opened")
    add_adverbs()
    words.append("beside")
    add_noun()
    add_adverbs()
    return " ".join(words)


def nouns_of(prompt: str) -> list[str]:
    """The nouns that belong at the masks of a prompt."""
    return [NOUNS[place % 2] for place, word in enumerate(prompt.split(), 1) if word == "[MASK]"]


def toy_material(seed: int) -> Material:
    rng = random.Random(seed)
    asked = {prompt.replace("[MASK]", "{}").format(*nouns_of(prompt)) for prompt in PROMPTS}
    sentences: dict[str, None] = {}  # in order, each once, none that will be asked for
    while len(sentences) < SENTENCES + HELD_OUT:
        if (sentence := toy_sentence(rng)) not in asked:
            sentences[sentence] = None
    lines = list(sentences)

    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=SPECIAL_TOKENS))
    tokenizer = HfDebertaTokenizer(tokenizer_object=words)

    rows = tokenizer(lines)["input_ids"]
    nouns = set(tokenizer.convert_tokens_to_ids(NOUNS))
    return Material(
        tokenizer=tokenizer,
        train=[{"input_ids": row} for row in rows[HELD_OUT:]],
        held_out=[mask(row, [token in nouns for token in row], tokenizer) for row in rows[:HELD_OUT]],
        prompts=PROMPTS,
        right=[nouns_of(prompt) for prompt in PROMPTS],
        model={"hidden_size": 64, "max_relative_positions": 3},
        training={"max_steps": 600, "per_device_train_batch_size": 64, "learning_rate": 3e-3},
    )


# 2. Your own text


def read_lines(path: Path) -> list[str]:
    """Lines that are not blank, or exit with one sentence that says what is wrong with the file."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise SystemExit(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it first.") from None
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}.") from None
    if len(text) > MOST_CHARACTERS:
        print(f"{path} is long: the demo reads its first {MOST_CHARACTERS:,} characters.")
    lines = [line.strip() for line in text[:MOST_CHARACTERS].splitlines() if line.strip()]
    characters = sum(map(len, lines))
    if len(lines) < LEAST_LINES or characters < LEAST_CHARACTERS:
        raise SystemExit(
            f"{path} is too small: it has {len(lines):,} lines with {characters:,} characters, and the demo needs "
            f"{LEAST_LINES} lines (one sentence or paragraph each) and {LEAST_CHARACTERS:,} characters at least."
        )
    return lines


def own_material(path: Path, seed: int) -> Material:
    lines = read_lines(path)
    rng = random.Random(seed)
    rng.shuffle(lines)
    some = max(5, len(lines) // 10)
    held_out, train = lines[:some], lines[some:]

    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(4000, max(2000, sum(map(len, train)) // 200)),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(train, trainer)
    space_too = AddedToken("[MASK]", lstrip=True, special=True)  # the space before a word is part of it
    tokenizer = HfDebertaTokenizer(tokenizer_object=pieces, mask_token=space_too)

    def rows(lines: list[str]) -> list[list[int]]:
        """Every line, cut into pieces of LONGEST tokens."""
        return tokenizer(lines, truncation=True, max_length=LONGEST, return_overflowing_tokens=True)["input_ids"]

    hidden = ([rng.random() < MASKED for _ in range(LONGEST)] for _ in range(MOST_HELD_OUT))
    prompts, right = prompts_from(held_out, tokenizer)
    return Material(
        tokenizer=tokenizer,
        train=[{"input_ids": row} for row in rows(train)],
        held_out=[mask(row, chosen, tokenizer) for row, chosen in zip(rows(held_out), hidden, strict=False)],
        prompts=prompts,
        right=right,
        model={"hidden_size": 128},
        training={"max_steps": 400, "per_device_train_batch_size": 32, "learning_rate": 2e-3},
    )


def prompts_from(lines: Iterable[str], tokenizer: HfDebertaTokenizer) -> tuple[list[str], list[list[str]]]:
    """The beginnings of up to four lines with one word masked, a word that is one token."""
    prompts, right = [], []
    for line in lines:
        words = line.split()[:12]
        for place in range(len(words) // 2, len(words)):
            if words[place].isalpha() and len(tokenizer.tokenize(words[place])) == 1:
                prompts.append(" ".join([*words[:place], "[MASK]", *words[place + 1 :]]))
                right.append([words[place]])
                break
        if len(prompts) == 4:
            break
    return prompts, right


# 3. Masking and training


def mask(row: list[int], hidden: Iterable[bool], tokenizer: HfDebertaTokenizer) -> dict:
    """A held-out row, masked once and for all, so that both models are asked the same."""
    special = tokenizer.all_special_ids
    hidden = [chosen and token not in special for token, chosen in zip(row, hidden, strict=False)]
    return {
        "input_ids": [tokenizer.mask_token_id if h else token for token, h in zip(row, hidden, strict=True)],
        "labels": [token if h else IGNORED for token, h in zip(row, hidden, strict=True)],
    }


class ProgressBar(ProgressCallback):
    """Trainer's own, with the loss beside it instead of a line for each log."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.2f}")


def make_model(material: Material, emd_steps: int, seed: int) -> HfDebertaForMaskedLM:
    set_seed(seed)
    config = HfDebertaConfig(
        vocab_size=len(material.tokenizer),
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=4 * material.model["hidden_size"],
        max_position_embeddings=LONGEST,
        position_buckets=0,  # every distance up to max_relative_positions has its own row
        emd_steps=emd_steps,
        pad_token_id=material.tokenizer.pad_token_id,
        **material.model,
    )
    return HfDebertaForMaskedLM(config)


def pretrain(model: HfDebertaForMaskedLM, material: Material, output_dir: Path, seed: int) -> Trainer:
    masking = DataCollatorForLanguageModeling(material.tokenizer, mlm_probability=MASKED, seed=seed)
    padding = DataCollatorForTokenClassification(material.tokenizer)  # held-out rows have their masks
    steps = material.training["max_steps"]
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        warmup_steps=steps // 10,
        weight_decay=0.01,
        logging_steps=max(1, steps // 30),
        eval_strategy="steps",
        eval_steps=max(1, steps // 15),
        per_device_eval_batch_size=100,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        seed=seed,
        **material.training,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=lambda rows: padding(rows) if "labels" in rows[0] else masking(rows),
        train_dataset=material.train,
        eval_dataset=material.held_out,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressBar)
    trainer.train()
    return trainer


# 4. What they have learned


@dataclass
class Result:
    """Held-out predictions at the masks: one entry per mask."""

    loss: float
    correct: np.ndarray  # bool
    labels: np.ndarray
    places: np.ndarray  # number of the token in its row, [CLS] is 0


def evaluate(trainer: Trainer, material: Material) -> Result:
    predicted, labels, metrics = trainer.predict(material.held_out)
    rows, places = np.nonzero(labels != IGNORED)
    labels = labels[rows, places]
    return Result(metrics["test_loss"], predicted[rows, places] == labels, labels, places)


def best_words(model, tokenizer, prompts: list[str]) -> list[list[tuple[str, float]]]:
    """The best word and its score for every mask of every prompt, from the standard pipeline."""
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=1)
    answers = []
    for prompt in prompts:
        masks = fill(prompt)
        masks = masks if isinstance(masks[0], list) else [masks]  # one mask comes without its list
        answers.append([(best["token_str"].strip(), best["score"]) for (best,) in masks])
    return answers


def plot_losses(trainers: dict[str, Trainer], path: Path, held_out_title: str, chance: float | None) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, trainer), colour in zip(trainers.items(), ["tab:orange", "tab:blue"], strict=True):
        for axes, key in ((left, "loss"), (right, "eval_loss")):
            steps, losses = zip(*((e["step"], e[key]) for e in trainer.state.log_history if key in e), strict=True)
            axes.plot(steps, losses, color=colour, label=name)
    if chance is not None:
        right.axhline(chance, color="grey", linestyle=":", label="guessing (ln 2)")
    left.set_title("Training: all masked words")
    right.set_title(held_out_title)
    for axes in (left, right):
        axes.set(xlabel="step", ylabel="masked-LM loss (nats)")
        axes.set_ylim(bottom=0 if chance is not None and axes is right else None)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("The same model with and without the enhanced mask decoder (EMD)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def print_by_place(results: dict[str, Result]) -> None:
    """Accuracy in bands of places, and that of always saying the commoner noun."""
    first = next(iter(results.values()))
    commonest = Counter(first.labels.tolist()).most_common(1)[0][0]
    rows = {"always the commoner noun": first.labels == commonest}
    rows |= {name: result.correct for name, result in results.items()}
    bands = [(first.places >= start) & (first.places <= end) for start, end in PLACES]
    print_table(
        [["place in the sentence", *(f"{start}-{end}" for start, end in PLACES), "all"]]
        + [[name, *(f"{hits[band].mean():.0%}" for band in [*bands, ...])] for name, hits in rows.items()]
    )


def print_overall(results: dict[str, Result]) -> None:
    labels = next(iter(results.values())).labels.tolist()
    commonest = Counter(labels).most_common(1)[0][1] / len(labels)
    print_table(
        [["", "loss", "right"], ["always the commonest token", "", f"{commonest:.1%}"]]
        + [[name, f"{result.loss:.3f}", f"{result.correct.mean():.1%}"] for name, result in results.items()]
    )


def print_answers(material: Material, answers: dict[str, list[list[tuple[str, float]]]]) -> None:
    for i, prompt in enumerate(material.prompts):
        print(f"  {prompt}")
        print_table(
            [["  right", *material.right[i]]]
            + [[f"  {name}", *(f"{word} {score:.2f}" for word, score in said[i])] for name, said in answers.items()]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="your own text: UTF-8, one sentence or paragraph per line")
    parser.add_argument("--output_dir", type=Path, default=Path("demo_output"))
    parser.add_argument("--steps", type=int, help="training steps of each model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be 1 or more, not {args.steps}")
    started = time.monotonic()
    torch.set_num_threads(min(4, torch.get_num_threads()))  # the models are too small for more

    is_toy = args.text is None
    material = toy_material(args.seed) if is_toy else own_material(args.text, args.seed)
    if args.steps:
        material.training["max_steps"] = args.steps
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--output_dir {args.output_dir} cannot be made: {error.strerror}.") from None

    if is_toy:
        print('\nA made-up language: "store" if the noun is an odd word of its sentence, "mall" if it is an even one.')
        print("With any number of adverbs before it, only its absolute position tells. For example\n")
        for row in material.train[:3]:
            print(f"  {material.tokenizer.decode(row['input_ids'], skip_special_tokens=True)}")
    print(f"\n{len(material.train):,} rows to train on, {len(material.held_out):,} held out, ", end="")
    print(f"vocabulary {len(material.tokenizer):,}")

    trainers, results, answers = {}, {}, {}
    for name, emd_steps in {"without EMD": 0, "with EMD": 2}.items():
        model = make_model(material, emd_steps, args.seed)
        if not answers:
            answers["before training"] = best_words(model, material.tokenizer, material.prompts)
        print(f"\nPretraining {name}: {model.num_parameters():,} parameters")
        trainers[name] = pretrain(model, material, args.output_dir, args.seed)
        results[name] = evaluate(trainers[name], material)
        answers[name] = best_words(model, material.tokenizer, material.prompts)

    if is_toy:
        print("\nHeld-out sentences, all nouns masked: how many each model gets right\n")
        print_by_place(results)
    else:
        print("\nHeld-out lines, 15% of the tokens masked: loss, and how many each model gets right\n")
        print_overall(results)
    print('Fill-mask with the standard pipeline("fill-mask"): best word and its score at each mask\n')
    print_answers(material, answers)

    picture, folder = args.output_dir / "loss_curves.png", args.output_dir / "model"
    title = "Held out: nouns only" if is_toy else "Held out"
    plot_losses(trainers, picture, title, float(np.log(2)) if is_toy else None)
    trainers["with EMD"].model.save_pretrained(folder)
    material.tokenizer.save_pretrained(folder)
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    same = best_words(model, tokenizer, material.prompts) == answers["with EMD"]
    print(f"Loss curves: {picture}")
    print(f"Model with EMD: {folder}, loaded back with AutoModelForMaskedLM and AutoTokenizer; ", end="")
    print("same answers." if same else "ITS ANSWERS DIFFER.")
    print(f"{time.monotonic() - started:.0f} seconds.")


if __name__ == "__main__":
    main()
