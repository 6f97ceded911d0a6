"""`hf-deberta score`: classify all texts of parquet and json lines files, on one machine or on a cluster of Ray.

A shard, one input file, is one row of a dataset of Ray Data, whose workers hold the model. Ray gives a shard to another
worker if one dies; the file of a shard appears when it is complete, so a run that is started again skips it.
"""

import argparse
import glob
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_deberta import HfDebertaConfig
from hf_deberta.commands.any_checkpoint import MODEL_HELP, checkpoint_errors, class_candidates
from hf_deberta.engines.onednn import has_onednn_bfloat16
from hf_deberta.gpu_check import parse_size
from hf_deberta.scoring import (
    FORMATS,
    TOKENS_PER_BATCH,
    UNFINISHED,
    ScoreSettings,
    ShardCounts,
    TextClassifier,
    format_of,
    score_shard,
)
from hf_deberta.tokenization_hf_deberta import load_tokenizer
from hf_deberta.training.errors import InputError, one_line
from hf_deberta.training.json_files import DamagedFileError, read_json_object, write_json
from hf_deberta.training.run_identity import weight_hashes
from hf_deberta.training.run_lock import lock_folder

SETTINGS_FILE = "_score.json"  # Spark and others skip names that begin with an underscore
SIZES_FILE = "_sizes.log"  # of the finished files beside it
FREE_SETTINGS = ("tokens_per_batch", "device", "cores", "skip_bad_rows")  # may change when a run is started again
SECONDS_BETWEEN_LINES = 10
ATTEMPTS = 10  # of a shard whose workers die
LOCAL = "local"
SECONDS_TO_START = 120  # that Ray waits for its first process; 30 by default, too few on a busy machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    batch = " on a GPU, ".join(map(str, reversed(TOKENS_PER_BATCH.values()))) + " on CPUs"
    parser.add_argument("--model", required=True, help=f"a sequence classifier: {MODEL_HELP}")
    parser.add_argument("--input", required=True, nargs="+", help=f"files or 'patterns': {', '.join(FORMATS)}")
    parser.add_argument("--output", "--output_dir", required=True, dest="output_dir", help="folder of the results")
    parser.add_argument("--text_column", default="text", help="(default: text)")
    parser.add_argument("--text_pair_column", help="the second text of a pair")
    parser.add_argument("--max_length", type=parse_size, help="tokens; longer texts are cut (default: of the model)")
    parser.add_argument("--tokens_per_batch", type=parse_size, help=f"(default: {batch})")
    parser.add_argument("--all_scores", action="store_true", help="add a column scores, with the score of each label")
    parser.add_argument("--prefix", default="", help="of the new columns' names, such as predicted_")
    parser.add_argument("--skip_bad_rows", action="store_true", help="give rows without text a null label; else stop")
    parser.add_argument("--address", default=LOCAL, help="of a Ray cluster, or auto (default: this machine)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda if Ray has GPUs)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), help="(default: bfloat16 on GPUs)")
    parser.add_argument("--cores_per_worker", type=parse_size, default=1, help="cores for each model (default: 1)")


def main(args: argparse.Namespace) -> int:
    """Score the shards that are not done, and print a summary."""
    folder = Path(args.output_dir).resolve()
    check_classifier(args.model)
    with lock_folder(folder):
        shards = find_shards(args.input, folder)
        remove_unfinished(folder)
        todo = unfinished_shards(shards)
        if not todo:
            # without Ray, which alone knows the default dtype
            unknown = () if args.dtype or args.device else ("dtype",)
            check_same_settings(folder, settings_on(args, args.device or "cpu"), unknown)
            print(f"Nothing to do: {plural(len(shards), 'shard')} done before")
            return 0
        with running_ray(args.address) as ray:
            settings, workers = plan(args, ray.cluster_resources())
            check_same_settings(folder, settings)
            done = len(shards) - len(todo)
            workers = min(workers, len(todo))
            share = "1 GPU" if settings.device == "cuda" else plural(settings.cores, "core")
            each = f"{plural(workers, 'worker')} with {share}{' each' if workers > 1 else ''}"
            print(f"{plural(len(todo), 'shard')} to score, {done:,} done before; {each}", flush=True)
            score_all(ray, todo, settings, workers)
        remove_unfinished(folder)
    return 0


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def remove_unfinished(folder: Path) -> None:
    """Remove what workers that died have left behind."""
    for unfinished in folder.rglob(UNFINISHED):
        unfinished.unlink()


def check_classifier(model: str) -> None:
    (name, *others) = class_candidates(model)
    if others or name != "HfDebertaForSequenceClassification":
        raise InputError(f"{model} is no sequence classifier: its class is {name}")
    with checkpoint_errors(model):
        load_tokenizer(model, trust_remote_code=False)


def find_shards(patterns: Sequence[str], folder: Path) -> dict[Path, Path]:
    """Return the output file of each input file: its path below the part of the pattern before the first wildcard."""
    shards: dict[Path, Path] = {}
    owners: dict[Path, Path] = {}
    for pattern in patterns:
        base = base_folder(pattern)
        sources = [Path(path).absolute() for path in glob.glob(pattern, recursive=True)]
        if not sources and Path(pattern).exists():  # a name with brackets
            sources = [Path(pattern).absolute()]
        if not sources:
            raise InputError(f"--input {pattern}: there is no such file; storage must be mounted as a folder")
        for source in sorted(filter(Path.is_file, sources)):
            if format_of(source) is None:
                raise InputError(f"--input {source} is none of {', '.join(FORMATS)}")
            target = folder / source.relative_to(base)
            if owners.setdefault(target, source) != source:
                raise InputError(f"{owners[target]} and {source} would both be written to {target}: score them apart")
            if target.exists() and target.samefile(source):
                raise InputError(f"{source} would be overwritten: take another --output")
            shards[source] = target
    if not shards:
        raise InputError(f"--input {' '.join(patterns)} names folders, not files: add /*.parquet")
    return shards


def unfinished_shards(shards: dict[Path, Path]) -> dict[Path, Path]:
    """Return the shards without output, and those whose output has another size than when it was complete."""
    sizes: dict[Path, int] = {}
    for path in filter(Path.exists, {target.with_name(SIZES_FILE) for target in shards.values()}):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):  # a kill has cut the line
                name, size = json.loads(line)
                sizes[path.with_name(name)] = size
    sizes_now = {target: target.stat().st_size for target in shards.values() if target.exists()}
    done = {target for target, size in sizes_now.items() if sizes.get(target, size) == size}
    return {source: target for source, target in shards.items() if target not in done}


def base_folder(pattern: str) -> Path:
    parts = Path(pattern).absolute().parts
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed])


@contextmanager
def running_ray(address: str) -> Iterator[Any]:
    """Connect to a cluster, or start Ray on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(SECONDS_TO_START))
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise InputError("score needs Ray Data: pip install '.[score]'") from error
    own = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address, logging_level="warning", **own)
    except Exception as error:  # Ray has no class of its own for a start that takes too long
        ray.shutdown()
        raise InputError(
            f"Ray did not start in time, or not at all, with --address {address}: {one_line(error)}. If the machine is "
            "busy, start the command again, or run `ray start --head` and add --address auto"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def plan(args: argparse.Namespace, resources: dict[str, float]) -> tuple[ScoreSettings, int]:
    """Return the settings and the number of workers that the resources of the cluster allow."""
    device = args.device or ("cuda" if resources.get("GPU") else "cpu")
    workers = int(resources.get("GPU", 0) if device == "cuda" else resources.get("CPU", 0) // args.cores_per_worker)
    if workers < 1:
        need = "a GPU" if device == "cuda" else f"--cores_per_worker {args.cores_per_worker}"
        raise InputError(f"Ray has {resources.get('CPU', 0):g} cores and {resources.get('GPU', 0):g} GPUs, not {need}")
    if (device, args.dtype) == ("cpu", "bfloat16") and not has_onednn_bfloat16():
        raise InputError("--dtype bfloat16: this processor has no products in bfloat16; take float32 or int8")
    return settings_on(args, device), workers


def settings_on(args: argparse.Namespace, device: str) -> ScoreSettings:
    """Return the settings of workers on CPUs or GPUs."""
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    if (device, dtype) == ("cuda", "int8"):
        raise InputError("--dtype int8 is for CPUs: on GPUs take bfloat16 or float32")
    model = str(Path(args.model).absolute()) if Path(args.model).exists() else args.model
    return ScoreSettings(
        model, args.text_column, args.text_pair_column, args.max_length, args.tokens_per_batch, device, dtype,
        args.cores_per_worker, args.all_scores, args.skip_bad_rows, args.prefix,
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
        has_results = any(format_of(path) and path.is_file() for path in folder.rglob("*"))  # else a run has failed
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


class ShardScorer:
    """A worker of Ray. A mistake in a file is returned, so that the other shards are still scored."""

    def __init__(self, settings: ScoreSettings):
        logging.disable_progress_bar()  # of loading
        self.load_error = ""
        try:
            self.classifier = TextClassifier(settings)
        except InputError as error:  # raised here, it would be repeated and get a traceback of Ray
            self.load_error = str(error)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        source, target = Path(row["source"]), Path(row["target"])
        start = time.monotonic()
        died = target.parent.glob(UNFINISHED.replace("*", f"{glob.escape(target.name)}.*"))
        try:
            if self.load_error:
                raise InputError(self.load_error)
            if not source.exists():
                raise InputError(f"{source} does not exist on {socket.gethostname()}: all nodes must see it")
            if len([*died]) >= ATTEMPTS:
                raise InputError(f"{source}: {ATTEMPTS} workers died of it, perhaps for lack of memory")
            counts = score_shard(self.classifier, source, target)
        except InputError as error:
            return {**row, "size": 0, **asdict(ShardCounts()), "seconds": time.monotonic() - start, "error": str(error)}
        size = target.stat().st_size
        return {**row, "size": size, **asdict(counts), "seconds": time.monotonic() - start, "error": ""}


def score_all(ray: Any, todo: dict[Path, Path], settings: ScoreSettings, workers: int) -> None:
    """Score shards on the workers, print progress and a summary; raise an InputError if there were errors."""
    start = printed = time.monotonic()
    total, errors, work = ShardCounts(), [], 0.0
    for number, result in enumerate(ray_results(ray, todo, settings, workers), 1):
        error, seconds = result["error"], result["seconds"]
        total += ShardCounts(result["rows"], result["tokens"], result["bad_rows"])
        if error:
            errors.append(error)
            print(error, flush=True)
        else:
            work += seconds
        if time.monotonic() - printed > SECONDS_BETWEEN_LINES:
            printed = time.monotonic()
            progress = f"{number:,} of {plural(len(todo), 'shard')}, {speed(total, printed - start)}"
            if number > len(errors):
                rounds = math.ceil((len(todo) - number) / workers)
                left = work / (number - len(errors)) * rounds  # without the start of the workers
                progress += f", {left:,.0f} s left"
            print(progress, flush=True)
    skipped = f", {total.bad_rows:,} of them bad, with a null label" if total.bad_rows else ""
    print(f"{plural(len(todo) - len(errors), 'shard')}, {speed(total, time.monotonic() - start)}{skipped}", flush=True)
    if errors:
        raise InputError(f"{len(errors):,} of {plural(len(todo), 'shard')} failed; the first: {errors[0]}")


def speed(total: ShardCounts, seconds: float) -> str:
    rates = f"{total.rows / seconds:,.1f} rows/s, {total.tokens / seconds:,.0f} tokens/s"
    return f"{plural(total.rows, 'row')} and {plural(total.tokens, 'token')} in {seconds:,.0f} s: {rates}"


def ray_results(ray: Any, todo: dict[Path, Path], settings: ScoreSettings, workers: int) -> Iterator[dict[str, Any]]:
    """Yield the result of each shard as soon as it is done, and record the size of its output."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    rows = [{"source": str(source), "target": str(target)} for source, target in todo.items()]
    results = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        ShardScorer,
        fn_constructor_args=[settings],
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        num_cpus=settings.cores,
        num_gpus=1 if settings.device == "cuda" else 0,
    )
    for block in results.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
        for result in block.to_pylist():
            if not result["error"]:
                target = Path(result["target"])
                with open(target.with_name(SIZES_FILE), "a", encoding="ascii") as file:  # a kill may cut the last line
                    file.write(f"\n{json.dumps([target.name, result['size']])}")
            yield result
