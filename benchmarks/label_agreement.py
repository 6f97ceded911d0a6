"""Count how many labels stay the same in bfloat16 and int8, for a fine-tuned classifier and a file of texts.

    python benchmarks/label_agreement.py --model FOLDER --file mnli/validation_matched.jsonl
    python benchmarks/label_agreement.py --model FOLDER --file sst2/validation.jsonl --columns sentence --rows 800

The model is a folder with a sequence classifier (type deberta-v2 or ours) and its tokenizer. The file has one JSON
object a line; --columns names its text, or its pair of texts. Every peer gets the same batches, sorted by length, and
is compared with in-tree in float32: labels that are equal, and the largest difference of logits. A peer that is not
installed or fails is skipped with the reason. Writes benchmarks/results/label_agreement.csv.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from encoder import quantize
from released import load, read_batches
from runtimes import RUNTIMES, Graphs, all_runners
from timing import record, report_failure

import hf_deberta

DTYPES = ("float32", "bfloat16", "int8")
PEERS = [("ours sdpa", "float32")]
PEERS += [(peer, dtype) for peer in ("ours sdpa", "in-tree") for dtype in DTYPES[1:]]
PEERS += [("ours optimized", dtype) for dtype in DTYPES]
PEERS += [("onnxruntime in-tree", "int8")]
PEERS += [(f"openvino {source}", dtype) for source in ("in-tree", "ours") for dtype in DTYPES[1:]]


def classifiers(folder: str, peer: str, dtype: str, graphs: Graphs) -> list[Any]:
    """Return the classifier of a peer; of a runtime one for each of its settings."""
    model, _ = load(folder, "ours" if "ours" in peer else "in-tree")
    if peer in RUNTIMES:
        return list(all_runners(peer, model, None, dtype, graphs))
    if peer == "ours optimized":
        return [hf_deberta.optimize(model, dtype=getattr(torch, dtype))]
    return [quantize(model) if dtype == "int8" else model.to(getattr(torch, dtype))]


def logits_of(classifier: Any, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the logits of all rows, float32 [rows, labels]."""
    with torch.no_grad():
        return torch.cat([classifier(**batch)[0].float().clone() for batch in batches])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a fine-tuned sequence classifier")
    parser.add_argument("--model_name", help="its name in the result file; default: that of the folder")
    parser.add_argument("--file", type=Path, required=True, help="JSON lines")
    parser.add_argument("--columns", nargs="+", default=["premise", "hypothesis"], help="of the text, or of both texts")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--peers", nargs="+", default=sorted({peer for peer, _ in PEERS}), help="default: all")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    folder, graphs = str(args.model), Graphs()
    batches = read_batches(folder, args.file, args.columns, args.rows)
    expected = logits_of(load(folder, "in-tree")[0], batches)
    name, data = args.model_name or args.model.name, f"{args.file.parent.name}/{args.file.stem}"
    for peer, dtype in PEERS:
        if peer not in args.peers:
            continue
        logits = {}
        with report_failure(f"{peer}, {dtype}"):
            for each in classifiers(folder, peer, dtype, graphs):
                logits[getattr(each, "settings", "")] = logits_of(each, batches)
        for settings, values in logits.items():
            equal = int((values.argmax(-1) == expected.argmax(-1)).sum())
            difference = f"{float((values - expected).abs().max()):.1e}"
            row = {"model": name, "data": data, "peer": peer, "dtype": dtype, "settings": settings}
            row |= {"rows": len(expected), "equal_labels": equal, "percent": f"{100 * equal / len(expected):.2f}"}
            row["largest_logit_difference"] = difference
            print(", ".join(map(str, list(row.values())[2:])), flush=True)
            record("label_agreement.csv", [row], ("model", "data", "peer", "dtype", "settings"))


if __name__ == "__main__":
    main()
