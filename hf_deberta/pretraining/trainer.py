"""`Trainer` for pretraining on rows of a corpus: their order, how fast it goes, and the model card."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.utils import logging

from hf_deberta.model.batch_loss import IGNORED
from hf_deberta.pretraining.throughput import peak_operations, training_operations
from hf_deberta.runs.checkpoints import TRAINER_STATE_NAME, AtomicCheckpointsMixin, last_checkpoint
from hf_deberta.runs.model_card import write_training_card
from hf_deberta.runs.row_order import EpochSampler, SetEpochCallback
from hf_deberta.runs.run_identity import check_same_run

logger = logging.get_logger(__name__)


class PretrainingTrainer(AtomicCheckpointsMixin):
    """Trains on `packing.Rows`, in an order that depends on seed and epoch alone.

    Besides what `Trainer` logs: tokens_per_second, real tokens of all processes, and mfu, the share of the devices'
    peak that their work is. Evaluation and saving are not in the time.

    Args:
        context: tokens of the document that a token stands in, on average, for mfu.
        about: what the model card says, see `model_card.write_training_card`.
    """

    def __init__(self, *args, context: float = 0.0, about: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.context, self.about = context, about or {"data": "text"}
        self.order: EpochSampler | None = None
        self.add_callback(SetEpochCallback(self))
        self.window = Window(self.model.config.pad_token_id)
        self.peak: float | None = None
        self.trained = False

    def train_and_evaluate(self) -> None:
        """All that a script does once its trainer is made: train, evaluate, tell of it."""
        news = self.args.do_train and self.train_to_end()
        if self.args.do_eval and self.eval_dataset is not None:
            metrics = self.evaluate()
            self.log_metrics("eval", metrics)
            self.save_metrics("eval", metrics)
        if news:
            self.create_model_card()
            self.save_state()
        if self.args.push_to_hub:
            self.push_to_hub()
        self.end()

    def settings(self) -> dict[str, Any]:
        """What makes a run another run, besides its flags."""
        batch, rows = self.args.total_batch, self.train_dataset
        epochs = math.ceil(self.args.num_train_epochs * len(rows) / batch)
        steps = self.args.max_steps if self.args.max_steps > 0 else epochs
        return {"text": rows.tokens.about.get("made_of"), "batch": batch, "steps": steps}

    def train_to_end(self) -> bool:
        """Train as far as asked, going on where a run was stopped, and write the model; whether there is news of it.

        Of a run that has come to its end nothing is trained, and what is written about it stays as it is.
        """
        check_same_run(self.args, self.settings(), may_grow=("steps",))
        self.trained, found = False, last_checkpoint(self.args)
        state = Path(self.args.output_dir) / TRAINER_STATE_NAME  # the last to be written of a run
        if found is None:
            state.unlink(missing_ok=True)
        result = self.train(resume_from_checkpoint=found)
        if not self.trained:
            logger.warning(f"{self.args.output_dir} holds this run, trained to its end: nothing is trained")
            if state.exists() and TrainerState.load_from_json(str(state)).global_step == self.state.global_step:
                return False
        self.save_model()
        if self.trained:
            self.log_metrics("train", result.metrics)
            self.save_metrics("train", result.metrics)
        return True

    def _run_epoch(self, *args, **kwargs) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:  # Trainer looks only after a step whether it was the last
            self.control.should_training_stop = True

    def _issue_warnings_after_load(self, load_result) -> None:
        """A tied weight is missing in any checkpoint, and is there once its source is."""
        missing, tied = load_result.missing_keys, self.model.all_tied_weights_keys
        missing = [name for name in missing if name not in tied or tied[name] in missing]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _get_train_sampler(self, train_dataset=None) -> EpochSampler:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.order = EpochSampler(len(dataset), seed)
        return self.order

    def get_batch_samples(self, *args, **kwargs):
        batches, items = super().get_batch_samples(*args, **kwargs)
        for batch in batches:
            self.window.add(batch)
        return batches, items

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        with self.window.paused():
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        with self.window.paused():
            super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs and not self.trained:
            return  # means over no step
        if "loss" in logs:
            logs |= self.speed()
        super().log(logs, start_time)

    def speed(self) -> dict[str, float]:
        """Since the last call."""
        if self.peak is None:
            self.peak = peak_operations(self.args.device, self.computing_dtype())
        tokens, predicted = self.accelerator.reduce(self.window.counts.to(self.args.device), "sum").tolist()
        seconds = self.window.close()
        share = self.operations(tokens, predicted) / seconds / (self.peak * self.args.world_size)
        return {"tokens_per_second": round(tokens / seconds, 1), "mfu": round(share, 4)}

    def operations(self, tokens: float, predicted: float) -> float:
        """Of training on so many tokens, of which so many are predicted."""
        return training_operations(self.model.config, tokens, self.context, predicted)

    def computing_dtype(self) -> torch.dtype:
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else self.model.dtype

    def create_model_card(self, **_) -> None:
        """What Trainer would say of the model is in the card anyway."""
        write_training_card(self, **self.about)


class Window:
    """What was trained on since the last log: counts [2] of real and of predicted tokens, and the time."""

    def __init__(self, padding: int | None):
        self.padding, self.began = padding, time.perf_counter()
        self.counts = torch.zeros(2, dtype=torch.long)

    def add(self, batch: dict[str, torch.Tensor]) -> None:
        found = torch.stack([(batch["input_ids"] != self.padding).sum(), (batch["labels"] != IGNORED).sum()])
        self.counts = self.counts.to(found.device) + found

    def close(self) -> float:
        """Seconds of the window; the next begins."""
        now = time.perf_counter()
        seconds, self.began = now - self.began, now
        self.counts = torch.zeros_like(self.counts)
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not the window's."""
        entered = time.perf_counter()
        yield
        self.began += time.perf_counter() - entered
