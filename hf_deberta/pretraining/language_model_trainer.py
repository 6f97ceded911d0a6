"""`Trainer` for masked, autoregressive and joint language modelling."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers.trainer_utils import EvalPrediction

from hf_deberta.model.losses import IGNORED, cross_entropy_per_item
from hf_deberta.pretraining.packing import TokenRows
from hf_deberta.pretraining.perplexity import perplexity_of_documents
from hf_deberta.pretraining.trainer import PretrainingTrainer
from hf_deberta.training.uneven_batches import IS_FILLER

LOSSES = {"mlm": ("masked",), "causal": ("causal",), "joint": ("masked", "causal")}


class LanguageModelTrainer(PretrainingTrainer):
    """Trains with the objective "mlm", "causal", or "joint": the sum of both losses on the same rows (DeBERTa-MT).

    Logs masked_accuracy or causal_accuracy, and perplexity, the exponential of a loss. Evaluation averages over all
    predicted tokens, independent of rows and batches, and computes logits at predicted positions only.

    >>> LanguageModelTrainer(model, arguments, RowCollator(0), rows, validation_rows, objective="mlm").train()

    Args:
        perplexity_stride: after training, evaluate with `perplexity_of_documents` too.
        text_sizes: for that, `Corpus.text_size` of "eval" and "test".
    """

    objective: str

    def __init__(
        self,
        *args: Any,
        objective: str = "mlm",
        perplexity_stride: int | None = None,
        text_sizes: Mapping[str, tuple[int, int]] | None = None,
        **kwargs: Any,
    ):
        self.objective, self.perplexity_stride, self.text_sizes = objective, perplexity_stride, text_sizes or {}
        kwargs.setdefault("compute_metrics", self.mean_metrics)
        super().__init__(*args, **kwargs)
        if objective == "joint":
            self.require_one_gpu_per_process("both objectives")
        self.counts = torch.zeros(2, dtype=torch.long, device=self.args.device)  # correct predictions, and all

    def inputs_per_loss(self, inputs: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
        """Return the model's inputs for each loss of the objective."""
        if self.objective != "joint":
            return {LOSSES[self.objective][0]: inputs}
        originals = torch.where(inputs["labels"] == IGNORED, inputs["input_ids"], inputs["labels"])
        positions = inputs.get("position_ids", torch.arange(originals.shape[1], device=originals.device))
        unpredicted = originals.eq(self.model.config.pad_token_id) | (positions == 0)  # and a document's first token
        labels = originals.masked_fill(unpredicted, IGNORED)
        causal = {"input_ids": originals, "labels": labels, "max_predictions_per_row": labels.shape[1]}
        return {"masked": {**inputs, "causal": False}, "causal": {**inputs, **causal}}

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the labels of each loss: a tensor [2] for the joint objective."""
        count: Callable[..., Any] = super()._get_num_items_in_batch
        if self.objective != "joint" or not batch_samples:
            return count(batch_samples, device)
        batches = [self.inputs_per_loss(batch) for batch in batch_samples]
        return torch.stack([count([batch[name] for batch in batches], device) for name in LOSSES["joint"]])

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs_per_loss = self.inputs_per_loss(inputs)
        items = num_items_in_batch.flatten() if self.objective == "joint" else [num_items_in_batch]
        compute: Callable[..., Any] = super().compute_loss
        results = [
            compute(model, loss_inputs, True, number)
            for loss_inputs, number in zip(inputs_per_loss.values(), items, strict=True)
        ]
        loss, outputs = sum(loss for loss, _ in results), results[0][1]
        predictions, labels = outputs.predictions, outputs.labels
        if predictions is None:  # a compiled graph returned logits at all positions
            labels = predicted_labels(*next(iter(inputs_per_loss.items())))
            predictions = outputs.logits.argmax(-1)
        if IS_FILLER not in inputs:
            self.counts += torch.stack([(predictions == labels).sum(), (labels != IGNORED).sum()])
        return (loss, outputs) if return_outputs else loss

    def step_statistics(self) -> Iterable[torch.Tensor]:
        return (self.counts,)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            if self.objective != "joint":
                logs["perplexity"] = math.exp(min(logs["loss"], 700))
            correct, number = self.accelerator.reduce(self.counts.float(), "sum").tolist()
            self.counts.zero_()
            if number:
                logs[f"{LOSSES[self.objective][0]}_accuracy"] = correct / number
        super().log(logs, start_time)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Return sums per row, [B, 3 per loss]: the loss, correct predictions, predictions."""
        inputs, sums = self._prepare_inputs(inputs), []
        for name, loss_inputs in self.inputs_per_loss(inputs).items():
            loss_inputs = {**loss_inputs, "max_predictions_per_row": None}  # below, the host reads the labels anyway
            with torch.no_grad(), self.compute_loss_context_manager():
                outputs = model(**loss_inputs, sparse_prediction=True)
            labels = predicted_labels(name, loss_inputs)
            labelled = labels != IGNORED
            predictions, losses = outputs.predictions, outputs.losses
            if predictions is None:  # a compiled graph returned logits at all positions
                logits = outputs.logits[labelled]
                predictions, losses = logits.argmax(-1), cross_entropy_per_item(logits, labels[labelled])
            correct = (predictions == labels[labelled]).float()
            values = torch.stack([losses.float(), correct, torch.ones_like(correct)], dim=1)
            row = labelled.nonzero()[:, 0]
            sums.append(values.new_zeros(labels.shape[0], 3).index_add(0, row, values))
        row_sums = torch.cat(sums, dim=1)
        return None, row_sums, row_sums

    def final_metrics(self, name: str, rows: TokenRows) -> dict[str, float]:
        if self.perplexity_stride is None:
            return {}
        return perplexity_of_documents(self.model, rows, self.perplexity_stride, *self.text_sizes[name])

    def operations(self, tokens: float, predictions: float) -> float:
        """A joint step makes two passes; the causal one predicts nearly all tokens."""
        causal = super().operations(tokens, tokens) if self.objective == "joint" else 0
        return super().operations(tokens, predictions) + causal

    def mean_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Average the sums of `prediction_step` over all predicted tokens."""
        sums = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
        metrics = {"loss": 0.0}
        for name, (loss, correct, number) in zip(LOSSES[self.objective], sums.reshape(-1, 3), strict=True):
            prefix = "causal_" if self.objective == "joint" and name == "causal" else ""
            number = max(number, 1)
            metrics["loss"] += loss / number
            metrics |= {f"{name}_accuracy": correct / number, f"{prefix}perplexity": math.exp(min(loss / number, 700))}
        return metrics


def predicted_labels(name: str, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the label that each position [B, N] predicts: its own, or with "causal" that of the next token."""
    labels = inputs["labels"]
    return labels if name == "masked" else functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
