"""Whether a checkpoint is whole: a manifest with the size and checksum of each file, and the parts that a run needs.

    checkpoint-500/manifest.json    {"files": {"model.safetensors": {"size": 1738, "crc32": 3405691582}, ...}}

The manifest is written last. CRC-32 notices missing, truncated, overwritten and flipped bytes in half the time of
SHA-256. It does not stop someone who changes the files and the manifest on purpose.

A checkpoint without a manifest comes from an earlier version or from another `Trainer`: of it only the parts that must
be there are checked. Damaged ones fail when they are read.
"""

import re
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_deberta.training.json_files import DamagedFileError, read_json_object, write_json

MANIFEST = "manifest.json"
BLOCK = 2**20  # bytes read at once
DEEPSPEED_STATES = "global_step*/*"  # weights, optimizer and schedule
# A checkpoint has a file of one of these patterns; shards have an index.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model*", "pytorch_model_fsdp*/*",
    "adapter_model*", "*/adapter_model*", DEEPSPEED_STATES,
)  # fmt: skip
WEIGHT_FILES = (*WEIGHTS, "model-*.safetensors")


def write_manifest(folder: Path, files: Iterable[Path] | None = None) -> None:
    """Write the size and checksum of files in `folder`, by default of all."""
    if files is None:
        files = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    paths = sorted(files)
    with ThreadPoolExecutor() as pool:  # zlib does not hold Python's lock
        checksums = list(pool.map(checksum, paths))
    entries = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": value}
        for path, value in zip(paths, checksums, strict=True)
    }
    write_json(folder / MANIFEST, {"files": entries})


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value, block = 0, memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return value


def find_damage(checkpoint: Path, arguments: TrainingArguments) -> list[str]:
    """Describe what is damaged or missing in a checkpoint: ["optimizer.pt is missing"]. Empty if it is whole."""
    damage = find_damaged_files(checkpoint, ("*", "*/*")) or find_missing_parts(checkpoint, arguments)
    return damage or find_state_error(checkpoint)


def find_damaged_files(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    """Compare the files of a folder that match one of the patterns with its manifest, if it has one."""
    if not (folder / MANIFEST).exists():
        return []
    try:
        manifest = read_json_object(folder / MANIFEST)
        expected = {name: (entry["size"], entry["crc32"]) for name, entry in manifest["files"].items()}
    except (DamagedFileError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} is damaged"]
    names = [name for name in expected if any(Path(name).match(pattern) for pattern in patterns)]
    with ThreadPoolExecutor() as pool:
        differences = pool.map(lambda name: find_difference(folder / name, *expected[name]), names)
    return [f"{name} {difference}" for name, difference in zip(names, differences, strict=True) if difference]


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
    """Name what training needs to resume from a checkpoint and is not there.

    Without DeepSpeed, Trainer would load the model of a DeepSpeed checkpoint and start with a new optimizer.
    """
    states = (DEEPSPEED_STATES,) if arguments.deepspeed_plugin else ()
    parts: dict[str, tuple[str, ...]] = {"model weights": WEIGHTS, TRAINER_STATE_NAME: (TRAINER_STATE_NAME,)}
    if not arguments.save_only_model:
        parts[OPTIMIZER_NAME] = ("optimizer*", "optimizer*/*", f"rank*-{OPTIMIZER_NAME}", *states)
        parts[SCHEDULER_NAME] = (SCHEDULER_NAME, *states)
        parts["rng_state.pth"] = ("rng_state*.pth",)  # one for each process, all of which a manifest lists
    return [
        f"no {part}"
        for part, patterns in parts.items()
        if not any(path.is_file() for pattern in patterns for path in checkpoint.glob(pattern))
    ]


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
