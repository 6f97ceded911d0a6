"""The last batch on several processes, when its rows do not fill all of them.

accelerate gives each process a full batch: it repeats rows from the start of the epoch, and their losses would count
twice. `UnevenBatchesMixin` leaves them out, so that several processes compute the loss and the gradients of one.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import has_length

from hf_deberta.training.errors import InputError
from hf_deberta.training.real_tokens import NUM_REAL_TOKENS

IS_FILLER = "is_filler"  # key of a batch whose loss does not count


class UnevenBatchesMixin(Trainer):
    """Mixin for a `Trainer` that leaves out the rows which accelerate repeats in the last batch.

    A process without any other row passes one of them through the model, since all processes must exchange gradients,
    and multiplies its loss by zero. In evaluation this concerns the loss alone: Trainer cuts predictions by itself.

    Put it before the other `Trainer` classes.
    """

    filler_row: dict[str, Any] = {}  # the first row of the last batch

    def without_repeated_rows(self, inputs: dict[str, Any], num_rows: int) -> dict[str, Any]:
        """Return the batch without repeated rows, perhaps with none at all. `num_rows` is the size of the dataset."""
        state, arguments = self.accelerator.gradient_state, self.args
        if (
            arguments.world_size == 1
            or not state.end_of_dataloader
            or not self.accelerator.even_batches
            or self.accelerator.parallelism_config is not None  # processes that share their rows
        ):
            return inputs
        size = next(value.shape[0] for value in inputs.values() if torch.is_tensor(value) and value.dim())
        remainder = num_rows % (size * arguments.world_size)
        if not remainder:
            return inputs
        self.filler_row = first_rows(inputs, size, 1)
        before = size * arguments.process_index  # rows of the batch that other processes have
        return first_rows(inputs, size, min(max(remainder - before, 0), size))

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        if self.args.dataloader_drop_last and has_length(loader) and not len(loader):
            raise InputError(
                f"--dataloader_drop_last leaves no batch of {self._train_batch_size} rows for each process: there "
                f"are {self.num_examples(loader):,} training rows: leave it out"
            )
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Load all rows of a split: by these flags, Trainer would drop some, or load an earlier split again."""
        args, self.args = self.args, copy.copy(self.args)
        self.args.dataloader_drop_last = self.args.dataloader_persistent_workers = False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args = args

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return self.get_eval_dataloader(test_dataset)

    def get_batch_samples(self, epoch_iterator: Iterator, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        if has_length(self.train_dataset) and not self.args.dataloader_drop_last:
            num_rows = len(self.train_dataset)  # type: ignore[arg-type]
            epoch_iterator = (self.without_repeated_rows(batch, num_rows) for batch in epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        return super().training_step(model, self.with_filler(inputs), num_items_in_batch)

    def with_filler(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the filler if the batch has no rows, otherwise the batch."""
        if all(value.shape[:1] != (0,) for value in inputs.values() if torch.is_tensor(value)):
            return inputs
        return {**inputs, **self.filler_row, IS_FILLER: True}

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not inputs.get(IS_FILLER):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = {name: value for name, value in inputs.items() if name != IS_FILLER}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (0 * loss, outputs) if return_outputs else 0 * loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        num_rows = self.accelerator.gradient_state.remainder
        own_rows = self.without_repeated_rows(inputs, num_rows) if num_rows > 0 else inputs
        if own_rows is inputs or any(inputs.get(name) is None for name in self.label_names):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        logits = labels = None
        if not prediction_loss_only:
            _, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        own_rows = self._prepare_inputs(own_rows)
        items = self._get_num_items_in_batch([own_rows], self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self.with_filler(own_rows), num_items_in_batch=items)
        return self.accelerator.reduce(loss.detach().mean(), "mean"), logits, labels


def first_rows(inputs: dict[str, Any], size: int, number: int) -> dict[str, Any]:
    """Return the first rows of a batch of `size` rows, without the number of real tokens, which would be another."""
    return {
        name: value[:number] if torch.is_tensor(value) and value.dim() and value.shape[0] == size else value
        for name, value in inputs.items()
        if name != NUM_REAL_TOKENS
    }
