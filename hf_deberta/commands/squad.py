r"""Fine-tune on SQuAD 1.1 or 2.0, or on your own questions with answers in a text.

SQuAD 2.0:

    hf-deberta squad --model_name_or_path microsoft/deberta-v3-base --task_name squad_v2 --output_dir squad2

The official files, or your own rows (id, context, question, and answers with text and answer_start), on several GPUs,
with SiFT:

    accelerate launch -m hf_deberta.commands.squad \
        --model_name_or_path microsoft/deberta-v3-large --train_file train-v2.0.json \
        --validation_file dev-v2.0.json --bf16 --sift --output_dir mine

A demonstration on made-up rows, offline:

    hf-deberta squad --demo

Repeat the command to resume an interrupted run; --demo starts over. The flags are those of Transformers'
run_qa.py, and the groups below.
"""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding, EvalPrediction, set_seed
from transformers.utils import logging

from hf_deberta import HfDebertaForQuestionAnswering
from hf_deberta.demos.squad import write_squad_demo
from hf_deberta.fine_tuning.arguments import OPTIONAL_SWITCH, FineTuningArguments, run_script
from hf_deberta.fine_tuning.ensemble import EnsembleTask, Scores
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments, hash_rows, read_splits, require_plain_splits
from hf_deberta.fine_tuning.task_model import ModelArguments, load_model, load_tokenizer, max_input_length
from hf_deberta.fine_tuning.tasks import squad
from hf_deberta.fine_tuning.trainer import (
    FineTuningTrainer,
    over_seeds,
    save_prediction_metrics,
    scored_splits,
    train_and_evaluate,
    write_card_and_push,
)
from hf_deberta.metrics import CONFIGURATIONS, compute_metric
from hf_deberta.runs.errors import InputError

HUB_NAMES = {"squad": "rajpurkar/squad", "squad_v2": "rajpurkar/squad_v2"}
ANSWER_COLUMNS = ("start_positions", "end_positions")

logger = logging.get_logger(__name__)


@dataclass
class SquadModelArguments(ModelArguments):
    """Without --cls_dropout: the head has no dropout."""

    cls_dropout: float | None = field(default=None, init=False)


@dataclass
class SquadArguments(DataArguments):
    """Which questions, how contexts are cut into windows, and how answers are selected."""

    task_name: str | None = field(
        default=None, metadata={"help": f"{' or '.join(HUB_NAMES)}. Leave it out for your own rows."}
    )
    version_2_with_negative: bool | None = field(
        default=None,
        metadata={
            "help": "Some questions have no answer; by default, if the rows or those of the training have such.",
            **OPTIONAL_SWITCH,
        },
    )
    null_score_diff_threshold: float = field(
        default=0.0,
        metadata={"help": "Predict no answer if its score exceeds that of the best answer by more than this."},
    )
    doc_stride: int | None = field(
        default=None,
        metadata={
            "help": "Number of tokens that neighbouring windows of a context share (default: 128, or half of what the "
            "question leaves for the context)."
        },
    )
    max_query_length: int | None = field(
        default=None, metadata={"help": "Truncate questions to N tokens; by default, a too long question is an error."}
    )
    n_best_size: int = field(default=20, metadata={"help": "Number of answers per question in nbest_predictions.json."})
    max_answer_length: int = field(default=30, metadata={"help": "Maximum number of tokens of an answer."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_name is not None and self.task_name not in HUB_NAMES:
            raise InputError(f"--task_name must be {' or '.join(HUB_NAMES)}, not {self.task_name!r}")
        for name in ("n_best_size", "max_answer_length"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1, not {getattr(self, name)}")


def recipe_task(flags: Namespace) -> str:
    return "squad_v2" if flags.version_2_with_negative else flags.task_name or "squad"


def main() -> None:
    argument_classes = (SquadModelArguments, SquadArguments, SiftArguments, FineTuningArguments)
    run_script(argument_classes, fine_tune, recipe_task, write_squad_demo)


def fine_tune(
    model_args: ModelArguments, data_args: SquadArguments, sift_args: SiftArguments, args: FineTuningArguments
) -> None:
    # 1. Questions
    hub = (HUB_NAMES[data_args.task_name], None) if data_args.task_name else None
    splits = read_splits(data_args, hub, squad.read_squad, model_args.download_options())
    args.drop_missing_splits(require_plain_splits(splits))
    args.row_hashes = hash_rows(splits, "answers")
    rows = {split: squad.squad_rows(raw, split, with_answers=split != "test") for split, raw in splits.items()}
    if data_args.version_2_with_negative is None:
        data_args.version_2_with_negative = data_args.task_name == "squad_v2" or has_unanswerable(rows)
    # kept in config.json, because test rows do not show it; not if false, since other rows may lack answers
    model_args.input_flags["version_2_with_negative"] = data_args.version_2_with_negative or None
    args.set_best_metric(CONFIGURATIONS["squad_v2" if data_args.version_2_with_negative else "squad"]["default"])

    # 2. Training, evaluation and predictions, once per seed
    over_seeds(
        args,
        lambda seed_args: run(model_args, data_args, sift_args, seed_args, rows),
        ensemble_task(data_args, args, rows),
    )


def ensemble_task(data_args: SquadArguments, args: FineTuningArguments, rows: dict[str, Dataset]) -> EnsembleTask:
    """How to score and write the answers of an ensemble."""

    def answers_of(split: str, scores: Scores) -> squad.PredictedAnswers:
        version_2 = bool(data_args.version_2_with_negative)
        return squad.answers_of_scores(rows[split]["id"], scores, version_2, data_args.null_score_diff_threshold)

    def metrics(split: str, scores: Scores) -> dict[str, float] | None:
        labelled = "answers" in rows[split].column_names
        return score_answers(answers_of(split, scores), rows[split], data_args) if labelled else None

    def write(folder: Path, split: str, scores: Scores) -> None:
        answers_of(split, scores).write(folder, "predict_")

    return EnsembleTask(scored_splits(rows, args), metrics, write, args.row_hashes)


def has_unanswerable(rows: dict[str, Dataset]) -> bool:
    """True if a train or validation question has no answer."""
    labelled = (split_rows for split, split_rows in rows.items() if split != "test")
    return any(not answers["text"] for split_rows in labelled for answers in split_rows["answers"])


def run(
    model_args: ModelArguments,
    data_args: SquadArguments,
    sift_args: SiftArguments,
    args: FineTuningArguments,
    rows: dict[str, Dataset],
) -> dict[str, float]:
    # 1. Tokenizer and model
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    model = load_model(
        model_args,
        HfDebertaForQuestionAnswering,
        AutoModelForQuestionAnswering,
        do_train=args.do_train,
        num_labels=2,
    )

    # 2. Windows of the contexts as model inputs
    length = max_input_length(data_args.max_seq_length, tokenizer, model.config, default=384)
    encoder = squad.SquadEncoder(tokenizer, length, data_args.doc_stride, data_args.max_query_length)
    with args.main_process_first(desc="tokenizing"):
        inputs = {}
        for split, split_rows in rows.items():
            encode = encoder.training_features if split == "train" else encoder.evaluation_features
            inputs[split] = encode(split_rows, data_args.map_options(f"tokenizing {split}"))

    def write_answers(split: str, logits: Any) -> squad.PredictedAnswers:
        start_logits, end_logits, *_ = logits
        answers = squad.find_answers(
            rows[split],
            inputs[split],
            start_logits,
            end_logits,
            n_best_size=data_args.n_best_size,
            max_answer_length=data_args.max_answer_length,
            version_2=bool(data_args.version_2_with_negative),
            null_score_diff_threshold=data_args.null_score_diff_threshold,
        )
        if args.process_index == 0:
            answers.write(args.output_folder, "predict_" if split == "test" else "eval_")
        return answers

    def compute_metrics(split: str, prediction: EvalPrediction) -> dict[str, float]:
        return score_answers(write_answers(split, prediction.predictions), rows[split], data_args)

    # 3. Training and evaluation
    trainer = FineTuningTrainer(
        model=model,
        args=args,
        sift=sift_args,
        splits=inputs,
        metrics=compute_metrics,
        scores=lambda split, predictions: squad.answer_scores(write_answers(split, predictions)),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, **data_args.padding_options(length, args)),
        card_fields=data_args.card_fields(model_args.checkpoint, model_args.demo),
    )
    metrics = train_and_evaluate(trainer)

    # 4. Answers to the test questions, and their scores if the rows have answers
    if args.do_predict:
        predicted = trainer.predict_split("test", "predict", without=ANSWER_COLUMNS)
        answers = write_answers("test", predicted.predictions)
        if set(ANSWER_COLUMNS) <= set(inputs["test"].column_names):
            scores = score_answers(answers, rows["test"], data_args)
            save_prediction_metrics(trainer, "predict", {f"predict_{name}": score for name, score in scores.items()})
    write_card_and_push(trainer)
    return metrics


def score_answers(answers: squad.PredictedAnswers, rows: Dataset, data_args: SquadArguments) -> dict[str, float]:
    """The official scores of SQuAD 1.1 or 2.0."""
    references = [{"id": x, "answers": golds} for x, golds in zip(rows["id"], rows["answers"], strict=True)]
    if data_args.version_2_with_negative:
        predictions = [
            {"id": x, "prediction_text": text, "no_answer_probability": answers.null_odds[x]}
            for x, text in answers.texts.items()
        ]
        threshold = data_args.null_score_diff_threshold
        return compute_metric("squad_v2", predictions=predictions, references=references, no_answer_threshold=threshold)
    predictions = [{"id": x, "prediction_text": text} for x, text in answers.predictions.items()]
    return compute_metric("squad", predictions=predictions, references=references)


if __name__ == "__main__":
    main()
