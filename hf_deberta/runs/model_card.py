"""The model card (README.md beside the weights): how to load the model, how it was trained, and its results.

>>> write_training_card(trainer, data="corpus.txt")
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard
from transformers import Trainer

from hf_deberta.model.configuration_hf_deberta import HfDebertaConfig
from hf_deberta.model.hub_export import write_model_card
from hf_deberta.runs.checkpoints import atomic_write

HYPERPARAMETERS = (
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "max_steps",
    "num_train_epochs",
    "warmup_steps",
    "lr_scheduler_type",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "max_grad_norm",
    "bf16",
    "fp16",
    "seed",
)
TIMINGS = ("epoch", "runtime", "per_second", "total_flos", "samples", "preparation_time")


def write_training_card(
    trainer: Trainer,
    data: str,
    base: str | None = None,
    dataset: str | None = None,
    folder: Path | None = None,
) -> None:
    """Write the card of a trained model, in the main process only.

    Args:
        data: the training data, in words.
        base: the checkpoint that training started from.
        dataset: the id of the training data on the Hub, if it has one.
        folder: the model's folder, `output_dir` by default.
    """
    if not trainer.is_world_process_zero():
        return
    output = Path(str(trainer.args.output_dir))
    folder = folder or output
    path, metrics = folder / "README.md", read_results(output)
    path.unlink(missing_ok=True)
    config = HfDebertaConfig.from_pretrained(folder)
    architectures: list[str] = config.architectures or []
    write_model_card(folder, architectures[0], config, trainer.args.hub_model_id)
    card = ModelCard.load(path)
    card.data.tags = [*card.data.tags, "generated_from_trainer"]
    card.data.base_model = base if base and not os.path.exists(base) else None
    card.data.datasets = [dataset] if dataset else None
    card.data.model_name = trainer.args.hub_model_id or folder.resolve().name
    card.data.eval_results = hub_results(metrics, card.data.pipeline_tag, data, dataset)
    started = f"from [{base}](https://huggingface.co/{base})" if card.data.base_model else f"from {base or 'scratch'}"
    card.text += "\n".join(
        [
            "\n\n## Training\n",
            f"Trained {started} on {data}, {trainer.state.global_step:,} steps.\n",
            *markdown_table("result", metrics),
            *markdown_table("setting", {name: getattr(trainer.args, name) for name in HYPERPARAMETERS}),
            *evaluation_table(trainer.state.log_history),
            f"torch {torch.__version__}, transformers {transformers.__version__}. The command:\n",
            "```bash",
            shlex.join([Path(sys.argv[0]).name, *hide_secrets(sys.argv[1:])]),
            "```",
            "",
        ]
    )
    with atomic_write(path) as unfinished:
        card.save(unfinished)


def update_results(folder: Path) -> None:
    """Replace the table of results in a folder's card; the rest stays, including edits by hand."""
    path = folder / "README.md"
    lines = markdown_table("result", read_results(folder))
    if lines and path.exists():
        card = path.read_text(encoding="utf-8")
        updated = re.sub(r"\| result \| \|\n(\|.*\n)+", lambda _: "\n".join(lines), card, count=1)
        if updated != card:
            with atomic_write(path) as unfinished:
                unfinished.write_text(updated, encoding="utf-8")


def read_results(folder: Path) -> dict[str, float]:
    """Read the metrics of all_results.json, without timings."""
    path = folder / "all_results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: value for name, value in results.items() if not name.endswith(TIMINGS)}


def hub_results(metrics: dict[str, float], task: str, data: str, dataset: str | None) -> list[EvalResult] | None:
    """Return the metrics in the form that the Hub displays, without losses."""
    return [
        EvalResult(
            task_type=task,
            dataset_type=dataset or data,
            dataset_name=data,
            metric_type=name.removeprefix("eval_"),
            metric_value=value,
        )
        for name, value in metrics.items()
        if name.startswith("eval_") and isinstance(value, float) and not name.startswith("eval_loss")
    ] or None


def markdown_table(heading: str, rows: dict[str, Any]) -> list[str]:
    """Return the lines of a table of names and values."""
    if not rows:
        return []
    return [
        f"| {heading} | |",
        "|---|--:|",
        *(f"| {name} | {format_value(value)} |" for name, value in rows.items()),
        "",
    ]


def evaluation_table(log: list[dict[str, Any]], max_rows: int = 20) -> list[str]:
    """Return the lines of a table of the evaluations during training."""
    by_step: dict[int, dict[str, Any]] = {}
    for entry in log:
        if "eval_loss" in entry:
            by_step.setdefault(entry["step"], entry)  # the best model is evaluated again at the last step
    evaluations = list(by_step.values())
    if len(evaluations) < 2:
        return []
    evaluations = evaluations[:: -(-len(evaluations) // max_rows)]
    names = [name for name in evaluations[0] if name.startswith("eval_") and not name.endswith(TIMINGS)]
    lines = [f"| step | {' | '.join(names)} |", "|--:|" + "--:|" * len(names)]
    for entry in evaluations:
        lines.append(f"| {entry['step']} | {' | '.join(format_value(entry.get(name, '')) for name in names)} |")
    return [*lines, ""]


def format_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(getattr(value, "value", value))


def hide_secrets(words: list[str]) -> list[str]:
    """Return a command line with the values of --token and --hub_token replaced by dots."""

    def is_secret(flag: str) -> bool:
        return flag.lstrip("-").replace("-", "_") in ("token", "hub_token")

    hidden = []
    for previous, word in zip(["", *words], words, strict=False):
        name, equals, _ = word.partition("=")
        hidden.append("..." if is_secret(previous) else f"{name}=..." if is_secret(name) and equals else word)
    return hidden
