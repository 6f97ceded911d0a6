"""Whether a checkpoint has the parts that a run needs, and whether the files of a finished run are as it wrote them.

A finished run writes the size and checksum of its model and its state, last of all:

    out/manifest.json    {"files": {"model.safetensors": {"size": 1738, "crc32": 3405691582}, ...}}

CRC-32 notices missing, truncated, overwritten and flipped bytes in half the time of SHA-256. It does not stop someone
who changes the files and the manifest on purpose. Checkpoints have no checksums: of them truncated files are noticed.
"""

import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from zipfile import is_zipfile

from safetensors import SafetensorError, safe_open
from transformers import TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from hf_deberta.training.errors import InputError
from hf_deberta.training.json_files import read_json_object, write_json

MANIFEST = "manifest.json"
BLOCK = 2**20  # bytes read at once
DEEPSPEED_STATES = "global_step*/*"  # weights, optimizer and schedule
# A checkpoint has a file of one of these patterns; shards have an index.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model*", "pytorch_model_fsdp*/*",
    "adapter_model*", "*/adapter_model*", DEEPSPEED_STATES,
)  # fmt: skip


def write_manifest(folder: Path, files: Iterable[Path]) -> None:
    """Write the size and checksum of files in `folder`."""
    entries = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": checksum(path)} for path in files
    }
    write_json(folder / MANIFEST, {"files": entries})


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value, block = 0, memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return value


def find_damaged_files(folder: Path) -> list[str]:
    """Say how files of a folder differ from its manifest, if it has one: ["model.safetensors is missing"]."""
    if not (folder / MANIFEST).exists():
        return []
    try:
        entries = read_json_object(folder / MANIFEST)["files"].items()
        differences = {name: find_difference(folder / name, entry["size"], entry["crc32"]) for name, entry in entries}
    except (InputError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} is damaged"]
    return [f"{name} {difference}" for name, difference in differences.items() if difference]


def find_difference(path: Path, size: int, crc32: int) -> str | None:
    """Say how a file differs from its entry in the manifest; None if it does not."""
    try:
        if not path.is_file():
            return "is missing"
        if path.stat().st_size != size:
            return f"has {path.stat().st_size} bytes instead of {size}"
        return None if checksum(path) == crc32 else "has another checksum than when it was written"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def find_missing_parts(checkpoint: Path, arguments: TrainingArguments) -> list[str]:
    """Name what training needs to resume and a checkpoint lacks: ["no optimizer.pt"]; or what is wrong with its state.

    Without DeepSpeed, Trainer would load the model of a DeepSpeed checkpoint and start with a new optimizer.
    """
    states = (DEEPSPEED_STATES,) if arguments.deepspeed_plugin else ()
    parts: dict[str, tuple[str, ...]] = {"model weights": WEIGHTS, TRAINER_STATE_NAME: (TRAINER_STATE_NAME,)}
    if not arguments.save_only_model:
        parts[OPTIMIZER_NAME] = ("optimizer*", "optimizer*/*", f"rank*-{OPTIMIZER_NAME}", *states)
        parts[SCHEDULER_NAME] = (SCHEDULER_NAME, *states)
        parts["rng_state.pth"] = ("rng_state*.pth",)
    missing = [
        f"no {part}"
        for part, patterns in parts.items()
        if not any(path.is_file() for pattern in patterns for path in checkpoint.glob(pattern))
    ]
    return missing or find_state_error(checkpoint)


def find_truncated_files(checkpoint: Path) -> list[str]:
    """Name files of tensors that end early, or that are none; other damage is noticed when they are read, or never."""
    truncated = []
    for path in checkpoint.rglob("*"):
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, "pt"):  # reads the header and compares it with the size
                    continue
            except SafetensorError:
                truncated.append(path)
        elif path.suffix in (".pt", ".pth", ".bin") and path.name != TRAINING_ARGS_NAME and not is_zipfile(path):
            truncated.append(path)
    return [f"{path.relative_to(checkpoint)} is truncated or damaged" for path in truncated]


def find_state_error(checkpoint: Path) -> list[str]:
    """Say why the state of a checkpoint is not that of its step."""
    name, message = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name), f"{TRAINER_STATE_NAME} is damaged"
    try:
        step = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step
    except (ValueError, TypeError) as error:
        return [f"{message} ({error})"]
    if name is not None and step != int(name[1]):
        return [f"{message} (it is of step {step})"]
    return []
