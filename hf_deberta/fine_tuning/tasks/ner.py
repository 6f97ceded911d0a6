r"""Fine-tune on named entities, or other labels of words, with the published settings for the checkpoint.

CoNLL-2003, from a folder with train.txt, valid.txt and test.txt (a word per line, its label in the last column):

    hf-deberta ner --model_name_or_path microsoft/deberta-v3-base --task_name conll2003 --data_dir conll2003 \
        --output_dir conll

Your own files, as CoNLL columns, or as jsonl or parquet with lists of words and labels, on several GPUs:

    accelerate launch -m hf_deberta ner \
        --model_name_or_path microsoft/deberta-v3-large --train_file train.jsonl \
        --validation_file dev.jsonl --test_file test.jsonl --bf16 --output_dir mine

Flags are named as in Transformers' run_ner.py.

Labels in IOB1 (the original CoNLL-2003), IOBES and BILOU are converted to IOB2. What an input holds
(--document_context):

    none      one sentence (default, as in Transformers' run_ner.py)
    merged    as many sentences of a document as fit, all with labels: the official recipe for CoNLL-2003, and the
              default with --task_name conll2003 where the files mark documents
    around    one sentence with labels, and words of its document on both sides without

A sentence that is too long is split into overlapping windows. Each word has a label in exactly one window, at its first
token.

Metrics: precision, recall and F1 of whole entities as conlleval and seqeval count them, and accuracy of words. Files:
predictions_SPLIT.txt, CoNLL columns with word, label and prediction; predictions_SPLIT.jsonl and .csv, the columns of
the rows, and the predicted label of each word with its probability.
"""

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta import HfDebertaForTokenClassification
from hf_deberta.fine_tuning.run import run_task
from hf_deberta.fine_tuning.splits import DataArguments
from hf_deberta.fine_tuning.task import Task, logits_of
from hf_deberta.fine_tuning.task_model import checkpoint_labels, label_fields, labels_in_checkpoint_order
from hf_deberta.fine_tuning.tasks.expand_rows import read_as
from hf_deberta.fine_tuning.tasks.submission import write_lines
from hf_deberta.metrics import CONFIGURATIONS, compute_metric
from hf_deberta.metrics.named_entities import ENTITY_METRICS, has_prefixes, tags_to_iob2
from hf_deberta.model.losses import IGNORED
from hf_deberta.training.command_line import flag, free_flag
from hf_deberta.training.data_files import Source, check_rows, read_table, require_columns
from hf_deberta.training.errors import InputError, RowError, input_errors
from hf_deberta.training.text_files import read_lines

TABLE_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
DOCUMENT_START = "-DOCSTART-"
DOCUMENT_COLUMNS = ("document_id", "doc_id", "document")

logger = logging.get_logger(__name__)


# 1. Flags


@dataclass
class NerArguments(DataArguments):
    """Which sentences, how they are labelled, and how much of their document the model sees."""

    task_names = ("conll2003",)
    task_name: str | None = flag(None, "conll2003, for its recipe. Leave it out for your own data.")
    text_column_name: str = flag("tokens", "Column of a table with lists of words.")
    label_column_name: str = flag("ner_tags", "Column with the lists of their labels.")
    label_all_tokens: bool = flag(False, "Label every token of a word, not only the first.")
    return_entity_level_metrics: bool = free_flag(False, "Report the metrics of each entity type too.")
    document_context: Literal["none", "merged", "around"] | None = flag(
        None,
        "What a sentence sees of its document. none; merged: as many sentences as fit share an input, as "
        "in the official code for CoNLL-2003; around: neighbouring words on both sides, without labels. By "
        "default merged for conll2003 if the files mark documents, else none.",
    )
    token_classifier: str | None = flag(
        None, "Classifier: linear, or projection, the official one with a dense layer before it."
    )


# 2. Sentences


@dataclass(frozen=True)
class Sentence:
    """Words with a tag each; `tags` is None if unlabelled, `document` is None if documents are not marked.

    `row` is the number of its row, of which others mark documents.
    """

    words: list[str]
    tags: list[str] | None = None
    document: int | None = None
    row: int = field(default=0, compare=False)


class WordWindow(NamedTuple):
    """An input with the words [start, end), of which [label_start, label_end) have labels."""

    start: int
    end: int
    label_start: int
    label_end: int


def read_conll(path: str | Path) -> Dataset:
    """Return the sentences of a CoNLL file: a word per line, its tag in the last column, blank lines in between.

    The columns are tokens, ner_tags (unless the file has one column) and document_id (if lines that begin with
    -DOCSTART- separate documents). Words and tags are separated by a tab or by spaces. The file may be gzipped.
    """
    columns: dict[str, list] = {"tokens": [], "ner_tags": [], "document_id": []}
    words: list[str] = []
    tags: list[str] = []
    num_columns = documents = 0
    for number, line in enumerate(chain(read_lines(path), [""]), 1):
        fields = _split_fields(line)
        starts_document = fields[:1] == [DOCUMENT_START]
        if words and (not fields or starts_document):
            for column, value in zip(columns.values(), (words, tags, documents), strict=True):
                column.append(value)
            words, tags = [], []
        if starts_document:
            documents += 1
        elif fields:
            num_columns = num_columns or len(fields)
            if len(fields) != num_columns:
                raise InputError(
                    f"{path}, line {number} has {len(fields)} column(s), the lines before it {num_columns}: {line!r}"
                )
            words.append(fields[0])
            tags.append(fields[-1])
    if not columns["tokens"]:
        raise InputError(f"{path} has no sentence: each line needs a word and its label, as in 'EU NNP I-NP B-ORG'")
    rows = Dataset.from_dict(columns)
    return rows.remove_columns(["ner_tags"] * (num_columns == 1) + ["document_id"] * (documents == 0))


def _split_fields(line: str) -> list[str]:
    if not line.strip():
        return []
    # str.split() would split a word at a no-break space.
    return [field for field in line.strip(" \t").split("\t" if "\t" in line else " ") if field]


def sentences_from_table(
    rows: Iterable[dict[str, Any]],
    tokens_column: str = "tokens",
    tags_column: str | None = "ner_tags",
    names: Sequence[str] | None = None,
) -> list[Sentence]:
    """Return the sentences of a table or a Hub dataset with a list of words and a list of tags in each row.

    A column document_id, doc_id or document, or rows with the one word -DOCSTART-, separate documents.

    Args:
        tags_column: None for unlabelled rows.
        names: the label names of integer tags, as in a ClassLabel.
    """
    sentences: list[Sentence] = []
    documents: dict[Any, int] = {}
    document_starts = 0
    shape = {tokens_column: [str]} | ({} if tags_column is None else {tags_column: [int | str]})

    def read_row(numbered: tuple[int, dict[str, Any]]) -> None:
        nonlocal document_starts
        number, row = numbered
        words, *tags = read_as(row, shape).values()
        if words[:1] == [DOCUMENT_START]:
            document_starts += 1
            return
        names_of_tags = _tag_names(tags[0], words, names) if tags else None
        marks = ((name, str(row[name])) for name in DOCUMENT_COLUMNS if row.get(name) is not None)
        document = documents.setdefault(next(marks, document_starts), len(documents))
        sentences.append(Sentence(words, names_of_tags, document, number))

    check_rows(enumerate(rows), read_row)
    if not any(sentence.words for sentence in sentences):
        raise InputError("the rows have no words")
    if document_starts or documents.keys() - {0}:
        return sentences
    return [replace(sentence, document=None) for sentence in sentences]


def _tag_names(tags: list[int | str], words: list[str], names: Sequence[str] | None) -> list[str]:
    """Return the names of the tags of a row, after checking that each word has one."""
    if len(tags) != len(words):
        raise InputError(f"there are {len(words)} words and {len(tags)} labels; each word needs one")
    for tag in tags:
        if tag == "":
            raise InputError("a label is empty")
        if names is not None and isinstance(tag, int) and not 0 <= tag < len(names):
            raise InputError(f"there is a label {tag}; labels are 0 to {len(names) - 1}: {', '.join(names)}")
    return [tag if isinstance(tag, str) else str(tag) if names is None else names[tag] for tag in tags]


def read_file(file: str) -> Dataset:
    """Return the rows of a table, or the sentences of a CoNLL file."""
    is_table = Path(file.removesuffix(".gz")).suffix.lower() in TABLE_SUFFIXES
    return read_table(file) if is_table else read_conll(file)


def read_sentences(rows: Dataset, source: Source, data_args: NerArguments) -> list[Sentence]:
    """Return sentences with IOB2 tags; test sentences may have none."""
    words, tags, is_test = data_args.text_column_name, data_args.label_column_name, source.split.startswith("test")
    labelled = tags in rows.column_names
    with input_errors(source):
        require_columns(rows, [words] if is_test else [words, tags], source.split)
        if labelled and is_test and all(row_tags is None for row_tags in rows[tags]):
            labelled = False
        names = getattr(getattr(rows.features[tags], "feature", None), "names", None) if labelled else None
        return convert_to_iob2(sentences_from_table(rows, words, tags if labelled else None, names))


# 3. Labels


def convert_to_iob2(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Return the sentences with tags in IOB2. Tags without prefixes (parts of speech; PER, LOC) do not change."""
    with input_errors("", ValueError):  # a mixture of both kinds
        prefixed = has_prefixes({tag for sentence in sentences for tag in sentence.tags or ()})
    if not prefixed:
        return list(sentences)
    return [s if s.tags is None else replace(s, tags=tags_to_iob2(s.tags)) for s in sentences]


def label_names(sentences: Iterable[Sentence]) -> list[str]:
    """Return the labels of a model for these sentences: O, then those of each type, with both B- and I-."""
    tags = {tag for sentence in sentences for tag in sentence.tags or ()}
    entity_labels = tags - {"O"}
    if not entity_labels:
        raise InputError(
            "the training sentences have only the label 'O', and no entity to learn: check that the last column, or "
            "the column --label_column_name, holds the labels"
        )
    if has_prefixes(tags):
        entity_labels = {prefix + tag[1:] for tag in entity_labels for prefix in "BI"}
    outside = ["O"] if "O" in tags or has_prefixes(tags) else []
    return outside + sorted(entity_labels, key=lambda label: (label.partition("-")[2], label))


def require_known_labels(sentences: Sequence[Sentence], labels: Sequence[str]) -> None:
    """Require that the model has all labels."""
    if unknown := {s.row: tags for s in sentences if (tags := set(s.tags or ()).difference(labels))}:
        names = ", ".join(sorted(set.union(*unknown.values())))
        text = f"labels that the training data does not have: {names}; it has {', '.join(labels)}; test rows need none"
        raise RowError(dict.fromkeys(unknown, text))


# 4. Model inputs


def group_sentences(sentences: Sequence[Sentence], context: str = "none") -> Iterator[dict[str, Any]]:
    """Yield the rows for `encode_sentences`: one sentence each, or one document each if the context needs it."""
    if context != "none" and any(sentence.document is None for sentence in sentences):
        raise InputError(
            f"document context {context!r} needs documents, and the data has neither -DOCSTART- lines nor a column "
            "document_id: add them, or read each sentence alone with --document_context none"
        )
    documents = groupby(sentences, key=lambda sentence: sentence.document)
    groups = ([sentence] for sentence in sentences) if context == "none" else (list(group) for _, group in documents)
    for group in groups:
        yield {"sentences": [sentence.words for sentence in group], "tags": [sentence.tags for sentence in group]}


def encode_sentences(
    rows: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    max_length: int,
    context: str = "none",
    label_all_tokens: bool = False,
) -> dict[str, list]:
    """Return the windows of a batch of `group_sentences`, for `Dataset.map(batched=True)`.

    Each window has `input_ids` and `word_positions`, the first token of each of its labelled words; and `labels`, if
    the rows have some. All windows together label the words of the rows in their order.

    Args:
        label_all_tokens: label all tokens of a word, not only the first.
    """
    prefix, suffix = _special_tokens(tokenizer)
    limit = max_length - len(prefix) - len(suffix)
    label_ids = {label: index for index, label in enumerate(labels)}
    # The label of a word's other tokens, by that of its first.
    continued = {
        index: label_ids.get("I" + label[1:], index) if label[:1] == "B" else index
        for label, index in label_ids.items()
        if label_all_tokens
    }
    tokenized = _tokenize_words(tokenizer, [s for sentences in rows["sentences"] for s in sentences], limit)
    labelled = rows["tags"][0][0] is not None
    windows: dict[str, list] = {"input_ids": [], "word_positions": [], **({"labels": []} if labelled else {})}
    for sentences, tags in zip(rows["sentences"], rows["tags"], strict=True):
        words = [ids for _ in sentences for ids in next(tokenized)]
        word_labels = [label_ids[tag] for sentence_tags in tags for tag in sentence_tags or ()]
        bounds = list(accumulate(map(len, sentences), initial=0))
        for window in plan_windows(list(map(len, words)), bounds, limit, context):
            ids, token_labels, positions = list(prefix), [IGNORED] * len(prefix), []
            for index in range(window.start, window.end):
                label = IGNORED
                if window.label_start <= index < window.label_end:
                    label = word_labels[index] if labelled else IGNORED
                    positions.append(len(ids))
                ids += words[index]
                token_labels += [label] + [continued.get(label, IGNORED)] * (len(words[index]) - 1)
            windows["input_ids"].append(ids + suffix)
            windows["word_positions"].append(positions)
            if labelled:
                windows["labels"].append(token_labels + [IGNORED] * len(suffix))
    return windows


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text: [CLS] and [SEP]."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    mask = encoded["special_tokens_mask"]
    start, end = mask.index(0), len(mask) - mask[::-1].index(0)
    return encoded["input_ids"][:start], encoded["input_ids"][end:]


def _tokenize_words(
    tokenizer: PreTrainedTokenizerBase, sentences: list[list[str]], limit: int
) -> Iterator[list[list[int]]]:
    """Yield the token ids of each word of a sentence: at least one (unknown) and at most `limit`."""
    encoded = tokenizer(sentences, is_split_into_words=True, add_special_tokens=False, truncation=False, verbose=False)
    for index, (words, ids) in enumerate(zip(sentences, encoded["input_ids"], strict=True)):
        word_ids: list[list[int]] = [[] for _ in words]
        for word, token_id in zip(encoded.word_ids(index), ids, strict=True):
            if len(word_ids[word]) < limit:
                word_ids[word].append(token_id)
        yield [ids_of_word or [tokenizer.unk_token_id] for ids_of_word in word_ids]


def plan_windows(lengths: Sequence[int], bounds: Sequence[int], limit: int, context: str) -> Iterator[WordWindow]:
    """Yield windows of at most `limit` tokens that label each word once.

    A sentence that is too long is split into parts of at most half the limit, with as much context to the left as to
    the right.

    Args:
        lengths: tokens of each word.
        bounds: the first word of each sentence, and the number of words.

    >>> list(plan_windows([1, 1, 1], [0, 2, 3], 4, "merged"))
    [WordWindow(start=0, end=3, label_start=0, label_end=3)]
    """
    sentences = [(start, end) for start, end in pairwise(bounds) if end > start]
    if not sentences:
        return
    for start, end in _join_spans(sentences, lengths, limit) if context == "merged" else sentences:
        lower, upper = (0, len(lengths)) if context == "around" else (start, end)
        is_too_long = sum(lengths[start:end]) > limit
        words = [(index, index + 1) for index in range(start, end)]
        for part in _join_spans(words, lengths, limit // 2) if is_too_long else [(start, end)]:
            yield WordWindow(*_add_context(lengths, part, lower, upper, limit), *part)


def _join_spans(spans: list[tuple[int, int]], lengths: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield the words [start, end) of as many neighbouring spans as fit, and at least one."""
    first = spans[0][0]
    for start, end in spans[1:]:
        if sum(lengths[first:end]) > limit:
            yield first, start
            first = start
    yield first, spans[-1][1]


def _add_context(lengths: Sequence[int], part: tuple[int, int], lower: int, upper: int, limit: int) -> tuple[int, int]:
    """Return `part`, extended within [lower, upper) by words from both sides in turn while they fit."""
    start, end = part
    room = limit - sum(lengths[start:end])
    left = right = True
    while left or right:
        left = left and start > lower and lengths[start - 1] <= room
        if left:
            start -= 1
            room -= lengths[start]
        right = right and end < upper and lengths[end] <= room
        if right:
            room -= lengths[end]
            end += 1
    return start, end


# 5. Predictions


class WordLabels(NamedTuple):
    """The predicted label of each word of each sentence, and its probability."""

    labels: list[list[str]]
    probabilities: list[list[float]]


def labels_of_words(
    best: np.ndarray, probabilities: np.ndarray, features: Any, sentences: Sequence[Sentence], labels: Sequence[str]
) -> WordLabels:
    """Return the labels of words, which are those of their first tokens.

    Args:
        best: label indices [windows, tokens].
        probabilities: of these labels.
        features: with the column `word_positions` of these windows.
    """
    sentence_ends = np.cumsum([len(sentence.words) for sentence in sentences])[:-1]

    def by_sentence(values: np.ndarray) -> list[np.ndarray]:
        of_words = [row[positions] for row, positions in zip(values, features["word_positions"], strict=True)]
        return np.split(np.concatenate(of_words), sentence_ends)

    names = [[labels[index] for index in indices] for indices in by_sentence(best)]
    return WordLabels(names, [values.astype(float).tolist() for values in by_sentence(probabilities)])


def write_conll_predictions(
    path: str | Path, sentences: Sequence[Sentence], predictions: Sequence[Sequence[str]]
) -> None:
    """Write CoNLL columns with word, label (if there is one) and prediction, spaces as _, as `conlleval` reads them."""
    last_document, lines = None, []
    for sentence, tags in zip(sentences, predictions, strict=True):
        columns = [sentence.words, tags] if sentence.tags is None else [sentence.words, sentence.tags, tags]
        if sentence.document != last_document:
            lines += [" ".join([DOCUMENT_START] + ["O"] * (len(columns) - 1)), ""]
            last_document = sentence.document
        for fields in zip(*columns, strict=True):
            lines.append(" ".join(re.sub(r"[ \t\r\n]+", "_", field) or "_" for field in fields))
        lines.append("")
    write_lines(Path(path), lines)


def best_labels(logits: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best label of each token [B, N] and its probability, which need less memory than all logits."""
    best = logits_of(logits).float().softmax(-1).max(-1)
    return best.indices, best.values


def metric_names(labels: Sequence[str], typed: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of the metrics for these labels, and for the types of the labels `typed`.

    The first selects the best checkpoint.
    """
    if "O" not in labels and not has_prefixes(labels):
        return ("accuracy",)
    kinds = sorted({label.partition("-")[2] or label for label in typed if label != "O"})
    of_types = (f"{kind}_{name}" for kind in kinds for name in ENTITY_METRICS)
    return (*CONFIGURATIONS["named_entities"]["default"], *of_types)


# 6. The task


class NamedEntities(Task):
    demo = "ner"
    arguments = NerArguments
    read_file = staticmethod(read_file)
    hub_names = {"conll2003": ("eriktks/conll2003", None)}
    hub_options = {"revision": "refs/convert/parquet"}  # the main branch is a script, which datasets refuses
    model_class, auto_class = HfDebertaForTokenClassification, AutoModelForTokenClassification
    collator_class = DataCollatorForTokenClassification
    tokenizer_options = {"add_prefix_space": True, "padding_side": "right"}  # word_positions count from the first token
    preprocess_logits = staticmethod(best_labels)

    @classmethod
    def recipe_name(cls, flags: Namespace) -> str:
        return "conll2003" if flags.task_name else "ner"

    def read(self, splits: dict[str, Dataset]) -> dict[str, list[Sentence]]:
        sentences = {
            split: read_sentences(rows, self.sources[split], self.data_args)
            for split, rows in splits.items()
            if split != "train" or self.args.do_train
        }
        if self.args.do_train:
            with input_errors(self.sources["train"]):
                labels = tuple(label_names(sentences["train"]))
        else:
            labels = checkpoint_labels(self.model_args) or ()
        self.labels = labels_in_checkpoint_order(labels, self.model_args, self.args.do_train)
        for split, split_sentences in sentences.items():
            with input_errors(self.sources[split]):
                require_known_labels(split_sentences, self.labels)
            self.original_rows[split] = splits[split].select([sentence.row for sentence in split_sentences])
            words = sum(len(sentence.words) for sentence in split_sentences)
            logger.info(f"{split}: {len(split_sentences):,} sentences, {words:,} words")
        self.choose_context(sentence for group in sentences.values() for sentence in group)
        logger.info(f"Labels: {', '.join(self.labels)}. Document context: {self.data_args.document_context}.")
        with input_errors(self.model_args.checkpoint, ValueError):  # labels of which some have prefixes
            tags = [tag for s in sentences.get("validation", ()) for tag in s.tags or ()] or self.labels
            self.metric_names = metric_names(self.labels, tags if self.data_args.return_entity_level_metrics else ())
        return sentences

    def choose_context(self, sentences: Iterable[Sentence]) -> None:
        """Set --document_context by the task, or to none if a trained model finds sentences without documents."""
        data_args, marked = self.data_args, all(sentence.document is not None for sentence in sentences)
        if not (marked or self.args.do_train or data_args.document_context in (None, "none")):
            logger.warning(
                f"--document_context {data_args.document_context} needs documents, and some rows have none: using none."
            )
            data_args.document_context = "none"
        if data_args.document_context is None:
            data_args.document_context = "merged" if marked and data_args.task_name == "conll2003" else "none"
            self.model_args.reading_flags["document_context"] = data_args.document_context

    def has_labels(self, split: str) -> bool:
        return self.rows[split][0].tags is not None

    def config_fields(self) -> dict[str, Any]:
        kind = self.data_args.token_classifier
        return label_fields(self.labels or ()) | ({} if kind is None else {"token_classifier": kind})

    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
        data_args, labels = self.data_args, self.labels or ()
        context, all_tokens = data_args.document_context or "none", data_args.label_all_tokens
        rows = Dataset.from_list(list(group_sentences(self.rows[split], context)))

        def encode_batch(batch: dict[str, list]) -> dict[str, list]:
            return encode_sentences(batch, tokenizer, labels, length, context, all_tokens)

        options = data_args.map_options(f"tokenizing {split}")
        return rows.map(encode_batch, remove_columns=rows.column_names, **options)

    def read_outputs(self, split: str, outputs: Any, inputs: Dataset) -> WordLabels:
        return labels_of_words(outputs[0], outputs[1], inputs, self.rows[split], self.labels or ())

    def metrics(self, split: str, predictions: WordLabels) -> dict[str, float]:
        gold = [sentence.tags or [] for sentence in self.rows[split]]
        by_type = self.data_args.return_entity_level_metrics
        return compute_metric("named_entities", predictions=predictions.labels, references=gold, by_type=by_type)

    def prediction_columns(self, split: str, predictions: WordLabels) -> dict[str, list]:
        return {"prediction": predictions.labels, "probability": predictions.probabilities}

    def write(self, folder: Path, split: str, predictions: WordLabels) -> None:
        write_conll_predictions(folder / f"predictions_{split}.txt", self.rows[split], predictions.labels)


def main() -> None:
    run_task(NamedEntities)
