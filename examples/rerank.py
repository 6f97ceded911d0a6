"""Train a reranker with sentence-transformers' CrossEncoder, and rank documents with it.

    pip install sentence-transformers
    python examples/rerank.py --train_file train.jsonl --validation_file dev.jsonl

Rows have a `query`, a `document` and a `label`, 1 if the document answers the query. Validation queries need documents
of both kinds. It prints the mean average precision before and after training, and a ranking:

    MAP ..., after training ...
    ...  the best document, and so on

`enable()` makes Transformers' classes, which CrossEncoder loads, compute with this package. The saved model is one of
Transformers: it works with and without this package, and with examples/serve.py.
"""

import argparse
from typing import Any

import pandas
from datasets import load_dataset
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import set_seed

import hf_deberta


def candidates(rows: pandas.DataFrame) -> list[dict[str, Any]]:
    """Return the queries with their documents, as the evaluator takes them."""
    return [
        {
            "query": query,
            "positive": group.document[group.label == 1].tolist(),
            "negative": group.document[group.label == 0].tolist(),
        }
        for query, group in rows.groupby("query", sort=False)
        if set(group.label) == {0, 1}
    ]


def main(flags: list[str] | None = None) -> tuple[float, float, list[dict[str, Any]]]:
    """Return the mean average precision before and after training, and the ranking of the first query."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="microsoft/deberta-v3-base", help="folder or Hub id")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", default="reranker")
    parser.add_argument("--max_steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    arguments = parser.parse_args(flags)
    set_seed(0)

    rows = load_dataset("json", data_files={"train": arguments.train_file, "validation": arguments.validation_file})
    train = rows["train"].select_columns(["query", "document", "label"])  # inputs in this order
    samples = candidates(rows["validation"].to_pandas())
    if not samples:
        parser.error(f"{arguments.validation_file} has no query with documents of both kinds, label 0 and label 1")
    evaluator = CrossEncoderRerankingEvaluator(samples, write_csv=False)
    with hf_deberta.enable():
        # a checkpoint for NLI has a head of three labels, which is replaced; released files are float16
        options = {"ignore_mismatched_sizes": True, "dtype": "float32"}
        model = CrossEncoder(
            arguments.model, num_labels=1, max_length=256, trust_remote_code=False, model_kwargs=options
        )
        before = evaluator(model)["map"]
        settings = CrossEncoderTrainingArguments(
            arguments.output_dir,
            num_train_epochs=1,
            max_steps=arguments.max_steps,
            per_device_train_batch_size=16,
            learning_rate=arguments.learning_rate,
            warmup_steps=0.1,
            save_strategy="no",
        )
        CrossEncoderTrainer(model, settings, train, loss=BinaryCrossEntropyLoss(model)).train()
        after = evaluator(model)["map"]
        model.save_pretrained(arguments.output_dir)
        documents = samples[0]["positive"] + samples[0]["negative"]
        ranking = model.rank(samples[0]["query"], documents, return_documents=True)
    print(f"MAP {before:.3f}, after training {after:.3f}")
    for hit in ranking:
        print(f"{hit['score']:.3f}  {hit['text']}")
    return before, after, ranking


if __name__ == "__main__":
    main()
