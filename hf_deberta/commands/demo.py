"""Show what the enhanced mask decoder (EMD) is for, in a few minutes on two CPU cores, offline.

    make demo                    # without make: install '.[demo]' with pip, then hf-deberta demo

Two tiny models are pretrained on the same sentences of a made-up language, with the same masks, steps and seed: one
with EMD and one without. Everything except the model is plain Transformers. Loss curves and the trained model are
written to `demo_output/mask_decoder/`.

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
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pandas import DataFrame
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaTokenizer
from hf_deberta.gpu_check import parse_size
from hf_deberta.training.errors import input_errors

SPECIAL_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
MASK_PROBABILITY = 0.15
EMD_STEPS = {"without EMD": 0, "with EMD": 2}  # for each of the two models
IGNORED = -100  # label of tokens that are not predicted

# The made-up language
NOUNS = ["mall", "store"]  # at even positions, at odd positions
ADVERBS = (
    "today yesterday again here there soon often gladly lately quietly suddenly finally slowly nearby downtown "
    "early late twice once maybe surely simply boldly calmly proudly quickly indoors outside upstairs abroad"
)
TRAIN_SENTENCES, HELD_OUT_SENTENCES = 6000, 500
MAX_ADVERBS = 9  # in a row
PAPER_SENTENCE = "a new [MASK] opened beside the new [MASK]"
PROMPTS = [
    PAPER_SENTENCE,
    f"today {PAPER_SENTENCE}",
    f"today once again here {PAPER_SENTENCE}",
    f"today once again here soon there often gladly lately {PAPER_SENTENCE}",
]
POSITION_RANGES = [(3, 6), (7, 12), (13, 18), (19, 26)]  # to report accuracy for, first and last; [CLS] is at 0


@dataclass
class Sentences:
    """Tokenized sentences of the made-up language."""

    tokenizer: HfDebertaTokenizer
    train_rows: list[dict]  # input_ids
    held_out_rows: list[dict]  # input_ids with [MASK], labels


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


def made_up_sentences(seed: int) -> Sentences:
    rng = random.Random(seed)
    prompt_sentences = {prompt.replace("[MASK]", "{}").format(*right_nouns(prompt)) for prompt in PROMPTS}
    sentences: dict[str, None] = {}  # without duplicates, in order, and without the prompts
    while len(sentences) < TRAIN_SENTENCES + HELD_OUT_SENTENCES:
        if (sentence := made_up_sentence(rng)) not in prompt_sentences:
            sentences[sentence] = None

    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.train_from_iterator(sentences, trainers.WordLevelTrainer(special_tokens=SPECIAL_TOKENS, show_progress=False))
    tokenizer = HfDebertaTokenizer(tokenizer_object=words)

    rows = tokenizer(list(sentences))["input_ids"]
    nouns = {tokenizer.get_vocab()[noun] for noun in NOUNS}
    return Sentences(
        tokenizer=tokenizer,
        train_rows=[{"input_ids": row} for row in rows[HELD_OUT_SENTENCES:]],
        held_out_rows=[mask_nouns(row, nouns, tokenizer.mask_token_id) for row in rows[:HELD_OUT_SENTENCES]],
    )


def mask_nouns(row: list[int], nouns: set[int], mask_token_id: int) -> dict:
    """Mask the nouns of a held-out row. Both models get the same masks."""
    return {
        "input_ids": [mask_token_id if token in nouns else token for token in row],
        "labels": [token if token in nouns else IGNORED for token in row],
    }


# 2. Training


def make_model(tokenizer: HfDebertaTokenizer, emd_steps: int, seed: int) -> HfDebertaForMaskedLM:
    set_seed(seed)
    config = HfDebertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0,  # the run is too short for dropout
        attention_probs_dropout_prob=0,
        max_position_embeddings=64,
        max_relative_positions=3,
        position_buckets=0,  # each distance up to max_relative_positions has its own embedding
        emd_steps=emd_steps,
        pad_token_id=tokenizer.pad_token_id,
    )
    return HfDebertaForMaskedLM(config)


class ProgressBar(ProgressCallback):
    """Trainer's progress bar, with the loss beside it instead of a printed line for each log."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.2f}")

    def on_prediction_step(self, *args, **kwargs) -> None:
        pass


def pretrain(model: HfDebertaForMaskedLM, sentences: Sentences, steps: int, output_dir: Path, seed: int) -> Trainer:
    mask_and_pad = DataCollatorForLanguageModeling(sentences.tokenizer, mlm_probability=MASK_PROBABILITY, seed=seed)
    pad = DataCollatorForTokenClassification(sentences.tokenizer)
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=steps,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        warmup_steps=steps // 10,
        logging_steps=max(1, steps // 30),
        eval_strategy="steps",
        eval_steps=max(1, steps // 15),
        per_device_eval_batch_size=100,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        seed=seed,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        # held-out rows are masked already
        data_collator=lambda rows: pad(rows) if "labels" in rows[0] else mask_and_pad(rows),
        train_dataset=sentences.train_rows,
        eval_dataset=sentences.held_out_rows,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressBar)
    trainer.train()
    return trainer


# 3. What the models have learned


def fill_masks(model: Any, tokenizer: Any) -> list[list[str]]:
    """Return the best word and its score for each mask of each of PROMPTS."""
    fill: Callable[[str], Any] = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=1)
    return [[f"{best['token_str'].strip()} {best['score']:.2f}" for (best,) in masks] for masks in map(fill, PROMPTS)]


def print_table(rows: list[list[str]]) -> None:
    print(DataFrame(rows).to_string(index=False, header=False), end="\n\n")


def print_accuracy(results: dict[str, Any]) -> None:
    """Print each model's accuracy by position, and that of always predicting the most frequent token.

    Args:
        results: by model, as `Trainer.predict` returns them.
    """
    labels = next(iter(results.values())).label_ids  # [rows, tokens]
    masked = labels != IGNORED
    most_frequent = np.bincount(labels[masked]).argmax()
    positions = np.broadcast_to(np.arange(labels.shape[1]), labels.shape)
    groups = [masked & (positions >= first) & (positions <= last) for first, last in POSITION_RANGES] + [masked]
    table = [["position", *(f"{first}-{last}" for first, last in POSITION_RANGES), "all", "loss"]]
    for name, (predictions, _, metrics) in {"most frequent": (most_frequent, None, None), **results}.items():
        right = predictions == labels
        accuracies = [f"{right[group].mean():.1%}" if group.any() else "-" for group in groups]
        table.append([name, *accuracies, f"{metrics['test_loss']:.3f}" if metrics else ""])
    print_table(table)


def plot_losses(trainers: dict[str, Trainer], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = {
        "loss": f"Training: {MASK_PROBABILITY:.0%} of the tokens masked",
        "eval_loss": "Held out: every noun masked",
    }
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for (name, trainer), color in zip(trainers.items(), ["tab:orange", "tab:blue"], strict=True):
            curve = [(entry["step"], entry[key]) for entry in trainer.state.log_history if key in entry]
            axes.plot(*zip(*curve, strict=True), color=color, label=name)
        axes.set(title=title, xlabel="step", ylabel="masked-language-model loss (nats)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("The same model with and without the enhanced mask decoder (EMD)")
    figure.savefig(path, dpi=120)


# 4. The demo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output = Path("demo_output/mask_decoder")
    parser.add_argument("--output_dir", type=Path, default=output, help="for the results (default: %(default)s)")
    parser.add_argument("--steps", type=parse_size, default=600, help="of training each model (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of the sentences and models (default: 0)")


def print_made_up_language(sentences: Sentences) -> None:
    print('\nA made-up language: a noun is "store" at an odd position in its sentence and "mall" at an even one.')
    print("The number of adverbs before it is random, so only its absolute position determines it:\n")
    for row in sentences.train_rows[:3]:
        print(f"  {sentences.tokenizer.decode(row['input_ids'], skip_special_tokens=True)}")
    print("\nRelative attention distinguishes only the nearest one or two words from distant ones here, so it")
    print("cannot count from the start. The enhanced mask decoder (EMD) adds the absolute position just before")
    print("the prediction.")


def main(args: argparse.Namespace) -> None:
    """Train both models, and print what they have learned."""
    torch.set_num_threads(max(1, min(4, torch.get_num_threads() // 2)))  # the models are too small for more
    sentences = made_up_sentences(args.seed)
    with input_errors("--output_dir", OSError):
        args.output_dir.mkdir(parents=True, exist_ok=True)

    print_made_up_language(sentences)
    print(f"\n{len(sentences.train_rows):,} rows to train on, {len(sentences.held_out_rows):,} held out; ", end="")
    print(f"vocabulary of {len(sentences.tokenizer):,}")

    tokenizer = sentences.tokenizer
    variants = {name: make_model(tokenizer, steps, args.seed) for name, steps in EMD_STEPS.items()}
    answers = {"before training": fill_masks(variants["without EMD"], tokenizer)}
    trainers, results = {}, {}
    for name, model in variants.items():
        print(f"\nPretraining {name} ({model.num_parameters():,} parameters)", flush=True)
        trainers[name] = pretrain(model, sentences, args.steps, args.output_dir, args.seed)
        results[name] = trainers[name].predict(sentences.held_out_rows)  # type: ignore[arg-type]  # a list works too
        answers[name] = fill_masks(model, tokenizer)

    print("\nHeld-out rows, every noun masked: accuracy by position, and loss\n")
    print_accuracy(results)
    print('Fill-mask, with the standard pipeline("fill-mask"): the best word at each mask, and its score\n')
    for i, prompt in enumerate(PROMPTS):
        print(f"  {prompt}")
        print_table([["right answer", *right_nouns(prompt)], *([name, *words[i]] for name, words in answers.items())])

    picture, folder = args.output_dir / "loss_curves.png", args.output_dir / "model"
    plot_losses(trainers, picture)
    variants["with EMD"].save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"Loss curves: {picture}")
    print(f"The model with EMD, for AutoModelForMaskedLM and AutoTokenizer: {folder}")
