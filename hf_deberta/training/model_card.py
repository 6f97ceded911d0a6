"""The model card (README.md beside the weights): that of Trainer, with the results of all splits and loading code.

>>> write_training_card(trainer, data="corpus.txt")
"""

import json
import os
from pathlib import Path

from huggingface_hub import ModelCard
from transformers import Trainer
from transformers.modelcard import TrainingSummary

from hf_deberta.model.configuration_hf_deberta import HfDebertaConfig
from hf_deberta.model.pretrained_model import write_model_card
from hf_deberta.training.json_files import atomic_write

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
        dataset: the task or the id of the training data on the Hub, if it has one.
        folder: the model's folder, `output_dir` by default.
    """
    if not trainer.is_world_process_zero():
        return
    output = Path(str(trainer.args.output_dir))
    path = (folder or output) / "README.md"
    name = trainer.args.hub_model_id or path.parent.resolve().name
    on_hub = bool(base) and not os.path.exists(str(base))
    fields = {"model_name": name, "finetuned_from": base if on_hub else None}
    loading = None
    if json.loads((path.parent / "config.json").read_text())["model_type"] == HfDebertaConfig.model_type:
        path.unlink(missing_ok=True)
        config = HfDebertaConfig.from_pretrained(path.parent)
        write_model_card(path.parent, (config.architectures or [""])[0], config, name)
        loading = ModelCard.load(path)
        fields |= {"tags": loading.data.get("tags"), "tasks": loading.data.get("pipeline_tag")}
    # columns in the order of trainer_state.json, also if the run did not resume from it
    trainer.state.log_history = [dict(sorted(entry.items())) for entry in trainer.state.log_history]
    summary = TrainingSummary.from_trainer(trainer, dataset=data, dataset_tags=dataset, **fields)
    # Trainer takes these two from the configuration and the last evaluation; an empty name would count as a checkpoint
    summary.finetuned_from, summary.eval_results = fields["finetuned_from"], read_results(output)
    if "lr_scheduler_warmup_steps" in summary.hyperparameters:  # it may be a share
        summary.hyperparameters["lr_scheduler_warmup_steps"] = trainer.args.get_warmup_steps(trainer.state.max_steps)
    card = ModelCard(summary.to_model_card())
    if loading is not None:
        card.data["pipeline_tag"] = loading.data.get("pipeline_tag")
        card.text += loading.text.replace(f"# {name}", "\n## How to load the model", 1)
    if base and not on_hub:  # others do not have this folder
        card.text = card.text.replace("trained from scratch", f"trained from {Path(base).resolve().name}", 1)
    with atomic_write(path) as unfinished:
        card.save(unfinished)


def read_results(folder: Path) -> dict[str, float]:
    """Read the metrics of all_results.json, without timings, by the names that Trainer's cards use."""
    path = folder / "all_results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name.removeprefix("eval_"): value for name, value in results.items() if not name.endswith(TIMINGS)}
