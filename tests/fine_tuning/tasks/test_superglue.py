"""SuperGLUE: both forms of the data, what the model sees, metrics as the papers define them, submission files."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from numerics import tiny_model

from hf_deberta import HfDebertaForEntityChoice, HfDebertaForMultipleChoice
from hf_deberta.fine_tuning.tasks import superglue
from hf_deberta.fine_tuning.tasks.race import ChoiceCollator
from hf_deberta.pretraining.tokenizer_training import train_tokenizer

PASSAGE = "Ann Lee met Bob in Rome. Bob's dog stayed in Paris, said Ann Lee.\n@highlight\nRome is old"
MENTIONS = ["Ann Lee", "Bob", "Rome", "Bob", "Paris", "Ann Lee", "Rome"]
ROWS = {
    "boolq": {"question": "is rome old", "passage": "Rome is old.", "idx": 7, "label": True},
    "cb": {"premise": "Rome is old.", "hypothesis": "Rome is new", "label": "contradiction", "idx": 7},
    "rte": {"premise": "Rome is old.", "hypothesis": "Rome is new", "label": "not_entailment", "idx": 7},
    "axb": {"sentence1": "Rome is old.", "sentence2": "Rome is new", "label": "entailment", "idx": 7},
    "axg": {
        "premise": "The cook met his aunt.",
        "hypothesis": "The cook has an aunt.",
        "label": "entailment",
        "idx": 7,
    },
    "copa": {
        "premise": "It rained.",
        "choice1": "The dog got wet.",
        "choice2": "Clouds came.",
        "question": "cause",
        "label": 1,
        "idx": 7,
    },
    "wic": {
        "word": "wash",
        "sentence1": "We wash it.",
        "sentence2": "He washed dirt.",
        "start1": 3,
        "end1": 7,
        "start2": 3,
        "end2": 9,
        "idx": 7,
        "label": False,
    },
    "wsc": {
        "text": "The dog feared the cat because it barked.",
        "target": {"span1_text": "The dog", "span1_index": 0, "span2_text": "it", "span2_index": 6},
        "idx": 7,
        "label": True,
    },
    "multirc": {
        "idx": 4,
        "passage": {
            "text": "Rome is old. Paris is large.",
            "questions": [
                {
                    "question": "What is old?",
                    "idx": 9,
                    "answers": [{"text": "Rome", "idx": 30, "label": 1}, {"text": "Paris", "idx": 31, "label": 0}],
                },
                {"question": "What is large?", "idx": 10, "answers": [{"text": "Paris", "idx": 32, "label": 1}]},
            ],
        },
    },
}


def mentions():
    found, start = [], 0
    for text in MENTIONS:
        start = PASSAGE.index(text, start)
        found.append({"start": start, "end": start + len(text) - 1})  # the last character, as official
        start += len(text)
    return found


def record_row(number=3, answers=("Bob",)):
    told = [{**place, "text": text} for place, text in zip(mentions(), MENTIONS, strict=True) if text in answers]
    questions = [
        {"query": "The owner of the dog is @placeholder.", "idx": 50, "answers": told},
        {"query": "The dog did not see @placeholder", "idx": 51, "answers": []},
    ]
    return {"source": "x", "passage": {"text": PASSAGE, "entities": mentions()}, "qas": questions, "idx": number}


ROWS["record"] = record_row()


def flat(name, rows=None, split="train"):
    return superglue.flat_rows(Dataset.from_list(rows or [ROWS[name]]), split, name)


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request):
    texts = [PASSAGE, "The owner of the dog is old, did not see; the cat: he washed * # it . We feared rain"] * 20
    return train_tokenizer(texts, 300 if request.param == "bpe" else 70, request.param)


# 1. Rows


def test_official_rows_become_the_hubs():
    rows = flat("multirc")
    assert rows["idx"] == [{"paragraph": 4, "question": q, "answer": a} for q, a in ((9, 30), (9, 31), (10, 32))]
    assert rows["answer"] == ["Rome", "Paris", "Paris"] and rows["label"] == [1, 0, 1]
    rows = flat("record")
    assert len(rows) == 2 and rows["idx"] == [{"passage": 3, "query": 50}, {"passage": 3, "query": 51}]
    spans = rows[0]["entity_spans"]
    assert spans["text"] == MENTIONS and rows[0]["answers"] == ["Bob"] and rows[1]["answers"] == []
    assert [PASSAGE[start:end] for start, end in zip(spans["start"], spans["end"], strict=True)] == MENTIONS
    row = flat("wsc")[0]
    assert (row["span1_text"], row["span2_index"], row["label"]) == ("The dog", 6, 1)


@pytest.mark.parametrize("name", ["multirc", "record", "wsc"])
def test_rows_of_a_test_split(name):
    """No labels, no answers; nothing else is different."""
    row = json.loads(json.dumps(ROWS[name]))
    if name == "multirc":
        for question in row["passage"]["questions"]:
            for answer in question["answers"]:
                del answer["label"]
    elif name == "record":
        for question in row["qas"]:
            del question["answers"]
    else:
        del row["label"]
    rows = flat(name, [row], "test")
    assert len(rows) == len(flat(name)) and not superglue.is_labelled(rows, "test", name)
    assert superglue.is_labelled(flat(name), "train", name)


def test_rows_of_the_hub_stay():
    rows = flat("record")
    assert superglue.flat_rows(rows, "train", "record") is rows


@pytest.mark.parametrize("name", [name for name in superglue.TASKS if name != "record"])
def test_labels_as_names_numbers_and_truths(name):
    rows = flat(name)
    numbers = superglue.labels_of(rows, "train", name)
    names = superglue.TASKS[name].labels
    for values in (numbers.tolist(), [names[number] for number in numbers]):
        again = rows.remove_columns("label").add_column("label", values)
        assert (superglue.labels_of(again, "train", name) == numbers).all()
    unknown = rows.remove_columns("label").add_column("label", [-1] * len(rows))
    assert superglue.labels_of(unknown, "test", name) is None


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "boolq",
            {"question": "?", "label": 1},
            "the train rows of boolq have no column 'passage'; they have question",
        ),
        ("record", {"passage": "text", "query": "?"}, "no column 'entity_spans'"),
        ("multirc", {"passage": {"text": "a"}, "idx": 1}, "not those of the official MultiRC: 'questions'"),
        ("record", {"passage": {"text": "a"}, "qas": [], "idx": 1}, "not those of the official ReCoRD: 'entities'"),
    ],
)
def test_unusable_rows(name, row, message):
    with pytest.raises(ValueError, match=message):
        flat(name, [row])


def test_unknown_labels_and_empty_splits():
    rows = flat("cb", [{**ROWS["cb"], "label": "contradicts"}])
    with pytest.raises(ValueError, match="labels that are not known: 'contradicts'; known are entailment, contradict"):
        superglue.labels_of(rows, "train", "cb")
    with pytest.raises(ValueError, match="the dev split of cb is empty"):
        superglue.flat_rows(Dataset.from_list([ROWS["cb"]]).select([]), "dev", "cb")


# 2. Inputs


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("boolq", ("Rome is old.", "is rome old")),
        ("cb", ("Rome is old.", "Rome is new")),
        ("axb", ("Rome is old.", "Rome is new")),
        ("multirc", ("Rome is old. Paris is large.", "What is old? Rome")),
        ("wic", ("wash: We * wash * it.", "He * washed * dirt.")),
        ("wsc", ("* The dog * feared the cat because # it # barked.", "The dog")),
    ],
)
def test_what_a_classifier_sees(tokenizer, name, said):
    rows = flat(name)
    features = superglue.encode(rows, "train", name, tokenizer, 128)
    assert len(features) == len(rows)
    assert features[0]["input_ids"] == tokenizer(*said)["input_ids"]
    assert (np.array(features["labels"]) == superglue.labels_of(rows, "train", name)).all()
    assert features.features["labels"].dtype == "int64"


def test_labels_in_the_models_order(tokenizer):
    order = ("neutral", "contradiction", "entailment")
    rows = flat("cb", [{**ROWS["cb"], "label": label} for label in ("entailment", "contradiction", "neutral")])
    assert superglue.encode(rows, "train", "cb", tokenizer, 64, order)["labels"] == [2, 1, 0]


def test_choices_are_told_in_the_order_of_events(tokenizer):
    rows = [ROWS["copa"], {**ROWS["copa"], "question": "effect"}]
    features = superglue.encode(flat("copa", rows), "train", "copa", tokenizer, 128)
    for number, pair in ((0, ("Clouds came.", "It rained.")), (1, ("It rained.", "Clouds came."))):
        assert features[number]["input_ids"][1] == tokenizer(*pair)["input_ids"]
    batch = ChoiceCollator(tokenizer)([features[0], features[1]])
    assert batch["input_ids"].shape[:2] == (2, 2) and batch["labels"].tolist() == [1, 1]
    model = tiny_model(HfDebertaForMultipleChoice, vocab_size=len(tokenizer))
    assert model(**batch).logits.shape == (2, 2)
    with pytest.raises(ValueError, match="'cause' or 'effect', not 'why'"):
        superglue.encode(flat("copa", [{**ROWS["copa"], "question": "why"}]), "train", "copa", tokenizer, 64)


def test_inputs_that_are_cut(tokenizer, caplog):
    caplog.set_level("WARNING")
    features = superglue.encode(flat("boolq"), "train", "boolq", tokenizer, 12)
    assert len(features[0]["input_ids"]) == 12 and "1 of 1 inputs fill --max_seq_length 12" in caplog.text


@pytest.mark.parametrize(
    ("text", "span", "word", "expected"),
    [
        ("The dog saw the dog", "the dog", 3, "the dog"),
        ("The dog saw the dog", "The dog", 3, "the dog"),  # as the files write it
        ("Ann saw them.", "them.", 2, "them"),
        ("Ann told her that\n she ran", "that she", 1, "that\n she"),
        ("Ann ran", "Bob", 1, "ran"),  # is not there: the word it should begin with
        ("Ann ran", "ran", 99, "ran"),
        ("Ann (Lee) ran", "(Lee)", 1, "(Lee)"),
    ],
)
def test_spans_of_wsc(text, span, word, expected):
    start, end = superglue.find_span(text, span, word)
    assert text[start:end] == expected
    if span == "The dog":
        assert start == 12


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("share", [0.7, 0.9, 1])
def test_places_of_entities(tokenizer, share, hub):
    """Every mention is in a window; its tokens are its text; its label says whether it is an answer."""
    rows = flat("record")
    if hub:  # a list of spans, as newer files of the Hub have it
        spans = [
            [dict(zip(s, values, strict=True)) for values in zip(*s.values(), strict=True)]
            for s in rows["entity_spans"]
        ]
        rows = rows.remove_columns("entity_spans").add_column("entity_spans", spans)
    queries = [query.replace("@placeholder", "[MASK]") for query in rows["query"]]
    length = int(share * max(len(tokenizer(PASSAGE, query)["input_ids"]) for query in queries))
    features = superglue.encode(rows, "train", "record", tokenizer, length)
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


def test_a_query_that_leaves_no_room(tokenizer):
    with pytest.raises(
        ValueError, match="the longest query of train has .* leaves no room for the passage in max_seq_length 12"
    ):
        superglue.encode(flat("record"), "train", "record", tokenizer, 12)


def test_labels_of_a_split_are_there_in_each_batch(tokenizer):
    """Whether a split has answers is not asked of a batch."""
    rows = flat("record")  # the second has none
    features = superglue.encode(rows, "train", "record", tokenizer, 200, mapping={"batch_size": 1})
    assert [sum(labels) for labels in features["labels"]] == [2, 0]
    features = superglue.encode(rows.select([1]), "test", "record", tokenizer, 200)
    assert "labels" not in features.column_names
    bare = rows.remove_columns("entity_spans").add_column("entity_spans", [{"start": [], "end": []}] * 2)
    with pytest.raises(ValueError, match="none of the train passages has an entity"):
        superglue.encode(bare, "train", "record", tokenizer, 200)


def test_entity_choice_learns(tokenizer):
    rows = flat("record", [record_row(0), record_row(1, ("Rome",))])
    rows = rows.select([0, 2])
    rows = rows.remove_columns("query").add_column("query", ["Whose dog? @placeholder", "Where? @placeholder"])
    features = superglue.encode(rows, "train", "record", tokenizer, 200)
    batch = superglue.EntityCollator(tokenizer, pad_to_multiple_of=8)([features[0], features[1]])
    assert batch["entity_indices"].shape[:2] == batch["labels"].shape == (2, 7)
    assert batch["input_ids"].shape[1] % 8 == 0
    torch.manual_seed(0)
    model = tiny_model(HfDebertaForEntityChoice, vocab_size=len(tokenizer)).train()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(40):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits.numpy()
    best = [of[0][0] for of in superglue.ranked_entities(logits, features, rows)]
    assert best == ["Bob", "Rome"]
    assert superglue.scores("record", rows, best) == {"f1": 1.0, "exact_match": 1.0}


def test_collator_pads_mentions(tokenizer):
    features = [
        {"input_ids": [1, 5, 2], "attention_mask": [1] * 3, "entity_indices": [[1]], "labels": [1], "row": 0},
        {
            "input_ids": [1, 5, 6, 2],
            "attention_mask": [1] * 4,
            "entity_indices": [[1, 2], [2]],
            "labels": [0, 1],
            "row": 1,
        },
    ]
    batch = superglue.EntityCollator(tokenizer)(features)
    assert batch["entity_indices"].tolist() == [[[1, 0], [0, 0]], [[1, 2], [2, 0]]]
    assert batch["labels"].tolist() == [[1, -100], [0, 1]] and batch["labels"].dtype == torch.long
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert superglue.EntityCollator(tokenizer, 9)(features)["input_ids"].shape == (2, 9)
    for feature in features:
        del feature["labels"]
    assert "labels" not in superglue.EntityCollator(tokenizer)(features)


# 3. Predictions and scores


def test_entities_are_ranked_over_windows():
    """The mean of the log probabilities; what a row does not have, padding say, is not looked at."""
    rows = flat("record")
    features = Dataset.from_dict({"entities": [[0, 1], [1, 2, 3], [4]], "row": [0, 0, 1]})
    logits = np.array([[1.0, 3.0, 99], [-2.0, 0.5, -9.0], [-9.0, 99.0, 99.0]])  # mention 3 is Bob again
    ranked = superglue.ranked_entities(logits, features, rows)
    assert [text for text, _ in ranked[0]] == ["Ann Lee", "Rome", "Bob"] and [t for t, _ in ranked[1]] == ["Paris"]
    assert ranked[0][2][1] == pytest.approx(-np.mean([np.log1p(np.exp(-3.0)), np.log1p(np.exp(2.0))]))


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1"),
    [
        ("the Rome!", ["Rome"], 1, 1),
        ("West Brom", ["West Bromwich Albion", "West Brom"], 1, 1),
        ("West Bromwich Albion", ["West Brom"], 0, 2 / 5),
        ("Paris", ["Rome"], 0, 0),
        ("", ["Rome"], 0, 0),
    ],
)
def test_record_scores(prediction, answers, exact, f1):
    rows = Dataset.from_list([{"answers": answers}, {"answers": ["x"]}])
    found = superglue.scores("record", rows, [prediction, "x"])
    assert found == pytest.approx({"f1": (f1 + 1) / 2, "exact_match": (exact + 1) / 2})


def test_multirc_scores():
    """F1 over all answers; a question is right if all its answers are. Question numbers may repeat."""
    idx = [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0)]
    rows = Dataset.from_list(
        [
            {"idx": {"paragraph": p, "question": q, "answer": a}, "label": label}
            for a, ((p, q), label) in enumerate(zip(idx, [1, 0, 1, 1, 1], strict=True))
        ]
    )
    found = superglue.scores("multirc", rows, np.array([1, 0, 0, 1, 1]))
    assert found == pytest.approx({"f1_a": 2 * 3 / (3 + 4), "exact_match": 2 / 3})
    assert superglue.scores("multirc", rows, np.zeros(5, int))["f1_a"] == 0


def test_cb_averages_over_classes():
    rows = Dataset.from_dict({"label": [0, 0, 1, 2]})
    found = superglue.scores("cb", rows, np.array([0, 0, 1, 1]))
    assert found == pytest.approx({"f1": (1 + 2 / 3 + 0) / 3, "accuracy": 0.75})


def test_matthews_of_the_diagnostics():
    rows = Dataset.from_dict({"label": [0, 1, 1, 0]})
    assert superglue.scores("axb", rows, np.array([1, 0, 0, 1])) == {"matthews_correlation": -1.0}
    with pytest.raises(ValueError, match="the test rows of axb have no labels"):
        superglue.scores("axb", Dataset.from_dict({"label": [-1]}), np.array([1]), "test")


@pytest.mark.parametrize("with_pairs", [False, True])
def test_gender_parity(with_pairs):
    pairs = [("The cook met {} aunt.", "The cook has an aunt."), ("The nurse saw that {} ran.", "The nurse ran.")]
    pronouns = (("his", "her"), ("he", "she"))
    rows = [
        {"premise": premise.format(of[n]), "hypothesis": hypothesis, "label": 0, "pair_id": str(i)}
        for n in range(2)  # the two of a pair need not be neighbours
        for i, ((premise, hypothesis), of) in enumerate(zip(pairs, pronouns, strict=True))
    ]
    rows = Dataset.from_list(rows if with_pairs else [{k: row[k] for k in row if k != "pair_id"} for row in rows])
    assert superglue.scores("axg", rows, np.array([0, 0, 0, 1])) == {"accuracy": 0.75, "gender_parity": 0.5}


# 4. Files


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "file", "first", "second"),
    [
        ("boolq", "BoolQ", "false", "true"),
        ("cb", "CB", "entailment", "contradiction"),
        ("copa", "COPA", 0, 1),
        ("rte", "RTE", "entailment", "not_entailment"),
        ("wic", "WiC", "false", "true"),
        ("wsc", "WSC", "False", "True"),
        ("axb", "AX-b", "entailment", "not_entailment"),
        ("axg", "AX-g", "entailment", "not_entailment"),
    ],
)
def test_submission_files(tmp_path, name, file, first, second):
    rows = Dataset.from_dict({"idx": [5, 6]})
    logits = np.full((2, len(superglue.TASKS[name].labels)), -9.0)
    logits[0, 0] = logits[1, 1] = 9.0
    superglue.write_predictions(tmp_path, name, rows, logits)
    assert lines_of(tmp_path / f"{file}.jsonl") == [{"idx": 5, "label": first}, {"idx": 6, "label": second}]
    told = lines_of(tmp_path / f"predictions_{name}.jsonl")[1]
    assert told["prediction"] == superglue.TASKS[name].labels[1] and sum(
        told["probabilities"].values()
    ) == pytest.approx(1)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".jsonl"]


def test_submission_in_the_models_order(tmp_path):
    order = ("not_entailment", "entailment")
    superglue.write_predictions(tmp_path, "rte", Dataset.from_dict({"idx": [0]}), np.array([[3.0, 1.0]]), labels=order)
    assert lines_of(tmp_path / "RTE.jsonl") == [{"idx": 0, "label": "not_entailment"}]


def test_nested_submission_of_multirc(tmp_path):
    superglue.write_predictions(tmp_path, "multirc", flat("multirc"), np.array([[0.0, 1], [1, 0], [1, 0]]))
    assert lines_of(tmp_path / "MultiRC.jsonl") == [
        {
            "idx": 4,
            "passage": {
                "questions": [
                    {"idx": 9, "answers": [{"idx": 30, "label": 1}, {"idx": 31, "label": 0}]},
                    {"idx": 10, "answers": [{"idx": 32, "label": 0}]},
                ]
            },
        }
    ]


def test_submission_of_record(tmp_path):
    """Each query gets an answer, be it a guess."""
    rows = flat("record")
    superglue.write_predictions(tmp_path, "record", rows, ranked=[[("Bob", -0.1), ("Rome", -2.0)], []])
    assert lines_of(tmp_path / "ReCoRD.jsonl") == [{"idx": 50, "label": "Bob"}, {"idx": 51, "label": "Ann Lee"}]
    assert [a["text"] for a in lines_of(tmp_path / "predictions_record.jsonl")[0]["answers"]] == ["Bob", "Rome"]


def test_submission_has_every_task():
    assert len(superglue.SUBMISSION) == 10
