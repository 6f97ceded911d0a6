r"""Fine-tune on multiple choice: RACE, SWAG, aNLI (abductive), or your own questions in the format of any of them.

RACE, from a model fine-tuned on MNLI as in the paper:

    hf-deberta race --intermediate my-deberta-mnli --task_name race --output_dir race

The official release of RACE, or your own rows (article, question, options, answer; or sent1, sent2, ending0, ending1,
..., label), on several GPUs, with SiFT:

    accelerate launch -m hf_deberta.commands.race \
        --model_name_or_path microsoft/deberta-v3-large --data_dir RACE --bf16 --sift \
        --output_dir race

A demonstration on made-up rows, offline:

    hf-deberta race --demo

aNLI, from the official files train.jsonl, train-labels.lst, dev.jsonl and so on; the submission is anli.lst:

    hf-deberta race --intermediate my-deberta-mnli --task_name anli --data_dir alphanli --output_dir anli

Repeat the command to resume an interrupted run; --demo starts over. The flags are those of Transformers'
run_swag.py, and the groups below.
"""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset
from scipy.special import softmax
from transformers import AutoModelForMultipleChoice, EvalPrediction, set_seed
from transformers.utils import logging

from hf_deberta import HfDebertaForMultipleChoice
from hf_deberta.demos.race import write_race_demo
from hf_deberta.fine_tuning.arguments import FineTuningArguments, run_script
from hf_deberta.fine_tuning.ensemble import EnsembleTask, Scores, label_logits, label_scores
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments, hash_rows, read_splits, require_plain_splits
from hf_deberta.fine_tuning.task_model import ModelArguments, load_model, load_tokenizer, max_input_length
from hf_deberta.fine_tuning.tasks import race
from hf_deberta.fine_tuning.trainer import (
    FineTuningTrainer,
    logits_of,
    over_seeds,
    save_prediction_metrics,
    scored_splits,
    train_and_evaluate,
    write_card_and_push,
)
from hf_deberta.metrics import compute_metric
from hf_deberta.runs.errors import InputError

HUB_NAMES = {
    "race": ("ehovy/race", "all"),
    "race_middle": ("ehovy/race", "middle"),
    "race_high": ("ehovy/race", "high"),
    "swag": ("allenai/swag", "regular"),
    "anli": ("allenai/art", "anli"),
}
RELEASE_FOLDERS = {"train": "train", "validation": "dev", "test": "test"}  # of RACE, each with middle/ and high/

logger = logging.get_logger(__name__)


@dataclass
class ChoiceArguments(DataArguments):
    """Which questions, and how a question and an option are joined."""

    task_name: str | None = field(
        default=None, metadata={"help": f"One of {', '.join(HUB_NAMES)}. Leave it out for your own rows."}
    )
    fill_blanks: bool = field(
        default=False,
        metadata={"help": "Put each option into the blank (_) of its question, not behind the question."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.task_name = normalized_name(self.task_name)
        if self.task_name is not None and self.task_name not in HUB_NAMES:
            raise InputError(f"--task_name must be one of {', '.join(HUB_NAMES)}, not {self.task_name!r}")
        folder = Path(self.data_dir or ".")
        if self.data_dir and all((folder / name).is_dir() for name in RELEASE_FOLDERS.values()):
            level = (self.task_name or "").partition("_")[2]
            for split, name in RELEASE_FOLDERS.items():
                if getattr(self, f"{split}_file") is None:
                    setattr(self, f"{split}_file", str(folder / name / level))
            self.data_dir = None


def normalized_name(task_name: str | None) -> str | None:
    return None if task_name is None else task_name.lower().replace("-", "_")


def recipe_task(flags: Namespace) -> str:
    return (normalized_name(flags.task_name) or "own").partition("_")[0]


def main() -> None:
    argument_classes = (ModelArguments, ChoiceArguments, SiftArguments, FineTuningArguments)
    run_script(argument_classes, fine_tune, recipe_task, write_race_demo)


def fine_tune(
    model_args: ModelArguments, data_args: ChoiceArguments, sift_args: SiftArguments, args: FineTuningArguments
) -> None:
    # 1. Questions
    hub = HUB_NAMES[data_args.task_name] if data_args.task_name else None
    splits = read_splits(data_args, hub, race.read_choices, model_args.download_options())
    args.drop_missing_splits(require_plain_splits(splits))
    args.row_hashes = hash_rows(splits, "answer", "label")
    rows = {
        split: race.choice_rows(raw, split, with_labels=split != "test", fill_blanks=data_args.fill_blanks)
        for split, raw in splits.items()
    }
    args.set_best_metric(["accuracy"])

    # 2. Training, evaluation and predictions, once per seed
    over_seeds(
        args,
        lambda seed_args: run(model_args, data_args, sift_args, seed_args, rows),
        ensemble_task(data_args, args, rows),
    )


def ensemble_task(data_args: ChoiceArguments, args: FineTuningArguments, rows: dict[str, Dataset]) -> EnsembleTask:
    """How to score and write the predictions of an ensemble."""

    def metrics(split: str, scores: Scores) -> dict[str, float] | None:
        if "label" not in rows[split].column_names:
            return None
        return choice_scores(label_logits(scores, race.choice_names(rows[split])), rows[split])

    def write(folder: Path, split: str, scores: Scores) -> None:
        logits = label_logits(scores, race.choice_names(rows[split]))
        race.write_choice_predictions(folder, rows[split], logits, is_anli=data_args.task_name == "anli")

    return EnsembleTask(scored_splits(rows, args), metrics, write, args.row_hashes)


def run(
    model_args: ModelArguments,
    data_args: ChoiceArguments,
    sift_args: SiftArguments,
    args: FineTuningArguments,
    rows: dict[str, Dataset],
) -> dict[str, float]:
    # 1. Tokenizer and model
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    model = load_model(model_args, HfDebertaForMultipleChoice, AutoModelForMultipleChoice, do_train=args.do_train)

    # 2. One model input per choice
    length = max_input_length(data_args.max_seq_length, tokenizer, model.config, default=256)
    with args.main_process_first(desc="tokenizing"):
        inputs = {
            split: race.encode_choices(split_rows, tokenizer, length, data_args.map_options(f"tokenizing {split}"))
            for split, split_rows in rows.items()
        }

    def compute_metrics(split: str, prediction: EvalPrediction) -> dict[str, float]:
        return choice_scores(logits_of(prediction.predictions), rows[split])

    # 3. Training and evaluation
    trainer = FineTuningTrainer(
        model=model,
        args=args,
        sift=sift_args,
        splits=inputs,
        metrics=compute_metrics,
        scores=lambda split, predictions: label_scores(
            softmax(logits_of(predictions).astype(np.float64), -1), race.choice_names(rows[split])
        ),
        processing_class=tokenizer,
        data_collator=race.ChoiceCollator(tokenizer, **data_args.padding_options(length, args)),
        card_fields=data_args.card_fields(model_args.checkpoint, model_args.demo),
    )
    metrics = train_and_evaluate(trainer)

    # 4. Predictions for the test questions, and their accuracy if the rows have answers
    if args.do_predict:
        logits = logits_of(trainer.predict_split("test", "predict", without=["labels"]).predictions)
        if trainer.is_world_process_zero():
            race.write_choice_predictions(args.output_folder, rows["test"], logits, data_args.task_name == "anli")
        if "label" in rows["test"].column_names:
            scores = choice_scores(logits, rows["test"])
            save_prediction_metrics(trainer, "predict", {f"predict_{name}": score for name, score in scores.items()})
    write_card_and_push(trainer)
    return metrics


def choice_scores(logits: np.ndarray, rows: Dataset) -> dict[str, float]:
    """Accuracy of the choices with the highest logit, also by level of RACE."""
    inputs = {"predictions": logits.argmax(-1), "references": rows["label"][:], "ids": rows["id"][:]}
    return compute_metric("multiple_choice", "race", **inputs)


if __name__ == "__main__":
    main()
