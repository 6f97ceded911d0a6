"""Schemes of entity tags: whether labels mark where entities begin, and conversion to IOB2."""

import re
from collections.abc import Iterable, Sequence

ENTITY_METRICS = ("precision", "recall", "f1")  # of all entities, or of each type
PREFIXED_LABEL = re.compile(r"[BIESLU](-.+)?")


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
