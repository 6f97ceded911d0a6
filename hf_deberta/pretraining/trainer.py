"""The trainer of pretraining on rows of a corpus: their order, throughput, and the evaluations at the end."""

import math
from functools import cached_property
from typing import Any, cast

from hf_deberta.pretraining.packing import TokenRows
from hf_deberta.pretraining.throughput import ThroughputMeter, peak_operations, training_operations
from hf_deberta.training.errors import InputError
from hf_deberta.training.run_trainer import RunTrainer


class PretrainingTrainer(RunTrainer):
    """Trains on `packing.TokenRows`, in an order that depends on seed and epoch alone.

    Logs, in addition to `Trainer`: tokens_per_second, the real tokens of all processes, and, with bf16 or fp16 on a GPU
    whose peak is known, mfu, the share of that peak that they amount to. Evaluating and saving do not count as time.

    Args:
        test_dataset: rows that are evaluated once, at the end.
    """

    may_grow = ("steps",)
    train_dataset: Any  # TokenRows

    def __init__(self, *args: Any, test_dataset: TokenRows | None = None, **kwargs: Any):
        kwargs.setdefault("card_fields", {"data": "text"})
        super().__init__(*args, **kwargs)
        self.test_dataset = test_dataset
        self.meter = ThroughputMeter(self.model.config.pad_token_id)
        self.add_callback(self.meter)

    @cached_property
    def context_length(self) -> float:
        """The mean length of a token's document, for mfu."""
        return self.train_dataset.mean_context_length()

    def require_one_gpu_per_process(self, trained: str) -> None:
        if self.args.n_gpu > 1:
            raise InputError(
                f"one process cannot train {trained} on {self.args.n_gpu} GPUs: start one process per GPU with "
                "accelerate launch or torchrun, or select one GPU with CUDA_VISIBLE_DEVICES"
            )

    def train_and_evaluate(self) -> None:
        """Train or resume, evaluate, and write the model card: all that a script does with its trainer."""
        saved = self.args.do_train and self.train_or_resume()
        for name, rows in (("eval", self.eval_dataset), ("test", self.test_dataset)):
            if self.args.do_eval and rows is not None:
                metrics = self.evaluate(rows, metric_key_prefix=name)
                metrics |= {
                    f"{name}_{key}": value for key, value in self.final_metrics(name, cast(TokenRows, rows)).items()
                }
                self.log_metrics(name, metrics)
                self.save_metrics(name, metrics)
        if saved:
            self.create_model_card()
            self.save_state()  # with the metrics of the evaluation
        if self.args.push_to_hub:
            self.push_to_hub()

    def final_metrics(self, name: str, rows: TokenRows) -> dict[str, float]:
        """Return what only the evaluation after training computes; `name` is "eval" or "test"."""
        return {}

    def identifying_settings(self) -> dict[str, Any]:
        batch = self.args.total_batch
        rows: TokenRows = self.train_dataset
        steps_of_epochs = math.ceil(self.args.num_train_epochs * len(rows) / batch)
        steps = self.args.max_steps if self.args.max_steps > 0 else steps_of_epochs
        return {"text": rows.tokens.about.get("fingerprint"), "batch": batch, "steps": steps}

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches, items = super().get_batch_samples(*args, **kwargs)
        for batch in batches:
            self.meter.add(batch)
        return batches, items

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs and not self.trained:  # means over no step
            if not any("train_runtime" in entry for entry in self.state.log_history):  # the model card looks for it
                self.state.log_history.append({"train_runtime": 0.0, "step": self.state.global_step})
            return
        if "loss" in logs:
            logs |= self.throughput()
        super().log(logs, start_time)

    def throughput(self) -> dict[str, float]:
        """Return tokens_per_second and mfu since the last call; no mfu without a known peak, or in float32."""
        seconds, counts = self.meter.read_and_reset()
        tokens, predictions = self.accelerator.reduce(counts.to(self.args.device), "sum").tolist()
        speed = {"tokens_per_second": round(tokens / seconds, 1)}
        peak = peak_operations(self.args.device) if self.args.bf16 or self.args.fp16 else None
        if peak is not None:
            devices = self.args.world_size * max(self.args.n_gpu, 1)
            speed["mfu"] = round(self.operations(tokens, predictions) / seconds / (peak * devices), 4)
        return speed

    def operations(self, tokens: float, predictions: float) -> float:
        """Return the operations of training on so many tokens, so many of them with a label."""
        return training_operations(self.model.config, tokens, self.context_length, predictions)
