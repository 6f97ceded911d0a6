"""Documents per second of `hf-deberta score` against the text-classification pipeline of Transformers, on this CPU.

    taskset -c 1 python benchmarks/scoring.py
    python benchmarks/scoring.py --preset v3-base --threads 4 --documents 200

Both score the same made-up texts of 12 to 300 tokens with the same random weights, in one process and without Ray.
Peers take turns, and the median of `--repeats` turns counts. The pipeline has Transformers' own classes and is timed
with several batch sizes; it does not sort texts. Ours reads and writes a parquet file. Writes
benchmarks/results/scoring.csv.
"""

import argparse
import random
import tempfile
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="v3-xsmall", help="size of the random model")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs=2, default=(12, 300), metavar="N", help="smallest and largest")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=(1, 8, 32), help="of the pipeline")
    parser.add_argument("--tokens_per_batch", type=int, nargs="+", default=(4096,))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-write", action="store_true", help="print the results, write no file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    draw = random.Random(0)
    lengths = [draw.randint(*arguments.lengths) for _ in range(arguments.documents)]
    texts = [" ".join(draw.choices(WORDS, k=length - 2)) for length in lengths]  # a word is a token
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(arguments.preset, folder)
        source = Path(folder) / "in.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), source)
        torch.set_num_threads(arguments.threads)
        pipe = transformers.pipeline("text-classification", model=folder, device="cpu")
        peers = {
            f"pipeline, batches of {size}": partial(pipe, texts, batch_size=size) for size in arguments.batch_sizes
        }
        for tokens in arguments.tokens_per_batch:
            ours = TextClassifier(ScoreSettings(folder, tokens_per_batch=tokens, cores=arguments.threads))
            peers[f"score, {tokens} tokens a batch"] = partial(score_shard, ours, source, Path(folder) / "out.parquet")
        milliseconds = medians(time_interleaved(peers, arguments.repeats))
        expected = [row["score"] for row in pipe(texts)]
        found = pyarrow.parquet.read_table(Path(folder) / "out.parquet")["score"].to_pylist()
    print(f"largest difference of scores: {max(abs(a - b) for a, b in zip(found, expected, strict=True)):.1e}")
    rows = [
        {
            "peer": peer,
            "model": arguments.preset,
            "documents": len(texts),
            "lengths": "{} to {}".format(*arguments.lengths),
            "documents_per_second": f"{1e3 * len(texts) / time:.1f}",
            "tokens_per_second": f"{1e3 * sum(lengths) / time:.0f}",
            **environment(),
        }
        for peer, time in milliseconds.items()
    ]
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    if not arguments.no_write:
        write_rows(RESULTS / "scoring.csv", rows, ("peer", "model", "documents", "lengths", "machine"))


if __name__ == "__main__":
    main()
