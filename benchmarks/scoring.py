"""Documents per second of the text-classification pipeline, without and with `enable()`, and of `hf-deberta score`.

    python benchmarks/scoring.py --model my-classifier --threads 2

All score the same made-up texts of 12 to 300 tokens on this CPU with the same weights. Peers take turns, and the
median of `--repeats` turns counts. The pipeline has Transformers' own classes and is timed with several batch sizes,
with texts as they come and sorted by length, which it does not do itself. `score` reads and writes a parquet file;
each thread computes a batch of its own. Writes benchmarks/results/scoring.csv.
"""

import argparse
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import transformers
from consumers import WORDS, enabled
from timing import record
from tqdm import tqdm

from hf_deberta.commands.score import ScoreSettings, TextClassifier, label_files
from hf_deberta.gpu_check import time_interleaved

LENGTHS = (12, 300)  # smallest and largest
TOKENS_PER_BATCH = 4096  # of ours


def on_cores(cores: int, call: Callable[[], Any]) -> None:
    """Call with so many cores for an operation; a TextClassifier has set one, its threads compute side by side."""
    torch.set_num_threads(cores)
    call()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a classifier")
    parser.add_argument("--name", help="of --model in the results, by default its last part")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=(1, 8, 16, 32), help="of the pipeline")
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"), help="of ours")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    draw = random.Random(0)
    lengths = [draw.randint(*LENGTHS) for _ in range(args.documents)]
    texts = [" ".join(draw.choices(WORDS, k=length - 2)) for length in lengths]
    pipe = transformers.pipeline("text-classification", model=args.model, device="cpu")
    by_length = sorted(texts, key=len, reverse=True)
    peers = {}
    for size in args.batch_sizes:
        for order, rows in {"": texts, **({", sorted": by_length} if size > 1 else {})}.items():
            call = partial(pipe, rows, batch_size=size)
            peers[f"pipeline, batches of {size}{order}"] = partial(on_cores, args.threads, call)
            with_enable = partial(on_cores, args.threads, partial(enabled, call))
            peers[f"pipeline and enable(), batches of {size}{order}"] = with_enable
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary) / "in.parquet", Path(temporary) / "out.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), source)
        for dtype in args.dtypes:
            options = ScoreSettings(args.model, tokens_per_batch=TOKENS_PER_BATCH, cores=args.threads, dtype=dtype)
            classifier, progress = TextClassifier(options), tqdm(total=0, disable=True)
            call = partial(label_files, {target: source}, options, classifier, progress)
            peers[f"score, {dtype}, {TOKENS_PER_BATCH} tokens a batch"] = partial(on_cores, 1, call)
            call()
            scores = pyarrow.parquet.read_table(target)["score"].to_pylist()[:16]
            differences = [abs(row["score"] - own) for row, own in zip(pipe(texts[:16]), scores, strict=True)]
            print(f"{dtype}: scores differ by {max(differences):.1e}")
        times = time_interleaved(peers, args.repeats, torch.device("cpu"))
    rates = {peer: 1e3 * args.documents / time for peer, time in times.items()}
    best = max(rate for peer, rate in rates.items() if peer.startswith("pipeline,"))
    for peer, rate in rates.items():
        row = {"peer": peer, "model": args.name or Path(args.model).name, "documents": args.documents}
        row |= {"lengths": "{} to {}".format(*LENGTHS), "documents_per_second": f"{rate:.1f}"}
        row["tokens_per_second"] = f"{rate * sum(lengths) / len(lengths):.0f}"
        row["times_the_best_pipeline"] = f"{rate / best:.2f}"
        print(", ".join(f"{name} {value}" for name, value in row.items()))
        record("scoring.csv", [row], ("peer", "model", "documents", "lengths"))


if __name__ == "__main__":
    main()
