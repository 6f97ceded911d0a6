"""The model card (README.md beside the weights): that of Trainer, with use, labels, rows, recipe and all results.

>>> write_training_card(trainer, data="corpus.txt")
"""

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import Trainer
from transformers.modelcard import TrainingSummary

from hf_deberta.model.configuration_hf_deberta import HfDebertaConfig
from hf_deberta.model.pretrained_model import write_model_card
from hf_deberta.training.json_files import atomic_write, read_fields

# Python that uses a model, by the end of its class name: "{name}" is the folder or the name on the Hub
PIPELINE = "from transformers import pipeline"
USES = {
    "SequenceClassification": (PIPELINE, 'pipeline("text-classification", "{name}")({text})'),
    "TokenClassification": (PIPELINE, 'pipeline("ner", "{name}", aggregation_strategy="simple")({text})'),
    "MaskedLM": (PIPELINE, 'pipeline("fill-mask", "{name}")("Paris is the {mask} of France.")'),
    "QuestionAnswering": (
        "from hf_deberta.question_answering import QuestionAnswerer\n"
        "from transformers import AutoModelForQuestionAnswering, AutoTokenizer",
        'QuestionAnswerer(AutoModelForQuestionAnswering.from_pretrained("{name}"), '
        'AutoTokenizer.from_pretrained("{name}"))(question="Where is it?", context="It is in Paris.")',
    ),
    "CausalLM": (PIPELINE, 'pipeline("text-generation", "{name}")({text})'),
}
SETTINGS = ("tokenizer_config.json", "config.json")  # of a model
LABELLED = ("SequenceClassification']", "TokenClassification']")  # ends of a list of one class
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
    base_card = Path(str(base)) / "README.md"
    if base_card.is_file():  # a local folder: its licence and base model hold for this model too
        inherited = ModelCard.load(base_card, ignore_metadata_errors=True).data
        fields |= {"license": inherited.get("license"), "finetuned_from": inherited.get("base_model")}
    loading, settings = None, read_fields(*(path.with_name(name) for name in SETTINGS))
    if settings["model_type"] == HfDebertaConfig.model_type:
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
    text = re.sub(r"\n## [^\n]+\n\nMore information needed\n|\n<!--.*?-->\n", "", card.text, flags=re.DOTALL)
    card.text = text.replace("\n## Training procedure\n", f"{describe_use(settings, name)}{describe_run(trainer)}", 1)
    if loading is not None:
        card.data["pipeline_tag"] = loading.data.get("pipeline_tag")
        card.text += loading.text.replace(f"# {name}", "\n## How to load the model", 1)
    if base and not on_hub:  # others do not have this folder
        card.text = card.text.replace("trained from scratch", f"trained from {Path(base).resolve().name}", 1)
    with atomic_write(path) as unfinished:
        card.save(unfinished)


def read_results(folder: Path) -> dict[str, float]:
    """Read the metrics of all_results.json but those of training, by the names that Trainer's cards use."""
    results = read_fields(folder / "all_results.json")
    names = [name for name in results if not name.startswith("train_") and not name.endswith(TIMINGS)]
    return {name.removeprefix("eval_"): results[name] for name in names}


def how_to_use(settings: dict[str, Any], name: str) -> tuple[list[str], str]:
    """Return imports, and an expression that uses the model with the fields of SETTINGS; "" if none."""
    head = (settings.get("architectures") or [""])[0].partition("For")[2]
    columns = (settings.get("fine_tuning_flags") or {}).get("text_column_names") or ()
    text = '{"text": "A text", "text_pair": "Another"}' if len(columns) == 2 else '"A text"'
    imports, expression = USES.get(head, ("", ""))
    ours = ["import hf_deberta"] if settings.get("model_type") == HfDebertaConfig.model_type else []
    expression = expression.replace("{mask}", str(settings.get("mask_token")))
    return [*ours, *imports.splitlines()], expression.replace("{name}", name).replace("{text}", text)


def describe_use(settings: dict[str, Any], name: str) -> str:
    """Return the sections of the card on how to use the model, and on its labels."""
    imports, expression = how_to_use(settings, name)
    use = "\n".join(["", "## How to use", "", "```python", *imports, "", f"print({expression})", "```", ""])
    labels = settings.get("id2label", {}) if str(settings.get("architectures")).endswith(LABELLED) else {}
    lines = [f"| {number} | {label} |" for number, label in labels.items()]
    table = "\n".join(["", "## Labels", "", "| Number | Label |", "| --- | --- |", *lines, ""])
    return use * bool(expression) + table * (len(lines) > 1)


def describe_run(trainer: Trainer) -> str:
    """Return the section of the card on the rows, the metric that selected the checkpoint, and the recipe."""
    args: Any = trainer.args
    rows: dict[str, Any] = {"train": trainer.train_dataset, "validation": trainer.eval_dataset}
    sizes = ", ".join(f"{name} {len(part):,}" for name, part in rows.items() if part is not None)
    lines = [f"- rows: {sizes}"]
    if args.load_best_model_at_end:
        lines.append(f"- checkpoint: the best by {args.metric_for_best_model.removeprefix('eval_')}")
    if message := getattr(args, "recipe_message", ""):
        lines.append(f"- {message[0].lower()}{message[1:]}")
    return "\n".join(["", "## Training", "", *lines, ""])


def describe_output(folder: Path, script: str) -> str:
    """Return the last line of a script: what is in its folder, and a command that uses it; "" if nothing is."""
    models = [name for name in ("discriminator", "generator") if (folder / name / "config.json").is_file()]
    predictions = sorted(path.name for path in folder.glob("predictions*.csv"))
    has_model = any(folder.glob("model*.safetensors"))
    others = [name for name in ("all_results.json", "seeds.json", "README.md") if (folder / name).is_file()]
    settings = read_fields(*(folder / name for name in SETTINGS)) if has_model else {}
    written = [*["model"] * has_model, *models, *predictions, *others]
    imports, expression = how_to_use(settings, str(folder))
    if models:
        start = f"hf-deberta classify --model_name_or_path {folder / models[0]}"
        command = f"{start} --train_file ROWS.csv --output_dir CLASSIFIER"
    elif expression:
        command = f"python -c '{'; '.join([*imports, f'print({expression})'])}'"
    else:
        command = f"{script} --model_name_or_path {folder} --do_predict --test_file ROWS.jsonl --output_dir PREDICTIONS"
    has_command = bool(models) or has_model
    return f"{folder}: {', '.join(written)}." * bool(written) + f" Try: {command}" * has_command
