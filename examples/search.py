"""Search hyperparameters with Trainer and optuna; then train once more with the best.

    pip install optuna
    python examples/search.py --train_file train.jsonl --validation_file dev.jsonl --trials 20

Rows have a `sentence` and a `label`, which counts from 0: {"sentence": "a fine film", "label": 1}. After each epoch,
from the sixth trial on, optuna stops trials that are worse than the median of the earlier ones at that epoch. It
prints:

    best of all trials: accuracy ... with {'learning_rate': ..., 'warmup_steps': ...}

Trials are kept in search/trials.db: repeat the command for more of them. The model is in search/best.
"""

import argparse
from pathlib import Path
from typing import Any

from datasets import load_dataset
from optuna.pruners import MedianPruner
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

from hf_deberta import HfDebertaForSequenceClassification, HfDebertaTokenizer


def accuracy(outputs: Any) -> dict[str, float]:
    return {"accuracy": float((outputs.predictions.argmax(-1) == outputs.label_ids).mean())}


def main(flags: list[str] | None = None) -> Any:
    """Return the best trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="microsoft/deberta-v3-base", help="folder or Hub id")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", type=Path, default=Path("search"))
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning_rates", type=float, nargs=2, default=[5e-6, 1e-4], help="the lowest, the highest")
    arguments = parser.parse_args(flags)

    rows = load_dataset("json", data_files={"train": arguments.train_file, "validation": arguments.validation_file})
    num_labels = max(rows["train"]["label"]) + 1
    tokenizer = HfDebertaTokenizer.from_pretrained(arguments.model)
    rows = rows.map(lambda batch: tokenizer(batch["sentence"], truncation=True, max_length=128), batched=True)
    settings = TrainingArguments(
        str(arguments.output_dir),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=32,  # fixed: trials are compared at equal steps
        warmup_steps=0.1,
        eval_strategy="epoch",
        save_strategy="no",
    )
    trainer = Trainer(
        args=settings,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        model_init=lambda: HfDebertaForSequenceClassification.from_pretrained(arguments.model, num_labels=num_labels),
        compute_metrics=accuracy,
    )

    def space(trial: Any) -> dict[str, Any]:
        lowest, highest = arguments.learning_rates
        return {
            "learning_rate": trial.suggest_float("learning_rate", lowest, highest, log=True),
            "warmup_steps": trial.suggest_float("warmup_steps", 0.0, 0.2),  # a share of all steps
        }

    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    best: Any = trainer.hyperparameter_search(
        space,
        compute_objective=lambda metrics: metrics["eval_accuracy"],
        n_trials=arguments.trials,
        direction="maximize",
        backend="optuna",
        pruner=MedianPruner(),
        study_name="search",
        storage=f"sqlite:///{arguments.output_dir}/trials.db",
        load_if_exists=True,
    )
    print(f"best of all trials: accuracy {best.objective:.3f} with {best.hyperparameters}")
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.train()
    trainer.save_model(str(arguments.output_dir / "best"))
    tokenizer.save_pretrained(arguments.output_dir / "best")
    return best


if __name__ == "__main__":
    main()
