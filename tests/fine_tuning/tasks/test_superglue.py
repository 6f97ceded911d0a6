"""SuperGLUE: both formats of the data, model inputs, submission files."""

import numpy as np
import pytest
from datasets import Dataset
from fine_tuning_models import read_json_lines, write_json_lines

from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.run import read_rows
from hf_deberta.fine_tuning.task import LabelPredictions, prediction_splits
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.fine_tuning.tasks import superglue
from hf_deberta.fine_tuning.tasks.labels import read_targets
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.data_files import Source
from hf_deberta.training.errors import InputError

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


def flat(name, rows=None, split="train"):
    return superglue.flatten_split(Dataset.from_list(rows or [ROWS[name]]), Source(split), name)[0]


def made(name, split="train", rows=None, model_labels=None) -> superglue.SuperGlue:
    """Return the task, as after reading these rows; `model_labels` may be in another order than the task's."""
    data_args = superglue.SuperGlueArguments(task_name=name)
    task = superglue.SuperGlue.class_for(data_args)(ModelArguments(demo=True), data_args, None)
    task.rows = {split: flat(name, rows, split) if rows is None or isinstance(rows, list) else rows}
    source = Source("test" if split in superglue.DIAGNOSTICS else split)
    task.targets_of_split = {split: read_targets(task.rows[split], source, task.labels)}
    task.model_labels = model_labels or task.labels
    return task


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request):
    texts = ["Rome is old. Paris is large.", "The dog feared the cat: he washed * # it . We got dirt; rain"] * 20
    return train_tokenizer(texts, 300 if request.param == "bpe" else 70, request.param)


# 1. Rows


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("boolq", {"question": "?", "label": 1}, "'passage'; .* question"),
        ("multirc", {"passage": {"text": "a"}, "idx": 1}, "row 1: passage.questions"),
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
    task = made(name)
    features = task.encode("train", tokenizer, 128)
    assert len(features) == len(task.rows["train"])
    assert features[0]["input_ids"] == tokenizer(*pair)["input_ids"]
    assert (np.array(features["labels"]) == task.targets("train")).all()
    assert features.features["labels"].dtype == "int64"
    assert len(task.model_args.reading_flags["text_column_names"]) == 2  # its card shows how to use it with a pair


def test_choices_are_in_the_order_of_events(tokenizer):
    rows = [ROWS["copa"], {**ROWS["copa"], "question": "effect"}]
    features = made("copa", rows=rows).encode("train", tokenizer, 128)
    for number, pair in ((0, ("Clouds came.", "It rained.")), (1, ("It rained.", "Clouds came."))):
        assert features[number]["input_ids"][1] == tokenizer(*pair)["input_ids"]
    assert features["labels"][:] == [1, 1]


@pytest.mark.parametrize(
    ("noun", "pronoun", "expected"),
    [
        ((0, 10), (0, 3), "* # his # mother * ran"),
        ((0, 10), (4, 10), "* his # mother # * ran"),
        ((0, 14), (4, 10), "* his # mother # ran *"),
        ((4, 10), (0, 3), "# his # * mother * ran"),
        ((0, 3), (3, 10), "* his *#  mother # ran"),
    ],
)
def test_marks_of_spans_within_one_another(noun, pronoun, expected):
    assert superglue.mark_spans("his mother ran", [(*noun, "*"), (*pronoun, "#")]) == expected


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
    """Labels are numbered as the task does, whatever their order in the model; diagnostics are splits of RTE."""
    task_name, split = ("rte", name) if name in superglue.DIAGNOSTICS else (name, "test")
    labels = superglue.TASKS[name].labels
    task = made(task_name, split, Dataset.from_dict({"idx": [5, 6], "label": list(labels[:2])}))
    predictions = LabelPredictions(np.eye(len(labels))[[-1, -2]], labels[::-1])
    task.write(tmp_path, split, predictions)
    assert read_json_lines(tmp_path / f"{file}.jsonl") == [{"idx": 5, "label": first}, {"idx": 6, "label": second}]
    assert len([*tmp_path.iterdir()]) == 1
    if name != "axg":  # whose metrics need pairs
        assert task.metrics(split, predictions)[superglue.TASKS[name].metrics[0]] == pytest.approx(1)


def test_a_diagnostic_is_predicted_without_test_rows(tmp_path):
    files = {name: write_json_lines(tmp_path / f"{name}.jsonl", [ROWS[name]] * 2) for name in ("rte", "axb")}
    data_args = superglue.SuperGlueArguments(task_name="rte", train_file=files["rte"], axb_file=files["axb"])
    arguments = FineTuningArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    task = superglue.SuperGlue(ModelArguments("model"), data_args, arguments)
    read_rows(task)
    assert arguments.do_predict and prediction_splits(task) == ["axb"]


def test_submission_of_multirc(tmp_path):
    predicted = LabelPredictions(np.array([[0.0, 1], [1, 0], [1, 0]]), superglue.FALSE_TRUE)
    made("multirc").write(tmp_path, "train", predicted)
    (line,) = read_json_lines(tmp_path / "MultiRC.jsonl")
    questions = [
        {"idx": 9, "answers": [{"idx": 30, "label": 1}, {"idx": 31, "label": 0}]},
        {"idx": 10, "answers": [{"idx": 32, "label": 0}]},
    ]
    assert line == {"idx": 4, "passage": {"questions": questions}}
