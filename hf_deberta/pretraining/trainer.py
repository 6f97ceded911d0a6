"""`Trainer` for pretraining on rows of a corpus: their order, exact resume, throughput, and the model card."""

import math
from pathlib import Path
from typing import Any, cast

from transformers import TrainerState
from transformers.utils import logging

from hf_deberta.pretraining.packing import TokenRows
from hf_deberta.pretraining.throughput import ThroughputMeter, peak_operations, training_operations
from hf_deberta.runs.checkpoints import (
    TRAINER_STATE_NAME,
    AtomicCheckpointsMixin,
    RunEnd,
    checkpoints_by_step,
    inspect_finished_run,
    last_checkpoint,
    require_checkpoint,
)
from hf_deberta.runs.errors import InputError
from hf_deberta.runs.finite_values import FiniteValuesMixin
from hf_deberta.runs.model_card import write_training_card
from hf_deberta.runs.real_tokens import RealTokensMixin
from hf_deberta.runs.row_order import EpochSampler, SetEpochCallback
from hf_deberta.runs.run_identity import RunArguments, claim_folder, compare_with_recorded_run
from hf_deberta.runs.uneven_batches import UnevenBatchesMixin

logger = logging.get_logger(__name__)


class PretrainingTrainer(FiniteValuesMixin, UnevenBatchesMixin, RealTokensMixin, AtomicCheckpointsMixin):
    """Trains on `packing.TokenRows`, in an order that depends on seed and epoch alone.

    Logs, in addition to `Trainer`: tokens_per_second, the real tokens of all processes, and, with bf16 or fp16 on a GPU
    whose peak is known, mfu, the share of that peak that they amount to. Evaluating and saving do not count as time.

    Args:
        context_length: mean length of a token's document, for mfu: `TokenRows.mean_context_length`.
        about: arguments of `model_card.write_training_card`.
        test_dataset: rows that are evaluated once, at the end.
    """

    args: RunArguments
    model: Any  # Trainer annotates it as a model or None
    train_dataset: Any  # TokenRows

    def __init__(
        self,
        *args: Any,
        context_length: float = 0.0,
        about: dict[str, Any] | None = None,
        test_dataset: TokenRows | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.test_dataset = test_dataset
        self.context_length, self.about = context_length, about or {"data": "text"}
        self.order: EpochSampler | None = None
        self.meter = ThroughputMeter(self.model.config.pad_token_id)
        self.trained = False  # set by SetEpochCallback
        self.add_callback(SetEpochCallback(self))
        self.add_callback(self.meter)

    def train_and_evaluate(self) -> None:
        """Train or resume, evaluate, and write the model card: all that a script does with its trainer."""
        new_model = self.args.do_train and self.train_or_resume()
        for name, rows in (("eval", self.eval_dataset), ("test", self.test_dataset)):
            if self.args.do_eval and rows is not None:
                metrics = self.evaluate(rows, metric_key_prefix=name)
                metrics |= {
                    f"{name}_{key}": value for key, value in self.final_metrics(name, cast(TokenRows, rows)).items()
                }
                self.log_metrics(name, metrics)
                self.save_metrics(name, metrics)
        if new_model:
            self.create_model_card()
            self.save_state()
        if self.args.push_to_hub:
            self.push_to_hub()
        self.end()

    def final_metrics(self, name: str, rows: TokenRows) -> dict[str, float]:
        """Return what only the evaluation after training computes; `name` is "eval" or "test"."""
        return {}

    def train_or_resume(self) -> bool:
        """Train, from the last checkpoint if there is one, and save the model. Return whether it was saved.

        A finished run is not trained again, and its files stay as they are.
        """
        self.trained, folder = False, Path(str(self.args.output_dir))
        only_final_model = self.holds_only_final_model()
        claim_folder(self.args, self.identifying_settings(), may_grow=("steps",))
        if only_final_model:
            logger.warning(f"{folder} holds this run, and it is finished: nothing is trained")
            self.load_final_model()
            return False
        checkpoint = last_checkpoint(self.args)
        state = folder / TRAINER_STATE_NAME  # a finished run has it
        if checkpoint is None:
            state.unlink(missing_ok=True)
        result = self.train(resume_from_checkpoint=checkpoint)
        if not self.trained:
            logger.warning(f"{folder} holds this run, and it is finished: nothing is trained")
            end, damage = inspect_finished_run(folder, self.final_models)
            if end is RunEnd.DAMAGED:
                logger.warning(f"its model is damaged ({', '.join(damage)}) and written again from {checkpoint}")
            elif end is RunEnd.WHOLE and TrainerState.load_from_json(str(state)).global_step == self.state.global_step:
                return False
        self.save_model()
        if self.trained:
            self.log_metrics("train", result.metrics)
            self.save_metrics("train", result.metrics)
        return True

    def holds_only_final_model(self) -> bool:
        """Return whether the folder holds this run, finished, whose checkpoints were deleted.

        Its training cannot be continued: an InputError if it should become longer, or if its model is damaged.
        """
        folder, flags = Path(str(self.args.output_dir)), {**self.args.identifying_flags, "seed": self.args.seed}
        settings = {name: value for name, value in self.identifying_settings().items() if name != "steps"}
        automatic = str(self.args.resume_from_checkpoint).lower() in ("none", "true")
        same_run = automatic and compare_with_recorded_run(self.args, {**flags, **settings})
        if not same_run or checkpoints_by_step(folder):
            return False
        end, damage = inspect_finished_run(folder, self.final_models)
        if end is RunEnd.DAMAGED:
            require_checkpoint(folder, damage)
        if end is RunEnd.MISSING:
            return False
        finished = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
        *_, steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
        if finished < steps:
            raise InputError(
                f"{folder} holds a finished run of {finished} steps without checkpoints, which cannot become longer "
                f"({steps} steps): train its model further with --model_name_or_path and another --output_dir, or "
                "start over with --resume_from_checkpoint false"
            )
        return True

    def identifying_settings(self) -> dict[str, Any]:
        """What identifies a run besides its flags, see `run_identity.claim_folder`."""
        batch = self.args.total_batch
        rows: TokenRows = self.train_dataset
        steps_of_epochs = math.ceil(self.args.num_train_epochs * len(rows) / batch)
        steps = self.args.max_steps if self.args.max_steps > 0 else steps_of_epochs
        return {"text": rows.tokens.about.get("fingerprint"), "batch": batch, "steps": steps}

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.order = EpochSampler(len(dataset), seed)
        return self.order

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
        tokens, predicted = self.accelerator.reduce(counts.to(self.args.device), "sum").tolist()
        speed = {"tokens_per_second": round(tokens / seconds, 1)}
        peak = peak_operations(self.args.device) if self.args.bf16 or self.args.fp16 else None
        if peak is not None:
            speed["mfu"] = round(self.operations(tokens, predicted) / seconds / (peak * self.args.world_size), 4)
        return speed

    def operations(self, tokens: float, predicted: float) -> float:
        """Return the operations of training on so many tokens, so many of them predicted."""
        return training_operations(self.model.config, tokens, self.context_length, predicted)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write our card, which contains what `Trainer` passes here."""
        write_training_card(self, **self.about)
