"""`Trainer` for pretraining on rows of a corpus: their order, how fast it goes, and the model card."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import TrainerCallback

from hf_deberta.batch_loss import IGNORED
from hf_deberta.training.model_card import write_training_card
from hf_deberta.training.packing import EpochSampler
from hf_deberta.training.throughput import peak_operations, training_operations
from hf_deberta.training.whole_checkpoints import WholeCheckpoints


class PretrainingTrainer(WholeCheckpoints):
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
        self.add_callback(NextEpoch(self))
        self.window = Window(self.model.config.pad_token_id)
        self.peak: float | None = None

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


class NextEpoch(TrainerCallback):
    """Tells the order of rows which epoch it is, since accelerate's loader does not where several processes resume."""

    def __init__(self, trainer: PretrainingTrainer):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self.trainer.order.set_epoch(int(state.epoch or 0))


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
