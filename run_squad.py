"""Fine-tune on SQuAD 1.1 or 2.0, or on questions of your own whose answers stand in a text.

    python run_squad.py --model_name_or_path microsoft/deberta-v3-base --task_name squad_v2 --output_dir squad2

Official files, or your own rows (id, context, question, answers with text and answer_start), on several GPUs, SiFT:

    accelerate launch run_squad.py --model_name_or_path microsoft/deberta-v3-large --train_file train-v2.0.json \
        --validation_file dev-v2.0.json --bf16 --sift --output_dir mine

See it work, offline: `python run_squad.py --demo`. The same command goes on where it was stopped. Flags
are those of Transformers' `run_qa.py` and ours; --help lists all.
"""

from dataclasses import dataclass, field

from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding, EvalPrediction, set_seed
from transformers.utils import logging

from hf_deberta import HfDebertaForQuestionAnswering
from hf_deberta.demos.squad import write_squad_demo
from hf_deberta.fine_tuning.arguments import SWITCH, FineTuningArguments, run_with_arguments
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments, one_of_each, read_splits
from hf_deberta.fine_tuning.task_model import ModelArguments, load_model, load_tokenizer, longest_input
from hf_deberta.fine_tuning.tasks import squad
from hf_deberta.fine_tuning.tasks.squad_scores import METRICS, METRICS_V2, squad_scores, squad_v2_scores
from hf_deberta.fine_tuning.trainer import FineTuningTrainer, over_seeds, train_and_evaluate, write_card_and_push

HUB = {"squad": "rajpurkar/squad", "squad_v2": "rajpurkar/squad_v2"}

logger = logging.get_logger("run_squad")


@dataclass
class SquadArguments(DataArguments):
    """Which questions, how they are read, and how they are answered."""

    task_name: str | None = field(default=None, metadata={"help": f"{' or '.join(HUB)}; else your own."})
    version_2_with_negative: bool | None = field(
        default=None,
        metadata={"help": "Some questions have no answer; by default if there are such.", **SWITCH},
    )
    null_score_diff_threshold: float = field(
        default=0.0,
        metadata={"help": "Leave a question unanswered if that scores more than this above the best answer."},
    )
    doc_stride: int = field(default=128, metadata={"help": "Tokens that the windows of a long text share."})
    max_query_length: int | None = field(
        default=None, metadata={"help": "Cut questions to so many tokens; by default too long a one is an error."}
    )
    n_best_size: int = field(default=20, metadata={"help": "Answers in nbest_predictions.json for each question."})
    max_answer_length: int = field(default=30, metadata={"help": "Tokens of an answer at most."})

    def __post_init__(self) -> None:
        if self.task_name is not None and self.task_name not in HUB:
            raise ValueError(f"--task_name is {' or '.join(HUB)}, not {self.task_name!r}")
        for name in ("n_best_size", "max_answer_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be 1 or more, not {getattr(self, name)}")


def main() -> None:
    kinds = (ModelArguments, SquadArguments, SiftArguments, FineTuningArguments)
    run_with_arguments(
        kinds,
        lambda flags: "squad_v2" if flags.version_2_with_negative else flags.task_name or "squad",
        write_squad_demo,
        fine_tune,
    )


def fine_tune(
    model_args: ModelArguments, data_args: SquadArguments, sift_args: SiftArguments, args: FineTuningArguments
) -> None:
    if model_args.cls_dropout is not None:
        raise ValueError(
            f"--cls_dropout {model_args.cls_dropout:g}: the head that finds answers has no dropout, so leave it out"
        )
    # 1. The questions
    hub = (HUB[data_args.task_name], None) if data_args.task_name else None
    splits = one_of_each(read_splits(data_args, hub, squad.read_squad, model_args.downloads()))
    args.drop_missing_splits(splits)
    splits = {split: squad.squad_rows(rows, split, with_answers=split != "test") for split, rows in splits.items()}
    if data_args.version_2_with_negative is None:
        data_args.version_2_with_negative = data_args.task_name == "squad_v2" or some_without_answer(splits)
    args.set_best_metric(METRICS_V2 if data_args.version_2_with_negative else METRICS)

    # 2. Fine-tuning, evaluation, predictions: with one seed or several
    over_seeds(args, lambda one: run(model_args, data_args, sift_args, one, splits))


def run(
    model_args: ModelArguments,
    data_args: SquadArguments,
    sift_args: SiftArguments,
    args: FineTuningArguments,
    splits: dict[str, Dataset],
) -> dict[str, float]:
    # 1. Model and tokenizer
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args)
    model = load_model(model_args, HfDebertaForQuestionAnswering, AutoModelForQuestionAnswering, num_labels=2)

    # 2. Windows of the texts as inputs
    length = longest_input(data_args, tokenizer, model.config, 384)
    windows = squad.SquadEncoder(tokenizer, length, data_args.doc_stride, data_args.max_query_length)
    with args.main_process_first(desc="tokenizing"):
        inputs = {
            split: (windows.training_features if split == "train" else windows.evaluation_features)(
                rows, data_args.mapping(f"tokenizing {split}")
            )
            for split, rows in splits.items()
        }

    def answers(split: str, predictions: tuple) -> squad.PredictedAnswers:
        found = squad.find_answers(
            splits[split],
            inputs[split],
            *predictions[:2],
            n_best_size=data_args.n_best_size,
            max_answer_length=data_args.max_answer_length,
            version_2=data_args.version_2_with_negative,
            null_score_diff_threshold=data_args.null_score_diff_threshold,
        )
        if args.process_index == 0:
            found.write(args.output_dir, "predict_" if split == "test" else "eval_")
        return found

    def metrics(found: EvalPrediction) -> dict[str, float]:
        return scores(answers("validation", found.predictions), splits["validation"], data_args)

    # 3. Training and evaluation
    trainer = FineTuningTrainer(
        model=model,
        args=args,
        sift=sift_args,
        train_dataset=inputs.get("train"),
        eval_dataset=inputs.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(
            tokenizer,
            padding="max_length" if data_args.pad_to_max_length else "longest",
            max_length=length if data_args.pad_to_max_length else None,
            pad_to_multiple_of=8 if args.fp16 or args.bf16 else None,
        ),
        compute_metrics=metrics,
        about={"data": data_args.source(model_args.demo), "base": model_args.start},
    )
    found = train_and_evaluate(trainer, {"": inputs["validation"]} if "validation" in inputs else {})

    # 4. Answers to the questions of the test split, and scores where it tells the right ones
    if args.do_predict:
        told = [name for name in ("start_positions", "end_positions") if name in inputs["test"].column_names]
        predicted = answers("test", trainer.predict(inputs["test"].remove_columns(told)).predictions)
        if told:
            results = {f"predict_{name}": value for name, value in scores(predicted, splits["test"], data_args).items()}
            trainer.log_metrics("predict", results)
            trainer.save_metrics("predict", results)
    write_card_and_push(trainer)
    return found


def some_without_answer(splits: dict[str, Dataset]) -> bool:
    known = (rows for split, rows in splits.items() if split != "test")
    return any(not answers["text"] for rows in known for answers in rows["answers"])


def scores(found: squad.PredictedAnswers, rows: Dataset, args: SquadArguments) -> dict[str, float]:
    """The official ones of either version."""
    golds = squad.gold_answers(rows)
    if args.version_2_with_negative:
        return squad_v2_scores(found.texts, golds, found.null_odds, args.null_score_diff_threshold)
    return squad_scores(found.predictions, golds)


if __name__ == "__main__":
    main()
