"""A model card that says how a model was made: beside the weights, README.md.

>>> write_training_card(trainer, data="corpus.txt")
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path

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
TIMES = ("epoch", "runtime", "per_second", "total_flos", "samples", "preparation_time")


def write_training_card(
    trainer: Trainer,
    data: str,
    base: str | None = None,
    dataset: str | None = None,
    folder: Path | None = None,
) -> None:
    """How to load the model, what it was trained on and how, and what came out.

    Args:
        data: what it was trained on, in words.
        base: the checkpoint it was made from.
        dataset: an id on the Hub, if there is one.
        folder: where the model is, if not in `output_dir`.
    """
    if not trainer.is_world_process_zero():
        return
    output = Path(trainer.args.output_dir)
    folder = folder or output
    path, metrics = folder / "README.md", results_of(output)
    path.unlink(missing_ok=True)
    config = HfDebertaConfig.from_pretrained(folder)
    write_model_card(folder, config.architectures[0], config, trainer.args.hub_model_id)
    card = ModelCard.load(path)
    card.data.tags = [*card.data.tags, "generated_from_trainer"]
    card.data.base_model = base if base and not os.path.exists(base) else None
    card.data.datasets = [dataset] if dataset else None
    card.data.model_name = trainer.args.hub_model_id or folder.resolve().name
    card.data.eval_results = eval_results(metrics, card.data.pipeline_tag, data, dataset)
    started = f"from [{base}](https://huggingface.co/{base})" if card.data.base_model else f"from {base or 'scratch'}"
    card.text += "\n".join(
        [
            "\n\n## Training\n",
            f"Trained {started} on {data}, {trainer.state.global_step:,} steps.\n",
            *table("result", metrics),
            *table("setting", {name: getattr(trainer.args, name) for name in HYPERPARAMETERS}),
            *history(trainer.state.log_history),
            f"torch {torch.__version__}, transformers {transformers.__version__}. The command:\n",
            "```bash",
            shlex.join([Path(sys.argv[0]).name, *without_secrets(sys.argv[1:])]),
            "```",
            "",
        ]
    )
    with atomic_write(path) as unfinished:
        card.save(unfinished)


def update_results(folder: Path) -> None:
    """Bring the table of results in a folder's card up to date, and leave all else as it is, also what others wrote."""
    path = folder / "README.md"
    lines = table("result", results_of(folder))
    if lines and path.exists():
        card = path.read_text(encoding="utf-8")
        updated = re.sub(r"\| result \| \|\n(\|.*\n)+", lambda _: "\n".join(lines), card, count=1)
        if updated != card:
            with atomic_write(path) as unfinished:
                unfinished.write_text(updated, encoding="utf-8")


def results_of(folder: Path) -> dict[str, float]:
    """What came out, without times."""
    path = folder / "all_results.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: value for name, value in found.items() if not name.endswith(TIMES)}


def eval_results(metrics: dict[str, float], task: str, data: str, dataset: str | None) -> list[EvalResult] | None:
    """What came out, as the Hub lists it."""
    found = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    about = {"task_type": task, "dataset_type": dataset or data, "dataset_name": data}
    return [
        EvalResult(**about, metric_type=name.removeprefix("eval_"), metric_value=value)
        for name, value in found.items()
        if isinstance(value, float) and not name.startswith("eval_loss")
    ] or None


def table(heading: str, rows: dict) -> list[str]:
    """Lines of a table of names and values."""
    if not rows:
        return []
    return [f"| {heading} | |", "|---|--:|", *(f"| {name} | {shown(value)} |" for name, value in rows.items()), ""]


def history(log: list[dict], most: int = 20) -> list[str]:
    """Lines of a table of evaluations along the way."""
    by_step: dict[int, dict] = {}
    for entry in log:
        if "eval_loss" in entry:
            by_step.setdefault(entry["step"], entry)  # after the last comes that of the best model
    found = list(by_step.values())
    if len(found) < 2:
        return []
    found = found[:: -(-len(found) // most)]
    names = [name for name in found[0] if name.startswith("eval_") and not name.endswith(TIMES)]
    lines = [f"| step | {' | '.join(names)} |", "|--:|" + "--:|" * len(names)]
    lines += [f"| {entry['step']} | {' | '.join(shown(entry.get(name, '')) for name in names)} |" for entry in found]
    return [*lines, ""]


def shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(getattr(value, "value", value))


def without_secrets(words: list[str]) -> list[str]:
    """A command line without the values of --token and --hub_token, in either form."""
    shown_words = []
    for before, word in zip(["", *words], words, strict=False):
        name, equals, _ = word.partition("=")
        secret = name.lstrip("-").replace("-", "_") in ("token", "hub_token")
        after_secret = before.lstrip("-").replace("-", "_") in ("token", "hub_token")
        shown_words.append("..." if after_secret else f"{name}=..." if secret and equals else word)
    return shown_words
