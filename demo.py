"""See what the enhanced mask decoder (EMD) is for, in about two minutes and without a network.

    make demo                    # on a made-up language, in which the place of a word decides the word
    make demo TEXT=my.txt        # on your own text: UTF-8, one sentence or paragraph per line

Without make: `pip install -e '.[demo]'`, then `python demo.py [--text my.txt]`.

Two tiny models are pretrained on the same sentences, with the same masks, steps and seed: one with EMD and one
without. Everything but the model is plain Transformers. Curves and the trained model go to `demo_output/`.

Why the made-up language needs absolute positions. The paper explains EMD with "a new store opened beside the new
mall": mask both nouns, and relative attention sees "new" before either; where they stand in the sentence tells them
apart. The language here says just that. Its sentences are

    ... the new NOUN opened ... beside a new NOUN ...

with any number of random adverbs at the dots. NOUN is "store" if it is an odd word of its sentence (the 1st, 3rd ...)
and "mall" if it is an even one, as in the paper's sentence (words 3 and 8). The numbers of adverbs being random, no
word nearby tells odd from even; only the number of words since the start does. EMD is told it. Relative attention has
to work it out, and here tells only the nearest word or two from "far" ones, the way the ends of a long text are far
for any model. To the left it is one word (max_relative_positions - 2), so three layers can pass on the distance to the
start over three words. Farther off it can be estimated, from the share of attention that [CLS] gets, but not counted.

Measured on this language, one seed, without EMD unless stated:
- as here, but trained for 6000 steps: right up to word 4, 55% up to word 12, a guess from word 13 on
- telling 6 words to the left apart, 6000 steps: right up to word 6, 60-70% up to word 12, a guess from word 13 on
- telling all words apart: right everywhere after 1800 steps
- if the rule were "store up to word 12, then mall": 98% after 600 steps, for which an estimate is enough
- with emd_steps=1, no deeper than the model without EMD: right everywhere after 500 steps
- with EMD, but its position embeddings held at zero: a guess after 3000 steps
"""

import argparse
import bisect
import itertools
import random
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
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
from transformers.trainer_utils import PredictionOutput
from transformers.utils import logging

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaTokenizer

SPECIAL_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
MASKED, IGNORED = 0.15, -100  # share of tokens to predict; label of the others
HELD_OUT = 500  # rows, at most

NOUNS = ["mall", "store"]  # of even places, of odd places
ADVERBS = (
    "today yesterday again here there soon often gladly lately quietly suddenly finally slowly nearby downtown "
    "early late twice once maybe surely simply boldly calmly proudly quickly indoors outside upstairs abroad"
)
SENTENCES, MOST_ADVERBS = 6000, 9
PAPER = "a new [MASK] opened beside the new [MASK]"
PROMPTS = [
    PAPER,
    f"today {PAPER}",
    f"today once again here {PAPER}",
    f"today once again here soon there often gladly lately {PAPER}",
]

LONGEST = 32  # tokens in a row of your own text, [CLS] and [SEP] included
LEAST_LINES, LEAST_CHARACTERS, MOST_CHARACTERS = 50, 10_000, 5_000_000


@dataclass
class Material:
    """What both models are trained on and asked."""

    tokenizer: HfDebertaTokenizer
    train: list[dict]  # input_ids
    held_out: list[dict]  # input_ids with [MASK] in them, labels
    masked: str  # what is masked in them
    prompts: dict[str, list[str]]  # text with [MASK] in it, and the words that belong there
    bands: list[tuple[int, int]]  # places to report on, first and last; [CLS] is 0
    model: dict  # fields of HfDebertaConfig
    training: dict  # fields of TrainingArguments


# 1. The made-up language


def made_up_sentence(rng: random.Random) -> str:
    words: list[str] = []
    for phrase in (["new", "NOUN", "opened"], ["beside", "new", "NOUN"], []):
        words += rng.choices(ADVERBS.split(), k=rng.randint(0, MOST_ADVERBS))
        for word in phrase:
            words += [rng.choice(["a", "the"])] if word == "new" else []
            words += [NOUNS[(len(words) + 1) % 2] if word == "NOUN" else word]
    return " ".join(words)


def nouns_of(prompt: str) -> list[str]:
    return [NOUNS[place % 2] for place, word in enumerate(prompt.split(), 1) if word == "[MASK]"]


def made_up_material(seed: int) -> Material:
    rng = random.Random(seed)
    asked = {prompt.replace("[MASK]", "{}").format(*nouns_of(prompt)) for prompt in PROMPTS}
    lines: dict[str, None] = {}  # each sentence once, and none that will be asked for
    while len(lines) < SENTENCES + HELD_OUT:
        if (sentence := made_up_sentence(rng)) not in asked:
            lines[sentence] = None

    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=SPECIAL_TOKENS, show_progress=False))
    tokenizer = HfDebertaTokenizer(tokenizer_object=words)

    rows = tokenizer(list(lines))["input_ids"]
    nouns = tokenizer.convert_tokens_to_ids(NOUNS)
    return Material(
        tokenizer=tokenizer,
        train=[{"input_ids": row} for row in rows[HELD_OUT:]],
        held_out=[mask(row, [token in nouns for token in row], tokenizer) for row in rows[:HELD_OUT]],
        masked="every noun masked",
        prompts={prompt: nouns_of(prompt) for prompt in PROMPTS},
        bands=[(3, 6), (7, 12), (13, 18), (19, 26)],
        model={"hidden_size": 64, "max_position_embeddings": 64, "max_relative_positions": 3},
        training={"max_steps": 600, "per_device_train_batch_size": 64, "learning_rate": 3e-3},
    )


# 2. Your own text


def read_lines(path: Path) -> list[str]:
    """Lines that are not blank; or exit with one sentence that says what is wrong with the file."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise SystemExit(f"{path} is not UTF-8 text ({error.reason}): convert it first, say with iconv.") from None
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}.") from None
    if len(text) > MOST_CHARACTERS:
        print(f"{path} is long: the demo reads its first {MOST_CHARACTERS:,} characters.")
    lines = [line.strip() for line in text[:MOST_CHARACTERS].splitlines() if line.strip()]
    characters = sum(map(len, lines))
    if len(lines) < LEAST_LINES or characters < LEAST_CHARACTERS:
        raise SystemExit(
            f"{path} is too small: the demo needs {LEAST_LINES} lines (a sentence or paragraph each) and "
            f"{LEAST_CHARACTERS:,} characters at least, and it has {len(lines):,} and {characters:,}."
        )
    return lines


def own_material(path: Path, seed: int) -> Material:
    lines = read_lines(path)
    rng = random.Random(seed)
    rng.shuffle(lines)
    seen = list(itertools.accumulate(map(len, lines)))  # characters up to each line
    some = min(bisect.bisect(seen, seen[-1] / 10) + 1, len(lines) - 1)
    held_out, train = lines[:some], lines[some:]

    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(4000, max(2000, seen[-1] // 200)),
        special_tokens=[*SPECIAL_TOKENS[:-1], AddedToken("[MASK]", lstrip=True)],  # a word owns the space before it
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(train, trainer)
    tokenizer = HfDebertaTokenizer(tokenizer_object=pieces)

    def rows(lines: list[str]) -> list[list[int]]:
        """Every line, cut into rows of LONGEST tokens."""
        return tokenizer(lines, truncation=True, max_length=LONGEST, return_overflowing_tokens=True)["input_ids"]

    return Material(
        tokenizer=tokenizer,
        train=[{"input_ids": row} for row in rows(train)],
        held_out=[mask(row, [rng.random() < MASKED for _ in row], tokenizer) for row in rows(held_out)[:HELD_OUT]],
        masked=f"{MASKED:.0%} of the tokens masked",
        prompts=dict(masked_words(held_out, tokenizer)[:4]),
        bands=[(1, 5), (6, 10), (11, 20), (21, 30)],
        model={"hidden_size": 128, "max_position_embeddings": LONGEST},
        training={"max_steps": 550, "per_device_train_batch_size": 32, "learning_rate": 2e-3},
    )


def masked_words(lines: Iterable[str], tokenizer: HfDebertaTokenizer) -> list[tuple[str, list[str]]]:
    """The beginning of each line with its sixth word masked, if that is a word of one token."""
    prompts = []
    for words in (line.split()[:12] for line in lines):
        if "".join(words[4:7]).isalpha() and len(words) > 8 and len(tokenizer.tokenize(words[5])) == 1:
            prompts.append((" ".join([*words[:5], "[MASK]", *words[6:]]), [words[5]]))
    return prompts


# 3. Masking and training


def mask(row: list[int], chosen: Iterable[bool], tokenizer: HfDebertaTokenizer) -> dict:
    """A held-out row, masked once and for all, so that both models are asked the same."""
    special = tokenizer.all_special_ids
    pairs = [(token, hide and token not in special) for token, hide in zip(row, chosen, strict=True)]
    return {
        "input_ids": [tokenizer.mask_token_id if hide else token for token, hide in pairs],
        "labels": [token if hide else IGNORED for token, hide in pairs],
    }


def make_model(material: Material, emd_steps: int, seed: int) -> HfDebertaForMaskedLM:
    set_seed(seed)
    config = HfDebertaConfig(
        vocab_size=len(material.tokenizer),
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=4 * material.model["hidden_size"],
        hidden_dropout_prob=0,  # the run is too short for it
        attention_probs_dropout_prob=0,
        position_buckets=0,  # every distance up to max_relative_positions has a row of its own
        emd_steps=emd_steps,
        pad_token_id=material.tokenizer.pad_token_id,
        **material.model,
    )
    return HfDebertaForMaskedLM(config)


class ProgressBar(ProgressCallback):
    """Trainer's own, with the loss beside the bar instead of a line for each log."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.2f}")

    def on_prediction_step(self, *args, **kwargs) -> None:
        pass


def pretrain(model: HfDebertaForMaskedLM, material: Material, output_dir: Path, seed: int) -> Trainer:
    masking = DataCollatorForLanguageModeling(material.tokenizer, mlm_probability=MASKED, seed=seed)
    padding = DataCollatorForTokenClassification(material.tokenizer)  # held-out rows have their masks
    steps = material.training["max_steps"]
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        warmup_steps=steps // 10,
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


def best_words(model, tokenizer, prompts: Iterable[str]) -> list[list[str]]:
    """For every prompt and every mask in it the best word and its score, from the standard pipeline."""
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=1)
    answers = []
    for masks in map(fill, prompts):
        masks = masks if isinstance(masks[0], list) else [masks]  # one mask comes without its list
        answers.append([f"{best['token_str'].strip()} {best['score']:.2f}" for (best,) in masks])
    return answers


def print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def print_accuracy(results: dict[str, PredictionOutput], bands: list[tuple[int, int]]) -> None:
    """Share of masks answered right, by place in the row, beside that of always saying the commonest answer."""
    labels = next(iter(results.values())).label_ids  # [rows, tokens]
    asked = labels != IGNORED
    commonest = np.bincount(labels[asked]).argmax()
    places = np.broadcast_to(np.arange(labels.shape[1]), labels.shape)
    groups = [asked & (places >= first) & (places <= last) for first, last in bands] + [asked]
    table = [["place in the row", *(f"{first}-{last}" for first, last in bands), "all", "loss"]]
    for name, (predictions, _, metrics) in {"commonest answer": (commonest, None, None), **results}.items():
        right = predictions == labels
        shares = [f"{right[group].mean():.1%}" if group.any() else "-" for group in groups]
        table.append([name, *shares, f"{metrics['test_loss']:.3f}" if metrics else ""])
    print_table(table)


def plot_losses(trainers: dict[str, Trainer], masked: str, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = {"loss": f"Training: {MASKED:.0%} of the tokens masked", "eval_loss": f"Held out: {masked}"}
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for (name, trainer), colour in zip(trainers.items(), ["tab:orange", "tab:blue"], strict=True):
            curve = [(entry["step"], entry[key]) for entry in trainer.state.log_history if key in entry]
            axes.plot(*zip(*curve, strict=True), color=colour, label=name)
        axes.set(title=title, xlabel="step", ylabel="masked-language-model loss (nats)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("The same model with and without the enhanced mask decoder (EMD)")
    figure.savefig(path, dpi=120)


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
    logging.disable_progress_bar()  # those of loading and saving
    torch.set_num_threads(max(1, min(4, torch.get_num_threads() // 2)))  # the models are too small for more
    material = made_up_material(args.seed) if args.text is None else own_material(args.text, args.seed)
    if args.steps:
        material.training["max_steps"] = args.steps
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.output_dir).close()
    except OSError as error:
        raise SystemExit(f"--output_dir {args.output_dir} cannot be written to: {error.strerror}.") from None

    if args.text is None:
        print('\nA made-up language: a noun is "store" if it is an odd word of its sentence, "mall" if it is an even')
        print("one. The adverbs before it are random in number, so only its absolute position tells:\n")
        for row in material.train[:3]:
            print(f"  {material.tokenizer.decode(row['input_ids'], skip_special_tokens=True)}")
        print("\nRelative attention tells only the nearest word or two from far ones here: it cannot count from the")
        print("start. The enhanced mask decoder (EMD) adds the absolute position, just before predicting.")
    print(f"\n{len(material.train):,} rows to train on, {len(material.held_out):,} held out; ", end="")
    print(f"vocabulary of {len(material.tokenizer):,}")

    trainers, results, answers = {}, {}, {}
    for name, emd_steps in {"without EMD": 0, "with EMD": 2}.items():
        model = make_model(material, emd_steps, args.seed)
        if not answers:
            answers["before training"] = best_words(model, material.tokenizer, material.prompts)
        print(f"\nPretraining {name} ({model.num_parameters():,} parameters)", flush=True)
        trainers[name] = pretrain(model, material, args.output_dir, args.seed)
        results[name] = trainers[name].predict(material.held_out)
        answers[name] = best_words(model, material.tokenizer, material.prompts)

    print(f"\nHeld-out rows, {material.masked}: the share each model gets right, by place, and its loss\n")
    print_accuracy(results, material.bands)
    if args.text is not None:
        print("Ordinary text leans less on absolute position, and this is a short run: the difference is small, and")
        print("which model is ahead changes with --seed.\n")
    print('Fill-mask, with the standard pipeline("fill-mask"): the best word at each mask and its score\n')
    if not material.prompts:
        print("  (No held-out line has a sixth word that is one token.)\n")
    for i, (prompt, right) in enumerate(material.prompts.items()):
        print(f"  {prompt}")
        print_table([["right answer", *right], *([name, *said[i]] for name, said in answers.items())])

    picture, folder = args.output_dir / "loss_curves.png", args.output_dir / "model"
    plot_losses(trainers, material.masked, picture)
    trainers["with EMD"].model.save_pretrained(folder)
    material.tokenizer.save_pretrained(folder)
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    same = best_words(model, tokenizer, material.prompts) == answers["with EMD"]
    print(f"Loss curves: {picture}")
    print(f"The model with EMD: {folder}, loaded back with AutoModelForMaskedLM and AutoTokenizer, gives ", end="")
    print("the same answers." if same else "OTHER ANSWERS, which it should not.")
    print(f"This took {time.monotonic() - started:.0f} seconds.")


if __name__ == "__main__":
    main()
