"""The trainer of the fine-tuning scripts, training and evaluation of one run, and runs over several seeds.

A script loads rows, tokenizer and model, creates a `FineTuningTrainer`, calls `train_and_evaluate`, predicts the test
rows, and ends with `write_card_and_push`. `over_seeds` does this once or with several seeds.
"""

import copy
import gc
import shutil
from collections.abc import Callable, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from torch.utils.data import Sampler, SequentialSampler
from transformers import EarlyStoppingCallback, EvalPrediction, PreTrainedModel
from transformers.trainer_utils import PredictionOutput
from transformers.utils import logging

from hf_deberta import HfDebertaForEntityChoice
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.ensemble import EnsembleTask, Scores, write_ensemble, write_scores
from hf_deberta.fine_tuning.sift import SiftTrainer, answer_labels
from hf_deberta.runs.checkpoints import (
    TRAINER_STATE_NAME,
    AtomicCheckpointsMixin,
    RunEnd,
    inspect_finished_run,
    last_checkpoint,
    require_checkpoint,
)
from hf_deberta.runs.errors import InputError
from hf_deberta.runs.finite_values import FiniteValuesMixin
from hf_deberta.runs.json_files import atomic_write, write_json
from hf_deberta.runs.model_card import write_training_card
from hf_deberta.runs.real_tokens import RealTokensMixin
from hf_deberta.runs.row_order import RowOrder, SetEpochCallback
from hf_deberta.runs.run_identity import claim_folder, compare_with_recorded_run, content_hash
from hf_deberta.runs.run_lock import lock_folder
from hf_deberta.runs.uneven_batches import UnevenBatchesMixin

TIMINGS = ("runtime", "per_second", "preparation_time")  # parts of the names of metrics that measure time

logger = logging.get_logger(__name__)


class FineTuningTrainer(FiniteValuesMixin, UnevenBatchesMixin, RealTokensMixin, SiftTrainer, AtomicCheckpointsMixin):
    """`Trainer` with SiFT, atomic checkpoints, metrics per split, a model card, and an exactly resumable row order.

    With `train_sampling_strategy="group_by_length"`, inputs of similar length share a batch. Predictions stay in the
    order of the rows.

    Args:
        splits: inputs by split; training and evaluation data come from here.
        metrics: called with the name of a split and its predictions.
        scores: called with the name of a split and its predictions (without labels); the scores for an ensemble, which
            are written to `output_dir`.
        card_fields: arguments of `model_card.write_training_card`.
    """

    args: FineTuningArguments
    model: PreTrainedModel

    def __init__(
        self,
        *args: Any,
        splits: dict[str, Dataset] | None = None,
        metrics: Callable[[str, EvalPrediction], dict[str, float]] | None = None,
        scores: Callable[[str, Any], Scores] | None = None,
        card_fields: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.splits, self.metrics = splits or {}, metrics
        self.validation_splits = validation_splits(self.splits)
        self.scored_split = self.validation_splits.get("", "")
        if splits is not None:
            kwargs |= {"train_dataset": splits.get("train"), "eval_dataset": splits.get(self.scored_split)}
        self.scores = scores
        self.predictions: Any = None
        if metrics is not None:
            kwargs["compute_metrics"] = self.compute_split_metrics
        super().__init__(*args, **kwargs)
        check_label_smoothing(self)
        if (fast := getattr(self.processing_class, "backend_tokenizer", None)) is not None:
            fast.no_truncation()  # which the rows have left in it, unless they came from a cache: it would be saved
        self.card_fields = card_fields or {"data": "task data"}
        self.order: RowOrder | None = None
        self.trained = False  # set by SetEpochCallback
        self.add_callback(SetEpochCallback(self))
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))

    def compute_split_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        self.require_all_rows(prediction.predictions)
        self.predictions = None if self.is_in_train else prediction.predictions  # for `evaluate_split`
        return self.metrics(self.scored_split, prediction) if self.metrics is not None else {}

    def require_all_rows(self, predictions: Any) -> None:
        """Require a prediction for each row, before a file of predictions is written."""
        rows, predicted = len(self.splits[self.scored_split]), len(logits_of(predictions))
        if predicted != rows:
            raise ValueError(f"there are {predicted:,} predictions for the {rows:,} rows of {self.scored_split}")

    def evaluate_split(self, split: str) -> dict[str, float]:
        self.scored_split = split
        metrics = self.evaluate(self.splits[split])
        self.write_scores(split, self.predictions)
        self.predictions = None
        return metrics

    def write_scores(self, split: str, predictions: Any) -> None:
        """Write what an ensemble needs of this run."""
        if self.scores is not None and self.is_world_process_zero():
            scores = self.scores(split, predictions)
            write_scores(self.args.output_folder, split, scores, self.args.row_hashes.get(split))

    def predict_split(self, split: str, prefix: str, without: Iterable[str] = ()) -> PredictionOutput:
        """Predictions of a split; their metrics too if it has labels and the columns `without` do not hold them."""
        self.scored_split = split
        columns = [name for name in without if name in self.splits[split].column_names]
        output = self.predict(self.splits[split].remove_columns(columns), metric_key_prefix=prefix)
        self.require_all_rows(output.predictions)
        self.predictions = None
        self.write_scores(split, output.predictions)
        return output

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        lengths = None
        if self.args.train_sampling_strategy == "group_by_length":
            # multiple choice: the longest choice
            lengths = [max(map(len, ids)) if isinstance(ids[0], list) else len(ids) for ids in rows["input_ids"]]
        self.order = RowOrder(len(rows), seed, lengths, self.args.total_batch)
        return self.order

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count labels, or the answers to questions, for which Trainer would average the losses of micro-batches."""
        if not batch_samples or "start_positions" not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        positions = [{"labels": answer_labels(batch)} for batch in batch_samples]
        items = super()._get_num_items_in_batch(positions, device)
        return items if items is None else items / 2

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        """Keep the order of the rows; Trainer would group evaluation rows by length too."""
        return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        warmup = self.args.get_warmup_steps(num_training_steps)
        if warmup >= num_training_steps:
            logger.warning(
                f"--warmup_steps {warmup} is not less than the {num_training_steps} steps of this run: the learning "
                "rate never reaches its value. --warmup_steps 0.1 warms up for a tenth of any run."
            )
        return super().create_scheduler(num_training_steps, optimizer)

    def load_finished_run(self) -> bool:
        """Load the model of `output_dir` if this run has finished there. A different run there is an error."""
        folder, rows = self.args.output_folder, cast(Dataset, self.train_dataset)
        settings = {"batch": self.args.total_batch, "rows": len(rows), "hash of rows": content_hash(rows)}
        same_run = claim_folder(self.args, settings)
        if same_run and self.args.resume_from_checkpoint is None:
            end, damage = inspect_finished_run(folder)
            if end is RunEnd.WHOLE:
                self.load_final_model()
                return True
            if end is RunEnd.DAMAGED:
                require_checkpoint(folder, damage)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            for path in (folder / TRAINER_STATE_NAME, folder / "README.md"):  # of an earlier run
                path.unlink(missing_ok=True)
        return False

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        write_training_card(self, **self.card_fields)


def holds_finished_run(args: FineTuningArguments) -> bool:
    folder = args.output_folder
    return (folder / TRAINER_STATE_NAME).exists() and args.resume_from_checkpoint is None


def check_recorded_flags(args: FineTuningArguments) -> None:
    """Before a model is loaded: refuse other flags than those of the run in `output_dir`, and log if it has finished.

    `FineTuningTrainer.load_finished_run` compares the training rows and the starting weights too.
    """
    flags = {**args.identifying_flags, "seed": args.seed}
    if args.do_train and compare_with_recorded_run(args, flags) and holds_finished_run(args):
        logger.warning(
            f"{args.output_folder} holds the finished run; its model is loaded, not trained again, if the training "
            "rows and the starting weights are the same"
        )


def check_label_smoothing(trainer: FineTuningTrainer) -> None:
    """Refuse smoothing where labels are not class numbers: Trainer would compute a wrong loss."""
    model, smoothing = trainer.model, trainer.args.label_smoothing_factor
    not_classes = (
        getattr(model.config, "problem_type", None) in ("regression", "multi_label_classification")
        or isinstance(model, HfDebertaForEntityChoice)
        or trainer.label_names != ["labels"]
    )
    if smoothing and not_classes:
        raise InputError(
            f"--label_smoothing_factor {smoothing:g} needs one class as the label of each sequence, word or set of "
            "choices; leave it out for regression, multi-label classification, question answering and ReCoRD"
        )


def validation_splits(splits: Iterable[str]) -> dict[str, str]:
    """Validation splits by the suffix of their metrics: none for the main one, which is the first or `_matched`."""
    suffixes = {split.removeprefix("validation"): split for split in splits if split.startswith("validation")}
    main = next((suffix for suffix in ("", "_matched", *suffixes) if suffix in suffixes), None)
    return {"" if suffix == main else suffix: split for suffix, split in suffixes.items()}


def scored_splits(rows: Mapping[str, Sized], args: FineTuningArguments) -> dict[str, int]:
    """The numbers of rows of the splits that a run writes scores of.

    Those are validation splits if it evaluates, and all others but the training rows if it predicts.
    """
    others = {split: len(of_split) for split, of_split in rows.items() if split != "train"}
    actions = {split: args.do_eval if split.startswith("validation") else args.do_predict for split in others}
    return {split: number for split, number in others.items() if actions[split]}


def prediction_splits(splits: Iterable[str]) -> list[str]:
    return [split for split in splits if split.startswith("test")]


def logits_of(predictions: Any) -> Any:
    """The logits of a model that may return other outputs after them."""
    return predictions[0] if isinstance(predictions, tuple) else predictions


def train_and_evaluate(trainer: FineTuningTrainer) -> dict[str, float]:
    """Train, resuming an interrupted run, then evaluate the model that is kept; its metrics."""
    args, metrics = trainer.args, {}
    if args.do_train and not trainer.load_finished_run():
        result = trainer.train(resume_from_checkpoint=last_checkpoint(args))
        trainer.save_model()
        if trainer.trained:  # otherwise means over no step
            trainer.log_metrics("train", result.metrics)
            trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        for suffix, split in trainer.validation_splits.items():
            for name, value in trainer.evaluate_split(split).items():
                if not suffix or not any(part in name for part in (*TIMINGS, "epoch")):
                    metrics[f"{name}{suffix}"] = value
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    return metrics


def has_training_card(folder: Path) -> bool:
    """True if the model card describes a training; `save_model` writes one that does not."""
    card = folder / "README.md"
    return card.exists() and "generated_from_trainer" in card.read_text(encoding="utf-8")


def save_prediction_metrics(trainer: FineTuningTrainer, name: str, metrics: dict[str, float] | None) -> None:
    trainer.log_metrics(name, metrics or {})
    trainer.save_metrics(name, metrics or {})


def write_card_and_push(trainer: FineTuningTrainer) -> None:
    """Write the final model card, push to the Hub on request, and list the results in `output_dir`."""
    folder = trainer.args.output_folder
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    elif trainer.args.do_train and (trainer.trained or not has_training_card(folder)):
        trainer.create_model_card()
    if trainer.is_world_process_zero() and folder.is_dir():
        files = sorted(path.name for path in folder.iterdir() if is_result(path))
        logger.warning(f"Results in {folder}: {', '.join(files)}; also the model's source files (*.py) and checkpoints")


def is_result(path: Path) -> bool:
    return path.is_file() and path.suffix != ".py" and not path.name.startswith("_")


# Several seeds


def over_seeds(
    args: FineTuningArguments,
    run: Callable[[FineTuningArguments], dict[str, float]],
    ensemble: EnsembleTask | None = None,
) -> None:
    """Call `run` once, or with each of --num_seeds seeds in its own folder. Finished seeds are skipped.

    The best model is copied to --output_dir, next to `seeds.json`, and the ensemble of all seeds is written to the
    folder `ensemble`. With --ensemble, nothing is run: the ensemble of those folders is written to --output_dir.
    """
    if ensemble is not None and args.ensemble is not None:
        if args.should_save:
            write_ensemble(args.output_folder, {folder: Path(folder) for folder in args.ensemble}, ensemble)
        return destroy_process_group()
    if args.num_seeds == 1:
        check_recorded_flags(args)
        run(args)
        return destroy_process_group()
    metrics = {}
    for seed in range(args.seed, args.seed + args.num_seeds):
        seed_args = copy.copy(args)
        seed_args.seed, seed_args.output_dir = seed, str(args.output_folder / f"seed-{seed}")
        with lock_folder(seed_args.output_folder):
            check_recorded_flags(seed_args)
            metrics[seed] = run(seed_args)
        clear_device_cache(garbage_collection=True)  # a Trainer is part of a reference cycle, and holds its model
    if args.should_save and args.do_eval:
        keep_best_seed(args.output_folder, metrics, args.best_metric, bool(args.greater_is_better))
    if args.should_save and ensemble is not None and (args.do_eval or args.do_predict):
        seeds = {f"seed-{seed}": args.output_folder / f"seed-{seed}" for seed in metrics}
        write_ensemble(args.output_folder / "ensemble", seeds, ensemble)
    destroy_process_group()


def destroy_process_group() -> None:
    """End distributed training cleanly, after everything that uses the process group is freed."""
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


def keep_best_seed(folder: Path, metrics: dict[int, dict[str, float]], metric: str, greater_is_better: bool) -> None:
    """Print the statistics over seeds, write seeds.json, and copy the files of the best model to `folder`."""
    frame: Any = Dataset.from_list(list(metrics.values())).to_pandas()
    summary = frame.filter(regex="^eval_(?!.*({}))".format("|".join(TIMINGS))).agg(
        ["median", "mean", "std", "min", "max"]
    )
    print(f"\n{len(metrics)} seeds", summary.T.to_string(float_format="%.4f"), sep="\n")
    best = (max if greater_is_better else min)(metrics, key=lambda seed: metrics[seed][metric])
    for path in sorted((folder / f"seed-{best}").iterdir()):
        if path.is_file() and not path.name.startswith("_"):
            with atomic_write(folder / path.name) as unfinished:
                shutil.copyfile(path, unfinished)
                if path.name == "README.md":  # the card names its folder
                    text = unfinished.read_text(encoding="utf-8").replace(f"seed-{best}", folder.resolve().name)
                    unfinished.write_text(text, encoding="utf-8")
    write_json(folder / "seeds.json", {"seeds": metrics, **summary.to_dict(), "best_seed": best})
    print(f"{folder} holds the model of the best seed, {best}.")
