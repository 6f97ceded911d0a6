"""Measure a token file's making from a large text: documents and bytes per second of CPU time, and peak memory.

    python benchmarks/token_file.py --train_file books/*.txt --tokenizer_name TOKENIZER --gigabytes 1 10 --deduplicate

The text is written to a temporary jsonl file first: documents of several paragraphs of the given files, in random
order, so that few are equal. It is read as a stream, as `run_mlm.py --streaming` does, and everything is deleted
afterwards. Peak memory is that of the process that tokenizes. Rows go to results/token_file.csv.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import RESULTS, environment, write_rows

from hf_deberta.pretraining.corpus import Corpus, CorpusArguments
from hf_deberta.tokenization_hf_deberta import load_tokenizer

RESULT_FILE = RESULTS / "token_file.csv"
KEY = ("gigabytes", "deduplicate", "machine")
PARAGRAPHS = 6  # of a document
PAPER_GIGABYTES = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", nargs="+", required=True)
    parser.add_argument("--tokenizer_name", required=True)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--deduplicate", action="store_true")
    parser.add_argument("--work_dir", default=tempfile.gettempdir(), help="needs 1.6 times the text's size")
    parser.add_argument("--text", help=argparse.SUPPRESS)  # the process that tokenizes
    args = parser.parse_args()
    if args.text is not None:
        print(json.dumps(tokenize(Path(args.text), args.tokenizer_name, args.deduplicate)))
        return
    print("| text | documents | per CPU second | MB per CPU second | peak memory | duplicates | CPU hours for 160 GB |"
          " hours |\n|--:|--:|--:|--:|--:|--:|--:|--:|")  # fmt: skip
    for gigabytes in args.gigabytes:
        with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
            text = Path(folder) / "text.jsonl"
            size = write_text(args.train_file, text, gigabytes)
            output = subprocess.run(
                [sys.executable, *sys.argv, "--text", str(text)], check=True, stdout=subprocess.PIPE
            )
        result = json.loads(output.stdout.splitlines()[-1])
        hours = {name: PAPER_GIGABYTES * 1e9 / size * result[name] / 3600 for name in ("seconds", "cpu_seconds")}
        row = {"gigabytes": f"{gigabytes:g}", "deduplicate": str(args.deduplicate), "bytes": size, **result}
        projected = {"hours_160_gb": f"{hours['seconds']:.1f}", "cpu_hours_160_gb": f"{hours['cpu_seconds']:.1f}"}
        write_rows(RESULT_FILE, [{**row, **projected, **environment()}], KEY)
        cells = [f"{gigabytes:g} GB", f"{result['documents']:,}", f"{result['documents'] / result['cpu_seconds']:,.0f}"]
        cells += [f"{size / result['cpu_seconds'] / 1e6:.1f}", f"{result['peak_mb']:,} MB", f"{result['duplicates']:,}"]
        cells += [f"{hours['cpu_seconds']:.0f}", f"{hours['seconds']:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def write_text(files: list[str], target: Path, gigabytes: float) -> int:
    """Write documents of random paragraphs; return the bytes of their texts."""
    rng = random.Random(0)
    paragraphs = [
        line for file in files for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    size = 0
    with target.open("w", encoding="utf-8") as lines:
        while size < gigabytes * 1e9:
            text = "\n".join(rng.choices(paragraphs, k=PARAGRAPHS))
            size += len(text.encode())
            lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return size


def tokenize(text: Path, tokenizer_name: str, deduplicate: bool) -> dict[str, float]:
    """Make the token file; return seconds, documents, tokens, duplicates and the peak memory of this process."""
    tokenizer = load_tokenizer(tokenizer_name)
    args = CorpusArguments(
        train_file=[str(text)], streaming=True, validation_split_percentage=0, deduplicate=deduplicate
    )
    start, start_cpu = time.perf_counter(), time.process_time()
    about = Corpus(args).token_file("train", tokenizer, text.parent / "tokens").about
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    return {
        "documents": about["documents"],
        "tokens": about["tokens"],
        "duplicates": about.get("duplicates", 0),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    main()
