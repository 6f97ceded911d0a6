"""Named entities: sentences of CoNLL files or tables, labels of word pieces, predictions per word, entity F1.

A sentence is a list of words with a tag each. Tags of IOB1 (the original CoNLL-2003), IOBES and BILOU become IOB2.
What the model sees of a sentence:

`none`    the sentence alone (default, as the Transformers example)
`merged`  as many sentences of one document as fit, all of them labelled: the authors' recipe for CoNLL-2003
`around`  the sentence with the words of its document on both sides, up to the limit; the sentence alone is labelled

A sentence beyond the limit is cut into windows that overlap. In each case every word is labelled in one window and
gets one prediction.

    >>> sentences = {"train": in_iob2(read_columns("train.txt"))}
    >>> labels = labels_of(sentences["train"])
    >>> rows = Dataset.from_list(list(rows_of(sentences["train"])))
    >>> options = {"batched": True, "remove_columns": rows.column_names}
    >>> features = rows.map(lambda batch: encode(batch, tokenizer, labels, 128), **options)
"""

import gzip
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_deberta.fine_tuning.tasks.submission import write_lines
from hf_deberta.model.batch_loss import IGNORED

CONTEXTS = ("none", "merged", "around")
DOCUMENT_START = "-DOCSTART-"
DOCUMENT_COLUMNS = ("document_id", "doc_id", "document")
SYLLABLES = ("ba", "dor", "fel", "gan", "ki", "lum", "mor", "nes", "pra", "rit", "sol", "tav", "ven", "zu")
RATIOS = ("precision", "recall", "f1")
PREFIXED = re.compile(r"[BIESLU](-.+)?")


@dataclass(frozen=True)
class Sentence:
    words: list[str]
    tags: list[str] | None = None  # None: to be predicted
    document: int | None = None  # None: the data does not tell documents apart


@dataclass(frozen=True)
class Window:
    """Words [start, end) are seen, [own_start, own_end) are labelled; `cut`: they are a part of a sentence."""

    start: int
    end: int
    own_start: int
    own_end: int
    cut: bool


# 1. Sentences


def read_columns(path: str | Path) -> list[Sentence]:
    """Sentences of a CoNLL file: a word per line, its tag in the last column, a blank line between sentences.

    Columns are parted by a tab or by spaces and may be any number; a file with one column has no tags. Lines
    that begin with -DOCSTART- part documents. It may be gzipped.
    """
    sentences, words, tags = [], [], []
    columns, document, has_documents = 0, 0, False

    def end_sentence() -> None:
        if words:
            sentences.append(Sentence(words.copy(), tags.copy() if columns > 1 else None, document))
            words.clear()
            tags.clear()

    for number, line in enumerate(_lines(path), 1):
        fields = _fields(line)
        if not fields:
            end_sentence()
        elif fields[0] == DOCUMENT_START:
            end_sentence()
            has_documents = True
            document += 1
        else:
            columns = columns or len(fields)
            if len(fields) != columns:
                raise ValueError(
                    f"{path}, line {number} has {len(fields)} column(s), those before it {columns}: {line!r}"
                )
            words.append(fields[0])
            tags.append(fields[-1])
    end_sentence()
    if not sentences:
        raise ValueError(f"{path} has no sentence: a line should hold a word and its label, 'EU NNP I-NP B-ORG'")
    return sentences if has_documents else [replace(sentence, document=None) for sentence in sentences]


def _lines(path: str | Path) -> Iterator[str]:
    try:
        with (gzip.open if Path(path).suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); convert it, with iconv -f latin1 -t utf-8") from error


def _fields(line: str) -> list[str]:
    if not line.strip():
        return []
    # not str.split(), which parts words at a no-break space
    return [field for field in line.strip(" \t").split("\t" if "\t" in line else " ") if field]


def from_table(
    rows: Iterable[dict[str, Any]],
    tokens_column: str = "tokens",
    tags_column: str | None = "ner_tags",
    names: Sequence[str] | None = None,
) -> list[Sentence]:
    """Sentences of a table or a data set of the Hub: a list of words and a list of tags in each row.

    Integer tags are numbers of `names`, those of a ClassLabel. A column document_id or doc_id, or rows of one word
    -DOCSTART-, part documents. Without `tags_column` the tags are to be predicted.
    """
    sentences, documents, has_documents = [], {}, False
    for number, row in enumerate(rows):
        for column in (tokens_column, tags_column):
            if column is not None and column not in row:
                raise ValueError(f"row {number} has no column {column!r} but {', '.join(row)}")
        words, tags = row[tokens_column], None if tags_column is None else row[tags_column]
        if isinstance(words, str) or words is None:
            raise ValueError(f"column {tokens_column!r} must hold lists of words; in row {number} it holds {words!r}")
        if list(words[:1]) == [DOCUMENT_START]:
            has_documents = True
            documents[None, number] = len(documents)
            continue
        if tags is not None and len(tags) != len(words):
            raise ValueError(f"row {number} has {len(words)} words and {len(tags)} labels: each word needs one")
        column = next((name for name in DOCUMENT_COLUMNS if row.get(name) is not None), None)
        if column is not None:
            has_documents = True
            documents.setdefault(row[column], len(documents))
        document = documents[row[column]] if column is not None else len(documents)
        named = None if tags is None else [_name(tag, names, number) for tag in tags]
        sentences.append(Sentence([str(word) for word in words], named, document))
    return sentences if has_documents else [replace(sentence, document=None) for sentence in sentences]


def _name(tag: str | int, names: Sequence[str] | None, row: int) -> str:
    if isinstance(tag, str):
        return tag
    if names is None:
        return str(tag)
    if not 0 <= tag < len(names):
        raise ValueError(f"row {row} has the label {tag}, and labels are 0 to {len(names) - 1}: {', '.join(names)}")
    return names[tag]


# 2. Labels


def in_iob2(sentences: Sequence[Sentence]) -> list[Sentence]:
    """The sentences with tags in IOB2. Tags without prefixes (parts of speech; PER, LOC) stay."""
    if not has_prefixes({tag for sentence in sentences for tag in sentence.tags or ()}):
        return list(sentences)
    return [s if s.tags is None else replace(s, tags=to_iob2(s.tags)) for s in sentences]


def has_prefixes(labels: Iterable[str]) -> bool:
    """Whether the labels say where entities begin: B-PER, I-PER. Some that do beside some that do not are an error."""
    inside = sorted(set(labels) - {"O"})
    with_prefix = [label for label in inside if PREFIXED.fullmatch(label)]
    without = [label for label in inside if label not in with_prefix]
    hyphened = [label for label in with_prefix if "-" in label]
    if hyphened and without:
        raise ValueError(
            f"labels begin with B- or I- ({', '.join(hyphened[:3])}) or none does, and here {without[0]!r} does not; "
            "is the last column the label?"
        )
    return bool(with_prefix) and not without


def to_iob2(tags: Sequence[str]) -> list[str]:
    """IOB1, IOBES or BILOU to IOB2: every entity begins with B-, and B- and I- are all there is.

    >>> to_iob2(["I-PER", "I-PER", "B-PER", "I-LOC", "O", "S-LOC"])
    ['B-PER', 'I-PER', 'B-PER', 'B-LOC', 'O', 'B-LOC']
    """
    found, prefix_before, kind_before = [], "O", ""
    for tag in tags:
        prefix, _, kind = tag.partition("-")
        if prefix != "O":
            begins = prefix in "BSU" or prefix_before in "OESLU" or kind != kind_before
            found.append(("B" if begins else "I") + tag[1:])
        else:
            found.append(tag)
        prefix_before, kind_before = prefix, kind
    return found


def labels_of(sentences: Iterable[Sentence]) -> list[str]:
    """The labels of training: O, then those of each type. A type that was seen has both B- and I-."""
    seen = {tag for sentence in sentences for tag in sentence.tags or ()}
    if not seen:
        raise ValueError("the training sentences have no labels: give files with a word and its label in each line")
    inside = seen - {"O"}
    if has_prefixes(seen):
        inside = {prefix + tag[1:] for tag in inside for prefix in "BI"}
    return ["O"] * ("O" in seen or has_prefixes(seen)) + sorted(inside, key=lambda tag: (tag.partition("-")[2], tag))


def check_labels(sentences: Iterable[Sentence], labels: Sequence[str], split: str) -> None:
    """Every label must be one of training's."""
    unseen = sorted({tag for sentence in sentences for tag in sentence.tags or ()} - set(labels))
    if unseen:
        raise ValueError(
            f"the {split} sentences have labels that training has not: {', '.join(unseen)}; training has "
            f"{', '.join(labels)}"
        )


# 3. What the model sees


def rows_of(sentences: Sequence[Sentence], context: str = "none") -> Iterator[dict[str, Any]]:
    """Rows to encode: a sentence each, or a document each where sentences see their neighbours."""
    if context not in CONTEXTS:
        raise ValueError(f"document context is one of {', '.join(CONTEXTS)}, not {context!r}")
    if context != "none" and any(sentence.document is None for sentence in sentences):
        raise ValueError(
            f"document context {context!r} needs to know the documents, and there are neither -DOCSTART- lines nor a "
            "column document_id"
        )
    row, before = None, None
    for first_word, sentence in zip(_offsets(sentences), sentences, strict=True):
        if row is None or context == "none" or sentence.document != before:
            if row is not None:
                yield row
            row, before = {"sentences": [], "tags": [], "first_word": first_word}, sentence.document
        row["sentences"].append(sentence.words)
        row["tags"].append(sentence.tags)
    if row is not None:
        yield row


def encode(
    rows: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    max_length: int,
    context: str = "none",
    label_all_tokens: bool = False,
) -> dict[str, list]:
    """Windows of a batch of `rows_of`, for `Dataset.map(batched=True)`.

    Beside the inputs of the model: `words`, the number in the split of each labelled word, and `places`, where its
    first piece is, which is the one that is labelled (`label_all_tokens`: its other pieces too); `cut`, whether the
    window is a part of a sentence. Without tags there is no `labels`.
    """
    before, after = _special_tokens(tokenizer)
    limit = max_length - len(before) - len(after)
    if limit < 1:
        raise ValueError(
            f"max_seq_length {max_length} leaves no room for words beside {len(before + after)} special tokens"
        )
    with_types = "token_type_ids" in tokenizer.model_input_names
    ids = {label: number for number, label in enumerate(labels)}
    pieces = iter(_pieces(tokenizer, [words for sentences in rows["sentences"] for words in sentences], limit))
    with_labels = any(tags[0] is not None for tags in rows["tags"])
    names = ["input_ids", "attention_mask", *["token_type_ids"] * with_types, *["labels"] * with_labels]
    features = {name: [] for name in (*names, "words", "places", "cut")}
    for sentences, tags, first_word in zip(rows["sentences"], rows["tags"], rows["first_word"], strict=True):
        words = [word for _ in sentences for word in next(pieces)]
        targets = [ids[tag] if tag is not None else IGNORED for tag in _flat(sentences, tags)]
        bounds = list(accumulate((len(sentence) for sentence in sentences), initial=0))
        inner = {ids[tag]: ids.get("I" + tag[1:], ids[tag]) if tag[:1] == "B" else ids[tag] for tag in labels}
        for window in plan([len(word) for word in words], bounds, limit, context):
            row_ids, row_labels, places = list(before), [IGNORED] * len(before), []
            for number in range(window.start, window.end):
                own = window.own_start <= number < window.own_end
                target = targets[number] if own else IGNORED
                if own:
                    places.append(len(row_ids))
                rest = inner[target] if label_all_tokens and target != IGNORED else IGNORED
                row_ids += words[number]
                row_labels += [target] + [rest] * (len(words[number]) - 1)
            row_ids += after
            features["input_ids"].append(row_ids)
            features["attention_mask"].append([1] * len(row_ids))
            if with_types:
                features["token_type_ids"].append([0] * len(row_ids))
            if with_labels:
                features["labels"].append(row_labels + [IGNORED] * len(after))
            features["words"].append(list(range(first_word + window.own_start, first_word + window.own_end)))
            features["places"].append(places)
            features["cut"].append(window.cut)
    return features


def _flat(sentences: list[list[str]], tags: list[list[str] | None]) -> Iterator[str | None]:
    for words, of_sentence in zip(sentences, tags, strict=True):
        yield from of_sentence if of_sentence is not None else [None] * len(words)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text: [CLS] and [SEP]."""
    found = tokenizer("a", return_special_tokens_mask=True)
    mask = found["special_tokens_mask"]
    first, last = mask.index(0), len(mask) - mask[::-1].index(0)
    return found["input_ids"][:first], found["input_ids"][last:]


def _pieces(tokenizer: PreTrainedTokenizerBase, sentences: list[list[str]], limit: int) -> Iterator[list[list[int]]]:
    """Ids of each word of each sentence, at least one (unknown) and at most so many that it fits."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not say which word a piece belongs to: use a fast tokenizer")
    options = {"is_split_into_words": True, "add_special_tokens": False, "truncation": False, "verbose": False}
    encoded = tokenizer(sentences, **options)
    for number, (words, ids) in enumerate(zip(sentences, encoded["input_ids"], strict=True)):
        found = [[] for _ in words]
        for word, piece in zip(encoded.word_ids(number), ids, strict=True):
            if len(found[word]) < limit:
                found[word].append(piece)
        yield [pieces or [tokenizer.unk_token_id] for pieces in found]


def plan(lengths: Sequence[int], bounds: Sequence[int], limit: int, context: str) -> Iterator[Window]:
    """Windows over words of `lengths` pieces, at most `limit` pieces each, that label every word once.

    `bounds` are the first words of the sentences, and the end. A sentence that does not fit is cut into pieces
    of half the limit or less, each of which sees as much to its left as to its right.

    >>> list(plan([1, 1, 1], [0, 2, 3], 4, "merged"))
    [Window(start=0, end=3, own_start=0, own_end=3, cut=False)]
    """
    sentences = [(start, end) for start, end in pairwise(bounds) if end > start]
    for start, end in _merged(lengths, sentences, limit) if context == "merged" else sentences:
        lower, upper = (0, len(lengths)) if context == "around" else (start, end)
        cut = sum(lengths[start:end]) > limit
        for own in _filled(lengths, start, end, limit // 2) if cut else [(start, end)]:
            yield Window(*_grown(lengths, own, lower, upper, limit), *own, cut)


def _merged(lengths: Sequence[int], sentences: list[tuple[int, int]], limit: int) -> Iterator[tuple[int, int]]:
    """Neighbouring sentences, as many as fit."""
    first = None
    for start, end in sentences:
        if first is not None and sum(lengths[first:end]) > limit:
            yield first, start
            first = None
        first = start if first is None else first
    if first is not None:
        yield first, sentences[-1][1]


def _filled(lengths: Sequence[int], start: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
    """Neighbouring words, as many as fit and at least one."""
    first, size = start, 0
    for number in range(start, end):
        if number > first and size + lengths[number] > limit:
            yield first, number
            first, size = number, 0
        size += lengths[number]
    yield first, end


def _grown(lengths: Sequence[int], own: tuple[int, int], lower: int, upper: int, limit: int) -> tuple[int, int]:
    """The words around `own`, within [lower, upper), taken from both sides in turn while they fit."""
    start, end = own
    room = limit - sum(lengths[start:end])
    left, right = start > lower, end < upper
    while left or right:
        if left:
            left = lengths[start - 1] <= room
            if left:
                start -= 1
                room -= lengths[start]
                left = start > lower
        if right:
            right = lengths[end] <= room
            if right:
                room -= lengths[end]
                end += 1
                right = end < upper
    return start, end


# 4. Predictions


def predicted_tags(
    predictions: np.ndarray,  # [windows, tokens] label numbers, or [windows, tokens, labels] logits
    features: Any,  # columns `words` and `places` of these windows
    sentences: Sequence[Sentence],
    labels: Sequence[str],
) -> list[list[str]]:
    """The tag of each word of each sentence, in the order of the sentences."""
    if predictions.ndim == 3:
        predictions = predictions.argmax(-1)
    by_word = np.full(sum(len(sentence.words) for sentence in sentences), IGNORED)
    for row, words, places in zip(predictions, features["words"], features["places"], strict=True):
        by_word[words] = row[places]
    if (by_word == IGNORED).any():
        number = (by_word == IGNORED).sum()
        raise ValueError(f"{number} words have no prediction: the windows are not those of these sentences")
    found = [labels[number] for number in by_word]
    return [found[start : start + len(s.words)] for start, s in zip(_offsets(sentences), sentences, strict=True)]


def _offsets(sentences: Sequence[Sentence]) -> list[int]:
    """The number in the split of the first word of each sentence."""
    return list(accumulate((len(sentence.words) for sentence in sentences), initial=0))[:-1]


def write_predictions(path: str | Path, sentences: Sequence[Sentence], predicted: Sequence[Sequence[str]]) -> None:
    """CoNLL columns, word, label, prediction, as `conlleval` reads them; the file appears when it is whole."""
    path, before, lines = Path(path), None, []
    for sentence, tags in zip(sentences, predicted, strict=True):
        if sentence.document != before:
            columns = 2 if sentence.tags is None else 3
            lines += [" ".join([DOCUMENT_START] + ["O"] * (columns - 1)), ""]
            before = sentence.document
        columns = [sentence.words, tags] if sentence.tags is None else [sentence.words, sentence.tags, tags]
        for word, *fields in zip(*columns, strict=True):
            lines.append(" ".join([re.sub(r"[ \t\r\n]+", "_", word) or "_", *fields]))
        lines.append("")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, lines)


# 5. Scores


def scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Precision, recall and F1 of whole entities, as `conlleval` and `seqeval` count, and accuracy of words.

    An entity is right if its words and its type are. `types` holds the same of each type. Labels without prefixes
    are taken as entities where neighbours have the same; with no O among them (parts of speech), accuracy is all.

    >>> scores([["B-PER", "I-PER", "O"]], [["B-PER", "I-PER", "B-LOC"]])["precision"]
    0.5
    """
    right_words = sum(g == p for gs, ps in zip(gold, predicted, strict=True) for g, p in zip(gs, ps, strict=True))
    accuracy = {"accuracy": right_words / max(1, sum(map(len, gold)))}
    seen = {tag for tags in (*gold, *predicted) for tag in tags}
    if "O" not in seen and not has_prefixes(seen):
        return accuracy
    expected, found = _entities_of_all(gold, has_prefixes(seen)), _entities_of_all(predicted, has_prefixes(seen))
    types = {}
    for kind in sorted({entity[0] for entity in expected | found}):
        of_kind = [{entity for entity in entities if entity[0] == kind} for entities in (expected, found)]
        types[kind] = {**_ratios(*of_kind), "number": len(of_kind[0])}
    return {**_ratios(expected, found), **accuracy, "types": types}


def metrics_of(labels: Sequence[str], by_type: bool = False) -> tuple[str, ...]:
    """The names of the scores for these labels, the decisive one first."""
    if "O" not in labels and not has_prefixes(labels):
        return ("accuracy",)
    kinds = sorted({label.partition("-")[2] or label for label in labels if label != "O"}) if by_type else []
    return ("f1", "precision", "recall", "accuracy", *(f"{kind}_{name}" for kind in kinds for name in RATIOS))


def _ratios(expected: set, found: set) -> dict[str, float]:
    right = len(expected & found)
    precision, recall = right / max(1, len(found)), right / max(1, len(expected))
    ratios = (precision, recall, 2 * right / max(1, len(expected) + len(found)))
    return dict(zip(RATIOS, ratios, strict=True))


def _entities_of_all(sentences: Sequence[Sequence[str]], prefixed: bool) -> set[tuple]:
    return {(*entity, n) for n, tags in enumerate(sentences) for entity in entities(tags, prefixed)}


def entities(tags: Sequence[str], prefixed: bool = True) -> set[tuple[str, int, int]]:
    """(type, first word, end) of each entity. An I- that follows nothing of its type begins one.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"]))
    [('LOC', 3, 4), ('LOC', 4, 5), ('PER', 0, 2)]
    """
    found, begun = set(), None
    tags = to_iob2(tags) if prefixed else to_iob2([tag if tag == "O" else f"I-{tag}" for tag in tags])
    for number, tag in enumerate([*tags, "O"]):
        if begun is not None and not tag.startswith("I"):
            found.add((tags[begun].partition("-")[2] or "_", begun, number))
            begun = None
        if tag.startswith("B"):
            begun = number
    return found


# 6. A demonstration


def made_up_file(sentences: int, seed: int) -> str:
    """A CoNLL file with names of people, places and companies; only the words beside a name tell what it is."""
    rng = random.Random(seed)
    patterns = {"PER": "Mr {} said", "LOC": "in {} today", "ORG": "of {} shares"}
    lines = []
    for number in range(sentences):
        if number % 5 == 0:
            lines += [f"{DOCUMENT_START} O", ""]
        for kind in rng.sample(sorted(patterns), 2):
            name = ["".join(rng.choices(SYLLABLES, k=2)).title() for _ in range(rng.choice((1, 1, 2)))]
            before, after = patterns[kind].split("{}")
            tags = [f"B-{kind}", f"I-{kind}"][: len(name)]
            lines += [f"{word} O" for word in before.split()]
            lines += [f"{word} {tag}" for word, tag in zip(name, tags, strict=True)]
            lines += [f"{word} O" for word in after.split()]
        lines += [". O", ""]
    return "\n".join(lines) + "\n"
