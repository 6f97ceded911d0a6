"""Fine-tune with Trainer as usual, compiled, or with CUDA graphs: how long does a step take?

    python examples/faster_steps.py --train_file train.jsonl --steps eager
    python examples/faster_steps.py --train_file train.jsonl --steps compiled
    python examples/faster_steps.py --train_file train.jsonl --steps graphed    # on a GPU

Rows have a `sentence` and a `label`, which counts from 0: {"sentence": "a fine film", "label": 1}. It prints:

    first two steps: ... s; then ... s a step (median); loss of the last 10 steps ...

Compiled: the first batch gets a graph for its shape, the second length one for all lengths. A smaller last batch might
need a third, so it is dropped. Measure before you compile: compiled graphs compute padding, which the model leaves out
otherwise. Graphed: each combination of shapes gets a graph, so batches are padded to a multiple of 64 tokens.
"""

import argparse
import time
from statistics import mean, median
from typing import Any

import torch
from datasets import load_dataset
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_deberta import HfDebertaForSequenceClassification, HfDebertaTokenizer
from hf_deberta.training.graphed_steps import GraphedStepsMixin


class GraphedTrainer(GraphedStepsMixin, Trainer):
    """`Trainer` with CUDA graphs."""


class StepTimes(TrainerCallback):
    """The seconds that each optimizer step took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)


def main(flags: list[str] | None = None) -> list[float]:
    """Return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="microsoft/deberta-v3-base", help="folder or Hub id")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--output_dir", default="faster_steps")
    parser.add_argument("--max_steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--backend", default="inductor", help="of torch.compile; inductor needs a C++ compiler on CPUs")
    parser.add_argument("--steps", choices=("eager", "compiled", "graphed"), default="compiled")
    arguments = parser.parse_args(flags)
    set_seed(0)

    rows = load_dataset("json", data_files=arguments.train_file, split="train")
    tokenizer = HfDebertaTokenizer.from_pretrained(arguments.model)
    rows = rows.map(lambda batch: tokenizer(batch["sentence"], truncation=True, max_length=128), batched=True)
    model = HfDebertaForSequenceClassification.from_pretrained(arguments.model, num_labels=max(rows["label"]) + 1)
    settings = TrainingArguments(
        arguments.output_dir,
        num_train_epochs=1,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        warmup_steps=0.1,
        logging_steps=1,
        dataloader_drop_last=True,
        torch_compile=arguments.steps == "compiled",
        torch_compile_backend=arguments.backend if arguments.steps == "compiled" else None,
        save_strategy="no",
    )
    times, graphed = StepTimes(), arguments.steps == "graphed"
    collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=64 if graphed else None)
    trainer = (GraphedTrainer if graphed else Trainer)(model, settings, collator, rows, callbacks=[times])
    trainer.train()
    trainer.save_model()
    tokenizer.save_pretrained(arguments.output_dir)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    later = median(times.seconds[2:] or times.seconds)
    print(
        f"first two steps: {sum(times.seconds[:2]):.1f} s; then {later:.3f} s a step (median); "
        f"loss of the last 10 steps {mean(losses[-10:]):.3f}"
    )
    return losses


if __name__ == "__main__":
    main()
