"""Precision, recall and F1 of whole named entities, as conlleval and seqeval count them, and accuracy of words.

>>> import evaluate, hf_deberta
>>> metric = evaluate.load(hf_deberta.metrics.path("named_entities"))
>>> predictions, references = [["B-PER", "I-PER", "B-LOC"]], [["B-PER", "I-PER", "O"]]
>>> metric.compute(predictions=predictions, references=references)["precision"]
0.5
"""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_deberta.metrics.entity_tags import ENTITY_METRICS, has_prefixes, tags_to_iob2

INPUTS = """
Args:
    predictions: a list of tags for each sentence, in IOB2 or another scheme with prefixes, or without prefixes.
    references: likewise.
    by_type: return the metrics of each type too, as PER_f1, and the number of its entities, as PER_number.
"""


class NamedEntities(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        tags = datasets.List(datasets.Value("string"))
        features = datasets.Features({"predictions": tags, "references": tags})
        return evaluate.MetricInfo(__doc__ or "", citation="", features=features, inputs_description=INPUTS)

    def _compute(
        self, predictions: list[list[str]], references: list[list[str]], by_type: bool = False
    ) -> dict[str, float]:
        scores = entity_scores(references, predictions)
        types = scores.pop("types", {})
        if by_type:
            scores |= {f"{kind}_{name}": value for kind, values in types.items() for name, value in values.items()}
        return scores


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return precision, recall and F1 of whole entities, as `conlleval` and `seqeval` count, and accuracy of words.

    A predicted entity is correct if its words and its type are. `types` has the metrics of each type. Of labels without
    prefixes, neighbours with the same label are an entity; if there is no O (parts of speech), only accuracy is
    returned.

    >>> entity_scores([["B-PER", "I-PER", "O"]], [["B-PER", "I-PER", "B-LOC"]])["precision"]
    0.5
    """
    correct = sum(g == p for gs, ps in zip(gold, predicted, strict=True) for g, p in zip(gs, ps, strict=True))
    accuracy = {"accuracy": correct / max(1, sum(map(len, gold)))}
    labels = {tag for tags in (*gold, *predicted) for tag in tags}
    prefixed = has_prefixes(labels)
    if "O" not in labels and not prefixed:
        return accuracy
    gold_entities, predicted_entities = _all_entities(gold, prefixed), _all_entities(predicted, prefixed)
    types = {}
    for kind in sorted({entity[0] for entity in gold_entities | predicted_entities}):
        gold_of_type = {entity for entity in gold_entities if entity[0] == kind}
        predicted_of_type = {entity for entity in predicted_entities if entity[0] == kind}
        types[kind] = {**_precision_recall_f1(gold_of_type, predicted_of_type), "number": len(gold_of_type)}
    return {**_precision_recall_f1(gold_entities, predicted_entities), **accuracy, "types": types}


def _precision_recall_f1(gold: set, predicted: set) -> dict[str, float]:
    correct = len(gold & predicted)
    precision, recall = correct / max(1, len(predicted)), correct / max(1, len(gold))
    values = (precision, recall, 2 * correct / max(1, len(gold) + len(predicted)))
    return dict(zip(ENTITY_METRICS, values, strict=True))


def _all_entities(sentences: Sequence[Sequence[str]], prefixed: bool) -> set[tuple]:
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
