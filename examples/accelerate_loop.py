"""Fine-tune a classifier in a loop of your own, with accelerate: one device or many, in any precision.

    accelerate launch examples/accelerate_loop.py --train_file train.jsonl --validation_file dev.jsonl
    accelerate launch --config_file configs/ddp.yaml examples/accelerate_loop.py ...    # docs/distributed.md

Rows have a `sentence` and a `label`, which counts from 0: {"sentence": "a fine film", "label": 1}. After each epoch the
first process prints the mean loss and the accuracy, and at the end it saves the model:

    epoch 1: loss ..., accuracy ...
"""

import argparse
import math
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, get_linear_schedule_with_warmup

from hf_deberta import HfDebertaForSequenceClassification, HfDebertaTokenizer


def main(flags: list[str] | None = None) -> float:
    """Return the accuracy after the last epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="microsoft/deberta-v3-base", help="folder or Hub id")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", default="accelerate_loop")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=16, help="rows of one process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of one optimizer step")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    arguments = parser.parse_args(flags)
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=arguments.accumulate)

    files = {"train": arguments.train_file, "validation": arguments.validation_file}
    rows = load_dataset("json", data_files=files)
    num_labels = max(rows["train"]["label"]) + 1
    tokenizer = HfDebertaTokenizer.from_pretrained(arguments.model)
    model: Any = HfDebertaForSequenceClassification.from_pretrained(arguments.model, num_labels=num_labels)
    with accelerator.main_process_first():  # the others read its cache
        rows = rows.map(lambda batch: tokenizer(batch["sentence"], truncation=True, max_length=128), batched=True)
    rows = rows.select_columns([*tokenizer.model_input_names, "label"])
    collator = DataCollatorWithPadding(tokenizer)
    train: Any = DataLoader(rows["train"], arguments.batch_size, shuffle=True, collate_fn=collator)
    validation: Any = DataLoader(rows["validation"], arguments.batch_size, collate_fn=collator)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    # of one process: with more, accelerate advances the schedule several times in each step
    steps = arguments.epochs * math.ceil(len(train) / arguments.accumulate)
    schedule: Any = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, train, validation, schedule = accelerator.prepare(model, optimizer, train, validation, schedule)

    accuracy = 0.0
    for epoch in range(1, arguments.epochs + 1):
        model.train()
        losses = []
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        model.eval()
        right = []
        for batch in validation:
            with torch.no_grad():
                predicted = model(**batch).logits.argmax(-1)
            right.append(accelerator.gather_for_metrics(predicted == batch["labels"]))
        accuracy = torch.cat(right).float().mean().item()
        loss = accelerator.gather(torch.stack(losses)).mean().item()
        accelerator.print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}")

    accelerator.unwrap_model(model).save_pretrained(
        arguments.output_dir,
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),  # collects the parts of FSDP and DeepSpeed: all processes call it
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(arguments.output_dir)
    accelerator.end_training()
    return accuracy


if __name__ == "__main__":
    main()
