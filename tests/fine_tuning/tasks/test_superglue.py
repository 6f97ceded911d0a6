"""SuperGLUE: both formats of the data, model inputs, submission files."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from fine_tuning_models import read_json_lines, write_json_lines
from numerics import tiny_model

from hf_deberta import HfDebertaForMultipleChoice
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.run import read_rows
from hf_deberta.fine_tuning.task import LabelLogits, prediction_splits
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.fine_tuning.tasks import superglue
from hf_deberta.fine_tuning.tasks.race import ChoiceCollator
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.errors import InputError

PASSAGE = "Ann Lee met Bob in Rome. Bob's dog stayed in Paris, said Ann Lee.\n@highlight\nRome is old"
MENTIONS = ["Ann Lee", "Bob", "Rome", "Bob", "Paris", "Ann Lee", "Rome"]
PAIR = {"premise": "Rome is old.", "hypothesis": "Rome is new", "idx": 7}
CHOICES = {"choice1": "The dog got wet.", "choice2": "Clouds came."}
WASH = {"word": "wash", "sentence1": "We wash it.", "sentence2": "He washed dirt."}
TARGET = {"span1_text": "The dog", "span1_index": 0, "span2_text": "it", "span2_index": 6}
ANSWERS = [{"text": "Rome", "idx": 30, "label": 1}, {"text": "Paris", "idx": 31, "label": 0}]
QUESTIONS = [
    {"question": "What is old?", "idx": 9, "answers": ANSWERS},
    {"question": "What is large?", "idx": 10, "answers": [{"text": "Paris", "idx": 32, "label": 1}]},
]
ROWS = {
    "boolq": {"question": "is rome old", "passage": "Rome is old.", "idx": 7, "label": True},
    "cb": {**PAIR, "label": "contradiction"},
    "rte": {**PAIR, "label": "not_entailment"},
    "axb": {"sentence1": "Rome is old.", "sentence2": "Rome is new", "label": "entailment", "idx": 7},
    "axg": {**PAIR, "label": "entailment"},
    "copa": {"premise": "It rained.", **CHOICES, "question": "cause", "label": 1, "idx": 7},
    "wic": {**WASH, "start1": 3, "end1": 7, "start2": 3, "end2": 9, "idx": 7, "label": False},
    "wsc": {"text": "The dog feared the cat because it barked.", "target": TARGET, "idx": 7, "label": True},
    "multirc": {"idx": 4, "passage": {"text": "Rome is old. Paris is large.", "questions": QUESTIONS}},
}


def mentions():
    spans, start = [], 0
    for text in MENTIONS:
        start = PASSAGE.index(text, start)
        spans.append({"start": start, "end": start + len(text) - 1})  # the last character, as in the official files
        start += len(text)
    return spans


def record_row(number=3, answers=("Bob",)):
    gold = [{**span, "text": text} for span, text in zip(mentions(), MENTIONS, strict=True) if text in answers]
    questions = [
        {"query": "The owner of the dog is @placeholder.", "idx": 50, "answers": gold},
        {"query": "The dog did not see @placeholder", "idx": 51, "answers": []},
    ]
    return {"source": "x", "passage": {"text": PASSAGE, "entities": mentions()}, "qas": questions, "idx": number}


ROWS["record"] = record_row()


def flat(name, rows=None, split="train"):
    return superglue.flatten_split(Dataset.from_list(rows or [ROWS[name]]), split, name)


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request):
    texts = [PASSAGE, "The owner of the dog is old, did not see; the cat: he washed * # it . We feared rain"] * 20
    return train_tokenizer(texts, 300 if request.param == "bpe" else 70, request.param)


# 1. Rows


def test_official_format_is_flattened():
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


def test_questions_of_record_without_answers():
    questions = [{"query": "is it @placeholder", "idx": 50}]
    rows = flat("record", [{**ROWS["record"], "qas": questions}], "test")
    assert rows["answers"] == [[]] and not superglue.has_labels(rows, "test", "record")


@pytest.mark.parametrize("name", [name for name in superglue.TASKS if name != "record"])
def test_labels_as_names_and_numbers(name):
    rows = flat(name)
    numbers = superglue.label_numbers(rows, "train", name)
    names = superglue.TASKS[name].labels
    for values in (numbers.tolist(), [names[number] for number in numbers]):
        again = rows.remove_columns("label").add_column("label", values)
        assert (superglue.label_numbers(again, "train", name) == numbers).all()
    bare = rows.remove_columns("label")
    assert superglue.label_numbers(bare.add_column("label", [-1] * len(rows)), "test", name) is None
    with pytest.raises(InputError, match=f"train rows? 1.*: .*'contradicts'; .* {names[0]}, {names[1]}"):
        superglue.label_numbers(bare.add_column("label", ["contradicts"] * len(rows)), "train", name)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("boolq", {"question": "?", "label": 1}, "'passage'; .* question"),
        ("record", {"passage": "text", "query": "?"}, "'entity_spans'"),
        ("multirc", {"passage": {"text": "a"}, "idx": 1}, "row 1: passage.questions"),
        ("record", {"passage": {"text": "a"}, "qas": [], "idx": 1}, "row 1: passage.entities"),
        ("wic", {**ROWS["wic"], "end1": 70}, "row 1: .*3 to 70 .*sentence1, which has 11"),
        ("copa", {**ROWS["copa"], "question": "why"}, "'why'"),
    ],
)
def test_invalid_rows(name, row, message):
    with pytest.raises(InputError, match=message):
        flat(name, [row])


@pytest.mark.parametrize("name", ["span1_index", "span2_index"])
def test_word_numbers_of_wsc(name):
    """Rows in both formats; a word between two spaces is empty, and counts."""
    for index in (-1, 8, 500):
        row = {**ROWS["wsc"], "target": {**ROWS["wsc"]["target"], name: index}}
        for rows in ([ROWS["wsc"], row], [flat("wsc")[0], {**flat("wsc")[0], name: index}]):
            with pytest.raises(InputError, match=rf"row 2: the {name} is {index}, .* 0 to 7"):
                flat("wsc", rows)
    flat("wsc", [{**ROWS["wsc"], "text": "The  dog feared the cat as it", "target": {**row["target"], name: 7}}])


# 2. Inputs


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("boolq", ("Rome is old.", "is rome old")),
        ("cb", ("Rome is old.", "Rome is new")),
        ("axb", ("Rome is old.", "Rome is new")),
        ("multirc", ("Rome is old. Paris is large.", "What is old? Rome")),
        ("wic", ("wash: We * wash * it.", "He * washed * dirt.")),
        ("wsc", ("* The dog * feared the cat because # it # barked.", "The dog")),
    ],
)
def test_inputs_of_a_classifier(tokenizer, name, pair):
    rows = flat(name)
    features = superglue.encode_split(rows, "train", name, tokenizer, 128)
    assert len(features) == len(rows)
    assert features[0]["input_ids"] == tokenizer(*pair)["input_ids"]
    assert (np.array(features["labels"]) == superglue.label_numbers(rows, "train", name)).all()
    assert features.features["labels"].dtype == "int64"


def test_labels_in_the_models_order(tokenizer):
    order = ("neutral", "contradiction", "entailment")
    rows = flat("cb", [{**ROWS["cb"], "label": label} for label in ("entailment", "contradiction", "neutral")])
    assert superglue.encode_split(rows, "train", "cb", tokenizer, 64, order)["labels"] == [2, 1, 0]


def test_choices_are_in_the_order_of_events(tokenizer):
    rows = [ROWS["copa"], {**ROWS["copa"], "question": "effect"}]
    features = superglue.encode_split(flat("copa", rows), "train", "copa", tokenizer, 128)
    for number, pair in ((0, ("Clouds came.", "It rained.")), (1, ("It rained.", "Clouds came."))):
        assert features[number]["input_ids"][1] == tokenizer(*pair)["input_ids"]
    batch = ChoiceCollator(tokenizer)([features[0], features[1]])
    assert batch["input_ids"].shape[:2] == (2, 2) and batch["labels"].tolist() == [1, 1]
    model = tiny_model(HfDebertaForMultipleChoice, vocab_size=len(tokenizer))
    assert model(**batch).logits.shape == (2, 2)


@pytest.mark.parametrize(
    ("text", "span", "word", "expected"),
    [
        ("The dog saw the dog", "the dog", 3, "the dog"),
        ("The dog saw the dog", "The dog", 3, "the dog"),  # with the case of the official files
        ("Ann saw them.", "them.", 2, "them"),
        ("Ann told her that\n she ran", "that she", 1, "that\n she"),
        ("Ann ran", "Bob", 1, "ran"),  # not in the text: the word that it should begin with
        ("Ann ran", "ran", 99, "ran"),
        ("Ann (Lee) ran", "(Lee)", 1, "(Lee)"),
    ],
)
def test_find_span(text, span, word, expected):
    start, end = superglue.find_span(text, span, word)
    assert text[start:end] == expected
    if span == "The dog":
        assert start == 12


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("share", [0.7, 0.9, 1])
def test_tokens_of_mentions(tokenizer, share, hub):
    """Every mention is in a window, its tokens give its text, and its label is 1 for an answer."""
    rows = flat("record")
    if hub:  # a list of mentions, as in newer files of the Hub
        spans = [
            [dict(zip(s, values, strict=True)) for values in zip(*s.values(), strict=True)]
            for s in rows["entity_spans"]
        ]
        rows = rows.remove_columns("entity_spans").add_column("entity_spans", spans)
    queries = [query.replace("@placeholder", "[MASK]") for query in rows["query"]]
    length = int(share * max(len(tokenizer(PASSAGE, query)["input_ids"]) for query in queries))
    features = superglue.encode_split(rows, "train", "record", tokenizer, length)
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
    rows = flat("record")  # the second has none
    features = superglue.encode_split(rows, "train", "record", tokenizer, 200, map_options={"batch_size": 1})
    assert [sum(labels) for labels in features["labels"]] == [2, 0]
    features = superglue.encode_split(rows.select([1]), "test", "record", tokenizer, 200)
    assert "labels" not in features.column_names
    with pytest.raises(InputError, match="max_seq_length 12"):  # the query leaves no room
        superglue.encode_split(rows, "train", "record", tokenizer, 12)
    bare = rows.remove_columns("entity_spans").add_column("entity_spans", [{"start": [], "end": []}] * 2)
    with pytest.raises(InputError, match="none of the train passages"):
        superglue.encode_split(bare, "train", "record", tokenizer, 200)


def test_entity_collator(tokenizer):
    first = {"input_ids": [1, 5, 2], "attention_mask": [1] * 3, "entity_indices": [[1]], "labels": [1]}
    second = {"input_ids": [1, 5, 6, 2], "attention_mask": [1] * 4, "entity_indices": [[1, 2], [2]], "labels": [0, 1]}
    features = [{**first, "row": 0}, {**second, "row": 1}]
    batch = superglue.EntityCollator(tokenizer)(features)
    assert batch["entity_indices"].tolist() == [[[1, 0], [0, 0]], [[1, 2], [2, 0]]]
    assert batch["labels"].tolist() == [[1, -100], [0, 1]] and batch["labels"].dtype == torch.long
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert superglue.EntityCollator(tokenizer, "max_length", 9)(features)["input_ids"].shape == (2, 9)
    for feature in features:
        del feature["labels"]
    assert "labels" not in superglue.EntityCollator(tokenizer)(features)


# 3. Predictions and metrics


def test_rank_entities_over_windows():
    """Log probabilities are averaged over windows, and padding is ignored."""
    rows = flat("record")
    features = Dataset.from_dict({"entities": [[0, 1], [1, 2, 3], [4]], "row": [0, 0, 1]})
    logits = np.array([[1.0, 3.0, 99], [-2.0, 0.5, -9.0], [-9.0, 99.0, 99.0]])  # mention 3 is Bob again
    ranked = superglue.rank_entities(logits, features, rows)
    assert [text for text, _ in ranked[0]] == ["Ann Lee", "Rome", "Bob"] and [t for t, _ in ranked[1]] == ["Paris"]
    assert ranked[0][2][1] == pytest.approx(-np.mean([np.log1p(np.exp(-3.0)), np.log1p(np.exp(2.0))]))


# 4. Files


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
    predicted = LabelLogits(logits, superglue.TASKS[name].labels)
    superglue.write_superglue_predictions(tmp_path, name, rows, predicted)
    assert read_json_lines(tmp_path / f"{file}.jsonl") == [{"idx": 5, "label": first}, {"idx": 6, "label": second}]
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize(("name", "key"), [("cb", "test"), ("rte", "axb")])
def test_metrics_and_files_are_those_of_the_split(tmp_path, name, key):
    """Labels are numbered as the task does, whatever their order in the model."""
    arguments = FineTuningArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    task = superglue.SuperGlue(ModelArguments("model"), superglue.SuperGlueArguments(task_name=name), arguments)
    task.rows = {key: Dataset.from_dict({"idx": [5, 6, 7], "label": [0, 1, 1]})}
    predicted = LabelLogits(np.array([[0.0, 1], [1, 0], [1, 0]]), task.labels[1::-1])
    assert task.metrics(key, predicted)[superglue.TASKS[task.task_and_split(key)[0]].metrics[0]] == 1
    task.write(tmp_path, key, predicted)
    assert (tmp_path / {"test": "CB.jsonl", "axb": "AX-b.jsonl"}[key]).exists()


def test_a_diagnostic_is_predicted_without_test_rows(tmp_path):
    files = {name: write_json_lines(tmp_path / f"{name}.jsonl", [ROWS[name]] * 2) for name in ("rte", "axb")}
    data_args = superglue.SuperGlueArguments(task_name="rte", train_file=files["rte"], axb_file=files["axb"])
    arguments = FineTuningArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    task = superglue.SuperGlue(ModelArguments("model"), data_args, arguments)
    read_rows(task)
    assert arguments.do_predict and prediction_splits(task) == ["axb"]


def test_submission_of_multirc(tmp_path):
    predicted = LabelLogits(np.array([[0.0, 1], [1, 0], [1, 0]]), superglue.FALSE_TRUE)
    superglue.write_superglue_predictions(tmp_path, "multirc", flat("multirc"), predicted)
    (line,) = read_json_lines(tmp_path / "MultiRC.jsonl")
    questions = [
        {"idx": 9, "answers": [{"idx": 30, "label": 1}, {"idx": 31, "label": 0}]},
        {"idx": 10, "answers": [{"idx": 32, "label": 0}]},
    ]
    assert line == {"idx": 4, "passage": {"questions": questions}}


def test_submission_of_record(tmp_path):
    """Each query has an answer, even if no mention was scored."""
    rows = flat("record")
    ranked = [[("Bob", -0.1), ("Rome", -2.0)], []]
    superglue.write_superglue_predictions(tmp_path, "record", rows, ranked)
    assert read_json_lines(tmp_path / "ReCoRD.jsonl") == [{"idx": 50, "label": "Bob"}, {"idx": 51, "label": "Ann Lee"}]
    task = superglue.SuperGlue(None, superglue.SuperGlueArguments(task_name="record"), None)
    task.rows = {"test": rows}
    columns = task.predicted_columns("test", ranked)
    assert columns["prediction"] == ["Bob", "Ann Lee"]
    assert [entity["text"] for entity in columns["best_entities"][0]] == ["Bob", "Rome"]
