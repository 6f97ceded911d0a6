r"""Fine-tune on SQuAD 1.1 or 2.0, or on your own questions with answers in a text.

SQuAD 2.0:

    hf-deberta squad --model_name_or_path microsoft/deberta-v3-base --task_name squad_v2 --output_dir squad2

The official files, or your own rows (id, context, question, and answers with text and answer_start), on several GPUs,
with SiFT:

    accelerate launch -m hf_deberta squad \
        --model_name_or_path microsoft/deberta-v3-large --train_file train-v2.0.json \
        --validation_file dev-v2.0.json --bf16 --sift --output_dir mine

Flags are named as in Transformers' run_qa.py.

A context is split into overlapping windows; a predicted answer is a span of one of them, and its text is copied from
the context. Metrics: those of the official scripts. Files for the validation and the test rows, in the format of these
scripts, whose names begin with eval_ or predict_: eval_predictions.json, eval_nbest_predictions.json and, for SQuAD
2.0, eval_null_odds.json; and predictions_SPLIT.jsonl and .csv, the columns of the rows, the predicted answer and its
probability.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, PreTrainedTokenizerBase

from hf_deberta import HfDebertaForQuestionAnswering
from hf_deberta.fine_tuning.answer_spans import PredictedAnswers, SquadEncoder, find_answers
from hf_deberta.fine_tuning.arguments import OPTIONAL_SWITCH
from hf_deberta.fine_tuning.run import run_task
from hf_deberta.fine_tuning.splits import DataArguments, require_plain_splits
from hf_deberta.fine_tuning.task import Task
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.fine_tuning.tasks.expand_rows import all_bad_rows, read_as
from hf_deberta.metrics import CONFIGURATIONS
from hf_deberta.metrics.squad import squad_scores
from hf_deberta.metrics.squad_v2 import squad_v2_scores
from hf_deberta.training.command_line import flag, free_flag
from hf_deberta.training.data_files import Source, cache_rows, read_table, require_columns, require_texts
from hf_deberta.training.errors import InputError, input_errors, short_repr
from hf_deberta.training.text_files import DIALECTS, file_kind, json_objects, read_json

HUB_NAMES = {"squad": ("rajpurkar/squad", None), "squad_v2": ("rajpurkar/squad_v2", None)}
TEXT_FEATURES = {name: datasets.Value("string") for name in ("id", "context", "question")}
ANSWER_FEATURES = {
    "answers": {"text": datasets.List(datasets.Value("string")), "answer_start": datasets.List(datasets.Value("int32"))}
}
MAX_ANSWER_START = 2**31  # of int32
# The official files, for `read_as`
OFFICIAL_ANSWERS = [{"text?": str, "answer_start": int}]
OFFICIAL_QUESTION = {"id": str | int, "question": str, "answers?": OFFICIAL_ANSWERS, "is_impossible?": bool}
OFFICIAL_ARTICLES = [{"paragraphs": [{"context": str, "qas": [OFFICIAL_QUESTION]}]}]


# 1. Flags


@dataclass
class SquadModelArguments(ModelArguments):
    """Without --cls_dropout: the head has no dropout."""

    cls_dropout: float | None = field(default=None, init=False)


@dataclass
class SquadArguments(DataArguments):
    """Which questions, how contexts are cut into windows, and how answers are selected."""

    task_names = HUB_NAMES
    positive_flags = (*DataArguments.positive_flags, "n_best_size", "max_answer_length")
    task_name: str | None = flag(None, f"{' or '.join(HUB_NAMES)}. Leave it out for your own rows.")
    version_2_with_negative: bool | None = flag(
        None,
        "Some questions have no answer; by default, if the rows or those of the training have such.",
        **OPTIONAL_SWITCH,
    )
    null_score_diff_threshold: float = free_flag(
        0.0, "Predict no answer if its score exceeds that of the best answer by more than this."
    )
    doc_stride: int | None = flag(
        None,
        "Number of tokens that neighbouring windows of a context share (default: 128, or half of what the "
        "question leaves for the context).",
    )
    max_query_length: int | None = flag(
        None, "Truncate questions to N tokens; by default, a too long question is an error."
    )
    n_best_size: int = free_flag(20, "Number of answers per question in nbest_predictions.json.")
    max_answer_length: int = free_flag(30, "Maximum number of tokens of an answer.")


# 2. Rows


def read_squad(file: str | Path) -> Dataset:
    """Return the questions of an official SQuAD file (nested JSON) or of a table (json, jsonl, parquet).

    Files may be gzipped.
    """
    path, data = Path(file), None
    if file_kind(path) in DIALECTS:
        raise InputError(f"{path} is none of json, jsonl, parquet, which hold the lists of answers")
    if file_kind(path) == "json" and path.is_file():
        with suppress(InputError):  # one row per line, or an invalid file, which read_table reports
            document = read_json(path)
            data = document.get("data") if isinstance(document, dict) else None
    if data is None:
        return read_table(path)
    if not isinstance(data, list) or (data and not (isinstance(data[0], dict) and "paragraphs" in data[0])):
        return cache_rows([path], partial(json_objects, data, path), field="data")
    with input_errors(f"{path} is not in the format of an official SQuAD file"):
        questions = list(_questions_of_articles(data))
        if not questions:
            raise InputError("there is no question")
        with_answers = any(question["answers"] is not None for question in questions)
        for question in questions:
            question["answers"] = _answers_by_column(question["answers"])
        return cache_rows([path], lambda: questions, TEXT_FEATURES | (ANSWER_FEATURES if with_answers else {}))


def _questions_of_articles(articles: list) -> Iterator[dict]:
    """Yield the questions in the format of the Hub, but for answers; None if the file has none for a question."""
    for article in read_as(articles, OFFICIAL_ARTICLES, "data"):
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                answers = [] if qa["is_impossible"] else qa["answers"]
                row = {"id": str(qa["id"]), "context": paragraph["context"], "question": qa["question"]}
                yield row | {"answers": answers}


def squad_rows(rows: Dataset, source: Source, with_answers: bool = True) -> Dataset:
    """Return the columns id, context, question and answers, after checking them.

    Args:
        with_answers: require answers; otherwise the column is left out unless every row has some, or an empty list.
    """
    split = source.split
    with input_errors(source):
        require_columns(rows, [*TEXT_FEATURES, *["answers"] * with_answers], split)
        require_texts(rows, ["context", "question"], source)
        labelled = with_answers or ("answers" in rows.column_names and None not in rows["answers"][:])
        features = datasets.Features(TEXT_FEATURES | (ANSWER_FEATURES if labelled else {}))
        rows, check = rows.select_columns(list(features)), partial(_check_row, labelled=with_answers)
        with all_bad_rows(rows, check):
            rows = rows.map(check, features=features, desc=f"checking {split}")
        ((most_common, count),) = Counter(rows["id"][:]).most_common(1)
        if count > 1 and split != "train":
            raise InputError(f"{count} {split} rows have the id {most_common!r}; predictions need one for each")
    return rows


def _check_row(row: dict[str, Any], labelled: bool) -> dict[str, Any]:
    row = {**row, "id": str(read_as(row["id"], str | int, "id"))}
    if labelled and row["answers"] is None:
        raise InputError("the row has no answers; of a question without an answer they are empty lists")
    return row | ({"answers": _answers_by_column(row["answers"])} if "answers" in row else {})


def _answers_by_column(answers: Any) -> dict[str, list]:
    """Return {text: [...], answer_start: [...]}, also from [{text, answer_start}, ...]; empty texts are dropped."""
    if isinstance(answers, dict):
        columns = read_as(answers, {"text": list, "answer_start": list}, "answers")
        if len(columns["text"]) != len(columns["answer_start"]):
            raise InputError(f"answers must hold as many text as answer_start, not {short_repr(answers)}")
        answers = [dict(zip(columns, pair, strict=True)) for pair in zip(*columns.values(), strict=True)]
    answers = [answer for answer in read_as(answers or [], OFFICIAL_ANSWERS, "answers") if answer["text"]]
    for start in (answer["answer_start"] for answer in answers):
        if not -1 <= start < MAX_ANSWER_START:
            raise InputError(f"answer_start must be the number of a character, not {start}")
    return {name: [answer[name] for answer in answers] for name in ("text", "answer_start")}


# 3. The task


class Squad(Task):
    demo = "squad"
    arguments, model_arguments = SquadArguments, SquadModelArguments
    read_file = staticmethod(read_squad)
    hub_names = HUB_NAMES
    model_class, auto_class = HfDebertaForQuestionAnswering, AutoModelForQuestionAnswering
    tokenizer_options = {"padding_side": "right"}  # answers are counted from the first token
    default_length = 384
    writes_evaluations = True

    @classmethod
    def recipe_name(cls, flags: Namespace) -> str:
        name = "squad_v2" if flags.version_2_with_negative else super().recipe_name(flags)
        return "squad" if name == "own" else name

    def read(self, splits: dict[str, Dataset]) -> dict[str, Dataset]:
        self.original_rows = require_plain_splits(splits)
        rows = {split: squad_rows(raw, self.sources[split], split != "test") for split, raw in splits.items()}
        has_answer = {split: {bool(x["text"]) for x in rows[split]["answers"]} for split in rows if split != "test"}
        data_args = self.data_args
        if data_args.version_2_with_negative is None:
            has_unanswerable = any(False in kinds for kinds in has_answer.values())
            data_args.version_2_with_negative = data_args.task_name == "squad_v2" or has_unanswerable
        # kept in config.json, because test rows do not show it; not if false, since other rows may lack answers
        self.model_args.reading_flags["version_2_with_negative"] = data_args.version_2_with_negative or None
        kinds = has_answer.get("validation", {True, False})
        absent = tuple({True: "HasAns", False: "NoAns"}[kind] for kind in {True, False} - kinds)
        self.metric_names = [name for name in CONFIGURATIONS[self.metric]["default"] if not name.startswith(absent)]
        return rows

    @property
    def metric(self) -> str:
        return "squad_v2" if self.data_args.version_2_with_negative else "squad"

    def has_labels(self, split: str) -> bool:
        return "answers" in self.rows[split].column_names

    def config_fields(self) -> dict[str, Any]:
        return {"num_labels": 2}

    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
        encoder = SquadEncoder(tokenizer, length, self.data_args.doc_stride, self.data_args.max_query_length)
        encode = encoder.training_features if split == "train" else encoder.evaluation_features
        return encode(self.rows[split], self.data_args.map_options(f"tokenizing {split}"))

    def read_outputs(self, split: str, outputs: Any, inputs: Dataset) -> PredictedAnswers:
        start_logits, end_logits, *_ = outputs
        return find_answers(
            self.rows[split],
            inputs,
            start_logits,
            end_logits,
            n_best_size=self.data_args.n_best_size,
            max_answer_length=self.data_args.max_answer_length,
            version_2=self.metric == "squad_v2",
            null_score_diff_threshold=self.data_args.null_score_diff_threshold,
        )

    def metrics(self, split: str, predictions: PredictedAnswers) -> dict[str, float]:
        rows = self.rows[split]
        golds = {x: answers["text"] for x, answers in zip(rows["id"], rows["answers"], strict=True)}
        if self.metric == "squad":
            return squad_scores(predictions.texts, golds)
        return squad_v2_scores(
            predictions.texts, golds, predictions.null_odds, self.data_args.null_score_diff_threshold
        )

    def prediction_columns(self, split: str, predictions: PredictedAnswers) -> dict[str, list]:
        return {"prediction": [*predictions.predictions.values()], "probability": predictions.probabilities()}

    def write(self, folder: Path, split: str, predictions: PredictedAnswers) -> None:
        predictions.write(folder, "predict_" if split == "test" else "eval_")


def main() -> None:
    run_task(Squad)
