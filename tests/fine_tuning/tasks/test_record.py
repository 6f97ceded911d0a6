"""ReCoRD: both formats of the data, tokens of mentions, ranked entities, the file of a submission."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from fine_tuning_models import read_json_lines

from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.fine_tuning.tasks.record import EntityCollator, encode_questions, has_answers, rank_entities
from hf_deberta.fine_tuning.tasks.superglue import Record, SuperGlueArguments, flatten_split
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.data_files import Source
from hf_deberta.training.errors import InputError

PASSAGE = "Ann Lee met Bob in Rome. Bob's dog stayed in Paris, said Ann Lee.\n@highlight\nRome is old"
MENTIONS = ["Ann Lee", "Bob", "Rome", "Bob", "Paris", "Ann Lee", "Rome"]


def mentions():
    spans, start = [], 0
    for text in MENTIONS:
        start = PASSAGE.index(text, start)
        spans.append({"start": start, "end": start + len(text) - 1})  # the last character, as in the official files
        start += len(text)
    return spans


def official_row():
    gold = [{**span, "text": text} for span, text in zip(mentions(), MENTIONS, strict=True) if text == "Bob"]
    questions = [
        {"query": "The owner of the dog is @placeholder.", "idx": 50, "answers": gold},
        {"query": "The dog did not see @placeholder", "idx": 51, "answers": []},
    ]
    return {"source": "x", "passage": {"text": PASSAGE, "entities": mentions()}, "qas": questions, "idx": 3}


def flat(row=None, split="test"):
    return flatten_split(Dataset.from_list([row or official_row()]), Source(split), "record")[0]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request):
    texts = [PASSAGE, "The owner of the dog is old, did not see; the cat"] * 20
    return train_tokenizer(texts, 300 if request.param == "bpe" else 60, request.param)


# 1. Rows


def test_questions_without_answers():
    row = {**official_row(), "qas": [{"query": "is it @placeholder", "idx": 50}]}
    rows = flat(row)
    assert rows["answers"] == [[]] and not has_answers(rows)
    with pytest.raises(InputError, match="^train row 1: the row has no answers"):
        flat(row, "train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"passage": "text", "query": "?"}, "'entity_spans'"),
        ({"passage": {"text": "a"}, "qas": [], "idx": 1}, "row 1: passage.entities"),
        ({"passage": "text", "query": "?", "entity_spans": [{"start": 2, "end": 5}]}, "row 1: .* 2 to 5 .* has 4"),
        ({"passage": "text", "query": "?", "entity_spans": {"start": [0], "end": []}}, "row 1: entity_spans"),
    ],
)
def test_invalid_rows(row, message):
    with pytest.raises(InputError, match=message):
        flat(row)


# 2. Model inputs


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("share", [0.7, 0.9, 1])
def test_tokens_of_mentions(tokenizer, share, hub):
    """Every mention is in a window, its tokens give its text, and its label is 1 for an answer."""
    rows = flat()
    if hub:  # a list of mentions, as in newer files of the Hub
        spans = [
            [dict(zip(s, values, strict=True)) for values in zip(*s.values(), strict=True)]
            for s in rows["entity_spans"]
        ]
        rows = rows.remove_columns("entity_spans").add_column("entity_spans", spans)
    queries = [query.replace("@placeholder", "[MASK]") for query in rows["query"]]
    length = int(share * max(len(tokenizer(PASSAGE, query)["input_ids"]) for query in queries))
    features = encode_questions(rows, "train", tokenizer, length)
    assert (len(features) == 2) == (share == 1)
    seen = set()
    for feature in features:
        query = tokenizer.decode(feature["input_ids"]).split("[SEP]")[1]
        assert "[MASK]" in query and len(feature["input_ids"]) <= length
        assert len(feature["entities"]) == len(feature["entity_indices"]) == len(feature["labels"]) > 0
        for entity, tokens, label in zip(
            feature["entities"], feature["entity_indices"], feature["labels"], strict=True
        ):
            seen.add((feature["row"], entity))
            assert tokenizer.decode([feature["input_ids"][token] for token in tokens]).strip() == MENTIONS[entity]
            assert label == (feature["row"] == 0 and MENTIONS[entity] == "Bob")
    assert seen == {(row, entity) for row in range(2) for entity in range(len(MENTIONS))}


def test_labels_depend_on_the_split_and_not_on_the_batch(tokenizer):
    rows = flat()  # the second has none
    features = encode_questions(rows, "train", tokenizer, 200, map_options={"batch_size": 1})
    assert [sum(labels) for labels in features["labels"]] == [2, 0]
    features = encode_questions(rows.select([1]), "test", tokenizer, 200)
    assert "labels" not in features.column_names
    with pytest.raises(InputError, match="max_seq_length 12"):  # the query leaves no room
        encode_questions(rows, "train", tokenizer, 12)
    bare = rows.remove_columns("entity_spans").add_column("entity_spans", [{"start": [], "end": []}] * 2)
    with pytest.raises(InputError, match="none of the train passages"):
        encode_questions(bare, "train", tokenizer, 200)


def test_entity_collator(tokenizer):
    first = {"input_ids": [1, 5, 2], "attention_mask": [1] * 3, "entity_indices": [[1]], "labels": [1]}
    second = {"input_ids": [1, 5, 6, 2], "attention_mask": [1] * 4, "entity_indices": [[1, 2], [2]], "labels": [0, 1]}
    features = [{**first, "row": 0}, {**second, "row": 1}]
    batch = EntityCollator(tokenizer)(features)
    assert batch["entity_indices"].tolist() == [[[1, 0], [0, 0]], [[1, 2], [2, 0]]]
    assert batch["labels"].tolist() == [[1, -100], [0, 1]] and batch["labels"].dtype == torch.long
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert EntityCollator(tokenizer, "max_length", 9)(features)["input_ids"].shape == (2, 9)
    for feature in features:
        del feature["labels"]
    assert "labels" not in EntityCollator(tokenizer)(features)


# 3. Predictions and metrics


def test_rank_entities_over_windows():
    """Log probabilities are averaged over windows, and padding is ignored."""
    rows = flat()
    features = Dataset.from_dict({"entities": [[0, 1], [1, 2, 3], [4]], "row": [0, 0, 1]})
    logits = np.array([[1.0, 3.0, 99], [-2.0, 0.5, -9.0], [-9.0, 99.0, 99.0]])  # mention 3 is Bob again
    ranked = rank_entities(logits, features, rows)
    assert [text for text, _ in ranked[0]] == ["Ann Lee", "Rome", "Bob"] and [t for t, _ in ranked[1]] == ["Paris"]
    assert ranked[0][2][1] == pytest.approx(-np.mean([np.log1p(np.exp(-3.0)), np.log1p(np.exp(2.0))]))


# 4. Files


def test_files(tmp_path):
    """Each query has an answer, even if no mention was scored."""
    task = Record(ModelArguments(demo=True), SuperGlueArguments(task_name="record"), None)
    task.rows = {"test": flat()}
    ranked = [[("Bob", -0.1), ("Rome", -2.0)], []]
    task.write(tmp_path, "test", ranked)
    assert read_json_lines(tmp_path / "ReCoRD.jsonl") == [{"idx": 50, "label": "Bob"}, {"idx": 51, "label": "Ann Lee"}]
    columns = task.prediction_columns("test", ranked)
    assert columns["prediction"] == ["Bob", "Ann Lee"]
    assert [entity["text"] for entity in columns["best_entities"][0]] == ["Bob", "Rome"]
