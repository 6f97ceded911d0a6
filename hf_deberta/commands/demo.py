"""Show what the enhanced mask decoder (EMD) is for, in a few minutes on two CPU cores, offline.

    make demo                    # on a made-up language in which the position of a word determines the word
    make demo TEXT=my.txt        # on your own text: UTF-8, one sentence or paragraph per line

Without make: `pip install 'hf-deberta[demo]'`, then `hf-deberta demo [--text my.txt]`.

Two tiny models are pretrained on the same sentences, with the same masks, steps and seed: one with EMD and one without.
Everything except the model is plain Transformers. Loss curves and the trained model are written to
`demo_output/mask_decoder/`.

Why the made-up language needs absolute positions. The paper explains EMD with the sentence "a new store opened beside
the new mall". If both nouns are masked, relative attention sees "new" before each of them; only their positions in the
sentence distinguish them. The sentences of this language are built in the same way:

    ... the new NOUN opened ... beside a new NOUN ...

with a random number of adverbs in place of the dots. NOUN is "store" at odd positions (word 1, 3, ...) and "mall" at
even positions, as in the paper's sentence (words 3 and 8). Because the number of adverbs is random, no nearby word
reveals whether a position is odd or even; only the number of words since the start does. EMD adds that position to the
input of the decoder. Relative attention has to derive it, and in this demo it can distinguish only the nearest one or
two words from distant ones, just as the ends of a long text are equally distant for any model. To the left it reaches
one word (max_relative_positions - 2), so three layers can pass on the distance to the start over three words. Beyond
that, the position can be estimated from the share of attention that [CLS] gets, but not counted.

docs/log.md has what was measured on this language with other settings.
"""

import argparse
import bisect
import itertools
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
from transformers.utils import logging

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaTokenizer

SPECIAL_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
MASK_PROBABILITY = 0.15
EMD_STEPS = {"without EMD": 0, "with EMD": 2}  # for each of the two models
IGNORED = -100  # label of tokens that are not predicted
MAX_HELD_OUT_ROWS = 500

# The made-up language
NOUNS = ["mall", "store"]  # at even positions, at odd positions
ADVERBS = (
    "today yesterday again here there soon often gladly lately quietly suddenly finally slowly nearby downtown "
    "early late twice once maybe surely simply boldly calmly proudly quickly indoors outside upstairs abroad"
)
NUM_SENTENCES = 6000
MAX_ADVERBS = 9  # in a row
PAPER_SENTENCE = "a new [MASK] opened beside the new [MASK]"
PROMPTS = [
    PAPER_SENTENCE,
    f"today {PAPER_SENTENCE}",
    f"today once again here {PAPER_SENTENCE}",
    f"today once again here soon there often gladly lately {PAPER_SENTENCE}",
]

# Your own text
MAX_TOKENS = 32  # of a row, [CLS] and [SEP] included
MIN_LINES, MIN_CHARACTERS, MAX_CHARACTERS = 50, 10_000, 5_000_000


@dataclass
class Experiment:
    """Data, prompts and settings that both models share."""

    tokenizer: HfDebertaTokenizer
    train_rows: list[dict]  # input_ids
    held_out_rows: list[dict]  # input_ids with [MASK], labels
    masked: str  # describes which tokens of the held-out rows are masked
    prompts: dict[str, list[str]]  # text with [MASK], and the right words
    position_ranges: list[tuple[int, int]]  # to report accuracy for, first and last; [CLS] is at 0
    config: dict  # fields of HfDebertaConfig
    training: dict  # fields of TrainingArguments


# 1. The made-up language


def made_up_sentence(rng: random.Random) -> str:
    words: list[str] = []
    for phrase in (["new", "NOUN", "opened"], ["beside", "new", "NOUN"], []):
        words += rng.choices(ADVERBS.split(), k=rng.randint(0, MAX_ADVERBS))
        for word in phrase:
            if word == "new":
                words.append(rng.choice(["a", "the"]))
            words.append(NOUNS[(len(words) + 1) % 2] if word == "NOUN" else word)
    return " ".join(words)


def right_nouns(prompt: str) -> list[str]:
    """Return the noun that belongs at each [MASK]."""
    return [NOUNS[position % 2] for position, word in enumerate(prompt.split(), 1) if word == "[MASK]"]


def made_up_experiment(seed: int) -> Experiment:
    rng = random.Random(seed)
    prompt_sentences = {prompt.replace("[MASK]", "{}").format(*right_nouns(prompt)) for prompt in PROMPTS}
    sentences: dict[str, None] = {}  # without duplicates, in order, and without the prompts
    while len(sentences) < NUM_SENTENCES + MAX_HELD_OUT_ROWS:
        if (sentence := made_up_sentence(rng)) not in prompt_sentences:
            sentences[sentence] = None

    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.train_from_iterator(sentences, trainers.WordLevelTrainer(special_tokens=SPECIAL_TOKENS, show_progress=False))
    tokenizer = HfDebertaTokenizer(tokenizer_object=words)

    rows = tokenizer(list(sentences))["input_ids"]
    nouns = {tokenizer.get_vocab()[noun] for noun in NOUNS}
    held_out, train = rows[:MAX_HELD_OUT_ROWS], rows[MAX_HELD_OUT_ROWS:]
    return Experiment(
        tokenizer=tokenizer,
        train_rows=[{"input_ids": row} for row in train],
        held_out_rows=[mask_row(row, [token in nouns for token in row], tokenizer) for row in held_out],
        masked="every noun masked",
        prompts={prompt: right_nouns(prompt) for prompt in PROMPTS},
        position_ranges=[(3, 6), (7, 12), (13, 18), (19, 26)],
        config={"hidden_size": 64, "max_position_embeddings": 64, "max_relative_positions": 3},
        training={"max_steps": 600, "per_device_train_batch_size": 64, "learning_rate": 3e-3},
    )


# 2. Your own text


def read_lines(path: Path) -> list[str]:
    """Return the lines that are not blank, or exit with one sentence about what is wrong with the file."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise SystemExit(
            f"{path} is not UTF-8 text ({error.reason}): convert it first, for example with iconv."
        ) from None
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}.") from None
    if len(text) > MAX_CHARACTERS:
        print(f"{path} is long: the demo reads its first {MAX_CHARACTERS:,} characters.")
    lines = [line.strip() for line in text[:MAX_CHARACTERS].split("\n") if line.strip()]
    characters = sum(map(len, lines))
    if len(lines) < MIN_LINES or characters < MIN_CHARACTERS:
        raise SystemExit(
            f"{path} is too small: it has {len(lines):,} lines and {characters:,} characters; the demo needs at least "
            f"{MIN_LINES} lines (a sentence or paragraph each) and {MIN_CHARACTERS:,} characters."
        )
    return lines


def own_text_experiment(path: Path, seed: int) -> Experiment:
    lines = read_lines(path)
    rng = random.Random(seed)
    rng.shuffle(lines)
    # A tenth of the characters is held out.
    characters = list(itertools.accumulate(map(len, lines)))
    num_held_out = min(bisect.bisect(characters, characters[-1] / 10) + 1, len(lines) - 1)
    held_out, train = lines[:num_held_out], lines[num_held_out:]

    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(4000, max(2000, characters[-1] // 200)),
        special_tokens=[*SPECIAL_TOKENS[:-1], AddedToken("[MASK]", lstrip=True)],  # includes the space before it
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(train, trainer)
    tokenizer = HfDebertaTokenizer(tokenizer_object=pieces)

    def tokenize(lines: list[str]) -> list[list[int]]:
        """Return the token ids of all lines, cut into rows of MAX_TOKENS."""
        return tokenizer(lines, truncation=True, max_length=MAX_TOKENS, return_overflowing_tokens=True)["input_ids"]

    train_rows = [{"input_ids": row} for row in tokenize(train)]
    held_out_rows = [
        mask_row(row, [rng.random() < MASK_PROBABILITY for _ in row], tokenizer)
        for row in tokenize(held_out)[:MAX_HELD_OUT_ROWS]
    ]
    return Experiment(
        tokenizer=tokenizer,
        train_rows=train_rows,
        held_out_rows=held_out_rows,
        masked=f"{MASK_PROBABILITY:.0%} of the tokens masked",
        prompts=dict(make_prompts(held_out, tokenizer)[:4]),
        position_ranges=[(1, 5), (6, 10), (11, 20), (21, 30)],
        config={"hidden_size": 128, "max_position_embeddings": MAX_TOKENS},
        training={"max_steps": 550, "per_device_train_batch_size": 32, "learning_rate": 2e-3},
    )


def make_prompts(lines: Iterable[str], tokenizer: HfDebertaTokenizer) -> list[tuple[str, list[str]]]:
    """Mask the sixth word of each line where that is one token; return (prompt, right words)."""
    prompts = []
    for words in (line.split()[:12] for line in lines):
        if "".join(words[4:7]).isalpha() and len(words) > 8 and len(tokenizer.tokenize(words[5])) == 1:
            prompts.append((" ".join([*words[:5], "[MASK]", *words[6:]]), [words[5]]))
    return prompts


# 3. Masking and training


def mask_row(row: list[int], chosen: list[bool], tokenizer: HfDebertaTokenizer) -> dict:
    """Mask the chosen tokens of a held-out row, except special tokens. Both models get the same masks."""
    masked = [choice and token not in tokenizer.all_special_ids for token, choice in zip(row, chosen, strict=True)]
    return {
        "input_ids": [tokenizer.mask_token_id if hide else token for token, hide in zip(row, masked, strict=True)],
        "labels": [token if hide else IGNORED for token, hide in zip(row, masked, strict=True)],
    }


def make_model(experiment: Experiment, emd_steps: int, seed: int) -> HfDebertaForMaskedLM:
    set_seed(seed)
    config = HfDebertaConfig(
        vocab_size=len(experiment.tokenizer),
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=4 * experiment.config["hidden_size"],
        hidden_dropout_prob=0,  # the run is too short for dropout
        attention_probs_dropout_prob=0,
        position_buckets=0,  # each distance up to max_relative_positions has its own embedding
        emd_steps=emd_steps,
        pad_token_id=experiment.tokenizer.pad_token_id,
        **experiment.config,
    )
    return HfDebertaForMaskedLM(config)


class ProgressBar(ProgressCallback):
    """Trainer's progress bar, with the loss beside it instead of a printed line for each log."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.2f}")

    def on_prediction_step(self, *args, **kwargs) -> None:
        pass


def pretrain(model: HfDebertaForMaskedLM, experiment: Experiment, output_dir: Path, seed: int) -> Trainer:
    mask_and_pad = DataCollatorForLanguageModeling(experiment.tokenizer, mlm_probability=MASK_PROBABILITY, seed=seed)
    pad = DataCollatorForTokenClassification(experiment.tokenizer)
    steps = experiment.training["max_steps"]
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
        **experiment.training,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        # held-out rows are masked already
        data_collator=lambda rows: pad(rows) if "labels" in rows[0] else mask_and_pad(rows),
        train_dataset=experiment.train_rows,
        eval_dataset=experiment.held_out_rows,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressBar)
    trainer.train()
    return trainer


# 4. What the models have learned


def fill_masks(model: Any, tokenizer: Any, prompts: Iterable[str]) -> list[list[str]]:
    """Return the best word and its score for each mask of each prompt."""
    fill: Callable[[str], Any] = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=1)
    answers = []
    for masks in map(fill, prompts):
        masks = masks if isinstance(masks[0], list) else [masks]  # the pipeline returns no outer list for one mask
        answers.append([f"{best['token_str'].strip()} {best['score']:.2f}" for (best,) in masks])
    return answers


def print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def print_accuracy(results: dict[str, Any], position_ranges: list[tuple[int, int]]) -> None:
    """Print each model's accuracy by position, and that of always predicting the most frequent token.

    Args:
        results: by model, as `Trainer.predict` returns them.
    """
    labels = next(iter(results.values())).label_ids  # [rows, tokens]
    masked = labels != IGNORED
    most_frequent = np.bincount(labels[masked]).argmax()
    positions = np.broadcast_to(np.arange(labels.shape[1]), labels.shape)
    groups = [masked & (positions >= first) & (positions <= last) for first, last in position_ranges] + [masked]
    table = [["position", *(f"{first}-{last}" for first, last in position_ranges), "all", "loss"]]
    for name, (predictions, _, metrics) in {"most frequent": (most_frequent, None, None), **results}.items():
        right = predictions == labels
        accuracies = [f"{right[group].mean():.1%}" if group.any() else "-" for group in groups]
        table.append([name, *accuracies, f"{metrics['test_loss']:.3f}" if metrics else ""])
    print_table(table)


def plot_losses(trainers: dict[str, Trainer], masked: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = {"loss": f"Training: {MASK_PROBABILITY:.0%} of the tokens masked", "eval_loss": f"Held out: {masked}"}
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for (name, trainer), color in zip(trainers.items(), ["tab:orange", "tab:blue"], strict=True):
            curve = [(entry["step"], entry[key]) for entry in trainer.state.log_history if key in entry]
            axes.plot(*zip(*curve, strict=True), color=color, label=name)
        axes.set(title=title, xlabel="step", ylabel="masked-language-model loss (nats)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("The same model with and without the enhanced mask decoder (EMD)")
    figure.savefig(path, dpi=120)


# 5. The demo


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="your own text: UTF-8, one sentence or paragraph per line")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("demo_output/mask_decoder"), help="default: %(default)s"
    )
    parser.add_argument("--steps", type=int, help="training steps of each model; default: 600, with --text 550")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be 1 or more, not {args.steps}")
    return args


def print_made_up_language(experiment: Experiment) -> None:
    print('\nA made-up language: a noun is "store" at an odd position in its sentence and "mall" at an even one.')
    print("The number of adverbs before it is random, so only its absolute position determines it:\n")
    for row in experiment.train_rows[:3]:
        print(f"  {experiment.tokenizer.decode(row['input_ids'], skip_special_tokens=True)}")
    print("\nRelative attention distinguishes only the nearest one or two words from distant ones here, so it")
    print("cannot count from the start. The enhanced mask decoder (EMD) adds the absolute position just before")
    print("the prediction.")


def main() -> None:
    args = parse_arguments()
    if find_spec("matplotlib") is None:
        raise SystemExit("The demo draws its loss curves with matplotlib: pip install 'hf-deberta[demo]'.")
    started = time.monotonic()
    logging.disable_progress_bar()  # of loading and saving
    torch.set_num_threads(max(1, min(4, torch.get_num_threads() // 2)))  # the models are too small for more
    experiment = made_up_experiment(args.seed) if args.text is None else own_text_experiment(args.text, args.seed)
    if args.steps:
        experiment.training["max_steps"] = args.steps
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--output_dir {args.output_dir} cannot be created: {error.strerror}.") from None

    if args.text is None:
        print_made_up_language(experiment)
    print(f"\n{len(experiment.train_rows):,} rows to train on, {len(experiment.held_out_rows):,} held out; ", end="")
    print(f"vocabulary of {len(experiment.tokenizer):,}")

    tokenizer, prompts = experiment.tokenizer, experiment.prompts
    variants = {name: make_model(experiment, steps, args.seed) for name, steps in EMD_STEPS.items()}
    answers = {"before training": fill_masks(variants["without EMD"], tokenizer, prompts)}
    trainers, results = {}, {}
    for name, model in variants.items():
        print(f"\nPretraining {name} ({model.num_parameters():,} parameters)", flush=True)
        trainers[name] = pretrain(model, experiment, args.output_dir, args.seed)
        results[name] = trainers[name].predict(experiment.held_out_rows)  # type: ignore[arg-type]  # a list works too
        answers[name] = fill_masks(model, tokenizer, prompts)

    print(f"\nHeld-out rows, {experiment.masked}: accuracy by position, and loss\n")
    print_accuracy(results, experiment.position_ranges)
    if args.text is not None:
        print("Ordinary text depends less on absolute positions, and this run is short: the difference is small, and")
        print("which model is ahead changes with --seed.\n")
    print('Fill-mask, with the standard pipeline("fill-mask"): the best word at each mask, and its score\n')
    if not prompts:
        print("  (No held-out line has a sixth word that is one token.)\n")
    for i, (prompt, right) in enumerate(prompts.items()):
        print(f"  {prompt}")
        print_table([["right answer", *right], *([name, *words[i]] for name, words in answers.items())])

    picture, folder = args.output_dir / "loss_curves.png", args.output_dir / "model"
    plot_losses(trainers, experiment.masked, picture)
    variants["with EMD"].save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False)
    loaded_tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    is_same = fill_masks(loaded, loaded_tokenizer, prompts) == answers["with EMD"]
    print(f"Loss curves: {picture}")
    print(f"The model with EMD: {folder}, loaded back with AutoModelForMaskedLM and AutoTokenizer, gives ", end="")
    print("the same answers." if is_same else "DIFFERENT answers, which is a bug.")
    print(f"This took {time.monotonic() - started:.0f} seconds.")


if __name__ == "__main__":
    main()
