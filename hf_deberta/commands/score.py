"""`hf-deberta score`: label the texts of files, on this machine or with workers of Ray.

Files are read and written here, in parts (scoring.py): the same command continues after the parts that are written.
"""

import argparse
import glob
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_deberta.commands.any_checkpoint import read_fields
from hf_deberta.gpu_check import parse_size
from hf_deberta.scoring import ScoreSettings, TextClassifier, count_rows, label_files, parts_folder
from hf_deberta.training.errors import InputError
from hf_deberta.training.json_files import read_json_object, write_json
from hf_deberta.training.run_identity import weight_hashes
from hf_deberta.training.run_lock import lock_folder
from hf_deberta.training.text_files import file_kind

FORMATS = ("parquet", "jsonl", "csv", "tsv", "txt")
SETTINGS_FILE = "_score.json"  # Spark and others skip names that begin with an underscore
FREE_SETTINGS = ("tokens_per_batch", "device", "cores", "skip_bad_rows")  # may change when a run continues


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "All files are checked first. One with a mistake is left out and named at the end (exit status 1)."
    parser.add_argument("--input", required=True, nargs="+", help=f"files or 'patterns': {', '.join(FORMATS)}, or .gz")
    parser.add_argument("--output", "--output_dir", required=True, help="folder of the results")
    for field in fields(ScoreSettings):
        options: Any = {**field.metadata, **({"type": parse_size} if field.type in (int, int | None) else {})}
        parser.add_argument(f"--{field.name}", **options)
    parser.add_argument("--address", help="of a Ray cluster; auto, or local to start Ray here (default: without Ray)")


def main(args: argparse.Namespace) -> int:
    """Score the files that are not done, and print a summary."""
    folder = Path(args.output).resolve()
    files, settings = find_files(args.input, folder), choose_settings(args)
    with lock_folder(folder):
        check_same_settings(folder, recorded := settings_to_record(settings))
        todo = {target: source for target, source in files.items() if not target.exists()}
        for target in files.keys() - todo.keys():
            shutil.rmtree(parts_folder(target), ignore_errors=True)  # a kill may have left them
        errors, rows = list[str](), 0
        for target, source in [*todo.items()]:
            try:
                rows += count_rows(source, settings)
            except InputError as error:
                errors.append(str(error))
                del todo[target]
        print(f"{len(todo):,} of {len(files):,} files to score", flush=True)
        if todo:
            write_json(folder / SETTINGS_FILE, recorded)
            score_files(todo, rows, settings, args.address)
    if errors:
        raise InputError("\n".join(errors))
    return 0


def find_files(patterns: Sequence[str], folder: Path) -> dict[Path, Path]:
    """Return the source of each target, whose path is that below the part of the pattern before a wildcard."""
    files: dict[Path, Path] = {}
    for pattern in patterns:
        absolute = Path(pattern).absolute().as_posix()
        is_pattern = glob.has_magic(absolute) and not os.path.exists(absolute)  # a name may have brackets
        names = glob.glob(absolute, recursive=True) if is_pattern else [absolute]
        sources = sorted(filter(Path.is_file, map(Path, names)))
        if not sources:
            raise InputError(
                f"--input {pattern}: there is no such file; for a folder, name its files: FOLDER/*.parquet"
            )
        base = re.split(r"[^/]*[*?[]", absolute)[0] if is_pattern else os.path.dirname(absolute)
        for source in sources:
            target = folder / source.relative_to(base)
            if file_kind(source) not in FORMATS:
                raise InputError(f"--input {source} is none of {', '.join(FORMATS)}")
            if file_kind(source) == "txt":  # which has no place for columns
                target = target.with_name(re.sub(r"txt(\.gz)?$", r"jsonl\1", target.name, flags=re.IGNORECASE))
            if files.setdefault(target, source) != source:
                raise InputError(f"{files[target]} and {source} would both be written to {target}: score them apart")
    return files


def choose_settings(args: argparse.Namespace) -> ScoreSettings:
    """Return the settings of the flags, with the defaults of this machine."""
    names = {field.name for field in fields(ScoreSettings)}
    settings = {name: value for name, value in vars(args).items() if name in names and value is not None}
    device = settings.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    dtype = settings.setdefault("dtype", "bfloat16" if device == "cuda" else "float32")
    if (device, dtype) == ("cuda", "int8"):
        raise InputError("--dtype int8 is for CPUs: add --device cpu, or take bfloat16 or float32")
    settings.setdefault("cores", 1 if args.address else torch.get_num_threads())
    settings["model"] = str(Path(args.model).absolute()) if Path(args.model).exists() else args.model
    return ScoreSettings(**settings)


def settings_to_record(settings: ScoreSettings) -> dict[str, Any]:
    """Return what the results depend on, but for the files."""
    config, hashes = read_fields(settings.model), weight_hashes({"model_name_or_path": settings.model})
    recorded = {name: value for name, value in asdict(settings).items() if name not in FREE_SETTINGS}
    recorded |= {name: config.get(name) for name in ("id2label", "_commit_hash")}  # the commit on the Hub
    return recorded | hashes | ({"model": None} if hashes else {})  # a folder may have been moved


def check_same_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder with results of another model or other settings."""
    path = folder / SETTINGS_FILE
    before = read_json_object(path) if path.exists() else settings
    changed = [name for name in sorted({*settings, *before}) if settings.get(name) != before.get(name)]
    if changed:
        changes = ", ".join(f"{name} {before.get(name)}, now {settings.get(name)}" for name in changed)
        raise InputError(f"{folder} holds results of other settings: {changes}; take another --output")


def score_files(files: dict[Path, Path], rows: int, settings: ScoreSettings, address: str | None) -> None:
    """Write each target from its source, with so many rows in all, and print a summary."""
    seconds = 0.2 if sys.stderr.isatty() else 30  # between lines
    with tqdm(total=rows, unit=" rows", mininterval=seconds, miniters=1, leave=False) as progress:
        classifier: Any = RayClassifier(settings, address) if address else TextClassifier(settings)
        try:
            classifier.collect(classifier.submit([[]]))  # waits for the model, whose time does not count
            progress.unpause()
            counts = label_files(files, settings, classifier, progress)
        finally:
            classifier.stop()
        seconds = progress.format_dict["elapsed"]
    bad = f", {counts['bad_rows']:,} of them bad, with a null label" if counts["bad_rows"] else ""
    cut = f"; {counts['full_rows']:,} rows fill --max_length: longer texts were cut" if counts["full_rows"] else ""
    print(f"{counts['rows']:,} rows in {seconds:,.0f} s: {counts['rows'] / seconds:,.1f} rows/s{bad}{cut}", flush=True)


# With Ray


class RayClassifier:
    """Labels texts in processes of Ray, which keep the model. Two share a GPU: one tokenizes, the other computes."""

    def __init__(self, settings: ScoreSettings, address: str):
        try:
            import ray
        except ImportError as error:
            raise InputError("--address needs Ray: pip install '.[score]'") from error
        ray.init(address, logging_level="error", log_to_driver=False)
        resource, share = ("GPU", 0.5) if settings.device == "cuda" else ("CPU", settings.cores)
        self.ray, self.settings = ray, settings
        workers = int(ray.cluster_resources().get(resource, 0) / share)
        if workers < 1:
            self.stop()
            raise InputError(
                f"Ray has no {resource}, or fewer than --cores {settings.cores}: lower it, or change --device"
            )
        self.ahead = 2 * workers
        options = {"num_cpus": settings.cores, "num_gpus": share if resource == "GPU" else 0, "max_calls": 0}
        self.label_texts = ray.remote(**options)(label_texts)

    def submit(self, texts: Sequence[Sequence[str]]) -> Any:
        return self.label_texts.remote(self.settings, [self.ray.put(texts)])  # in a list: tasks stay alike for Ray

    def collect(self, submitted: Any) -> Any:
        return self.ray.get(submitted)

    def stop(self) -> None:
        self.ray.shutdown()


cached_classifier = lru_cache(maxsize=1)(TextClassifier)


def label_texts(settings: ScoreSettings, texts: list[Any]) -> Any:
    """Label texts, whose reference is in a list, in a process of Ray."""
    import ray

    classifier = cached_classifier(settings)
    return classifier.collect(classifier.submit(ray.get(texts[0])))
