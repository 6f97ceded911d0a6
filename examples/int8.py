"""Serve a classifier in int8 on a CPU: which labels change, and how much faster is it on your rows?

    python examples/int8.py --model cross-encoder/nli-deberta-v3-base --rows dev.jsonl --columns premise hypothesis

Rows are json lines with one or two columns of text. It prints, for both models prepared by `hf_deberta.optimize`:

    100 rows: ... with the same label (...%); ... s in float32, ... s in int8

docs/serving.md says when bfloat16 is the better choice. examples/serve.py serves over HTTP: --dtype int8.
"""

import argparse
import time
from typing import Any

import torch
from datasets import load_dataset
from tqdm import tqdm

import hf_deberta
from hf_deberta import HfDebertaForSequenceClassification, HfDebertaTokenizer


@torch.inference_mode()
def predict(model: Any, batches: list[Any], name: str) -> tuple[torch.Tensor, float]:
    """Return the labels of all rows, and the seconds that they took."""
    model(**batches[0])  # the first call prepares
    start = time.perf_counter()
    labels = torch.cat([model(**batch).logits.argmax(-1) for batch in tqdm(batches, f"batches in {name}")])
    return labels, time.perf_counter() - start


def main(flags: list[str] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels in float32 and in int8."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cross-encoder/nli-deberta-v3-base", help="folder or Hub id of a classifier")
    parser.add_argument("--rows", required=True, help="json lines")
    parser.add_argument("--columns", nargs="+", default=["sentence1", "sentence2"], help="one or two columns of text")
    parser.add_argument("--max_rows", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=8)
    arguments = parser.parse_args(flags)

    rows = load_dataset("json", data_files=arguments.rows, split=f"train[:{arguments.max_rows}]")
    tokenizer = HfDebertaTokenizer.from_pretrained(arguments.model)
    batches = [
        tokenizer(*(batch[name] for name in arguments.columns), truncation=True, padding=True, return_tensors="pt")
        for batch in rows.iter(arguments.batch_size)
    ]
    model = HfDebertaForSequenceClassification.from_pretrained(arguments.model, dtype=torch.float32)
    labels, seconds = predict(hf_deberta.optimize(model, inplace=False), batches, "float32")  # a copy
    rounded, fewer_seconds = predict(hf_deberta.optimize(model, torch.int8), batches, "int8")
    same = int((labels == rounded).sum())
    print(
        f"{len(rows)} rows: {same} with the same label ({same / len(rows):.1%}); "
        f"{seconds:.1f} s in float32, {fewer_seconds:.1f} s in int8"
    )
    return labels, rounded


if __name__ == "__main__":
    main()
