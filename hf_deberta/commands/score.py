"""`hf-deberta score`: label the texts of files, on this machine or with workers of Ray.

Files are read and written here, in order, in parts of a thousand rows. Each part is read, labelled and written on its
own, so that the same command continues after the parts that are written. A few parts are submitted ahead to the models,
here or in other processes.
"""

import argparse
import glob
import gzip
import json
import math
import os
import re
import shutil
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from pyarrow.parquet import ParquetFile, ParquetWriter, write_table
from tqdm import tqdm
from transformers.tokenization_utils_base import LARGE_INTEGER

from hf_deberta.commands.any_checkpoint import load_checkpoint, read_fields
from hf_deberta.gpu_check import parse_size
from hf_deberta.serving.optimize import optimize
from hf_deberta.tokenization_hf_deberta import load_tokenizer
from hf_deberta.training.command_line import flag
from hf_deberta.training.errors import InputError, describe, input_errors
from hf_deberta.training.json_files import atomic_write, read_json_object, write_json
from hf_deberta.training.run_identity import weight_hashes
from hf_deberta.training.run_lock import lock_folder
from hf_deberta.training.text_files import DIALECTS, csv_line, csv_records, file_kind, read_lines, read_rows

FORMATS = ("parquet", "jsonl", "csv", "tsv", "txt")
SETTINGS_FILE = "_score.json"  # Spark and others skip names that begin with an underscore
FREE_SETTINGS = ("tokens_per_batch", "device", "cores", "skip_bad_rows")  # may change when a run continues
PART_ROWS = 1000
TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 32768}


@dataclass(frozen=True)
class ScoreSettings:
    """What to label and how: the flags of `hf-deberta score` for the model and the columns, with argparse's options."""

    model: str = field(metadata={"required": True, "help": "a sequence classifier: a folder, or a name on the Hub"})
    text_column: str = flag("text", "(default: text)")
    text_pair_column: str | None = flag(None, "the second text of a pair")
    all_scores: bool = flag(False, "add a column scores, with the score of each label", action="store_true")
    prefix: str = flag("", "of the new columns' names, such as predicted_")
    skip_bad_rows: bool = flag(
        False, "give rows without text a null label; else leave out their file", action="store_true"
    )
    max_length: int | None = flag(None, "tokens; longer texts are cut (default: of the model)")
    tokens_per_batch: int | None = flag(None, "(default: 32768 on a GPU, 4096 on CPUs)")
    device: str = flag("cpu", "(default: cuda if there is a GPU)", choices=("cpu", "cuda"))
    dtype: str = flag("float32", "(default: bfloat16 on GPUs)", choices=("float32", "bfloat16", "int8"))
    cores: int = flag(1, "cores to use (default: all), or with Ray for each worker (default: 1)")

    @property
    def columns(self) -> list[str]:
        return [self.text_column] if self.text_pair_column is None else [self.text_column, self.text_pair_column]

    @property
    def new_columns(self) -> list[str]:
        return [self.prefix + name for name in ("label", "score", *(["scores"] if self.all_scores else []))]


# 1. The model


class TextClassifier:
    """A sequence classifier and its tokenizer. On CPUs, each thread of this process has one core from then on."""

    ahead = 1  # parts that should be submitted before one is collected

    def __init__(self, settings: ScoreSettings):
        self.settings = settings
        os.environ["RAYON_NUM_THREADS"] = str(settings.cores)  # of the tokenizer
        on_cpu, dtype = settings.device == "cpu", getattr(torch, settings.dtype)
        if on_cpu:
            torch.set_num_threads(1)
        with input_errors(settings.model, OSError, ValueError, RuntimeError):
            self.tokenizer = load_tokenizer(settings.model)
            model = load_checkpoint(settings.model, "HfDebertaForSequenceClassification")
            self.model = optimize(model, dtype) if on_cpu else model.to("cuda", dtype)
        self.config = model.config
        self.labels = [self.config.id2label[number] for number in range(self.config.num_labels)]
        limit = self.tokenizer.model_max_length
        if self.config.position_biased_input or limit > LARGE_INTEGER:  # the tokenizer has no limit
            limit = min(limit, self.config.max_position_embeddings)
        self.max_length = settings.max_length or limit
        self.num_threads = settings.cores if on_cpu else 1
        self.threads = ThreadPoolExecutor(self.num_threads)

    def submit(self, texts: Sequence[Sequence[str]]) -> Any:
        """Tokenize texts, or pairs from two lists, and let threads compute; `collect` waits for them.

        Texts are sorted by length and put into rows of whole texts, so that no padding is computed.
        """
        options = {"truncation": True, "max_length": self.max_length, "return_attention_mask": False, "verbose": False}
        options["return_token_type_ids"] = self.config.type_vocab_size > 0
        encoded = self.tokenizer(*texts, **options) if texts[0] else {"input_ids": []}
        lengths = np.array([len(ids) for ids in encoded["input_ids"]], np.int64)
        order, total = np.argsort(-lengths, kind="stable"), int(lengths.sum())
        tokens = self.settings.tokens_per_batch or TOKENS_PER_BATCH[self.settings.device]
        count = self.num_threads * math.ceil(total / tokens / self.num_threads)
        shares = lengths[order].cumsum() * count // (total + 1)  # equal ones for all threads
        batches = np.split(order, np.flatnonzero(np.diff(shares)) + 1) if total else []
        inputs = [{name: [ids[row] for row in batch] for name, ids in encoded.items()} for batch in batches]
        return lengths, batches, [self.threads.submit(self._compute, batch) for batch in inputs]

    def collect(self, submitted: Any) -> tuple[list[str], np.ndarray, int]:
        """Return the names of the labels, a probability for each row and label, and the number of full rows.

        These have the maximum length: nearly all of them were cut.
        """
        lengths, batches, computed = submitted
        result = np.empty((len(lengths), len(self.labels)), np.float32)
        for batch, values in zip(batches, computed, strict=True):
            result[batch] = values.result()
        if not np.isfinite(result).all():
            advice = "look for NaN in its weights" if self.settings.dtype == "float32" else "try --dtype float32"
            raise InputError(f"{self.settings.model} returns scores that are not finite: {advice}")
        return self.labels, result, int((lengths >= self.max_length).sum())

    @torch.inference_mode()
    def _compute(self, rows: dict[str, list[list[int]]]) -> np.ndarray:
        """Compute texts as one row, in which they do not see each other; return what Transformers' pipeline does.

        Softmax over labels, but sigmoid for multi-label classifiers and those with one label; regressions keep theirs.
        """
        lengths = [len(ids) for ids in rows["input_ids"]]
        packed = {name: np.concatenate(ids)[None] for name, ids in rows.items()}
        packed["cu_seq_lens_q"] = np.cumsum([0, *lengths], dtype=np.int32)
        inputs: dict[str, Any] = {name: torch.from_numpy(ids).to(self.model.device) for name, ids in packed.items()}
        logits = self.model(**inputs, max_length_q=max(lengths)).logits.float()
        problem = self.config.problem_type
        if problem != "regression":
            independent = problem == "multi_label_classification" or logits.shape[1] == 1
            logits = logits.sigmoid() if independent else logits.softmax(-1)
        return logits.cpu().numpy()

    def stop(self) -> None:
        self.threads.shutdown(cancel_futures=True)


# 2. Formats


def read_parts(
    path: Path, settings: ScoreSettings, columns: list[str] | None = None
) -> Iterator[tuple[list[str], Any]]:
    """Yield column names and rows of each part: a table of parquet, or a list of objects, with texts in a csv file.

    The first part has no rows: with it the header or the schema is written.

    Args:
        columns: of parquet that are read, by default all.
    """
    kind = file_kind(path)
    if kind == "parquet":
        with input_errors(str(path), OSError, pyarrow.ArrowException):
            # nanoseconds, the default, end in 2262; Spark writes microseconds as INT96
            file = ParquetFile(path, coerce_int96_timestamp_unit="us")
            yield file.schema_arrow.names, file.schema_arrow.empty_table()
            for batch in file.iter_batches(PART_ROWS, columns=columns):
                yield batch.schema.names, pyarrow.Table.from_batches([batch], None if columns else file.schema_arrow)
        return
    yield next(csv_records(path), (0, [""]))[1] if kind in DIALECTS else [], []
    if path.stat().st_size == 0:  # as jobs write them for a part without rows
        return
    is_text, column = kind == "txt", settings.text_column
    rows: Iterator[Any] = ({column: line} for line in read_lines(path)) if is_text else read_rows(path)
    while part := list(islice(rows, PART_ROWS)):
        yield [*dict.fromkeys(chain(*part))], part


def count_rows(path: Path, settings: ScoreSettings) -> int:
    """Return the number of rows, after a check of all. This needs no model."""
    count = 0
    for names, rows in read_parts(path, settings, settings.columns):
        if count == 0 and (wrong := [name for name in settings.columns if names and names.count(name) != 1]):
            raise InputError(f"{path} needs one column {wrong[0]!r}; it has {', '.join(names)}")
        if taken := [column for column in settings.new_columns if column in names]:
            raise InputError(f"{path} has a column {taken[0]!r} already: add --prefix, such as --prefix predicted_")
        read_texts(rows, settings, path, count)
        count += len(rows)
    return count


def read_texts(rows: Any, settings: ScoreSettings, path: Path, first: int) -> tuple[list[list[str]], np.ndarray]:
    """Return the texts of each column, and which rows lack one; that is an InputError unless such rows are skipped.

    Args:
        first: the number of the first of these rows in the file.
    """
    is_bad, texts = np.zeros(len(rows), bool), []
    for column in settings.columns:
        is_table = isinstance(rows, pyarrow.Table)
        values = rows[column].to_pylist() if is_table else [row.get(column) for row in rows]
        if file_kind(path) in DIALECTS:  # where an empty text is None
            values = [value or "" for value in values]
        for row, text in enumerate(values):
            if not isinstance(text, str):
                if not settings.skip_bad_rows:
                    place = f"{path}, row {first + row + 1}"
                    raise InputError(f"{place} has a bad text: {describe(text)}; --skip_bad_rows gives a null label")
                is_bad[row], values[row] = True, ""
        texts.append(values)
    return texts, is_bad


# 3. Files


def label_files(files: dict[Path, Path], settings: ScoreSettings, classifier: Any, progress: tqdm) -> Counter[str]:
    """Write each target from its source; return counts of the rows that were labelled.

    Parts that are written are not labelled again. A few are submitted to the classifier before one is collected.
    """
    counts, waiting = Counter(rows=0, full_rows=0, bad_rows=0), deque[Callable[[], Counter[str]]]()
    for target, source in files.items():
        paths, rows = [], 0
        for names, part in read_parts(source, settings):
            paths.append(part_path(source, target, rows, len(part)))
            if paths[-1].exists():
                progress.total -= len(part)
            else:
                texts, is_bad = read_texts(part, settings, source, rows)
                labels = partial(classifier.collect, classifier.submit(texts))
                waiting.append(partial(write_part, names, part, is_bad, labels, settings, target, paths[-1]))
            rows += len(part)
            while len(waiting) > classifier.ahead:
                counts.update(waiting.popleft()())
                progress.update(counts["rows"] - progress.n)
        waiting.append(partial(join_parts, paths, target))
    for step in waiting:
        counts.update(step())
    return counts


def write_part(
    names: list[str], rows: Any, is_bad: np.ndarray, labels: Callable, settings: ScoreSettings, target: Path, path: Path
) -> Counter[str]:
    """Write rows with their labels to a path, in the format of the target; return counts of rows."""
    label_names, probabilities, full_rows = labels()
    columns = [
        pyarrow.array([label_names[label] for label in probabilities.argmax(1)], pyarrow.string(), mask=is_bad),
        pyarrow.array(probabilities.max(1), mask=is_bad),
        pyarrow.StructArray.from_arrays(list(probabilities.T.copy()), label_names, mask=pyarrow.array(is_bad)),
    ]
    kind, table = file_kind(target), pyarrow.table(columns[: len(settings.new_columns)], settings.new_columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished:
        if kind == "parquet":
            for name in table.column_names:
                rows = rows.append_column(name, table[name])
            write_table(rows, unfinished, compression="zstd")
        else:
            labelled = [row | new for row, new in zip(rows, table.to_pylist(), strict=True)]
            if kind not in DIALECTS:
                lines = [json.dumps(row, ensure_ascii=False) for row in labelled]
            elif rows:
                lines = [csv_line(row.values(), kind) for row in labelled]
            else:
                lines = [csv_line([*names, *table.column_names], kind)]
            content = "".join(f"{line}\n" for line in lines).encode()
            unfinished.write_bytes(gzip.compress(content, mtime=0) if target.suffix == ".gz" else content)
    return Counter(rows=len(rows), full_rows=full_rows, bad_rows=int(is_bad.sum()))


def parts_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.parts")


def part_path(source: Path, target: Path, first: int, count: int) -> Path:
    """Return where rows are written before the file is complete; another path if the source has changed."""
    state = source.stat()
    return parts_folder(target) / f"{first}-{count}-{state.st_size}-{state.st_mtime_ns}.{file_kind(target)}"


def join_parts(paths: list[Path], target: Path) -> Counter[str]:
    """Write the parts of a file to its target, and remove them."""
    with atomic_write(target) as unfinished, open(unfinished, "wb") as file:
        if file_kind(target) == "parquet":
            with ParquetWriter(file, ParquetFile(paths[0]).schema_arrow, compression="zstd") as writer:
                for path in paths[1:]:  # the first one has no rows
                    writer.write_table(ParquetFile(path).read())
        else:
            for path in paths:
                file.write(path.read_bytes())
    shutil.rmtree(parts_folder(target))
    return Counter()


# 4. Ray


class RayClassifier:
    """Labels texts in processes of Ray, which keep the model. Two share a GPU: one tokenizes, the other computes."""

    def __init__(self, settings: ScoreSettings, address: str):
        with input_errors("--address needs Ray: pip install '.[score]'", ImportError):
            import ray
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


# 5. The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "All files are checked first. One with a mistake is left out and named at the end (exit status 1)."
    parser.add_argument("--input", required=True, nargs="+", help=f"files or 'patterns': {', '.join(FORMATS)}, or .gz")
    parser.add_argument("--output", "--output_dir", required=True, help="folder of the results")
    for setting in fields(ScoreSettings):
        options: Any = {**setting.metadata, **({"type": parse_size} if setting.type in (int, int | None) else {})}
        parser.add_argument(f"--{setting.name}", **options)
    parser.add_argument("--address", help="of a Ray cluster; auto, or local to start Ray here (default: without Ray)")


def main(args: argparse.Namespace) -> None:
    """Score the files that are not done, and print a summary."""
    folder = Path(args.output).resolve()
    files, settings = find_files(args.input, folder), choose_settings(args)
    with lock_folder(folder):
        recorded = check_same_settings(folder, settings)
        todo = {target: source for target, source in files.items() if not target.exists()}
        for target in (done := sorted(files.keys() - todo.keys())):
            shutil.rmtree(parts_folder(target), ignore_errors=True)  # a kill may have left them
        errors, rows = list[str](), 0
        for target, source in [*todo.items()]:
            try:
                rows += count_rows(source, settings)
            except InputError as error:
                errors.append(str(error))
                del todo[target]
        if old := [target for target in done if target.stat().st_mtime < files[target].stat().st_mtime]:
            counts = f"{len(old):,} of {len(done):,} results are older than their input"
            print(f"{counts}, such as {old[0]}: delete them to score again")
        print(f"{len(todo):,} of {len(files):,} files to score", flush=True)
        if todo:
            write_json(folder / SETTINGS_FILE, recorded)
            score_files(todo, rows, settings, args.address)
    if errors:
        raise InputError("\n".join(errors))


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
            if target.exists() and target.samefile(source):
                raise InputError(f"--output {folder}: {source} would be its own result; name another folder")
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


def check_same_settings(folder: Path, settings: ScoreSettings) -> dict[str, Any]:
    """Return what the results depend on besides the files; refuse a folder with results of other settings."""
    config, hashes = read_fields(settings.model), weight_hashes({"model_name_or_path": settings.model})
    now = {name: value for name, value in asdict(settings).items() if name not in FREE_SETTINGS}
    now |= {name: config.get(name) for name in ("id2label", "_commit_hash")}  # the commit on the Hub
    now |= hashes | ({"model": None} if hashes else {})  # a folder may have been moved
    path = folder / SETTINGS_FILE
    before = read_json_object(path) if path.exists() else now
    if changed := [name for name in sorted({*now, *before}) if now.get(name) != before.get(name)]:
        changes = ", ".join(f"{name} {before.get(name)}, now {now.get(name)}" for name in changed)
        raise InputError(f"{folder} holds results of other settings: {changes}; take another --output")
    return now


def score_files(files: dict[Path, Path], rows: int, settings: ScoreSettings, address: str | None) -> None:
    """Write each target from its source, with so many rows in all, and print a summary."""
    wait = 0 if sys.stderr.isatty() else 30  # seconds before the first line of a log, and between lines
    with tqdm(total=rows, unit=" rows", mininterval=wait or 0.2, delay=wait, miniters=1, leave=False) as progress:
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
