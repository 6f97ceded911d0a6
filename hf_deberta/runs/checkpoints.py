"""Checkpoints that are always complete, for any `Trainer`.

`Trainer` writes the files of `checkpoint-N` one by one, so a killed run or a full disk can leave a folder that looks
like a checkpoint but cannot be loaded. `AtomicCheckpointsMixin` writes to `_unfinished/checkpoint-N`, renames the
folder once everything is on disk, and deletes older checkpoints only then. So the last checkpoint is always complete.

    >>> class MyTrainer(AtomicCheckpointsMixin, Trainer): ...
    >>> trainer = MyTrainer(model, arguments, ...)
    >>> trainer.train(resume_from_checkpoint=last_checkpoint(arguments))
"""

import errno
import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints
from transformers.utils import logging

from hf_deberta.runs.errors import InputError

UNFINISHED = "_unfinished"  # push_to_hub ignores names that start with an underscore

logger = logging.get_logger(__name__)


class AtomicCheckpointsMixin(Trainer):
    """Mixin for a `Trainer` whose checkpoints and final model appear under their names only when complete.

    Put it before the other `Trainer` classes.
    """

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
                replace_folder(unfinished, complete)
                rotate_checkpoints(
                    output_dir=str(folder),
                    save_total_limit=self.args.save_total_limit,
                    best_model_checkpoint=self.state.best_model_checkpoint,
                    use_mtime=True,  # as Trainer does: a run may have resumed from an older checkpoint
                )
        except Exception:  # such as a full disk
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
            raise
        finally:
            self._writing_checkpoint = False
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(complete))

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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `Trainer` does; each file of the final model appears once it is complete.

        With FSDP and sharded checkpoints (accelerate's default) the final model is gathered and saved whole. This is
        tested with a stand-in for accelerate's FSDP plugin only.
        """
        if self._writing_checkpoint:
            return super().save_model(output_dir, _internal_call=True)
        if _internal_call:  # from push_to_hub
            with self._full_state_dict():
                return super().save_model(output_dir, _internal_call=True)
        folder = Path(output_dir or str(self.args.output_dir))
        unfinished = folder / UNFINISHED / "model"
        with self._full_state_dict():
            super().save_model(str(unfinished), _internal_call=True)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            for path in sorted(unfinished.iterdir()):
                os.replace(path, folder / path.name)
            shutil.rmtree(folder / UNFINISHED)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

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

    def end(self) -> None:
        """Leave the process group in order, once everything is done."""
        self.accelerator.wait_for_everyone()
        # A DDP wrapper that still holds the process group would destroy it while the interpreter exits.
        self.accelerator.free_memory()
        self.model_wrapped = cast(nn.Module, self.model)
        gc.collect()
        self.accelerator.end_training()


def last_checkpoint(arguments: TrainingArguments) -> str | None:
    """Return the checkpoint to resume from: `resume_from_checkpoint`, or the last complete one in `output_dir`.

    `--resume_from_checkpoint false` gives None.
    """
    requested = arguments.resume_from_checkpoint
    if requested and str(requested).lower() not in ("true", "false"):
        if not Path(requested).is_dir():
            raise InputError(f"--resume_from_checkpoint {requested} is not a folder")
        return str(requested)
    folder = Path(str(arguments.output_dir))
    if str(requested).lower() == "false" or not folder.is_dir():
        return None
    checkpoint = get_last_checkpoint(str(folder))
    if checkpoint is not None:
        logger.warning_once(
            f"resuming from {checkpoint}; to start over, use another --output_dir or --resume_from_checkpoint false"
        )
    return checkpoint


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; it is renamed to `path` when the block ends without an error.

    >>> with atomic_write(Path("seeds.json")) as unfinished:
    ...     unfinished.write_text("{}")
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


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
        try:
            handle = os.open(path, os.O_RDONLY)
        except PermissionError:
            if not path.is_dir():
                raise
            continue  # Windows cannot open folders
        try:
            os.fsync(handle)
        except OSError as error:  # some file systems do not support fsync
            if error.errno == errno.ENOSPC:
                raise
        finally:
            os.close(handle)
