"""`Trainer` for pretraining on rows of a corpus: order, masks and numbers of such a run."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers.trainer_utils import EvalPrediction

from hf_deberta.batch_loss import IGNORED
from hf_deberta.training.model_card import write_training_card
from hf_deberta.training.packing import EpochSampler
from hf_deberta.training.throughput import peak_operations, training_operations
from hf_deberta.training.whole_checkpoints import WholeCheckpoints


class PretrainingTrainer(WholeCheckpoints):
    """Trains a masked-language model, or with `objective` "causal" or "joint" an autoregressive one, on `Rows`.

    Besides loss and learning rate it logs masked_accuracy, perplexity, tokens_per_second and mfu: real tokens of all
    processes, and the share of the devices' peak that their work is. Evaluation weighs every predicted token alike.

    Args:
        context: tokens of the document that a token stands in, on average, for mfu.
        objective: "mlm", "causal", or "joint" (DeBERTa-MT): the sum of both losses on the same rows.
        about: what the model card says, see `model_card.write_training_card`.
    """

    def __init__(self, *args, context: float = 0.0, objective: str = "mlm", about: dict | None = None, **kwargs):
        kwargs.setdefault("compute_metrics", self.mean_over_tokens)
        super().__init__(*args, **kwargs)
        self.context, self.objective, self.about = context, objective, about or {"data": "text"}
        self.window = Window()
        self.peak = None

    def _get_train_sampler(self, train_dataset=None) -> EpochSampler:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSampler(len(dataset), seed)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.window.add(inputs, outputs, self.model.config.pad_token_id, self.objective)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Sums of each row [B, 3]: loss, right predictions, predictions. No logits of all positions are made."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs, sparse_prediction=True)
        labels = self.predicted_labels(inputs)
        row = (labels != IGNORED).nonzero()[:, 0]
        right = (outputs.predictions == labels[labels != IGNORED]).float()
        found = torch.stack([outputs.losses.float(), right, torch.ones_like(right)], dim=1)
        sums = found.new_zeros(labels.shape[0], 3).index_add(0, row, found)
        return None, sums, sums

    def predicted_labels(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["labels"]

    @staticmethod
    def mean_over_tokens(prediction: EvalPrediction) -> dict[str, float]:
        loss, right, number = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
        number = max(number, 1)
        return {"loss": loss / number, "masked_accuracy": right / number, "perplexity": perplexity(loss / number)}

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        with self.window.paused():
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        with self.window.paused():
            super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.window_numbers(logs["loss"])
        super().log(logs, start_time)

    def window_numbers(self, loss: float) -> dict[str, float]:
        """Of the time since the last log."""
        if self.peak is None:
            self.peak = peak_operations(self.args.device, self.computing_dtype())
        right, predicted, tokens = self.accelerator.reduce(self.window.sums.to(self.args.device), "sum").tolist()
        seconds = self.window.close()
        work = training_operations(self.model.config, tokens, self.context, predicted)
        numbers = {"perplexity": perplexity(loss), "tokens_per_second": round(tokens / seconds, 1)}
        if predicted:
            numbers["masked_accuracy"] = right / predicted
        return {**numbers, "mfu": round(work / seconds / (self.peak * self.args.world_size), 4)}

    def create_model_card(self, **about) -> None:
        write_training_card(self, **{**self.about, **about})

    def computing_dtype(self) -> torch.dtype:
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else self.model.dtype


class Window:
    """What happened since the last log: sums [3] of right predictions, predictions and real tokens, and the time."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, inputs: dict, outputs, padding: int | None, objective: str) -> None:
        ids, labels = inputs["input_ids"], inputs["labels"]
        labels = labels[labels != IGNORED]
        predictions = getattr(outputs, "predictions", None)
        right = labels.new_zeros(()) if predictions is None else (predictions == labels).sum()
        found = torch.stack([right, torch.tensor(labels.numel(), device=ids.device), (ids != padding).sum()])
        self.sums = self.sums.to(found.device) + found

    def close(self) -> float:
        """Seconds of the window; the next begins."""
        now = time.perf_counter()
        seconds, self.began = now - self.began, now
        self.sums = torch.zeros_like(self.sums)
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not the window's."""
        entered = time.perf_counter()
        yield
        self.began += time.perf_counter() - entered


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else float("inf")
