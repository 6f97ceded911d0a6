"""Checkpoints that are whole or not there, for any `Trainer`.

`Trainer` writes into `checkpoint-N` file by file, so a run that is killed, or a disk that fills up, leaves a folder
that looks like a checkpoint. Here it is written into `_unfinished/checkpoint-N` and renamed when all is on disk; older
ones are removed only then. The last whole one is always there to go on from.

    >>> class MyTrainer(WholeCheckpoints, Trainer): ...
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

from safetensors import SafetensorError
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints
from transformers.utils import logging

UNFINISHED = "_unfinished"  # push_to_hub leaves out what begins so
STATE = "trainer_state.json"

logger = logging.get_logger(__name__)


class AtomicCheckpointsMixin(Trainer):
    """Mixin: put it before the `Trainer` that is to save so."""

    _writing = False

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED) if self._writing else folder

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        unfinished, whole = folder / UNFINISHED / name, folder / name
        if self.args.should_save:
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._writing = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            self._name_best(folder)  # in every process: each loads it in the end
            if self.args.should_save:
                self.state.save_to_json(unfinished / STATE)
                write_through(unfinished)
                replace_folder(unfinished, whole)
                rotate_checkpoints(
                    output_dir=str(folder),
                    save_total_limit=self.args.save_total_limit,
                    best_model_checkpoint=self.state.best_model_checkpoint,
                    use_mtime=True,  # as Trainer: a run may go on from an older one
                )
        except (OSError, SafetensorError, RuntimeError) as error:
            if not is_full_disk(error):
                raise
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
            last = get_last_checkpoint(folder)
            raise OSError(
                errno.ENOSPC,
                f"the disk of {folder} is full: {name} could not be written; "
                + (f"{Path(last).name} is whole" if last else "there is no earlier checkpoint")
                + ". Make room (save_total_limit keeps fewer) and start the same command again",
            ) from error
        finally:
            self._writing = False
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(whole))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._writing:  # what is not whole yet is not pushed
            return
        if self.args.should_save:
            for code in Path(checkpoint_folder).glob("*.py"):  # Trainer takes weights and configuration alone
                shutil.copy(code, self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`; each file of the final model appears when it is whole.

        Where FSDP writes checkpoints in shards, accelerate's default, the final model is gathered all the same. This
        was tested with a stand-in for accelerate's FSDP plugin only.
        """
        if self._writing:  # a checkpoint
            return super().save_model(output_dir, _internal_call=True)
        if _internal_call:  # of push_to_hub
            with self._gathered():
                return super().save_model(output_dir, _internal_call=True)
        folder = Path(output_dir or self.args.output_dir)
        unfinished = folder / UNFINISHED / "model"
        with self._gathered():
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
    def _gathered(self) -> Iterator[None]:
        """`Trainer` writes no model file while FSDP's state dicts are sharded."""
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if plugin is None:
            yield
            return
        before = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            yield
        finally:
            plugin.set_state_dict_type(before)  # that of checkpoints, which are loaded by it too

    def end(self) -> None:
        """Leave the other processes in order, once everything is done."""
        self.accelerator.wait_for_everyone()
        # a wrapper that still holds the process group would have it taken down while the interpreter ends
        self.accelerator.free_memory()
        self.model_wrapped = self.model
        gc.collect()
        self.accelerator.end_training()

    def _name_best(self, folder: Path) -> None:
        """The best checkpoint by the name that it will have, or has had all along."""
        if self.state.best_global_step:
            best = folder / f"checkpoint-{self.state.best_global_step}"
            if best.exists() or best.name == f"checkpoint-{self.state.global_step}":
                self.state.best_model_checkpoint = str(best)


def last_checkpoint(arguments: TrainingArguments) -> str | None:
    """The checkpoint that a script should go on from: the one asked for, or the last whole one of `output_dir`."""
    given = arguments.resume_from_checkpoint
    if given and str(given).lower() not in ("true", "false"):
        return str(given)
    folder = Path(arguments.output_dir)
    if str(given).lower() == "false" or not folder.is_dir():
        return None
    found = get_last_checkpoint(folder)
    if found is not None:
        logger.warning_once(
            f"going on from {found}; to start anew, give another --output_dir or --resume_from_checkpoint false"
        )
    return found


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Where to write a file that is to appear under its name when it is whole.

    >>> with whole_file(Path("seeds.json")) as unfinished:
    ...     unfinished.write_text("{}")
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def replace_folder(source: Path, target: Path) -> None:
    """Rename `source` to `target`, in place of what may be there."""
    if target.exists():
        old = source.with_name(f"{source.name}.old")
        os.replace(target, old)
        os.replace(source, target)
        shutil.rmtree(old)
    else:
        os.replace(source, target)


def write_through(folder: Path) -> None:
    """Have the system write to disk what it still holds in memory, so that a power cut does no more than a kill."""
    for path in (*folder.rglob("*"), folder):
        try:
            handle = os.open(path, os.O_RDONLY)
        except PermissionError:
            if not path.is_dir():
                raise
            continue  # Windows opens no folders
        try:
            os.fsync(handle)
        except OSError as error:  # not every file system can
            if error.errno == errno.ENOSPC:
                raise
        finally:
            os.close(handle)


def is_full_disk(error: BaseException) -> bool:
    """Whether a library's error means that there was no room."""
    words = ("no space left", "os error 28", "disk quota", "unexpected pos", "file write failed")
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(w in str(error).lower() for w in words)
