"""Measure a token file's making from a large text: documents and bytes per second of CPU time, and peak memory.

    python benchmarks/token_file.py --train_file books/*.txt --tokenizer_name TOKENIZER --gigabytes 0.1 --deduplicate

The text is written to a temporary jsonl file first: documents of several paragraphs of the given files, in random
order, so that few are equal. It is read as a stream, as `run_mlm.py --streaming` does, and everything is deleted
afterwards. Peak memory is that of the process that tokenizes. Rows go to results/token_file.csv.
"""

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from timing import in_new_process, record

from hf_deberta.pretraining.corpus import Corpus, CorpusArguments
from hf_deberta.tokenization_hf_deberta import load_tokenizer

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
    for gigabytes in args.gigabytes:
        with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
            text = Path(folder) / "text.jsonl"
            size = write_text(args.train_file, text, gigabytes)
            result = json.loads(in_new_process(__file__, *sys.argv[1:], "--text", text))
        row = {"gigabytes": f"{gigabytes:g}", "deduplicate": str(args.deduplicate), "bytes": size, **result}
        for name in ("seconds", "cpu_seconds"):
            hours = PAPER_GIGABYTES * 1e9 / size * result[name] / 3600
            row[f"{name.replace('seconds', 'hours')}_160_gb"] = f"{hours:.1f}"
        print(", ".join(f"{name} {value}" for name, value in row.items()), end=", ")
        speed, rate = size / result["cpu_seconds"] / 1e6, result["documents"] / result["cpu_seconds"]
        print(f"{speed:.1f} MB and {rate:.0f} documents per CPU second", flush=True)
        record("token_file.csv", [row], ("gigabytes", "deduplicate"))


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
    args = CorpusArguments(
        train_file=[str(text)], streaming=True, validation_split_percentage=0, deduplicate=deduplicate
    )
    tokenizer = load_tokenizer(tokenizer_name)
    start, start_cpu = time.perf_counter(), time.process_time()
    about = Corpus(args).token_file("train", tokenizer, text.parent / "tokens").about
    return {
        "documents": about["documents"],
        "tokens": about["tokens"],
        "duplicates": about.get("duplicates", 0),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - start_cpu, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    main()
