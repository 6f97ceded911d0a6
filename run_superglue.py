"""Fine-tune on SuperGLUE by the published recipe of the checkpoint.

    python run_superglue.py --model_name_or_path microsoft/deberta-v3-large --task_name record --output_dir record

The official files in place of the Hub's, on several GPUs; COPA starts from a model fine-tuned on MNLI:

    accelerate launch run_superglue.py --intermediate my-mnli --task_name copa --data_dir SuperGLUE/COPA --bf16 \
        --output_dir copa

A model of RTE tells of the diagnostics too: --axb_file, --axg_file.
`python -m hf_deberta.fine_tuning.tasks.superglue` makes the zip of a submission.
See it work, offline: `python run_superglue.py --demo`. The same command goes on
where it was stopped. Flags are those of Transformers' `run_glue.py` and ours; --help lists all.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    set_seed,
)
from transformers.utils import logging

from hf_deberta import HfDebertaForEntityChoice, HfDebertaForMultipleChoice, HfDebertaForSequenceClassification
from hf_deberta.demos.superglue import write_superglue_demo
from hf_deberta.fine_tuning.arguments import FineTuningArguments, run_with_arguments
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments, read_splits
from hf_deberta.fine_tuning.task_model import (
    ModelArguments,
    label_fields,
    labels_in_order,
    load_model,
    load_tokenizer,
    longest_input,
)
from hf_deberta.fine_tuning.tasks import superglue
from hf_deberta.fine_tuning.tasks.race import ChoiceCollator
from hf_deberta.fine_tuning.trainer import (
    FineTuningTrainer,
    evaluations_of,
    over_seeds,
    train_and_evaluate,
    write_card_and_push,
)
from hf_deberta.runs.data_files import read_table

HUB = "aps/super_glue"
HEADS = {
    "sequence": (HfDebertaForSequenceClassification, AutoModelForSequenceClassification),
    "choice": (HfDebertaForMultipleChoice, AutoModelForMultipleChoice),
    "entity": (HfDebertaForEntityChoice, None),
}

logger = logging.get_logger("run_superglue")


@dataclass
class SuperGlueArguments(DataArguments):
    """Which task, and its data if not those of the Hub."""

    task_name: str | None = field(default=None, metadata={"help": f"One of {', '.join(superglue.TASKS)}."})
    axb_file: str | None = field(default=None, metadata={"help": "AX-b.jsonl, to be told of by a model of RTE."})
    axg_file: str | None = field(default=None, metadata={"help": "AX-g.jsonl, to be told of by a model of RTE."})
    doc_stride: int = field(
        default=superglue.DEFAULT_STRIDE,
        metadata={"help": "Tokens that neighbouring windows of a ReCoRD passage share."},
    )

    def source(self, demo: bool = False) -> str:
        return super().source(demo) if demo else f"SuperGLUE {superglue.TASKS[self.task_name].submission_name}"

    def __post_init__(self) -> None:
        self.task_name = name_of(self.task_name)
        if self.task_name not in superglue.TASKS:
            raise ValueError(f"--task_name is one of {', '.join(superglue.TASKS)}, not {self.task_name!r}")
        if (self.axb_file or self.axg_file) and self.task_name != "rte":
            raise ValueError(f"--axb_file and --axg_file are for --task_name rte, not {self.task_name}")


def name_of(task: str | None) -> str | None:
    return task and task.lower().replace("-", "")


def main() -> None:
    kinds = (ModelArguments, SuperGlueArguments, SiftArguments, FineTuningArguments)
    run_with_arguments(kinds, lambda flags: name_of(flags.task_name) or "own", write_superglue_demo, fine_tune)


def fine_tune(
    model_args: ModelArguments, data_args: SuperGlueArguments, sift_args: SiftArguments, args: FineTuningArguments
) -> None:
    # 1. The task and its rows
    name, task = data_args.task_name, superglue.TASKS[data_args.task_name]
    loading = model_args.downloads()
    splits = read_splits(data_args, (HUB, name), loading=loading)
    args.drop_missing_splits(splits)
    rows = {(name, split): of for split, of in splits.items()}
    if name == "rte" and args.do_predict:
        rows |= diagnostics(data_args, loading)
    rows = {
        (one, split): superglue.flatten_split(of, split, one, data_args.mapping(f"reading {split}"))
        for (one, split), of in rows.items()
    }
    for (one, split), of in rows.items():
        logger.warning(f"{superglue.TASKS[one].submission_name} {split}: {len(of):,} rows")
        if not split.startswith("test") and not superglue.has_labels(of, split, one):
            raise ValueError(f"the {split} rows of {one} have no labels")
    args.set_best_metric(task.metrics)

    # 2. Fine-tuning, evaluation, predictions: with one seed or several
    over_seeds(args, lambda one: run(model_args, data_args, sift_args, one, rows))


def diagnostics(data_args: SuperGlueArguments, loading: dict[str, Any]) -> dict[tuple[str, str], Dataset]:
    """The rows of AX-b and AX-g: of the files given; of the Hub, if the rows of RTE are."""
    files = {"axb": data_args.axb_file, "axg": data_args.axg_file}
    given = {(name, "test"): read_table(file) for name, file in files.items() if file}
    local = (data_args.data_dir, data_args.train_file, data_args.validation_file, data_args.test_file)
    if given or any(local) or data_args.dataset_name:
        return given
    return {(name, "test"): load_dataset(HUB, name, split="test", **loading) for name in files}


def run(
    model_args: ModelArguments,
    data_args: SuperGlueArguments,
    sift_args: SiftArguments,
    args: FineTuningArguments,
    rows: dict[tuple[str, str], Dataset],
) -> dict[str, float]:
    # 1. Model and tokenizer
    set_seed(args.seed)
    name, task = data_args.task_name, superglue.TASKS[data_args.task_name]
    tokenizer = load_tokenizer(model_args)
    ours, auto = HEADS[task.head]
    labels, fields = None, {}
    if task.head == "sequence":
        labels = labels_in_order(task.labels, model_args)
        fields = {**label_fields(labels), "problem_type": "single_label_classification"}
    model = load_model(model_args, ours, auto, **fields)

    # 2. Rows as inputs
    length = longest_input(data_args, tokenizer, model.config, default=256)
    with args.main_process_first(desc="tokenizing"):
        inputs = {
            (one, split): superglue.encode_split(
                of,
                split,
                one,
                tokenizer,
                length,
                labels,
                data_args.doc_stride,
                data_args.mapping(f"tokenizing {split}"),
            )
            for (one, split), of in rows.items()
        }
    evaluations = evaluations_of({split: of for (_, split), of in inputs.items()})
    padding = (length if data_args.pad_to_max_length else None, 8 if args.fp16 or args.bf16 else None)

    # 3. Training and evaluation
    trainer = SuperGlueTrainer(
        model=model,
        args=args,
        sift=sift_args,
        train_dataset=inputs.get((name, "train")),
        eval_dataset=evaluations.get(""),
        processing_class=tokenizer,
        data_collator=collator(task.head, tokenizer, *padding),
        about={"data": data_args.source(model_args.demo), "base": model_args.start},
        rows={id(of): (*key, rows[key]) for key, of in inputs.items()},
        labels=labels,
    )
    found = train_and_evaluate(trainer, evaluations)

    # 4. Predictions of the rows without labels, and of the diagnostics
    if args.do_predict:
        for (one, split), of in inputs.items():
            if split.startswith("test"):
                prefix = split.replace("test", "predict", 1) if one == name else one
                predicted = trainer.predict(of, metric_key_prefix=prefix)
                if superglue.has_labels(rows[one, split], split, one):
                    trainer.log_metrics(prefix, predicted.metrics)
                    trainer.save_metrics(prefix, predicted.metrics)
                if trainer.is_world_process_zero():
                    told = trainer.told(predicted.predictions, of)
                    superglue.write_superglue_predictions(
                        Path(args.output_dir), one, rows[one, split], **told, labels=labels
                    )
    write_card_and_push(trainer)
    return found


def collator(head: str, tokenizer: Any, length: int | None, multiple: int | None) -> Any:
    """Pads to the longest of the batch, or to a length; to a multiple of something if asked."""
    collators = {"sequence": DataCollatorWithPadding, "choice": ChoiceCollator, "entity": superglue.EntityCollator}
    return collators[head](tokenizer, "max_length" if length else "longest", length, multiple)


class SuperGlueTrainer(FineTuningTrainer):
    """Scores rows: those of ReCoRD are cut into windows, those of MultiRC and AX-g belong together.

    Args:
        rows: (task, split, flat rows) of a data set of inputs, by its id().
        labels: in the model's order.
    """

    def __init__(self, *args, rows: dict[int, tuple[str, str, Dataset]], labels: tuple[str, ...] | None, **kwargs):
        super().__init__(*args, compute_metrics=self.scores, **kwargs)
        self.rows, self.labels = rows, labels

    def scores(self, found: EvalPrediction) -> dict[str, float]:
        name, split, rows = self.rows[id(self.evaluated)]
        told = self.told(found.predictions, self.evaluated)
        if "ranked" in told:
            return superglue.superglue_scores(name, rows, superglue.best_entities(told["ranked"], rows))
        task = superglue.TASKS[name]
        numbers = np.array([task.labels.index(label) for label in self.labels or task.labels])
        return superglue.superglue_scores(name, rows, numbers[told["logits"].argmax(-1)], split)

    def told(self, predictions: Any, inputs: Dataset) -> dict[str, Any]:
        """Logits [rows, labels], or the ranked entities of each row."""
        logits = predictions[0] if isinstance(predictions, tuple) else predictions
        name, _, rows = self.rows[id(inputs)]
        return {"ranked": superglue.rank_entities(logits, inputs, rows)} if name == "record" else {"logits": logits}


if __name__ == "__main__":
    main()
