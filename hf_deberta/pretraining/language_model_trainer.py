"""`Trainer` for masked, autoregressive and joint language modelling."""

import math

import numpy as np
import torch
from torch.nn import functional
from transformers.trainer_utils import EvalPrediction

from hf_deberta.model.batch_loss import IGNORED, cross_entropy_per_item
from hf_deberta.model.enhanced_mask_decoder import HfDebertaMaskedLMOutput
from hf_deberta.pretraining.trainer import PretrainingTrainer

PASSES = {"mlm": ("masked",), "causal": ("causal",), "joint": ("masked", "causal")}


class LanguageModelTrainer(PretrainingTrainer):
    """Trains by the objective "mlm", "causal", or "joint": the sum of both losses on the same rows (DeBERTa-MT).

    Logs masked_accuracy or causal_accuracy, and perplexity, the exponential of a loss. Evaluation weighs every
    predicted token alike, however rows and batches are cut, and makes no logits of all positions.

    >>> LanguageModelTrainer(model, arguments, RowCollator(0), rows, held_out_rows, objective="mlm").train()
    """

    def __init__(self, *args, objective: str = "mlm", **kwargs):
        if objective not in PASSES:
            raise ValueError(f"objective is one of {', '.join(PASSES)}, not {objective!r}")
        self.objective = objective
        kwargs.setdefault("compute_metrics", self.means)
        super().__init__(*args, **kwargs)
        if objective == "joint" and self.args.n_gpu > 1:
            raise ValueError(
                f"one process cannot train both objectives on {self.args.n_gpu} GPUs; start one for each with "
                "accelerate launch or torchrun, or show it one with CUDA_VISIBLE_DEVICES"
            )
        self.right: torch.Tensor | int = 0  # predictions since the last log, and how many there were
        self.predicted: torch.Tensor | int = 0

    def inputs_of_passes(self, inputs: dict[str, torch.Tensor]) -> dict[str, dict]:
        """What the model is given for each of the objective's losses."""
        if self.objective != "joint":
            return {PASSES[self.objective][0]: inputs}
        masked = {**inputs, "causal": False}
        originals = torch.where(inputs["labels"] == IGNORED, inputs["input_ids"], inputs["labels"])
        labels = originals.masked_fill(inputs["input_ids"] == self.model.config.pad_token_id, IGNORED)
        if "position_ids" in inputs:  # nothing predicts the first token of a document
            labels = labels.masked_fill(inputs["position_ids"] == 0, IGNORED)
        return {"masked": masked, "causal": {**inputs, "input_ids": originals, "labels": labels}}

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device):
        if self.objective != "joint" or not batch_samples:
            return super()._get_num_items_in_batch(batch_samples, device)
        passes = [self.inputs_of_passes(batch) for batch in batch_samples]
        return torch.stack(
            [
                super(LanguageModelTrainer, self)._get_num_items_in_batch([p[name] for p in passes], device)
                for name in PASSES["joint"]
            ]
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        passes = self.inputs_of_passes(inputs)
        items = num_items_in_batch.flatten() if self.objective == "joint" else [num_items_in_batch]
        compute = super().compute_loss
        found = [compute(model, given, True, number) for given, number in zip(passes.values(), items, strict=True)]
        loss, outputs = sum(loss for loss, _ in found), found[0][1]
        self._count(next(iter(passes.items())), outputs)
        return (loss, outputs) if return_outputs else loss

    def _count(self, given: tuple[str, dict], outputs) -> None:
        labels = predicted_labels(*given)
        right = predictions(outputs, labels) == labels[labels != IGNORED]
        self.right, self.predicted = self.right + right.sum(), self.predicted + right.numel()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            if self.objective != "joint":
                logs["perplexity"] = perplexity(logs["loss"])
            found = torch.tensor([float(self.right), float(self.predicted)], device=self.args.device)
            right, predicted = self.accelerator.reduce(found, "sum").tolist()
            self.right = self.predicted = 0
            if predicted:
                logs[f"{PASSES[self.objective][0]}_accuracy"] = right / predicted
        super().log(logs, start_time)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Sums of each row [B, 3 per pass]: loss, right predictions, predictions."""
        inputs, sums = self._prepare_inputs(inputs), []
        for name, given in self.inputs_of_passes(inputs).items():
            with torch.no_grad(), self.compute_loss_context_manager():
                outputs = model(**given, sparse_prediction=True)
            labels = predicted_labels(name, given)
            known = labels != IGNORED
            right = (predictions(outputs, labels) == labels[known]).float()
            losses = outputs.losses
            if losses is None:
                losses = cross_entropy_per_item(outputs.logits[known], labels[known])
            found = torch.stack([losses.float(), right, torch.ones_like(right)], dim=1)
            row = known.nonzero()[:, 0]
            sums.append(found.new_zeros(labels.shape[0], 3).index_add(0, row, found))
        sums = torch.cat(sums, dim=1)
        return None, sums, sums

    def operations(self, tokens: float, predicted: float) -> float:
        """A joint step is two; in the causal one, next to all tokens are predicted."""
        causal = super().operations(tokens, tokens) if self.objective == "joint" else 0
        return super().operations(tokens, predicted) + causal

    def means(self, prediction: EvalPrediction) -> dict[str, float]:
        """Over all predicted tokens."""
        sums = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
        metrics = {"loss": 0.0}
        for name, (loss, right, number) in zip(PASSES[self.objective], sums.reshape(-1, 3), strict=True):
            prefix = "causal_" if self.objective == "joint" and name == "causal" else ""
            number = max(number, 1)
            metrics["loss"] += loss / number
            metrics |= {f"{name}_accuracy": right / number, f"{prefix}perplexity": perplexity(loss / number)}
        return metrics


def predicted_labels(name: str, inputs: dict) -> torch.Tensor:
    """At each position [B, N] what it has to predict."""
    labels = inputs["labels"]
    return labels if name == "masked" else functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def predictions(outputs: HfDebertaMaskedLMOutput, labels: torch.Tensor) -> torch.Tensor:
    """Best words [M] where something is to be predicted; a compiled graph predicts at all positions."""
    return outputs.logits[labels != IGNORED].argmax(-1) if outputs.predictions is None else outputs.predictions


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else float("inf")
