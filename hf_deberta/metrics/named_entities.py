"""Precision, recall and F1 of whole named entities, as conlleval and seqeval count them, and accuracy of words."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from datasets import List

from hf_deberta.metrics.evaluate_metric import TEXT, evaluate_metric

ENTITY_METRICS = ("precision", "recall", "f1")  # of all entities, or of each type
PREFIXED_LABEL = re.compile(r"[BIESLU](-.+)?")
Tags = Sequence[Sequence[str]]


def named_entities(predictions: Tags, references: Tags, by_type: bool = False) -> dict[str, Any]:
    """Return precision, recall and F1 of the entities, and accuracy of the words.

    A predicted entity is correct if its words and its type are. Of labels without prefixes, neighbours with the same
    label are an entity; if there is no O (parts of speech), only accuracy is returned.

    Args:
        predictions: a list of tags for each sentence, in IOB2 or another scheme with prefixes, or without prefixes.
        references: likewise.
        by_type: return the metrics of each type too, as PER_f1, and the number of its entities, as PER_number.

    >>> named_entities([["B-PER", "I-PER", "B-LOC"]], [["B-PER", "I-PER", "O"]])["precision"]
    0.5
    """
    pairs = [pair for tags in zip(references, predictions, strict=True) for pair in zip(*tags, strict=True)]
    accuracy = {"accuracy": sum(gold == predicted for gold, predicted in pairs) / max(1, len(pairs))}
    labels = {label for pair in pairs for label in pair}
    prefixed = has_prefixes(labels)
    if "O" not in labels and not prefixed:
        return accuracy
    gold, predicted = _all_entities(references, prefixed), _all_entities(predictions, prefixed)
    metrics = {**_precision_recall_f1(gold, predicted), **accuracy}
    for kind in sorted({entity[0] for entity in gold | predicted}) if by_type else ():
        gold_of_type, predicted_of_type = ({e for e in entities if e[0] == kind} for entities in (gold, predicted))
        values = {**_precision_recall_f1(gold_of_type, predicted_of_type), "number": len(gold_of_type)}
        metrics |= {f"{kind}_{name}": value for name, value in values.items()}
    return metrics


def _precision_recall_f1(gold: set, predicted: set) -> dict[str, float]:
    correct = len(gold & predicted)
    precision, recall = correct / max(1, len(predicted)), correct / max(1, len(gold))
    values = (precision, recall, 2 * correct / max(1, len(gold) + len(predicted)))
    return dict(zip(ENTITY_METRICS, values, strict=True))


def _all_entities(sentences: Tags, prefixed: bool) -> set[tuple]:
    return {(*entity, index) for index, tags in enumerate(sentences) for entity in find_entities(tags, prefixed)}


def find_entities(tags: Sequence[str], prefixed: bool = True) -> set[tuple[str, int, int]]:
    """Return (type, start, end) of each entity. An I- that does not continue an entity of its type begins one.

    >>> sorted(find_entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"]))
    [('LOC', 3, 4), ('LOC', 4, 5), ('PER', 0, 2)]
    """
    entities, start = set(), None
    tags = tags_to_iob2(tags if prefixed else [tag if tag == "O" else f"I-{tag}" for tag in tags])
    for index, tag in enumerate([*tags, "O"]):
        if start is not None and not tag.startswith("I"):
            entities.add((tags[start].partition("-")[2] or "_", start, index))
            start = None
        if tag.startswith("B"):
            start = index
    return entities


def has_prefixes(labels: Iterable[str]) -> bool:
    """Return whether the labels mark where entities begin (B-PER, I-PER). A mixture of both kinds is an error."""
    entity_labels = sorted(set(labels) - {"O"})
    prefixed = [label for label in entity_labels if PREFIXED_LABEL.fullmatch(label)]
    plain = [label for label in entity_labels if label not in prefixed]
    hyphenated = [label for label in prefixed if "-" in label]
    if hyphenated and plain:
        raise ValueError(
            f"either all labels or none begin with B- or I-; {', '.join(hyphenated[:3])} do, and {plain[0]!r} does "
            "not. Is the last column the label?"
        )
    return bool(prefixed) and not plain


def tags_to_iob2(tags: Sequence[str]) -> list[str]:
    """Convert IOB1, IOBES or BILOU to IOB2, where every entity begins with B- and goes on with I-.

    >>> tags_to_iob2(["I-PER", "I-PER", "B-PER", "I-LOC", "O", "S-LOC"])
    ['B-PER', 'I-PER', 'B-PER', 'B-LOC', 'O', 'B-LOC']
    """
    converted, last_prefix, last_type = [], "O", ""
    for tag in tags:
        prefix, _, entity_type = tag.partition("-")
        if prefix != "O":
            begins = prefix in "BSU" or last_prefix in "OESLU" or entity_type != last_type
            tag = ("B" if begins else "I") + tag[1:]
        converted.append(tag)
        last_prefix, last_type = prefix, entity_type
    return converted


NamedEntities = evaluate_metric(named_entities, default={"predictions": List(TEXT), "references": List(TEXT)})
