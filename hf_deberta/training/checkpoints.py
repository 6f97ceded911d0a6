"""Checkpoints that are always complete, for any `Trainer`.

`Trainer` writes the files of `checkpoint-N` one by one, so a killed run or a full disk can leave a folder that looks
like a checkpoint but cannot be loaded. `AtomicCheckpointsMixin` writes to `_unfinished/checkpoint-N`, renames the
folder once everything is on disk, and deletes older checkpoints only then. So the last checkpoint is always complete.
No decision depends on the clock.

    >>> class MyTrainer(AtomicCheckpointsMixin, Trainer): ...
    >>> trainer = MyTrainer(model, arguments, ...)
    >>> trainer.train(resume_from_checkpoint=last_checkpoint(arguments))
"""

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from hf_deberta.training.errors import InputError, input_errors
from hf_deberta.training.integrity import (
    MANIFEST,
    find_damaged_files,
    find_missing_parts,
    find_truncated_files,
    write_manifest,
)
from hf_deberta.training.json_files import atomic_write, read_fields, write_json
from hf_deberta.training.processes import in_main_process

# push_to_hub ignores names that start with an underscore
UNFINISHED = "_unfinished"
ARCHIVE = "_before"
FINAL_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")

logger = logging.get_logger(__name__)


class AtomicCheckpointsMixin(Trainer):
    """Mixin for a `Trainer` whose checkpoints and final model appear under their names only when complete.

    Put it before the other `Trainer` classes.
    """

    final_models: tuple[str, ...] = (".",)  # folders in `output_dir` that hold the weights of a finished run
    _writing_checkpoint = False

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED) if self._writing_checkpoint else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        unfinished, complete = folder / UNFINISHED / name, folder / name
        if self.args.should_save:
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._writing_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            self._update_best_checkpoint(folder)  # in every process: each loads the best model at the end
            if self.args.should_save:
                self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))
                flush_to_disk(unfinished)
                self._archive_later_checkpoints(folder)
                replace_folder(unfinished, complete)
                keep = {name, Path(self.state.best_model_checkpoint or name).name}
                delete_old_checkpoints(folder, self.args.save_total_limit, keep)
        except Exception:  # such as a full disk
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
            raise
        finally:
            self._writing_checkpoint = False
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(complete))

    def _archive_later_checkpoints(self, folder: Path) -> None:
        """Move checkpoints past this step away: this run resumed from an earlier one, or started anew."""
        checkpoints = checkpoints_by_step(folder)
        later = [checkpoints[step] for step in checkpoints if step > self.state.global_step]
        if later:
            logger.warning(
                f"{', '.join(path.name for path in later)} in {folder} moved to {ARCHIVE}: this run has reached step "
                f"{self.state.global_step} only, and does not continue from there"
            )
            archive_checkpoints(later)

    def _update_best_checkpoint(self, folder: Path) -> None:
        """Make `state.best_model_checkpoint` the final path of the best checkpoint, not its path while unfinished."""
        if self.state.best_global_step:
            best = folder / f"checkpoint-{self.state.best_global_step}"
            if best.exists() or best.name == f"checkpoint-{self.state.global_step}":
                self.state.best_model_checkpoint = str(best)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._writing_checkpoint:  # push complete checkpoints only
            return
        if self.args.should_save:
            for source_file in Path(checkpoint_folder).glob("*.py"):  # Trainer copies weights and configuration alone
                shutil.copy(source_file, str(self.args.output_dir))
        super()._push_from_checkpoint(checkpoint_folder)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """Resume with the best checkpoint beside this one, wherever their folder was when they were written."""
        progress, checkpoint = super()._init_training_state(*args), args[3]
        if checkpoint is not None:
            self.args.eval_on_start = False  # it is not another evaluation without improvement
            best = best_beside(Path(checkpoint))
            exists = best is not None and best.is_dir()
            self.state.best_model_checkpoint = str(best) if exists else None
            if best is not None:
                (logger.info if exists else logger.warning)(f"best checkpoint so far: {best}{', gone' * (not exists)}")
        return progress

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step < self.state.max_steps and not has_stopped_early(self.state):
            super()._run_epoch(*args, **kwargs)
        else:  # resumed from the last step: Trainer would make one more before it stops
            self.control.should_training_stop = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `Trainer` does; each file of the final model appears once it is complete.

        With FSDP and sharded checkpoints (accelerate's default) the final model is gathered and saved whole.
        """
        if self._writing_checkpoint:
            return super().save_model(output_dir, _internal_call=True)
        if _internal_call:  # from push_to_hub
            with self._full_state_dict():
                return super().save_model(output_dir, _internal_call=True)
        folder = Path(output_dir or str(self.args.output_dir))
        unfinished = folder / UNFINISHED / "model"
        if self.args.should_save:
            (folder / MANIFEST).unlink(missing_ok=True)  # of another model
        with self._full_state_dict():
            super().save_model(str(unfinished), _internal_call=True)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.publish_model(unfinished, folder)
            shutil.rmtree(folder / UNFINISHED)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save a weight that is tied to another once. FSDP2 and DeepSpeed have gathered both, as separate tensors."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        super()._save(output_dir, state_dict and {name: state_dict[name] for name in state_dict if name not in tied})

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with input_errors("resume as the run was started, or with --resume_from_checkpoint false", ValueError):
            super()._load_from_checkpoint(*args, **kwargs)

    def publish_model(self, unfinished: Path, folder: Path) -> None:
        """Move the saved model, which is complete, to `folder`."""
        for path in sorted(unfinished.iterdir()):
            os.replace(path, folder / path.name)

    def save_state(self) -> None:
        """Write the state as `Trainer` does, and a manifest of it and the final model: the run has finished."""
        folder = Path(str(self.args.output_dir))
        if self.is_world_process_zero():
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, EarlyStoppingCallback):
                    cast(dict, self.state.stateful_callbacks)[type(callback).__name__] = callback.state()
            with atomic_write(folder / TRAINER_STATE_NAME) as unfinished:
                self.state.save_to_json(str(unfinished))
            write_manifest(folder, [folder / TRAINER_STATE_NAME, *final_weights(folder, self.final_models)])

    def load_final_model(self) -> None:
        """Load the state and the final model that a finished run has left in `output_dir`."""
        folder = Path(str(self.args.output_dir))
        if is_deepspeed_zero3_enabled():  # parameters that are divided among processes would not be copied
            raise InputError(
                f"the run in {folder} is finished, and with ZeRO-3 its model is not loaded again: evaluate it with "
                "--do_train false and --model_name_or_path (--discriminator_name_or_path), or start over with "
                "--resume_from_checkpoint false"
            )
        self.state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        # not Trainer._load_from_checkpoint, which under FSDP needs files that a finished model does not have
        cast(nn.Module, self.model).load_state_dict(self.read_final_model().state_dict())

    def read_final_model(self) -> Any:
        """Return the final model of `output_dir`, with the configuration of this one."""
        folder, model = str(self.args.output_dir), cast(PreTrainedModel, self.model)
        return type(model).from_pretrained(folder, config=model.config, dtype=model.dtype, trust_remote_code=False)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write the metrics as `Trainer` does, each file complete or not at all.

        In all_results.json they replace all earlier metrics of the split, also those that this command did not compute.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        path, combined_path = folder / f"{split}_results.json", folder / "all_results.json"
        if combined:
            replaced = read_fields(path).keys() - {"epoch"}  # of all splits
            kept = {name: value for name, value in read_fields(combined_path).items() if name not in replaced}
            write_json(combined_path, dict(sorted({**kept, **metrics}.items())))
        write_json(path, dict(sorted(metrics.items())))

    @contextmanager
    def _full_state_dict(self) -> Iterator[None]:
        """Gather FSDP's shards inside the block: `Trainer` writes no model file from a sharded state dict."""
        plugin: Any = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if plugin is None:
            yield
            return
        previous = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            yield
        finally:
            plugin.set_state_dict_type(previous)  # checkpoints are saved and loaded with this type


def resume_choice(arguments: TrainingArguments) -> str:
    """Return "true" (the last checkpoint, the default), "false" (start over), or the path to resume from."""
    choice = "true" if arguments.resume_from_checkpoint is None else str(arguments.resume_from_checkpoint)
    return choice.lower() if choice.lower() in ("true", "false") else choice


def last_checkpoint(arguments: TrainingArguments) -> str | None:
    """Return the checkpoint to resume from: `resume_from_checkpoint`, or the last whole one in `output_dir`.

    `--resume_from_checkpoint false` gives None. A checkpoint that lacks a part is passed over with a warning. If it was
    requested by its path, or if no whole one is left, that is an InputError. The main process decides for all.
    """
    checkpoint = in_main_process(lambda: choose_checkpoint(arguments))
    return None if checkpoint is None else str(checkpoint)


def choose_checkpoint(arguments: TrainingArguments) -> Path | None:
    choice = resume_choice(arguments)
    if choice == "false":
        return None
    newest_first = reversed(checkpoints_by_step(Path(str(arguments.output_dir))).values())
    incomplete = []
    for checkpoint in newest_first if choice == "true" else [Path(choice)]:
        missing = find_missing_parts(checkpoint, arguments) or find_truncated_files(checkpoint)
        if not missing:
            if arguments.save_only_model and not any(checkpoint.glob("optimizer*")):
                logger.warning(
                    f"{checkpoint} holds the model only (--save_only_model): the optimizer and the learning rate start "
                    "anew"
                )
            logger.info(
                f"resuming from {checkpoint}; to start over, use another --output_dir or --resume_from_checkpoint false"
            )
            return checkpoint
        incomplete.append(f"{checkpoint}: {', '.join(missing)}")
        logger.warning(f"this checkpoint is not whole, and not used: {incomplete[-1]}")
    if incomplete:
        raise InputError(
            f"there is no whole checkpoint to resume from ({'; '.join(incomplete)}): restore the files, name another "
            "with --resume_from_checkpoint PATH, or start over with --resume_from_checkpoint false"
        )
    return None


def has_stopped_early(state: TrainerState) -> bool:
    """Return whether the patience of early stopping was over when a state was saved."""
    saved: Any = cast(dict, state.stateful_callbacks).get(EarlyStoppingCallback.__name__)
    patience = saved and max(1, saved["args"]["early_stopping_patience"])
    return bool(patience) and saved["attributes"]["early_stopping_patience_counter"] >= patience


def best_beside(checkpoint: Path) -> Path | None:
    """Return the best checkpoint that a checkpoint records, by its name: the folder of both may have been moved."""
    recorded = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).best_model_checkpoint
    return None if recorded is None else checkpoint.absolute().with_name(Path(recorded).name)


def final_weights(folder: Path, models: Iterable[str]) -> list[Path]:
    """Return the weight files of a finished run; other files of a model may be edited later."""
    return sorted(path for model in models for pattern in FINAL_WEIGHTS for path in (folder / model).glob(pattern))


def find_damage_of_finished_run(folder: Path, models: Iterable[str] = (".",)) -> list[str]:
    """Say what is damaged in the state and the models' weights of a finished run."""
    return find_damaged_files(folder) if final_weights(folder, models) else ["no model weights"]


def require_checkpoint(folder: Path, damage: list[str]) -> None:
    """Warn that a damaged finished run is finished again from its last checkpoint; an InputError if there is none."""
    message = f"{folder} holds a finished run that is damaged ({', '.join(damage)})"
    if not checkpoints_by_step(folder):
        raise InputError(
            f"{message}, and no checkpoint: restore its files, or start over with --resume_from_checkpoint false"
        )
    logger.warning(f"{message}: it is finished again from its last checkpoint")


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by their steps, the lowest first."""
    names = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*") if path.is_dir())
    steps = sorted((int(name[1]), name[0]) for name in names if name)
    return {step: folder / name for step, name in steps}


def archive_checkpoints(checkpoints: Iterable[Path]) -> None:
    """Move checkpoints that are not of this run to `_before` beside them, so that no run resumes from them."""
    for checkpoint in checkpoints:
        archived = checkpoint.parent / ARCHIVE / checkpoint.name
        archived.parent.mkdir(exist_ok=True)
        shutil.rmtree(archived, ignore_errors=True)
        os.replace(checkpoint, archived)


def delete_old_checkpoints(folder: Path, limit: int | None, keep: Collection[str]) -> None:
    """Delete checkpoints, the lowest steps first, until `limit` are left; never those of the names in `keep`.

    Steps give the order in which they were written: a run archives the checkpoints past its own step. Modification
    times would not, because a clock may be set back.
    """
    checkpoints = checkpoints_by_step(folder).values()
    others = [checkpoint for checkpoint in checkpoints if checkpoint.name not in keep]
    if limit is not None and limit > 0:
        excess = len(checkpoints) - limit
        for checkpoint in others[: max(0, excess)]:
            unfinished = folder / UNFINISHED / f"{checkpoint.name}.old"  # half deleted, it must not look whole
            unfinished.parent.mkdir(exist_ok=True)
            os.replace(checkpoint, unfinished)
            shutil.rmtree(unfinished, ignore_errors=True)


def replace_folder(source: Path, target: Path) -> None:
    """Rename the folder `source` to `target`, replacing a folder of that name."""
    if target.exists():
        old = source.with_name(f"{source.name}.old")
        os.replace(target, old)
        os.replace(source, target)
        shutil.rmtree(old)
    else:
        os.replace(source, target)


def flush_to_disk(folder: Path) -> None:
    """Force all files of a folder to disk (fsync), so that a power cut cannot leave them half written."""
    for path in (*folder.rglob("*"), folder):
        if os.name == "nt" and path.is_dir():
            continue  # Windows cannot open folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:  # some file systems do not support fsync
            if error.errno == errno.ENOSPC:
                raise
        finally:
            os.close(handle)
