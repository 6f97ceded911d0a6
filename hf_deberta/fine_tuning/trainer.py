"""The trainer of the fine-tuning scripts: metrics and files of predictions per split."""

from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, EvalPrediction, PreTrainedModel
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging

from hf_deberta import HfDebertaForEntityChoice
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.sift import SiftTrainer, answer_labels, share_of_batch
from hf_deberta.fine_tuning.task import Task, input_lengths, is_validation, logits_of
from hf_deberta.training.checkpoints import has_stopped_early
from hf_deberta.training.errors import InputError
from hf_deberta.training.row_order import RowOrder
from hf_deberta.training.run_identity import content_hash
from hf_deberta.training.run_trainer import RunTrainer

TIMINGS = ("runtime", "per_second", "preparation_time")  # parts of the names of metrics that measure time

logger = logging.get_logger(__name__)


class FineTuningTrainer(RunTrainer, SiftTrainer):
    """`RunTrainer` with SiFT, and with metrics and files of predictions per split.

    With `train_sampling_strategy="group_by_length"`, inputs of similar length share a batch. Predictions stay in the
    order of the rows.

    Args:
        splits: inputs by split; training and evaluation data come from here.
        task: makes metrics and files from predictions; None to compute the loss alone.
    """

    args: FineTuningArguments
    model: PreTrainedModel

    def __init__(
        self,
        *args: Any,
        splits: dict[str, Dataset] | None = None,
        task: Task | None = None,
        **kwargs: Any,
    ) -> None:
        self.splits, self.task = splits or {}, task
        self.validation_splits = validation_splits(self.splits)
        self.scored_split = self.validation_splits.get("", "")
        if splits is not None:
            kwargs |= {"train_dataset": splits.get("train"), "eval_dataset": splits.get(self.scored_split)}
        self.predictions: Any = None  # of the last evaluation, as `Task.read_outputs` returns it
        if task is not None:
            kwargs |= {"compute_metrics": self.compute_split_metrics}
            kwargs |= {"preprocess_logits_for_metrics": task.preprocess_logits}
        super().__init__(*args, **kwargs)
        check_label_smoothing(self)
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))

    def reason_against_graphs(self) -> str | None:
        return "--sift" if self.sift is not None else super().reason_against_graphs()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weight the mean of these rows, which BERT and others return: they take num_items_in_batch and ignore it."""
        if num_items_in_batch is None or "num_items_in_batch" in signature(self.model.forward).parameters:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, dict(inputs), True)
        loss = loss * share_of_batch(inputs, num_items_in_batch)
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # as Trainer does: gradients are averaged
        return (loss, outputs) if return_outputs else loss

    def compute_split_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        predictions = self.read_predictions(prediction.predictions)
        if not self.is_in_train:
            self.predictions = predictions  # for the files
        return self.task.metrics(self.scored_split, predictions) if self.task is not None else {}

    def read_predictions(self, outputs: Any) -> Any:
        """Return the predictions for all rows of the split from the model's outputs."""
        rows, number = len(self.splits[self.scored_split]), len(logits_of(outputs))
        if number != rows:
            raise ValueError(f"there are {number:,} predictions for the {rows:,} rows of {self.scored_split}")
        return self.task and self.task.read_outputs(self.scored_split, outputs, self.splits[self.scored_split])

    def train_and_evaluate(self) -> dict[str, float]:
        """Train, resuming an interrupted run, then evaluate the model that is kept; its metrics."""
        if self.args.do_train and self.train_or_resume():
            self.save_state()
        if self.args.do_train and has_stopped_early(self.state):
            self.log_early_stop()
        metrics = {}
        if self.args.do_eval:
            for suffix, split in self.validation_splits.items():
                for name, value in self.evaluate_split(split).items():
                    if not suffix or not any(part in name for part in (*TIMINGS, "epoch")):
                        metrics[f"{name}{suffix}"] = value
            self.log_metrics("eval", metrics)
            self.save_metrics("eval", metrics)
        return metrics

    def log_early_stop(self) -> None:
        """Log at which step training stopped early, why, and which checkpoint is the best."""
        state, patience = self.state, self.args.early_stopping_patience
        kept = "it is the model" if self.args.load_best_model_at_end else "the model is that of the last step"
        logger.info(
            f"Stopped early at step {state.global_step:,} of {state.max_steps:,}: {self.args.best_metric} has not "
            f"improved in {patience} evaluation{'s' * (patience != 1)} (--early_stopping_patience). The best "
            f"checkpoint is that of step {state.best_global_step:,}, with {state.best_metric:.4g}: {kept}."
        )

    def evaluate_split(self, split: str) -> dict[str, float]:
        self.scored_split = split
        metrics = self.evaluate(self.splits[split])
        self.write_predictions(split)
        return metrics

    def predict_split(self, split: str) -> dict[str, float]:
        """Write the predictions of a split; return its metrics, and write them too, if it has labels."""
        self.scored_split, rows, prefix = split, self.splits[split], split.replace("test", "predict", 1)
        labelled = self.task is not None and self.task.has_labels(split)
        hidden = [] if labelled else [name for name in self.label_names if name in rows.column_names]
        output = self.predict(rows.remove_columns(hidden), metric_key_prefix=prefix)
        metrics = output.metrics or {}
        if labelled:
            self.log_metrics(prefix, metrics)
            self.save_metrics(prefix, metrics)
        else:
            self.predictions = self.read_predictions(output.predictions)
        self.write_predictions(split)
        return metrics

    def write_predictions(self, split: str) -> None:
        """Write the files of the last predictions."""
        is_written = self.task is not None and (self.task.writes_evaluations or not is_validation(split))
        if self.task is not None and is_written and self.is_world_process_zero():
            self.task.write_predictions(self.args.output_folder, split, self.predictions)
        self.predictions = None

    def identifying_settings(self) -> dict[str, Any]:
        rows: Any = self.train_dataset
        return {"batch": self.args.total_batch, "rows": len(rows), "hash of rows": content_hash(rows)}

    def make_row_order(self, rows: Any, seed: int) -> RowOrder:
        lengths = input_lengths(rows) if self.args.train_sampling_strategy == "group_by_length" else None
        return RowOrder(len(rows), seed, lengths, self.args.total_batch)

    def write_card_and_push(self) -> None:
        """Push the model with its card on request; otherwise write the card, unless the trained model has it."""
        card = self.args.output_folder / "README.md"  # `save_model` writes one that describes no training
        is_complete = card.exists() and "generated_from_trainer" in card.read_text("utf-8", "replace")
        if self.args.push_to_hub:
            self.push_to_hub()
        elif self.args.do_train and (self.trained or not is_complete):
            self.create_model_card()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count labels, or the answers to questions, for which Trainer would average the losses of micro-batches."""
        if not batch_samples or "start_positions" not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        positions = [{"labels": answer_labels(batch)} for batch in batch_samples]
        items = super()._get_num_items_in_batch(positions, device)
        return items if items is None else items / 2


def check_label_smoothing(trainer: FineTuningTrainer) -> None:
    """Refuse factors outside [0, 1), and labels that are no class numbers: Trainer would compute a wrong loss."""
    model, smoothing = trainer.model, trainer.args.label_smoothing_factor
    if not 0 <= smoothing < 1:
        raise InputError(f"--label_smoothing_factor must be at least 0 and below 1, not {smoothing:g}")
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
    counts_items = "num_items_in_batch" in signature(LabelSmoother.__call__).parameters  # from Transformers 5.15 on
    if smoothing and trainer.args.gradient_accumulation_steps > 1 and not counts_items:
        raise InputError(
            "--label_smoothing_factor with --gradient_accumulation_steps needs Transformers 5.15 or later: older ones "
            "add up the losses of the steps; upgrade, or take larger batches"
        )


def validation_splits(splits: Iterable[str]) -> dict[str, str]:
    """Validation splits by the suffix of their metrics: none for the main one, which is the first or `_matched`."""
    suffixes = {split.removeprefix("validation"): split for split in splits if is_validation(split)}
    main = next((suffix for suffix in ("", "_matched", *suffixes) if suffix in suffixes), None)
    return {"" if suffix == main else suffix: split for suffix, split in suffixes.items()}
