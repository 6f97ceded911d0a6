"""Fine-tune with LoRA (PEFT): train under 1 % of the weights, save them alone, and merge them for serving.

    pip install peft
    python examples/lora.py --train_file train.jsonl --validation_file dev.jsonl

Rows have a `sentence` and a `label`, which counts from 0: {"sentence": "a fine film", "label": 1}. It prints:

    trainable params: ... || all params: ... || trainable%: ...
    accuracy: ..., of the merged model ...

lora/merged is a model without PEFT. `PeftModel.from_pretrained(base, "lora/adapter")` loads the adapter, where `base`
is the checkpoint with as many labels. More on adapters: docs/use.md.
"""

import argparse
from typing import Any

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments, set_seed

from hf_deberta import HfDebertaForSequenceClassification, HfDebertaTokenizer


def accuracy(outputs: Any) -> dict[str, float]:
    return {"accuracy": float((outputs.predictions.argmax(-1) == outputs.label_ids).mean())}


def main(flags: list[str] | None = None) -> tuple[float, float]:
    """Return the accuracy of the model with the adapter, and that of the merged model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="microsoft/deberta-v3-base", help="folder or Hub id")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", default="lora")
    parser.add_argument("--max_steps", type=int, default=-1, help="default: three epochs")
    parser.add_argument("--learning_rate", type=float, default=3e-4, help="over ten times that of all weights")
    arguments = parser.parse_args(flags)
    set_seed(0)

    rows = load_dataset("json", data_files={"train": arguments.train_file, "validation": arguments.validation_file})
    num_labels = max(rows["train"]["label"]) + 1
    tokenizer = HfDebertaTokenizer.from_pretrained(arguments.model)
    rows = rows.map(lambda batch: tokenizer(batch["sentence"], truncation=True, max_length=128), batched=True)
    base = HfDebertaForSequenceClassification.from_pretrained(arguments.model, num_labels=num_labels)
    # a pretrained checkpoint has no pooler: left out here, it would stay random, and the adapter would not contain it
    heads = ["pooler", "classifier"]
    model: Any = get_peft_model(
        base, LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=0.1, modules_to_save=heads)
    )
    model.print_trainable_parameters()

    settings = TrainingArguments(
        arguments.output_dir,
        num_train_epochs=3,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=32,
        learning_rate=arguments.learning_rate,
        warmup_steps=0.1,
        save_strategy="no",
    )
    columns = {"train_dataset": rows["train"], "eval_dataset": rows["validation"], "compute_metrics": accuracy}
    trainer = Trainer(model, settings, DataCollatorWithPadding(tokenizer), **columns)
    trainer.train()
    adapted = trainer.evaluate()["eval_accuracy"]
    model.save_pretrained(f"{arguments.output_dir}/adapter")

    merged = model.merge_and_unload()
    merged.save_pretrained(f"{arguments.output_dir}/merged")
    tokenizer.save_pretrained(f"{arguments.output_dir}/merged")
    trainer = Trainer(merged, settings, DataCollatorWithPadding(tokenizer), **columns)
    result = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy: {adapted:.3f}, of the merged model {result:.3f}")
    return adapted, result


if __name__ == "__main__":
    main()
