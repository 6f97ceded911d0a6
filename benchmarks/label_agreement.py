"""Count how many labels stay the same in bfloat16 and int8, for a fine-tuned classifier and a file of texts.

    python benchmarks/label_agreement.py --model FOLDER --file mnli/validation_matched.jsonl
    python benchmarks/label_agreement.py --model FOLDER --file sst2/validation.jsonl --columns sentence --rows 800

The model is a folder with a sequence classifier (type deberta-v2 or ours) and its tokenizer. The file has one JSON
object a line; --columns names its text, or its pair of texts. Every peer gets the same batches, sorted by length, and
is compared with in-tree in float32: labels that are equal, and the largest difference of logits. A peer that is not
installed or fails is skipped with the reason. Writes benchmarks/results/label_agreement.csv.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from encoder import quantize
from runtimes import Graphs, all_runners
from timing import RESULTS, environment, write_rows

import hf_deberta

Classifier = Callable[..., Any]
RUNTIME_PEERS = (
    ("onnxruntime in-tree", "int8"),
    ("openvino in-tree", "bfloat16"),
    ("openvino in-tree", "int8"),
    ("openvino ours", "bfloat16"),
    ("openvino ours", "int8"),
)


def read_batches(arguments: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Return the tokenized rows of the file, in batches of similar length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    lines = arguments.file.read_text(encoding="utf-8").removesuffix("\n").split("\n")[: arguments.rows]
    rows = [json.loads(line) for line in lines]
    rows.sort(key=lambda row: sum(len(row[column]) for column in arguments.columns))
    batches = []
    for start in range(0, len(rows), arguments.batch_size):
        batch = rows[start : start + arguments.batch_size]
        texts = [[row[column] for row in batch] for column in arguments.columns]
        inputs = tokenizer(*texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        batches.append({name: inputs[name] for name in ("input_ids", "attention_mask")})
    return batches


def load(folder: Path, ours: bool = False) -> Any:
    """Return in-tree's classifier in float32, or ours with the same weights."""
    if ours:
        return hf_deberta.HfDebertaForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def peers_of(folder: Path, graphs: Graphs) -> dict[tuple[str, str], Callable[[], list[Classifier]]]:
    """A function for each peer and type that returns its classifiers, one for each of its settings."""
    peers: dict[tuple[str, str], Callable[[], list[Classifier]]] = {
        ("ours sdpa", "float32"): lambda: [load(folder, ours=True)],
        ("ours sdpa", "bfloat16"): lambda: [load(folder, ours=True).bfloat16()],
        ("ours sdpa", "int8"): lambda: [quantize(load(folder, ours=True))],
        ("in-tree", "bfloat16"): lambda: [load(folder).bfloat16()],
        ("in-tree", "int8"): lambda: [quantize(load(folder))],
    }
    for runtime in ("torch", "openvino"):
        for dtype in ("float32", "bfloat16", "int8"):
            peers[f"ours optimized, {runtime}", dtype] = lambda dtype=dtype, runtime=runtime: [
                hf_deberta.optimize(load(folder, ours=True), dtype=getattr(torch, dtype), runtime=runtime)
            ]
    for peer, dtype in RUNTIME_PEERS:
        peers[peer, dtype] = lambda peer=peer, dtype=dtype: list(
            all_runners(peer, load(folder, ours=peer.endswith("ours")), None, dtype, graphs)
        )
    return peers


@torch.no_grad()
def predict(classifier: Classifier, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the logits of all rows, float32 [rows, labels]."""
    return torch.cat([classifier(**batch)[0].float().clone() for batch in batches])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a fine-tuned sequence classifier")
    parser.add_argument("--model_name", help="its name in the result file; default: that of the folder")
    parser.add_argument("--file", type=Path, required=True, help="JSON lines")
    parser.add_argument("--columns", nargs="+", default=["premise", "hypothesis"], help="of the text, or of both texts")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--peers", nargs="+", help="default: all")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    batches = read_batches(arguments)
    expected = predict(load(arguments.model), batches)
    model_name = arguments.model_name or arguments.model.name
    data = f"{arguments.file.parent.name}/{arguments.file.stem}"
    graphs = Graphs()
    for (peer, dtype), make in peers_of(arguments.model, graphs).items():
        if arguments.peers and peer not in arguments.peers:
            continue
        try:
            results = {getattr(each, "settings", ""): predict(each, batches) for each in make()}
        except Exception as reason:  # not installed, not supported
            print(f"{peer}, {dtype} is skipped: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
            continue
        for settings, logits in results.items():
            equal = int((logits.argmax(-1) == expected.argmax(-1)).sum())
            row = {
                "model": model_name,
                "data": data,
                "peer": peer,
                "dtype": dtype,
                "settings": settings,
                "rows": len(expected),
                "equal_labels": equal,
                "percent": f"{100 * equal / len(expected):.2f}",
                "largest_logit_difference": f"{float((logits - expected).abs().max()):.1e}",
                **environment(),
            }
            print(", ".join(str(row[name]) for name in list(row)[2:9]), flush=True)
            write_rows(
                RESULTS / "label_agreement.csv", [row], ("model", "data", "peer", "dtype", "settings", "machine")
            )


if __name__ == "__main__":
    main()
