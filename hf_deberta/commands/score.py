"""`hf-deberta score`: classify all texts of files, on this machine or with Ray Data on a cluster.

The file of an output appears when it is complete, so a run that is started again skips it. With Ray, one input file is
one row of a dataset, whose workers hold the model; Ray gives a file to another worker if one dies.
"""

import argparse
import glob
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from hf_deberta import HfDebertaConfig
from hf_deberta.commands.any_checkpoint import MODEL_HELP, checkpoint_errors, class_candidates
from hf_deberta.engines.onednn import has_onednn_bfloat16
from hf_deberta.gpu_check import parse_size
from hf_deberta.scoring import (
    FORMATS,
    MAX_COUNTED_ROWS,
    TOKENS_PER_BATCH,
    UNFINISHED,
    ScoreSettings,
    TextClassifier,
    count_rows,
    score_file,
)
from hf_deberta.training.errors import InputError, input_errors
from hf_deberta.training.json_files import DamagedFileError, read_json_object, write_json
from hf_deberta.training.run_identity import weight_hashes
from hf_deberta.training.run_lock import lock_folder
from hf_deberta.training.text_files import file_kind

SETTINGS_FILE = "_score.json"  # Spark and others skip names that begin with an underscore
SIZES_FILE = "_sizes.log"  # of the finished files beside it
FREE_SETTINGS = ("tokens_per_batch", "device", "cores", "skip_bad_rows")  # may change when a run is started again
SECONDS_BETWEEN_LINES = 30
SECONDS_BETWEEN_RENEWALS = 0.2  # of the line on a terminal
ATTEMPTS = 10  # of a file whose workers die
SECONDS_TO_START = 120  # that Ray waits for its first process; 30 by default, too few on a busy machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    batch = " on a GPU, ".join(map(str, reversed(TOKENS_PER_BATCH.values()))) + " on CPUs"
    parser.add_argument("--model", required=True, help=f"a sequence classifier: {MODEL_HELP}")
    parser.add_argument("--input", required=True, nargs="+", help=f"files or 'patterns': {', '.join(FORMATS)}, or .gz")
    parser.add_argument("--output", "--output_dir", required=True, dest="output_dir", help="folder of the results")
    parser.add_argument("--text_column", default="text", help="(default: text)")
    parser.add_argument("--text_pair_column", help="the second text of a pair")
    parser.add_argument("--max_length", type=parse_size, help="tokens; longer texts are cut (default: of the model)")
    parser.add_argument("--tokens_per_batch", type=parse_size, help=f"(default: {batch})")
    parser.add_argument("--all_scores", action="store_true", help="add a column scores, with the score of each label")
    parser.add_argument("--prefix", default="", help="of the new columns' names, such as predicted_")
    parser.add_argument("--skip_bad_rows", action="store_true", help="give rows without text a null label; else stop")
    parser.add_argument("--address", help="of a Ray cluster; auto, or local to start Ray here (default: without Ray)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda if there is a GPU)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), help="(default: bfloat16 on GPUs)")
    cores = "cores to use (default: all), or with Ray for each worker (default: 1)"
    parser.add_argument("--cores", "--cores_per_worker", type=parse_size, help=cores)


def main(args: argparse.Namespace) -> int:
    """Score the files that are not done, and print a summary."""
    folder = Path(args.output_dir).resolve()
    check_classifier(args.model)
    with lock_folder(folder):
        files = find_files(args.input, folder)
        remove_unfinished(folder)
        todo = unfinished_files(files)
        settings = settings_on(args, torch.cuda.device_count())
        if not todo:
            # without Ray, which alone knows the default dtype
            unknown = ("dtype",) if args.address and not (args.dtype or args.device) else ()
            check_same_settings(folder, settings, unknown)
            print(f"Nothing to do: {plural(len(files), 'file')} done before")
            return 0
        rows, errors = check_first_rows(todo, settings)
        for error in errors if len(todo) > 1 else ():
            print(error, flush=True)
        if rows:
            print(f"{plural(len(rows), 'file')} to score, {len(files) - len(todo):,} done before", flush=True)
            errors += score_files(args, folder, todo, rows)
            remove_unfinished(folder)
        if errors:
            failed = f"{len(errors):,} of {plural(len(todo), 'file')} failed; the first: " if len(todo) > 1 else ""
            raise InputError(failed + errors[0])
    return 0


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def remove_unfinished(folder: Path) -> None:
    """Remove what a run that was stopped, or workers that died, have left behind."""
    for unfinished in folder.rglob(UNFINISHED):
        unfinished.unlink()


def check_classifier(model: str) -> None:
    """Refuse a model of another class. Official files name none: their weights are checked when they are loaded."""
    (name, *others) = class_candidates(model)
    if not others and name != "HfDebertaForSequenceClassification":
        raise InputError(f"{model} is no sequence classifier: its class is {name}")


# 1. Files


def find_files(patterns: Sequence[str], folder: Path) -> dict[Path, Path]:
    """Return the output file of each input file: its path below the part of the pattern before the first wildcard."""
    files: dict[Path, Path] = {}
    owners: dict[Path, Path] = {}
    for pattern in patterns:
        base = base_folder(pattern)
        sources = [Path(path).absolute() for path in glob.glob(pattern, recursive=True)]
        if not sources and Path(pattern).exists():  # a name with brackets
            sources = [Path(pattern).absolute()]
        if not sources:
            raise InputError(f"--input {pattern}: there is no such file; storage must be mounted as a folder")
        for source in sorted(filter(Path.is_file, sources)):
            if file_kind(source) not in FORMATS:
                raise InputError(f"--input {source} is none of {', '.join(FORMATS)}")
            target = folder / source.relative_to(base)
            if file_kind(source) == "txt":  # which has no place for columns
                target = target.with_name(re.sub(r"txt(\.gz)?$", r"jsonl\1", target.name, flags=re.IGNORECASE))
            if owners.setdefault(target, source) != source:
                raise InputError(f"{owners[target]} and {source} would both be written to {target}: score them apart")
            if target.exists() and target.samefile(source):
                raise InputError(f"{source} would be overwritten: take another --output")
            files[source] = target
    if not files:
        raise InputError(f"--input {' '.join(patterns)} names folders, not files: add /*.parquet")
    return files


def base_folder(pattern: str) -> Path:
    parts = Path(pattern).absolute().parts
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed])


def unfinished_files(files: dict[Path, Path]) -> dict[Path, Path]:
    """Return the files without output, and those whose output has another size than when it was complete."""
    sizes: dict[Path, int] = {}
    for path in filter(Path.exists, {target.with_name(SIZES_FILE) for target in files.values()}):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):  # a kill has cut the line
                name, size = json.loads(line)
                sizes[path.with_name(name)] = size
    sizes_now = {target: target.stat().st_size for target in files.values() if target.exists()}
    done = {target for target, size in sizes_now.items() if sizes.get(target, size) == size}
    return {source: target for source, target in files.items() if target not in done}


def check_first_rows(sources: Iterable[Path], settings: ScoreSettings) -> tuple[dict[Path, int], list[str]]:
    """Return the number of rows of each file that can be scored, and what is wrong with the others.

    After MAX_COUNTED_ROWS, files are not read, and their rows are estimated from their sizes.
    """
    rows: dict[Path, int] = {}
    errors = []
    counted = size = 0
    for source in sources:
        try:
            if counted < MAX_COUNTED_ROWS:
                rows[source] = count_rows(source, settings)
                counted, size = counted + rows[source], size + source.stat().st_size
            else:
                rows[source] = counted * source.stat().st_size // size
        except InputError as error:
            errors.append(str(error))
    return rows, errors


# 2. Settings


def plan(args: argparse.Namespace, ray: Any) -> tuple[ScoreSettings, int]:
    """Return the settings and the number of workers that the resources of this machine, or of a cluster, allow."""
    here = {"CPU": os.cpu_count(), "GPU": torch.cuda.device_count()}
    resources: dict[str, Any] = ray.cluster_resources() if ray else here
    settings = settings_on(args, resources.get("GPU", 0))
    workers = int(resources.get("GPU", 0) if settings.device == "cuda" else resources.get("CPU", 0) // settings.cores)
    if workers < 1:
        need = "a GPU" if settings.device == "cuda" else f"--cores {settings.cores}"
        has = f"{resources.get('CPU', 0):g} cores and {resources.get('GPU', 0):g} GPUs"
        raise InputError(f"{'Ray' if ray else 'this machine'} has {has}, not {need}")
    if (settings.device, settings.dtype) == ("cpu", "bfloat16") and not has_onednn_bfloat16():
        raise InputError("--dtype bfloat16: this processor has no products in bfloat16; take float32 or int8")
    return settings, workers


def settings_on(args: argparse.Namespace, gpus: float) -> ScoreSettings:
    """Return the settings of workers, where there are so many GPUs."""
    device = args.device or ("cuda" if gpus else "cpu")
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    if (device, dtype) == ("cuda", "int8"):
        raise InputError("--dtype int8 is for CPUs: add --device cpu, or take bfloat16 or float32")
    model = str(Path(args.model).absolute()) if Path(args.model).exists() else args.model
    cores = args.cores or (1 if args.address else torch.get_num_threads())
    return ScoreSettings(
        model, args.text_column, args.text_pair_column, args.max_length, args.tokens_per_batch, device, dtype,
        cores, args.all_scores, args.skip_bad_rows, args.prefix,
    )  # fmt: skip


def check_same_settings(folder: Path, settings: ScoreSettings, unknown: Sequence[str] = ()) -> None:
    """Refuse a folder with results of another model or other settings; record new ones, if none is unknown."""
    with checkpoint_errors(settings.model):
        config = HfDebertaConfig.from_pretrained(settings.model)
    now = {name: value for name, value in asdict(settings).items() if name not in FREE_SETTINGS}
    now["labels"] = [(config.id2label or {}).get(number) for number in range(config.num_labels or 0)]
    now["commit"] = getattr(config, "_commit_hash", None)  # of the Hub
    now |= weight_hashes({"model_name_or_path": settings.model})
    if "weights of model_name_or_path" in now:  # the folder may have been moved
        del now["model"]
    path = folder / SETTINGS_FILE
    try:
        # else a run has failed
        has_results = any(file_kind(path) in FORMATS and path.is_file() for path in folder.rglob("*"))
        before = read_json_object(path) if path.exists() and has_results else now
    except DamagedFileError as error:
        raise InputError(f"{error}; take another --output") from error
    now |= {name: before.get(name) for name in unknown}
    changed = [name for name in sorted({*now, *before}) if now.get(name) != before.get(name)]
    if changed:
        changes = ", ".join(f"{name} {before.get(name)}, now {now.get(name)}" for name in changed)
        raise InputError(f"{folder} holds results of other settings: {changes}; take another --output")
    if not unknown:
        write_json(path, now)


# 3. Scoring


class FileScorer:
    """Scores a file a call. A mistake in a file is returned, so that the other files are still scored."""

    def __init__(self, settings: ScoreSettings, report: Callable[[int], None] = lambda rows: None):
        logging.disable_progress_bar()  # of loading
        self.report, self.load_error = report, ""
        try:
            self.classifier = TextClassifier(settings)
        except InputError as error:  # raised by a worker of Ray, it would be repeated and get a traceback
            self.load_error = str(error)

    def __call__(self, task: dict[str, str]) -> dict[str, Any]:
        source, target = Path(task["source"]), Path(task["target"])
        died = target.parent.glob(UNFINISHED.replace("*", f"{glob.escape(target.name)}.*"))
        result = {**task, "rows": 0, "tokens": 0, "bad_rows": 0, "full_rows": 0, "size": 0, "error": ""}
        try:
            if self.load_error:
                raise InputError(self.load_error)
            if not source.exists():
                raise InputError(f"{source} does not exist on {socket.gethostname()}: all nodes must see it")
            if len([*died]) >= ATTEMPTS:
                raise InputError(f"{source}: {ATTEMPTS} workers died of it, perhaps for lack of memory")
            result |= score_file(self.classifier, source, target, self.report)
            result["size"] = target.stat().st_size
        except InputError as error:
            result["error"] = str(error)
        return result


def score_files(args: argparse.Namespace, folder: Path, todo: dict[Path, Path], rows: dict[Path, int]) -> list[str]:
    """Score the files of `rows`, here or with Ray; return what went wrong."""
    tasks = [{"source": str(source), "target": str(todo[source])} for source in rows]
    with running_ray(args.address) if args.address else nullcontext() as ray:
        settings, workers = plan(args, ray)
        check_same_settings(folder, settings)
        seconds = SECONDS_BETWEEN_RENEWALS if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
        with tqdm(total=sum(rows.values()), unit=" rows", mininterval=seconds, miniters=1, leave=False) as progress:
            if not ray:
                return collect(score_here(tasks, settings, progress), rows, progress)
            return collect(score_on_ray(ray, min(workers, len(tasks)), tasks, settings), rows, progress)


def collect(scored: Iterator[dict[str, Any]], rows: dict[Path, int], progress: tqdm) -> list[str]:
    """Record the size of each output when it is complete, and print a summary; return what went wrong.

    `rows` are the numbers of rows in the files that `progress` expects.
    """
    errors, total = [], Counter(files=0, rows=0, tokens=0, bad_rows=0, full_rows=0)
    for result in scored:
        total.update({name: result[name] for name in ("rows", "tokens", "bad_rows", "full_rows")})
        progress.update(total["rows"] - progress.n)  # unless the scorer has reported them
        if result["error"]:
            errors.append(result["error"])
            if len(rows) > 1:
                progress.write(result["error"])
            continue
        progress.total += result["rows"] - rows[Path(result["source"])]
        total["files"] += 1
        target = Path(result["target"])
        with open(target.with_name(SIZES_FILE), "a", encoding="ascii") as file:  # a kill may cut the last line
            file.write(f"\n{json.dumps([target.name, result['size']])}")
    seconds = progress.format_dict["elapsed"]
    progress.close()
    skipped = f", {total['bad_rows']:,} of them bad, with a null label" if total["bad_rows"] else ""
    cut = f"; {total['full_rows']:,} rows fill --max_length: longer texts were cut" if total["full_rows"] else ""
    work = " and ".join(plural(total[f"{noun}s"], noun) for noun in ("row", "token"))
    rates = f"{total['rows'] / seconds:,.1f} rows/s, {total['tokens'] / seconds:,.0f} tokens/s"
    print(f"{plural(total['files'], 'file')}, {work} in {seconds:,.0f} s: {rates}{skipped}{cut}", flush=True)
    return errors


def score_here(tasks: list[dict[str, str]], settings: ScoreSettings, progress: tqdm) -> Iterator[dict[str, Any]]:
    """Yield the result of each file in turn."""
    scorer = FileScorer(settings, progress.update)
    if scorer.load_error:
        raise InputError(scorer.load_error)
    progress.unpause()  # the time of loading the model does not count
    yield from map(scorer, tasks)


# 4. With Ray


@contextmanager
def running_ray(address: str) -> Iterator[Any]:
    """Connect to a cluster, or start Ray on this machine, without its log lines."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(SECONDS_TO_START))
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise InputError("--address needs Ray Data: pip install '.[score]'") from error
    getLogger("ray").setLevel("ERROR")
    getLogger("ray.data").setLevel("ERROR")
    own = {"include_dashboard": False} if address == "local" else {}
    try:
        with input_errors(f"Ray did not start (--address {address})", Exception):  # it has no class of its own for that
            ray.init(address, logging_level="error", log_to_driver=False, **own)
        yield ray
    finally:
        ray.shutdown()


def score_on_ray(
    ray: Any, workers: int, tasks: list[dict[str, str]], settings: ScoreSettings
) -> Iterator[dict[str, Any]]:
    """Yield the result of each file as soon as it is done."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    results = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map(
        FileScorer,
        fn_constructor_args=[settings],
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        num_cpus=settings.cores,
        num_gpus=1 if settings.device == "cuda" else 0,
    )
    for block in results.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
        yield from block.to_pylist()
