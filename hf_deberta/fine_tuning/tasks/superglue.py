r"""Fine-tune on SuperGLUE with the published settings for the checkpoint.

ReCoRD:

    hf-deberta superglue --model_name_or_path microsoft/deberta-v3-large --task_name record --output_dir record

COPA from the official files, from a model fine-tuned on MNLI as in the paper, on several GPUs:

    accelerate launch -m hf_deberta superglue \
        --intermediate my-mnli --task_name copa --data_dir SuperGLUE/COPA --bf16 \
        --output_dir copa

A model fine-tuned on RTE predicts the diagnostics AX-b and AX-g too.

Flags are named as in Transformers' run_glue.py.

Columns: those of the Hub dataset. The official files, where MultiRC, ReCoRD and WSC are nested, are flattened to them.

| task         | input                                                                                              |
|--------------|----------------------------------------------------------------------------------------------------|
| BoolQ        | passage, question                                                                                  |
| CB, RTE, AX  | premise, hypothesis                                                                                |
| COPA         | one input per choice, cause first: (choice, premise) or (premise, choice)                          |
| MultiRC      | paragraph, question and one answer                                                                 |
| ReCoRD       | passage, query with [MASK] for @placeholder; the model scores the mentions of entities             |
| WiC          | "word: sentence", sentence; the word is marked, "we need to * wash * it"                           |
| WSC          | text, noun; the noun and the pronoun are marked, "* the men * fled because # they # feared it"     |

COPA and ReCoRD are encoded as in the official DeBERTa code, which has no recipe for WiC and WSC.

Metrics: those of the SuperGLUE paper, between 0 and 1. Files: predictions_TASK.jsonl and .csv, the columns of the rows,
prediction and probabilities (ReCoRD: the best entities), and the file of a SuperGLUE submission, such as BoolQ.jsonl.

`python -m hf_deberta.fine_tuning.tasks.superglue submission.zip runs/*` zips those files for super.gluebenchmark.com.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, load_dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta import HfDebertaForEntityChoice
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.run import run_task
from hf_deberta.fine_tuning.splits import DataArguments
from hf_deberta.fine_tuning.task import Task, logits_of
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.fine_tuning.tasks import record
from hf_deberta.fine_tuning.tasks.expand_rows import expand_rows, read_as, with_numbers
from hf_deberta.fine_tuning.tasks.glue import NLI_COLUMNS, SENTENCE_COLUMNS, TWO_WAY_ENTAILMENT
from hf_deberta.fine_tuning.tasks.labels import read_targets
from hf_deberta.fine_tuning.tasks.race import ChoiceTask, group_choices
from hf_deberta.fine_tuning.tasks.submission import submission_command, write_json_lines
from hf_deberta.metrics import CONFIGURATIONS, compute_metric
from hf_deberta.metrics.super_glue import record_scores
from hf_deberta.training.command_line import flag, free_flag
from hf_deberta.training.data_files import Source, check_rows, csv_text, read_table, require_columns, require_texts
from hf_deberta.training.errors import InputError, input_errors

HUB_NAME = "aps/super_glue"
DIAGNOSTICS = ("axb", "axg")
METRICS = CONFIGURATIONS["super_glue"]
FALSE_TRUE = ("False", "True")
COPA_COLUMNS = ("premise", "choice1", "choice2", "question")
MULTIRC_COLUMNS = ("paragraph", "question", "answer")
WIC_COLUMNS = ("word", "sentence1", "sentence2", "start1", "end1", "start2", "end2")
WSC_COLUMNS = ("text", "span1_text", "span1_index", "span2_text", "span2_index")
GENDERED_WORDS = re.compile(r"\b(he|she|his|her|hers|him|himself|herself)\b", re.IGNORECASE)

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class SuperGlueTask:
    """A task of SuperGLUE.

    Args:
        submission_name: the name of its file in a submission, without .jsonl.
        labels: label names in the order of the Hub's numbers; none of ReCoRD, which has answers.
        metrics: the first selects the best checkpoint.
        submission_labels: the labels as a submission has them, if not by name.
    """

    submission_name: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    submission_labels: tuple[str | int, ...] = ()


TASKS = {
    "boolq": SuperGlueTask("BoolQ", ("passage", "question"), FALSE_TRUE, METRICS["boolq"], ("false", "true")),
    "cb": SuperGlueTask("CB", NLI_COLUMNS, ("entailment", "contradiction", "neutral"), METRICS["cb"]),
    "copa": SuperGlueTask("COPA", COPA_COLUMNS, ("choice1", "choice2"), METRICS["copa"], (0, 1)),
    "multirc": SuperGlueTask("MultiRC", MULTIRC_COLUMNS, FALSE_TRUE, METRICS["multirc"], (0, 1)),
    "record": SuperGlueTask("ReCoRD", ("passage", "query", "entity_spans"), (), METRICS["record"]),
    "rte": SuperGlueTask("RTE", NLI_COLUMNS, TWO_WAY_ENTAILMENT, METRICS["rte"]),
    "wic": SuperGlueTask("WiC", WIC_COLUMNS, FALSE_TRUE, METRICS["wic"], ("false", "true")),
    "wsc": SuperGlueTask("WSC", WSC_COLUMNS, FALSE_TRUE, METRICS["wsc"]),
    "axb": SuperGlueTask("AX-b", SENTENCE_COLUMNS, TWO_WAY_ENTAILMENT, METRICS["axb"]),
    "axg": SuperGlueTask("AX-g", NLI_COLUMNS, TWO_WAY_ENTAILMENT, METRICS["axg"]),
}
# the other columns of a task are texts
NUMBER_COLUMNS = {"start1", "end1", "start2", "end2", "span1_index", "span2_index", "entity_spans"}
SUBMISSION_FILES = [f"{task.submission_name}.jsonl" for task in TASKS.values()]


# 1. Flags


@dataclass
class SuperGlueArguments(DataArguments):
    """Which task, and the files of the diagnostics."""

    task_names = TASKS
    task_name: str = flag("", f"One of {', '.join(TASKS)}.")
    axb_file: str | None = free_flag(None, "AX-b.jsonl, to predict with --task_name rte.")
    axg_file: str | None = free_flag(None, "AX-g.jsonl, to predict with --task_name rte.")
    doc_stride: int = flag(record.DEFAULT_STRIDE, "Tokens that neighbouring windows of a ReCoRD passage share.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.axb_file or self.axg_file) and self.task_name != "rte":
            raise InputError(f"--axb_file and --axg_file need --task_name rte, not {self.task_name}")

    def card_fields(self, checkpoint: str, demo: bool = False) -> dict[str, str | None]:
        data = {} if demo else {"data": f"SuperGLUE {TASKS[self.task_name].submission_name}"}
        return super().card_fields(checkpoint, demo) | data


# 2. Rows


def flatten_split(
    rows: Dataset, source: Source, name: str, map_options: dict[str, Any] | None = None
) -> tuple[Dataset, Source]:
    """Return a split in the format of the Hub, a row per question, answer or sentence, with `idx` and `label`.

    Besides the rows, return where they come from.

    >>> target = {"span1_text": "the men", "span1_index": 0, "span2_text": "they", "span2_index": 4}
    >>> row = {"text": "the men fled because they feared it", "target": target, "idx": 0, "label": True}
    >>> flatten_split(Dataset.from_list([row]), Source("train"), "wsc")[0]["span2_text"][:]
    ['they']
    """
    texts = [column for column in TASKS[name].columns if column not in NUMBER_COLUMNS]
    rows = with_numbers(rows, set(rows.column_names) - set(texts), source)
    nested_column, flatten = NESTED_FORMATS.get(name, (None, None))
    if flatten is not None and nested_column in rows.column_names:
        columns, options = [*TASKS[name].columns, "idx", "label"], map_options or {}
        if name == "record":
            columns, options = [*record.FEATURES], {**options, "features": Features(record.FEATURES)}
        rows, source = expand_rows(rows, source, flatten, columns, **options)
    needed = [*TASKS[name].columns]
    if name == "multirc" and source.split != "train":
        needed.append("idx")
    if name == "record" and not source.split.startswith("test"):
        needed.append("answers")
    with input_errors(source):
        require_columns(rows, needed, source.split)
        require_texts(rows, texts, source)
        check_rows(rows, partial(_check_row, name=name, needed=needed))
    return rows, source


def _check_row(row: dict[str, Any], name: str, needed: Sequence[str]) -> None:
    """Require what a row needs besides texts and a label."""
    match name:
        case "multirc" if "idx" in needed:
            read_as(row["idx"], MULTIRC_IDX, "idx")
        case "record":
            record.check_question(row, needs_answers="answers" in needed)
        case "copa":
            if row["question"] not in ("cause", "effect"):
                raise InputError(f"the question of COPA is 'cause' or 'effect', not {row['question']!r}")
        case "wic":
            numbers = read_as(row, dict.fromkeys(("start1", "end1", "start2", "end2"), int))
            for side in ("1", "2"):
                text = csv_text(row[f"sentence{side}"])
                record.require_span(numbers[f"start{side}"], numbers[f"end{side}"], text, f"sentence{side}")
        case "wsc":
            # two spaces hold an empty word, as in the official counting
            words = len(re.split(r"\s", csv_text(row["text"])))
            for side, index in read_as(row, {"span1_index": int, "span2_index": int}).items():
                if not 0 <= index < words or not csv_text(row["text"]).strip():
                    raise InputError(f"the {side} is {index}, and the words of the text are 0 to {words - 1}")


# Rows of the official files, for `read_as`
MULTIRC_IDX = {"paragraph": int, "question": int, "answer": int}
MULTIRC_ANSWER = {"text": str, "idx": int, "label?": bool | int | str}
MULTIRC_QUESTION = {"question": str, "idx": int, "answers": [MULTIRC_ANSWER]}
MULTIRC_ROW = {"passage": {"text": str, "questions": [MULTIRC_QUESTION]}, "idx": int}
WSC_TARGET = {"span1_text": str, "span1_index": int, "span2_text": str, "span2_index": int}


def _flatten_multirc(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    row = read_as(row, MULTIRC_ROW)
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            yield {
                "paragraph": row["passage"]["text"],
                "question": question["question"],
                "answer": answer["text"],
                "idx": {"paragraph": row["idx"], "question": question["idx"], "answer": answer["idx"]},
                "label": -1 if answer["label"] is None else answer["label"],
            }


def _flatten_wsc(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    flat = read_as(row, {"text": str, "target": WSC_TARGET})
    yield {"text": flat["text"], **flat["target"], "idx": row.get("idx"), "label": row.get("label")}


# The column that only the official format has, and the function that flattens its rows.
NESTED_FORMATS = {
    "multirc": ("passage", _flatten_multirc),
    "record": ("qas", record.flatten_passage),
    "wsc": ("target", _flatten_wsc),
}


# 3. Model inputs


def text_pairs(name: str, *values: Any) -> list[tuple[str, str]]:
    """Return the texts of each input of a row, from the values of the task's columns: two for COPA, otherwise one."""
    match name:
        case "copa":
            premise, *choices, question = values
            return [(choice, premise) if question == "cause" else (premise, choice) for choice in choices]
        case "multirc":
            paragraph, question, answer = values
            return [(paragraph, f"{question} {answer}")]
        case "wic":
            word, first, second, start1, end1, start2, end2 = values
            first, second = mark_spans(first, [(start1, end1, "*")]), mark_spans(second, [(start2, end2, "*")])
            return [(f"{word}: {first}", second)]
        case "wsc":
            text, noun, noun_index, pronoun, pronoun_index = values
            marks = [(*find_span(text, noun, noun_index), "*"), (*find_span(text, pronoun, pronoun_index), "#")]
            return [(mark_spans(text, marks), noun)]
    first, second = values
    return [(first, second)]


def mark_spans(text: str, spans: list[tuple[int, int, str]]) -> str:
    """Return the text with marks around spans [start, end), which may be within one another.

    >>> mark_spans("we need to wash it.", [(11, 15, "*"), (3, 15, "#")])
    'we # need to * wash * # it.'
    """
    spans = sorted(spans, key=lambda span: span[1] - span[0])
    marks = [(end, f" {mark}") for _, end, mark in spans] + [(start, f"{mark} ") for start, _, mark in reversed(spans)]
    pieces, last = [], 0
    for position, mark in sorted(marks, key=lambda place: place[0]):  # stable: ends come first, of the shorter span
        pieces += [text[last:position], mark]
        last = position
    return "".join([*pieces, text[last:]])


def find_span(text: str, span: str, word: int) -> tuple[int, int]:
    """Return the characters [start, end) of a span of WSC that should begin with the `word`-th word of the text.

    In the official files some spans differ from the text ("The demonstrators", "them."), and some do not begin at their
    word. Returns the nearest occurrence of the span in any case, or else the word.
    """
    words = [match.span() for match in re.finditer(r"\S+", text)]
    start, end = words[min(max(word, 0), len(words) - 1)]
    pattern = r"\s+".join(map(re.escape, span.rstrip(".,;:!?").split()))
    occurrences = [match.span() for match in re.finditer(pattern, text, re.IGNORECASE)] if pattern else []
    return min(occurrences, key=lambda occurrence: abs(occurrence[0] - start), default=(start, end))


# 4. Predictions


def metric_inputs(name: str, rows: Dataset, numbers: np.ndarray, predictions: np.ndarray) -> dict[str, Any]:
    """Return the inputs of hf_deberta/metrics/super_glue.py for label numbers."""
    best: list[Any] = predictions.tolist()
    if name == "multirc":
        best = [{"idx": idx, "prediction": number} for idx, number in zip(rows["idx"], best, strict=True)]
    pairs = {"pairs": _gender_pairs(rows)} if name == "axg" else {}
    return {"predictions": best, "references": numbers.tolist(), **pairs}


def _gender_pairs(rows: Dataset) -> list[str]:
    """Return a text that rows share which differ only in the gender of a pronoun."""
    if "pair_id" in rows.column_names:
        return list(map(str, rows["pair_id"]))
    texts = zip(rows["premise"], rows["hypothesis"], strict=True)
    return [GENDERED_WORDS.sub("_", "\n".join(pair)).lower() for pair in texts]


def _nest_multirc_answers(submission: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the predictions by paragraph and question, as a submission has them."""
    paragraphs: dict[int, dict[int, list]] = {}
    for line in submission:
        idx = line["idx"]
        answers = paragraphs.setdefault(idx["paragraph"], {}).setdefault(idx["question"], [])
        answers.append({"idx": idx["answer"], "label": line["label"]})
    for paragraph, questions in paragraphs.items():
        nested = [{"idx": question, "answers": answers} for question, answers in questions.items()]
        yield {"idx": paragraph, "passage": {"questions": nested}}


# 5. The task


class SuperGlue(Task):
    """A task of SuperGLUE. Besides its splits, `rows` has the diagnostics of RTE: axb and axg."""

    demo = "superglue"
    arguments = SuperGlueArguments
    hub_names = {name: (HUB_NAME, name) for name in TASKS}
    default_length = 256

    @classmethod
    def class_for(cls, data_args: SuperGlueArguments) -> type[Task]:
        return {"record": Record, "copa": Copa}.get(data_args.task_name, cls)

    def __init__(self, model_args: ModelArguments, data_args: SuperGlueArguments, args: FineTuningArguments) -> None:
        super().__init__(model_args, data_args, args)
        self.task = TASKS[data_args.task_name]
        self.labels, self.metric_names = self.task.labels, self.task.metrics
        texts = [column for column in self.task.columns if column not in NUMBER_COLUMNS]  # all inputs are pairs
        model_args.reading_flags["text_column_names"] = texts if len(texts) == 2 else ["text", "text_pair"]

    def name_of(self, split: str) -> str:
        """Return the name of the task of a split: that of the diagnostics is axb or axg."""
        return split if split in DIAGNOSTICS else self.data_args.task_name

    def read_splits(self) -> tuple[dict[str, Dataset], dict[str, Source]]:
        """Add AX-b and AX-g to the splits of RTE: from the given files; from the Hub if RTE comes from the Hub."""
        splits, sources = super().read_splits()
        args = self.data_args
        if args.task_name != "rte" or not self.args.do_predict:
            return splits, sources
        files = {name: file for name in DIAGNOSTICS if (file := getattr(args, f"{name}_file"))}
        diagnostics = {name: read_table(file) for name, file in files.items()}
        if not files and not any(
            (args.data_dir, args.train_file, args.validation_file, args.test_file, args.dataset_name)
        ):
            options = self.model_args.download_options()
            with input_errors(HUB_NAME, Exception):
                diagnostics = {name: load_dataset(HUB_NAME, name, split="test", **options) for name in DIAGNOSTICS}
        for name, rows in diagnostics.items():
            sources[name] = Source("test", {files.get(name, f"{HUB_NAME} ({name})"): len(rows)})
        return splits | diagnostics, sources

    def read(self, splits: dict[str, Dataset]) -> dict[str, Dataset]:
        flat = {}
        for key, raw in splits.items():
            name, options = self.name_of(key), self.data_args.map_options(f"reading {key}")
            flat[key], source = flatten_split(raw, self.sources[key], name, options)
            logger.info(f"{TASKS[name].submission_name} {source.split}: {len(flat[key]):,} rows")
            with input_errors(source):
                labels = TASKS[name].labels
                self.targets_of_split[key] = read_targets(flat[key], source, labels) if labels else None
        return flat

    def batch_encoder(self, split: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Callable[[Any], Any]:
        """Return a function that returns the inputs of a row; two of COPA, one after another."""
        name = self.name_of(split)

        def encode_batch(batch: dict[str, list]) -> Any:
            columns = (batch[x] if x in NUMBER_COLUMNS else map(csv_text, batch[x]) for x in TASKS[name].columns)
            pairs = [pair for values in zip(*columns, strict=True) for pair in text_pairs(name, *values)]
            texts = [first for first, _ in pairs], [second for _, second in pairs]
            return tokenizer(*texts, truncation=True, max_length=length)

        return encode_batch

    def metrics(self, split: str, predictions: Any) -> dict[str, float]:
        name, best = self.name_of(split), predictions.numbers(self.task.labels)
        return compute_metric("super_glue", name, **metric_inputs(name, self.rows[split], self.targets(split), best))

    def write(self, folder: Path, split: str, predictions: Any) -> None:
        """Write the file of a submission."""
        rows, name = self.rows[split], self.name_of(split)
        idx: Any = rows["idx"] if "idx" in rows.column_names else range(len(rows))
        if name == "record":
            idx = [number["query"] if isinstance(number, dict) else number for number in idx]
        answers = zip(idx, self.submitted(split, predictions), strict=True)
        submission = [{"idx": number, "label": answer} for number, answer in answers]
        if name == "multirc":
            submission = list(_nest_multirc_answers(submission))
        write_json_lines(folder / f"{TASKS[name].submission_name}.jsonl", submission)

    def submitted(self, split: str, predictions: Any) -> list[Any]:
        """Return the answer to each row as a submission has it."""
        task = TASKS[self.name_of(split)]
        names = dict(zip(task.labels, task.submission_labels or task.labels, strict=True))
        return [names[label] for label in predictions.best()]


class Copa(ChoiceTask, SuperGlue):
    def batch_encoder(self, split: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Callable[[Any], Any]:
        encode = super().batch_encoder(split, tokenizer, length)
        return lambda batch: group_choices(encode(batch), 2)


class Record(SuperGlue):
    """Entities instead of labels, see record.py."""

    model_class, auto_class = HfDebertaForEntityChoice, None
    collator_class = record.EntityCollator
    tokenizer_options = {"padding_side": "right"}  # entity_indices count from the first token

    def has_labels(self, split: str) -> bool:
        return record.has_answers(self.rows[split])

    def config_fields(self) -> dict[str, Any]:
        return {}

    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
        rows, options = self.rows[split], self.data_args.map_options(f"tokenizing {split}")
        return record.encode_questions(rows, split, tokenizer, length, self.data_args.doc_stride, options)

    def read_outputs(self, split: str, outputs: Any, inputs: Dataset) -> record.RankedEntities:
        return record.rank_entities(logits_of(outputs), inputs, self.rows[split])

    def metrics(self, split: str, predictions: record.RankedEntities) -> dict[str, float]:
        best, answers = record.best_entities(predictions, self.rows[split]), self.rows[split]["answers"]
        return record_scores(dict(enumerate(best)), dict(enumerate(answers)))

    def prediction_columns(self, split: str, predictions: record.RankedEntities) -> dict[str, list]:
        """Return the best entity, and up to five with their scores."""
        top = [[{"text": text, "log_probability": score} for text, score in entities[:5]] for entities in predictions]
        return {"prediction": self.submitted(split, predictions), "best_entities": top}

    def submitted(self, split: str, predictions: record.RankedEntities) -> list[str]:
        return record.best_entities(predictions, self.rows[split])


def main() -> None:
    run_task(SuperGlue)


if __name__ == "__main__":
    submission_command("superglue", SUBMISSION_FILES)
