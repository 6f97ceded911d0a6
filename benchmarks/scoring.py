"""Documents per second of `hf-deberta score` against the text-classification pipeline of Transformers, on this CPU.

    python benchmarks/scoring.py --threads 2 --model my-classifier
    taskset -c 1 python benchmarks/scoring.py --preset v3-base --documents 64
    python benchmarks/scoring.py --threads 2 --shards 16

Both score the same made-up texts of 12 to 300 tokens with the same weights: random ones, or those of --model. Peers
take turns, and the median of `--repeats` turns counts. The pipeline has Transformers' own classes and is timed with
several batch sizes, with texts as they come and sorted by length, which it does not do itself. Ours reads and writes a
parquet file, in one process and without Ray. With `--shards`, the command is timed too, once, over so many copies of
the file: with Ray, and with loading the model. Writes benchmarks/results/scoring.csv.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
import transformers
from server import WORDS, save_random_model
from timing import RESULTS, environment, medians, time_interleaved, write_rows

from hf_deberta.scoring import ScoreSettings, TextClassifier, score_shard


def main() -> None:
    arguments = parse_arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    draw = random.Random(0)
    lengths = [draw.randint(*arguments.lengths) for _ in range(arguments.documents)]
    texts = [" ".join(draw.choices(WORDS, k=length - 2)) for length in lengths]  # a word is a token
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = arguments.model or temporary
        if arguments.model is None:
            save_random_model(arguments.preset, temporary)
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "in.parquet")
        pipe = transformers.pipeline("text-classification", model=model, device="cpu")
        check_equal(pipe, texts, model, folder, arguments)
        peers = pipeline_peers(pipe, texts, arguments.batch_sizes) | own_peers(model, folder, arguments)
        seconds = {peer: time / 1e3 for peer, time in medians(time_interleaved(peers, arguments.repeats)).items()}
        per_second = {peer: arguments.documents / time for peer, time in seconds.items()}
        for dtype in arguments.dtypes if arguments.shards else ():
            peer = f"command with Ray, {dtype}"
            per_second[peer] = arguments.documents * arguments.shards / time_command(model, folder, dtype, arguments)
    best = max(rate for peer, rate in per_second.items() if peer.startswith("pipeline"))
    rows = [
        {
            "peer": peer,
            "model": arguments.name or Path(arguments.model or arguments.preset).name,
            "documents": arguments.documents * (arguments.shards if peer.startswith("command") else 1),
            "lengths": "{} to {}".format(*arguments.lengths),
            "documents_per_second": f"{rate:.1f}",
            "tokens_per_second": f"{rate * sum(lengths) / len(lengths):.0f}",
            "times_the_best_pipeline": f"{rate / best:.2f}",
            **environment(),
        }
        for peer, rate in per_second.items()
    ]
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    if not arguments.no_write:
        write_rows(RESULTS / "scoring.csv", rows, ("peer", "model", "documents", "lengths", "machine"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="v3-xsmall", help="size of the random model")
    parser.add_argument("--model", help="a classifier in place of a random one")
    parser.add_argument("--name", help="of --model in the results, by default its last part")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs=2, default=(12, 300), metavar="N", help="smallest and largest")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=(1, 8, 16, 32), help="of the pipeline")
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"), help="of ours")
    parser.add_argument("--tokens_per_batch", type=int, nargs="+", default=(4096,))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shards", type=int, default=0, help="time the command too, on so many files")
    parser.add_argument("--no-write", action="store_true", help="print the results, write no file")
    return parser.parse_args()


def pipeline_peers(pipe: Callable, texts: list[str], sizes: list[int]) -> dict[str, Callable[[], object]]:
    peers = {f"pipeline, batches of {size}": partial(pipe, texts, batch_size=size) for size in sizes}
    by_length = sorted(texts, key=len, reverse=True)
    return peers | {
        f"pipeline, batches of {size}, sorted": partial(pipe, by_length, batch_size=size) for size in sizes if size > 1
    }


def own_peers(model: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Callable[[], object]]:
    peers: dict[str, Callable[[], object]] = {}
    for dtype in arguments.dtypes:
        for tokens in arguments.tokens_per_batch:
            settings = ScoreSettings(model, tokens_per_batch=tokens, cores=arguments.threads, dtype=dtype)
            classifier = TextClassifier(settings)
            call = partial(score_shard, classifier, folder / "in.parquet", folder / "out.parquet")
            peers[f"score, {dtype}, {tokens} tokens a batch"] = call
    return peers


def check_equal(pipe: Callable, texts: list[str], model: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Print how much the scores in float32 differ from those of the pipeline, for a few texts."""
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[:16]}), folder / "few.parquet")
    classifier = TextClassifier(ScoreSettings(model, cores=arguments.threads))
    score_shard(classifier, folder / "few.parquet", folder / "scored.parquet")
    found = pyarrow.parquet.read_table(folder / "scored.parquet")["score"].to_pylist()
    expected = [row["score"] for row in pipe(texts[:16])]
    print(f"largest difference of scores: {max(abs(a - b) for a, b in zip(found, expected, strict=True)):.1e}")


def time_command(model: str, folder: Path, dtype: str, arguments: argparse.Namespace) -> float:
    """Return the seconds that the command needs for copies of the file, with a core for each worker."""
    shards, output = folder / "in", folder / f"out-{dtype}"
    shards.mkdir(exist_ok=True)
    for number in range(arguments.shards):
        shutil.copy(folder / "in.parquet", shards / f"{number}.parquet")
    flags = ["--model", model, "--input", f"{shards}/*.parquet", "--output", str(output), "--dtype", dtype]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "hf_deberta", "score", *flags], check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
