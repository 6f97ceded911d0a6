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
from hf_deberta.training.errors import InputError, input_errors, one_line
from hf_deberta.training.json_files import read_json_object, write_json
from hf_deberta.training.run_identity import weight_hashes
from hf_deberta.training.run_lock import lock_folder
from hf_deberta.training.text_files import file_kind

FORMATS = ("parquet", "jsonl", "csv", "tsv", "txt")
SETTINGS_FILE = "_score.json"  # Spark and others skip names that begin with an underscore
FREE_SETTINGS = ("tokens_per_batch", "device", "cores", "skip_bad_rows")  # may change when a run continues


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        check_same_settings(folder, settings)
        todo = {target: source for target, source in files.items() if not target.exists()}
        for target in files.keys() - todo.keys():
            shutil.rmtree(parts_folder(target), ignore_errors=True)  # a kill may have left them
        rows = sum(count_rows(source, settings) for source in todo.values())
        print(f"{len(todo):,} of {len(files):,} files to score", flush=True)
        if todo:
            score_files(todo, rows, settings, args.address)
    return 0


def find_files(patterns: Sequence[str], folder: Path) -> dict[Path, Path]:
    """Return the source of each target, whose path is that below the part of the pattern before a wildcard."""
    files: dict[Path, Path] = {}
    for pattern in patterns:
        absolute = Path(pattern).absolute().as_posix()
        is_file = Path(absolute).is_file()  # whose name may have brackets
        names = [absolute] if is_file else glob.glob(absolute, recursive=True)
        sources = sorted(filter(Path.is_file, map(Path, names)))
        if not sources and names:
            raise InputError(f"--input {pattern} names folders, not files: add /*.parquet, or another ending")
        if not sources:
            raise InputError(f"--input {pattern}: there is no such file; storage must be mounted as a folder")
        has_wildcard = glob.has_magic(absolute) and not is_file
        base = re.split(r"[^/]*[*?[]", absolute)[0] if has_wildcard else os.path.dirname(absolute)
        for source in sources:
            target = folder / source.relative_to(base)
            if file_kind(source) not in FORMATS:
                raise InputError(f"--input {source} is none of {', '.join(FORMATS)}")
            if file_kind(source) == "txt":  # which has no place for columns
                target = target.with_name(re.sub(r"txt(\.gz)?$", r"jsonl\1", target.name, flags=re.IGNORECASE))
            if target == source:
                raise InputError(f"{source} would be overwritten: take another --output")
            if files.setdefault(target, source) != source:
                raise InputError(f"{files[target]} and {source} would both be written to {target}: score them apart")
    return files


def choose_settings(args: argparse.Namespace) -> ScoreSettings:
    """Return the settings of the flags, with the defaults of this machine."""
    names = {field.name for field in fields(ScoreSettings)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    device = given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    dtype = given.setdefault("dtype", "bfloat16" if device == "cuda" else "float32")
    if (device, dtype) == ("cuda", "int8"):
        raise InputError("--dtype int8 is for CPUs: add --device cpu, or take bfloat16 or float32")
    given.setdefault("cores", 1 if args.address else torch.get_num_threads())
    given["model"] = str(Path(args.model).absolute()) if Path(args.model).exists() else args.model
    return ScoreSettings(**given)


def check_same_settings(folder: Path, settings: ScoreSettings) -> None:
    """Refuse a folder with results of another model or other settings; record the settings of this run."""
    config = read_fields(settings.model)
    now = {name: value for name, value in asdict(settings).items() if name not in FREE_SETTINGS}
    now |= {name: config.get(name) for name in ("id2label", "_commit_hash")}  # the commit on the Hub
    if hashes := weight_hashes({"model_name_or_path": settings.model}):  # the folder may have been moved
        now |= {**hashes, "model": None}
    path = folder / SETTINGS_FILE
    # without results, the run before has failed
    has_results = any(file_kind(path) in FORMATS and path.is_file() for path in folder.rglob("*"))
    before = read_json_object(path) if path.exists() and has_results else now
    changed = [name for name in sorted({*now, *before}) if now.get(name) != before.get(name)]
    if changed:
        changes = ", ".join(f"{name} {before.get(name)}, now {now.get(name)}" for name in changed)
        raise InputError(f"{folder} holds results of other settings: {changes}; take another --output")
    write_json(path, now)


def score_files(files: dict[Path, Path], rows: int, settings: ScoreSettings, address: str | None) -> None:
    """Write each target from its source, with so many rows in all, and print a summary."""
    seconds = 0.2 if sys.stderr.isatty() else 30  # between lines
    with tqdm(total=rows, unit=" rows", mininterval=seconds, miniters=1, leave=False) as progress:
        classifier: Any = RayClassifier(settings, address) if address else TextClassifier(settings, progress)
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
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")  # by default 30, too few on a busy machine
        try:
            import ray
        except ImportError as error:
            raise InputError("--address needs Ray: pip install '.[score]'") from error
        with input_errors(f"Ray did not start (--address {address})", Exception):  # it has no class of its own for that
            ray.init(address, logging_level="error", log_to_driver=False)
        self.ray, self.settings, has = ray, settings, ray.cluster_resources()
        on_gpus = settings.device == "cuda"
        workers = int(2 * has.get("GPU", 0) if on_gpus else has.get("CPU", 0) // settings.cores)
        if workers < 1:
            need = "a GPU" if on_gpus else f"--cores {settings.cores}"
            self.stop()
            raise InputError(f"Ray has {has.get('CPU', 0):g} cores and {has.get('GPU', 0):g} GPUs, not {need}")
        self.ahead = 2 * workers
        options = {"num_cpus": settings.cores, "num_gpus": 0.5 if on_gpus else 0, "max_calls": 0}
        self.label_texts = ray.remote(**options)(label_texts)

    def submit(self, texts: Sequence[Sequence[str]]) -> Any:
        return self.label_texts.remote(self.settings, [self.ray.put(texts)])  # in a list: tasks stay alike for Ray

    def collect(self, submitted: Any) -> Any:
        try:
            return self.ray.get(submitted)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self.ray.exceptions.RayError as error:
            raise InputError(f"workers of Ray died, perhaps for lack of memory: {one_line(error)}") from error

    def stop(self) -> None:
        self.ray.shutdown()


cached_classifier = lru_cache(maxsize=1)(TextClassifier)


def label_texts(settings: ScoreSettings, texts: list[Any]) -> Any:
    """Label texts, whose reference is in a list, in a process of Ray."""
    import ray

    classifier = cached_classifier(settings)
    return classifier.collect(classifier.submit(ray.get(texts[0])))
