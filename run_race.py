"""Fine-tune on multiple choice: RACE, SWAG, or questions of your own in the form of either.

    python run_race.py --intermediate my-deberta-mnli --task_name race --output_dir race

The release of RACE, or your own rows (article, question, options, answer; or sent1, sent2, ending0, ending1, ...,
label), on several GPUs, with SiFT:

    accelerate launch run_race.py --model_name_or_path microsoft/deberta-v3-large --data_dir RACE --bf16 --sift \
        --output_dir race

See it work, offline: `python run_race.py --demo`. The same command goes on where it was stopped. Flags
are those of Transformers' `run_swag.py` and ours; --help lists all.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForMultipleChoice, EvalPrediction, set_seed
from transformers.utils import logging

from hf_deberta import HfDebertaForMultipleChoice
from hf_deberta.demos.race import write_race_demo
from hf_deberta.fine_tuning.arguments import FineTuningArguments, run_with_arguments
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments, one_of_each, read_splits
from hf_deberta.fine_tuning.task_model import ModelArguments, load_model, load_tokenizer, longest_input
from hf_deberta.fine_tuning.tasks import race
from hf_deberta.fine_tuning.trainer import FineTuningTrainer, over_seeds, train_and_evaluate, write_card_and_push

HUB = {
    "race": ("ehovy/race", "all"),
    "race_middle": ("ehovy/race", "middle"),
    "race_high": ("ehovy/race", "high"),
    "swag": ("allenai/swag", "regular"),
}
RELEASE = {"train": "train", "validation": "dev", "test": "test"}  # folders of RACE

logger = logging.get_logger("run_race")


@dataclass
class ChoiceArguments(DataArguments):
    """Which questions, and how they are put."""

    task_name: str | None = field(default=None, metadata={"help": f"One of {', '.join(HUB)}; else your own."})
    fill_blanks: bool = field(
        default=False,
        metadata={"help": "Put an option into the blank (_) of its question; else behind it, as DeBERTa's code does."},
    )

    def __post_init__(self) -> None:
        self.task_name = self.task_name and self.task_name.lower().replace("-", "_")
        if self.task_name is not None and self.task_name not in HUB:
            raise ValueError(f"--task_name is one of {', '.join(HUB)}, not {self.task_name!r}")
        folder = Path(self.data_dir or ".")
        if self.data_dir and all((folder / name).is_dir() for name in RELEASE.values()):
            level = (self.task_name or "").partition("_")[2]  # a folder in each
            for split, name in RELEASE.items():
                if getattr(self, f"{split}_file") is None:
                    setattr(self, f"{split}_file", str(folder / name / level))
            self.data_dir = None


def main() -> None:
    kinds = (ModelArguments, ChoiceArguments, SiftArguments, FineTuningArguments)
    run_with_arguments(kinds, lambda flags: (flags.task_name or "own").partition("_")[0], write_race_demo, fine_tune)


def fine_tune(
    model_args: ModelArguments, data_args: ChoiceArguments, sift_args: SiftArguments, args: FineTuningArguments
) -> None:
    # 1. The questions
    loading = model_args.downloads()
    splits = one_of_each(read_splits(data_args, HUB.get(data_args.task_name), race.read_choices, loading))
    args.drop_missing_splits(splits)
    splits = {
        split: race.choice_rows(rows, split, with_labels=split != "test", fill_blanks=data_args.fill_blanks)
        for split, rows in splits.items()
    }
    args.set_best_metric(["accuracy"])

    # 2. Fine-tuning, evaluation, predictions: with one seed or several
    over_seeds(args, lambda one: run(model_args, data_args, sift_args, one, splits))


def run(
    model_args: ModelArguments,
    data_args: ChoiceArguments,
    sift_args: SiftArguments,
    args: FineTuningArguments,
    splits: dict[str, Dataset],
) -> dict[str, float]:
    # 1. Model and tokenizer
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    model = load_model(model_args, HfDebertaForMultipleChoice, AutoModelForMultipleChoice)

    # 2. Each choice as an input
    length = longest_input(data_args, tokenizer, model.config, 256)
    with args.main_process_first(desc="tokenizing"):
        inputs = {
            split: race.encode_choices(rows, tokenizer, length, data_args.mapping(f"tokenizing {split}"))
            for split, rows in splits.items()
        }

    def metrics(found: EvalPrediction) -> dict[str, float]:
        return race.choice_scores(logits_of(found.predictions), found.label_ids, splits["validation"]["id"])

    # 3. Training and evaluation
    trainer = FineTuningTrainer(
        model=model,
        args=args,
        sift=sift_args,
        train_dataset=inputs.get("train"),
        eval_dataset=inputs.get("validation"),
        processing_class=tokenizer,
        data_collator=race.ChoiceCollator(
            tokenizer,
            padding="max_length" if data_args.pad_to_max_length else "longest",
            max_length=length if data_args.pad_to_max_length else None,
            pad_to_multiple_of=8 if args.fp16 or args.bf16 else None,
        ),
        compute_metrics=metrics,
        about={"data": data_args.source(model_args.demo), "base": model_args.start},
    )
    found = train_and_evaluate(trainer, {"": inputs["validation"]} if "validation" in inputs else {})

    # 4. Predictions of the test split, and its accuracy where it tells the answers
    if args.do_predict:
        rows = splits["test"]
        told = [name for name in ("labels",) if name in inputs["test"].column_names]
        logits = logits_of(trainer.predict(inputs["test"].remove_columns(told)).predictions)
        if trainer.is_world_process_zero():
            race.write_choice_predictions(Path(args.output_dir), rows, logits)
        if told:
            scores = race.choice_scores(logits, np.array(rows["label"]), rows["id"])
            results = {f"predict_{name}": value for name, value in scores.items()}
            trainer.log_metrics("predict", results)
            trainer.save_metrics("predict", results)
    write_card_and_push(trainer)
    return found


def logits_of(found: Any) -> np.ndarray:
    """[rows, choices]"""
    return found[0] if isinstance(found, tuple) else found


if __name__ == "__main__":
    main()
