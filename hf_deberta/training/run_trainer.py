"""The trainer of every script: it goes on with an interrupted run, and leaves a finished one as it is.

>>> class MyTrainer(RunTrainer): ...
>>> trainer = MyTrainer(model, arguments, ...)
>>> trainer.train_or_resume()  # repeat the command after an interruption
"""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler, SequentialSampler
from transformers import SchedulerType, TrainerState
from transformers.utils import logging

from hf_deberta import HfDebertaConfig
from hf_deberta.training.checkpoints import (
    TRAINER_STATE_NAME,
    AtomicCheckpointsMixin,
    checkpoints_by_step,
    find_damage_of_finished_run,
    has_stopped_early,
    last_checkpoint,
    require_checkpoint,
    resume_choice,
)
from hf_deberta.training.errors import InputError, input_errors
from hf_deberta.training.finite_values import FiniteValuesMixin
from hf_deberta.training.graphed_steps import GraphedStepsMixin
from hf_deberta.training.model_card import write_training_card
from hf_deberta.training.processes import in_main_process
from hf_deberta.training.row_order import EpochSampler, SetEpochCallback
from hf_deberta.training.run_identity import RunArguments, compare_with_recorded_run, record_run
from hf_deberta.training.uneven_batches import UnevenBatchesMixin
from hf_deberta.transformers_format import convert_folder, require_transformers_class

logger = logging.get_logger(__name__)


class RunTrainer(FiniteValuesMixin, UnevenBatchesMixin, AtomicCheckpointsMixin, GraphedStepsMixin):
    """`Trainer` with whole and finite checkpoints, a row order that resumes exactly, and one run in a folder.

    A subclass says what identifies its run (`identifying_settings`), and may read rows in another order
    (`make_row_order`).

    Args:
        card_fields: arguments of `model_card.write_training_card`.
    """

    args: RunArguments
    model: Any  # Trainer annotates it as a model or None
    may_grow: Collection[str] = ()  # identifying settings that may be larger when a run is continued

    def __init__(self, *args: Any, card_fields: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.card_fields = card_fields or {"data": "task data"}
        self.order: EpochSampler | None = None
        self.trained = False  # set by SetEpochCallback
        self.add_callback(SetEpochCallback(self))
        self._set_special_tokens()
        if self.saves_for_transformers and self.args.do_train:
            with input_errors("--save_format transformers", ValueError):
                require_transformers_class(self.model)

    @property
    def saves_for_transformers(self) -> bool:
        """Whether the final model has the format of Transformers' own class; models of other types have it anyway."""
        is_ours = self.model.config.model_type == HfDebertaConfig.model_type
        return is_ours and getattr(self.args, "save_format", "") == "transformers"

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.saves_for_transformers and self.args.should_save and not self._writing_checkpoint:
            convert_folder(output_dir or self.args.output_folder, type(self.model))

    def identifying_settings(self) -> dict[str, Any]:
        """Return what identifies the run besides its flags, see `RunArguments.run_settings`."""
        raise NotImplementedError

    def make_row_order(self, rows: Any, seed: int) -> EpochSampler:
        return EpochSampler(len(rows), seed)

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.order = self.make_row_order(self.train_dataset if train_dataset is None else train_dataset, seed)
        return self.order

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        """Keep the order of the rows; Trainer would group evaluation rows by length too."""
        return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None

    def _set_special_tokens(self) -> None:
        """Complete the configurations from the tokenizer, as `Trainer` would with a warning."""
        model: Any = self.model
        for config in (model.config.get_text_config(), getattr(model, "generation_config", None)):
            for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
                if config is not None and getattr(config, name, None) is None:
                    setattr(config, name, getattr(self.processing_class, name, None))

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Log the loss at least twenty times, unless --logging_steps is given."""
        *others, steps = super().set_initial_training_values(args, dataloader)
        if args.logging_steps == type(args).logging_steps:
            args.logging_steps = max(1, min(args.logging_steps, steps // 20))
        return *others, steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Give schedules that need settings their own, unless --lr_scheduler_kwargs does.

        `warmup_stable_decay` falls in the last tenth of the steps, `cosine_with_min_lr` to a tenth of the rate.
        """
        warmup = self.args.get_warmup_steps(num_training_steps)
        if warmup >= num_training_steps:
            logger.warning_once(
                f"--warmup_steps {warmup} is not less than the {num_training_steps} steps of this run: the learning "
                "rate never reaches its value. --warmup_steps 0.1 warms up for a tenth of any run."
            )
        user_kwargs: Any = self.args.lr_scheduler_kwargs
        if self.args.lr_scheduler_type == SchedulerType.WARMUP_STABLE_DECAY:
            steps = min(math.ceil(num_training_steps / 10), num_training_steps - warmup)
            self.args.lr_scheduler_kwargs = {"num_decay_steps": steps, "decay_type": "1-sqrt", **(user_kwargs or {})}
        elif self.args.lr_scheduler_type == SchedulerType.COSINE_WITH_MIN_LR:
            self.args.lr_scheduler_kwargs = user_kwargs or {"min_lr_rate": 0.1}
        try:
            return super().create_scheduler(num_training_steps, optimizer)
        finally:
            self.args.lr_scheduler_kwargs = user_kwargs

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        tied = getattr(self.model, "all_tied_weights_keys", {})
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def train_or_resume(self) -> bool:
        """Train, from the last checkpoint if there is one, and save the model. Return whether it was saved.

        If this run has finished in `output_dir`, its model is loaded instead, and its files stay as they are. Another
        run there is an InputError.
        """
        folder, settings = self.args.output_folder, self.args.run_settings(self.identifying_settings())
        grown = compare_with_recorded_run(self.args, settings, self.may_grow)
        same_run = grown is not None
        finished = same_run and resume_choice(self.args) == "true" and self._has_finished()
        record_run(self.args, settings, same_run)
        if grown:
            logger.warning(
                f"the run in {folder} becomes longer ({', '.join(grown.values())}): it resumes, and its learning rate "
                "follows the longer schedule from here on"
            )
        if finished:
            logger.info(f"{folder} holds this run, and it is finished: nothing is trained")
            self.load_final_model()
            return False
        try:
            result = self.train(resume_from_checkpoint=last_checkpoint(self.args))
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(self.where_stopped())
            raise
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            for path in (folder / TRAINER_STATE_NAME, *self._cards()):  # of an earlier training
                path.unlink(missing_ok=True)
        self.save_model()
        if self.trained:  # otherwise means over no step
            self.log_metrics("train", result.metrics)
            self.save_metrics("train", result.metrics)
        if self.args.torch_compile:
            from torch._dynamo.utils import compilation_time_metrics, counters  # takes a second

            seconds = sum(compilation_time_metrics.get("_compile.compile_inner", ()))
            logger.info(f"torch.compile made {counters['stats']['unique_graphs']} graphs in {seconds:.0f} seconds.")
        return True

    def where_stopped(self) -> str:
        """Return the step that training has reached, and what repeating the command does."""
        reached = f"Step {self.state.global_step:,} of {self.state.max_steps:,} was done."
        choice, checkpoints = resume_choice(self.args), [*checkpoints_by_step(self.args.output_folder).values()]
        checkpoint = (checkpoints[-1] if checkpoints else None) if choice in ("true", "false") else choice
        if checkpoint is None:
            return f"{reached} There is no checkpoint yet: repeat the command to start over."
        command = "command without --resume_from_checkpoint false" if choice == "false" else "command"
        return f"{reached} Repeat the {command} to resume from {checkpoint}."

    def _has_finished(self) -> bool:
        """Return whether this run has finished in `output_dir`: not if a signal stopped it, or it is to become longer.

        An InputError if its files are damaged, or if it is to become longer, and there is no checkpoint to go on from.
        """
        folder = self.args.output_folder
        if not in_main_process((folder / TRAINER_STATE_NAME).exists):
            return False
        if damage := in_main_process(lambda: find_damage_of_finished_run(folder, self.final_models)):
            require_checkpoint(folder, damage)
            return False
        state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        steps = state.max_steps
        if self.may_grow:
            *_, steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
        if state.global_step >= steps or (has_stopped_early(state) and state.max_steps >= steps):
            return True
        can_go_on = bool(checkpoints_by_step(folder))
        if not can_go_on and state.max_steps < steps:
            raise InputError(
                f"{folder} holds a finished run of {state.global_step} steps without checkpoints, which cannot become "
                f"longer ({steps} steps): train its model further with --model_name_or_path and another --output_dir, "
                "or start over with --resume_from_checkpoint false"
            )
        return not can_go_on

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write our cards, which contain what `Trainer` passes here."""
        for card in self._cards():
            if card.parent.is_dir():
                write_training_card(self, **self.card_fields, folder=card.parent)

    def _cards(self) -> list[Path]:
        return [self.args.output_folder / model / "README.md" for model in self.final_models]
