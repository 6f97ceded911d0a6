"""Repeat cheap rows of most result files and compare them with the recorded ones; exit with 1 if a value differs.

    python benchmarks/reproduce.py                     # what needs neither data nor weights, also: make reproduce
    python benchmarks/reproduce.py --data data --model deberta-v3-xsmall
    python benchmarks/reproduce.py --only exactness.csv encoder.csv

--data is the folder that benchmarks/fine_tuning.py describes, with the books of results/README.md as
text/books_*.txt; books_validation.txt is held out. --model is the checkpoint of the tables, a DeBERTa-v3-xsmall
fine-tuned on NLI. Scripts write into a temporary folder, and the recorded files stay as they are. Commands run two at a
time with one thread each, as recorded; those whose times count run first, alone.

A value may differ from the recorded one of the same seed by as much as the recorded seeds differ among themselves; the
class `Limits` has the other rules. Times and memory are compared as ratios of two peers of one run.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from table import RESULTS, markdown, read_rows

ROOT = Path(__file__).parents[1]
NLI = "a DeBERTa-v3-xsmall fine-tuned on NLI (int8 weights multiplied out)"
BOOKS = "--train_file {books} --validation_file {data}/text/books_validation.txt --work_dir {work}"
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Limits:
    """How far a new value may lie from the recorded ones: those of the same row, by default on several machines.

    Without arguments it may lie nowhere else.
    """

    seeds: bool = False  # as far as the recorded values of all seeds differ among themselves ...
    margin: float = 0.0  # ... or by this much
    times: float = 1.0  # up to this multiple of the largest, down to this fraction of the smallest
    no_lower_limit: bool = False  # for differences, which may always be smaller
    peer: str = ""  # compare the value of this peer in the same run, divided by the row's own

    def interval(self, recorded: list[float], of_all_seeds: list[float]) -> tuple[float, float]:
        """Return the smallest and the largest value allowed."""
        spread = max(self.margin, max(of_all_seeds) - min(of_all_seeds) if self.seeds else 0.0)
        low, high = min(recorded) / self.times - spread, max(recorded) * self.times + spread
        return -float("inf") if self.no_lower_limit else low, high


@dataclass(frozen=True)
class Repeat:
    """A command that repeats recorded rows, and how its values are compared.

    Attributes:
        key: columns that say which row it is, without the seed.
        modules: those beside the package's own requirements; "c++" is a compiler.
    """

    result_file: str
    command: str
    key: tuple[str, ...]
    limits: dict[str, Limits]  # by column
    timed: bool = False
    modules: tuple[str, ...] = ()

    def missing(self, data: Path | None, model: str | None) -> str:
        """Return what the command needs and does not get."""
        names = [name for name in self.modules if not (shutil.which(name) if name == "c++" else find_spec(name))]
        if data is None and any(f"{{{name}}}" in self.command for name in ("data", "books", "mnli")):
            names.append("DATA=folder")
        if model is None and "{model}" in self.command:
            names.append("MODEL=folder")
        return " ".join(names)

    def read(self, row: dict[str, str], column: str, rows: Rows) -> list[float]:
        """Return the value of a row, or that of the peer on the same machine divided by it; nothing if it is empty."""
        peer = self.limits[column].peer
        if not peer or not row[column]:
            return [float(row[column])] if row[column] else []
        same = {name: row[name] for name in (*self.key, "machine") if name != "peer"}
        values = [float(other[column]) for other in rows if other["peer"] == peer and same.items() <= other.items()]
        return [values[0] / float(row[column])] if values and row["peer"] != peer else []


EQUAL, SEEDS = Limits(), Limits(seeds=True, margin=0.005)
RATIO = Limits(times=1.5, peer="in-tree")
CONSUMERS = ("gliner", "lightning", "peft", "sentence_transformers", "setfit", "torchao", "trl")
GPU_COUNTS = ("launches", "triton_launches", "gigabytes", "gflop")
REPEATS = [
    Repeat("encoder.csv", "benchmarks/encoder.py --cases 1x32 --repeats 7 --peers in-tree bert 'ours sdpa' enabled",
           ("peer", "mode", "case", "dtype", "device", "preset"), {"milliseconds": RATIO}, timed=True),
    Repeat("memory.csv", "benchmarks/memory.py --lengths 1024",
           ("peer", "tokens", "dtype", "device"), {"extra_mib": RATIO}, timed=True),
    Repeat("scoring.csv", "benchmarks/scoring.py --model {model} --name v3-xsmall-nli --documents 48 --threads 2 "
           "--batch_sizes 16 --repeats 1", ("peer", "model", "documents", "lengths"),
           {"documents_per_second": Limits(times=2, peer="pipeline, batches of 16, sorted")}, timed=True),
    Repeat("consumers.csv", "benchmarks/consumers.py --model {model} --name v3-xsmall-nli",
           ("consumer", "way", "model"),
           {"max_abs_difference": Limits(times=10, no_lower_limit=True), "times_as_fast": Limits(times=1.5)},
           timed=True, modules=CONSUMERS),
    Repeat("exactness.csv", "benchmarks/exactness.py", ("against", "shape", "tokens"),
           {"max_abs_difference": Limits(times=2, no_lower_limit=True)}),
    Repeat("gpu_counts.csv", "tests/fake_cuda/gpu_counts.py --shapes 8x128 --csv {results}/gpu_counts.csv",
           ("peer", "mode", "case"), dict.fromkeys(GPU_COUNTS, EQUAL), modules=("c++",)),
    Repeat("gpu_host.csv", "tests/fake_cuda/host_time.py --seconds 0 --csv {results}/gpu_host.csv",
           ("peer", "mode", "case"), {"python_calls": Limits(times=1.1), "launches": EQUAL, "triton_launches": EQUAL},
           modules=("c++", "triton")),
    Repeat("fine_tuning.csv", "benchmarks/fine_tuning.py --model {model} --name v3-xsmall-nli --data {data} "
           "--settings short --who ours --seeds 1 --tasks cola sst2 copa", ("checkpoint", "task", "who", "setting"),
           {"value": SEEDS, "train_loss": SEEDS}),
    Repeat("fine_tuning.csv", "benchmarks/fine_tuning.py --model {model} --name v3-xsmall-nli --data {data} "
           "--no_dropout --epochs 1 --learning_rate 1e-4 --max_train_samples 128 --max_eval_samples 100 --seeds 1 "
           "--tasks cola stsb cb", ("checkpoint", "task", "who", "setting"),
           {"value": Limits(margin=0.025), "train_loss": SEEDS}),
    Repeat("ablations.csv", f"benchmarks/ablations.py parts {BOOKS} --seeds 1 --variants DeBERTa '- EMD' "
           "--steps 200 --length 64 --hidden_size 128 --vocab_size 4000", ("variant", "setting"),
           dict.fromkeys(("validation_loss", "masked_accuracy"), SEEDS)),
    Repeat("causal.csv", f"benchmarks/ablations.py causal {BOOKS} --seeds 1 --variants DeBERTa DeBERTa-AP "
           "--steps 1000 --length 128 --hidden_size 128 --vocab_size 4000", ("variant", "setting"),
           {"word_perplexity": Limits(seeds=True, times=1.005), "bits_per_byte": SEEDS}),
    Repeat("rtd.csv", f"benchmarks/ablations.py rtd {BOOKS} --seeds 1",
           ("experiment", "embedding_sharing", "setting", "step"),
           dict.fromkeys(("replaced_found", "original_kept", "rtd_loss"), SEEDS)),
    Repeat("released.csv", "benchmarks/released.py --model {model} --model_name v3-xsmall-nli "
           "--rows {data}/glue/mnli/validation_matched.jsonl", ("model", "measure", "peer"), {"value": EQUAL}),
    Repeat("label_agreement.csv", f"benchmarks/label_agreement.py --model {{model}} --model_name '{NLI}' "
           "--file {mnli} --peers 'ours sdpa'", ("model", "data", "peer", "dtype", "settings"),
           {"equal_labels": Limits(margin=10)}),
]  # fmt: skip
NOT_REPEATED = {  # result file -> how to repeat it, and what it needs
    "gpu_check.csv": "copied from what hf-deberta gpu-check prints, on a GPU",
    "gpu_kernels.csv": "copied from torch.profiler over attention and steps of encoder.py, on a GPU",
    "pretraining.csv": "benchmarks/pretraining.py --device cpu --batch 8 --no_optimizer, 17 GB of memory",
    "recipes.csv": "benchmarks/ablations.py recipes, an hour",
    "soak.csv": "make soak, an hour",
    "versions.csv": "make test-versions, which needs a network",
}
EARLIER_SCRIPTS = {  # result file -> the script of commit c3c2872 that wrote it
    "attention.csv": "released.py --attention",
    "attention_triton_aot.csv": "attention_triton_aot.py",
    "continuation.csv": "continuation.py",
    "continuation_losses.csv": "continuation.py",
    "long_texts.csv": "long_texts.py",
    "sift.csv": "sift.py",
    "sift_divergence.csv": "sift.py --divergence",
    "token_file.csv": "token_file.py",
}
NOT_REPEATED |= {name: f"benchmarks/{script} of commit c3c2872" for name, script in EARLIER_SCRIPTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the tasks and of text")
    parser.add_argument("--model", help="folder of the checkpoint")
    names = sorted({repeat.result_file for repeat in REPEATS})
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="result files, default: all")
    args = parser.parse_args()
    chosen = [repeat for repeat in REPEATS if repeat.result_file in args.only]
    possible = [repeat for repeat in chosen if not repeat.missing(args.data, args.model)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        run = partial(run_and_compare, data=args.data, model=args.model, scratch=scratch)
        groups = [run(repeat) for repeat in possible if repeat.timed]
        groups += pool.map(run, [repeat for repeat in possible if not repeat.timed])
    lines = [line for group in groups for line in group]
    print(markdown(["file", "row", "column", "recorded", "new", "allowed", ""], lines, 3))
    for repeat in chosen:
        if needs := repeat.missing(args.data, args.model):
            print(f"not repeated: {repeat.result_file} needs {needs}: {repeat.command}")
    print(*(f"not repeated: {name}: {command}" for name, command in NOT_REPEATED.items()), sep="\n")
    failures = sum(line[-1] != "ok" for line in lines)
    print(f"{len(lines)} values, {failures} not as recorded")
    sys.exit(1 if failures else 0)


def run_and_compare(repeat: Repeat, data: Path | None, model: str | None, scratch: str) -> list[list[str]]:
    """Run a command; return a line for each value that it writes, or one that says that there are none."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    words = fill_in(repeat.command, data, model, folder)
    variables = {**os.environ, "RESULTS": str(folder), "PYTHONPATH": str(ROOT)}
    variables |= {} if repeat.timed else {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *words]
    print(f"running {shlex.join(words)}", flush=True)
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    failure = f", failed: {done.stderr[-2000:]}" if done.returncode else ""
    new = [] if failure else read_rows(folder / repeat.result_file)
    lines = list(compare(repeat, new, read_rows(RESULTS / repeat.result_file)))
    lines = lines or [[repeat.result_file, "", "", "", "none", "", "MISSING"]]
    verdicts = ", ".join(sorted({line[-1] for line in lines}))
    print(f"{repeat.result_file} took {time.monotonic() - start:.0f} s: {verdicts}{failure}", flush=True)
    return lines


def fill_in(command: str, data: Path | None, model: str | None, folder: Path) -> list[str]:
    """Return the words of a command, with absolute paths in place of the names in braces."""
    values = {"results": folder, "work": folder / "work", "model": model and Path(model).resolve()}
    values["work"].mkdir()
    books: list[Path] = []
    if data is not None:
        values["data"] = data = data.resolve()
        books = [file for file in sorted(data.glob("text/books_*.txt")) if file.stem != "books_validation"]
        if "{mnli}" in command:  # the recorded rows are of both files
            values["mnli"] = folder / "mnli" / "validation.jsonl"
            values["mnli"].parent.mkdir()
            files = [data / f"glue/mnli/validation_{name}.jsonl" for name in ("matched", "mismatched")]
            values["mnli"].write_bytes(b"".join(file.read_bytes() for file in files))
    words = shlex.split(command)  # before paths, which may have spaces, are filled in
    return [str(each) for word in words for each in (books if word == "{books}" else [word.format_map(values)])]


def compare(repeat: Repeat, new: Rows, recorded: Rows) -> Iterator[list[str]]:
    """Yield a line for each new value: where it is from, recorded and new value, allowed interval, verdict."""
    for row in new:
        same = [old for old in recorded if all(old[name] == row[name] for name in repeat.key)]
        same_seed = [old for old in same if old.get("seed") == row.get("seed")]
        for column, limits in repeat.limits.items():
            value, old, of_all_seeds = (
                [number for each in rows for number in repeat.read(each, column, others)]
                for rows, others in (([row], new), (same_seed, recorded), (same, recorded))
            )
            if not value:  # an empty cell, or the peer that others are compared with
                continue
            label = ", ".join(row[name] for name in (*repeat.key, "seed") if row.get(name))
            cells = [repeat.result_file, label, f"{column} of {limits.peer} / this" if limits.peer else column]
            if not old:
                yield [*cells, "none", interval_text(*value), "", "MISSING"]
                continue
            low, high = limits.interval(old, of_all_seeds)
            verdict = "ok" if low <= value[0] <= high else "DIFFERS"
            yield [*cells, interval_text(min(old), max(old)), interval_text(*value), interval_text(low, high), verdict]


def interval_text(low: float, high: float | None = None) -> str:
    high = low if high is None else high
    first, last = (f"{value:.0f}" if value.is_integer() else f"{value:.4g}" for value in (low, high))
    if low == -float("inf"):
        return f"at most {last}"
    return first if first == last else f"{first} to {last}"


if __name__ == "__main__":
    main()
