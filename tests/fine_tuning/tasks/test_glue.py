"""GLUE: labels, inputs, submission files."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from fine_tuning_models import encode_texts

from hf_deberta.fine_tuning.task import LabelLogits
from hf_deberta.fine_tuning.tasks import glue
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.runs.data_files import read_table, source_of
from hf_deberta.runs.errors import InputError, input_errors

WORDS = "the cat sat on a mat while many old birds sang in some tall trees"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([WORDS] * 5, 300, "bpe")


def rows(**columns) -> Dataset:
    return Dataset.from_dict(columns)


def test_pairs_are_encoded_as_pairs(tokenizer):
    task = glue.TASKS["rte"]
    data = rows(sentence1=["the cat"], sentence2=["a mat"], label=[1])
    inputs = encode_texts(data, "train", task, tokenizer, 32, task.labels)
    assert inputs[0]["input_ids"] == tokenizer("the cat", "a mat")["input_ids"]
    assert inputs[0]["labels"] == 1
    assert "sentence1" not in inputs.column_names


def test_inputs_are_truncated_with_a_warning(tokenizer, caplog):
    task = glue.TASKS["cola"]
    data = rows(sentence=[WORDS * 3, "the cat"], label=[1, 0])
    inputs = encode_texts(data, "train", task, tokenizer, 12, task.labels)
    assert "1 of 2 inputs fill --max_seq_length 12" in caplog.text
    assert len(inputs[0]["input_ids"]) == 12 < len(tokenizer(WORDS * 3)["input_ids"])


def test_labels_by_number_and_by_name(tokenizer):
    task = glue.TASKS["mnli"]
    texts = {"premise": ["a"] * 4, "hypothesis": ["b"] * 4}
    by_number = encode_texts(rows(**texts, label=[2, 0, 1, -1]), "test", task, tokenizer, 16, task.labels)
    assert by_number["labels"] == [2, 0, 1, -1]
    names = ["contradiction", "entailment", "neutral", "neutral"]
    by_name = encode_texts(rows(**texts, label=names), "train", task, tokenizer, 16, task.labels)
    assert by_name["labels"] == [2, 0, 1, 1]
    model = ("contradiction", "entailment", "neutral")  # the order of a checkpoint
    assert encode_texts(rows(**texts, label=names), "train", task, tokenizer, 16, model)["labels"] == [0, 1, 2, 2]
    numbers = rows(**texts, label=[2, 0, 1, -1])
    assert encode_texts(numbers, "test", task, tokenizer, 16, model)["labels"] == [0, 1, 2, -1]


def test_errors_name_the_file(tokenizer, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"sentence": "a", "label": "maybe"}\n')
    for task in (glue.TASKS["cola"], glue.TASKS["rte"]):
        with pytest.raises(InputError, match=r"train\.jsonl: the train rows have (unknown labels|no column)"):
            encode_texts(read_table(tmp_path / "train.jsonl"), "train", task, tokenizer, 16, task.labels)


def test_unknown_labels(tokenizer):
    task = glue.TASKS["rte"]
    data = rows(sentence1=["a"], sentence2=["b"], label=["maybe"])
    with pytest.raises(InputError, match="validation rows .* in row 1: 'maybe'; .* entailment, not_entailment"):
        encode_texts(data, "validation", task, tokenizer, 16, task.labels)
    with pytest.raises(InputError, match="train rows .*: 2; .* 0 to 1"):
        encode_texts(rows(sentence1=["a"], sentence2=["b"], label=[2]), "train", task, tokenizer, 16, task.labels)


def test_a_missing_column(tokenizer):
    task = glue.TASKS["mrpc"]
    with pytest.raises(InputError, match="train rows .* 'sentence2'.* sentence1, label: .*--text_column_names"):
        encode_texts(rows(sentence1=["a"], label=[1]), "train", task, tokenizer, 16, task.labels)
    data = rows(sentence1=["a"], sentence2=["b"])
    for split in ("train", "validation", "validation_matched"):
        with pytest.raises(InputError, match=rf"{split} rows have no column 'label' .*sentence1, sentence2: .*--label"):
            encode_texts(data, split, task, tokenizer, 16, task.labels)
    assert "labels" not in encode_texts(data, "test", task, tokenizer, 16, task.labels).column_names


def test_infer_task():
    task = glue.infer_task({"train": rows(text=["a", "b"], label=["yes", "no"], number=[1, 2])})
    assert (task.columns, task.labels) == (("text",), ("no", "yes"))
    flags = glue.infer_task({"train": rows(guid=["x", "y"], text=["a", "b"], label=[True, False])}, columns=["text"])
    assert (flags.columns, flags.labels) == (("text",), ("LABEL_0", "LABEL_1"))
    assert glue.infer_task({"train": rows(text=["a", "b"], label=[0.5, 2.0])}).labels is None
    three = glue.infer_task({"train": rows(a=["a"] * 3, b=["b"] * 3, label=[0, 1, 2])})
    assert three.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert glue.infer_task({"train": rows(text=["a", "b"], label=[1, 5])}).labels == ("1", "5")
    assert glue.infer_task({"train": rows(text=["a", "b"], label=[1, 5])}, regression=True).labels is None
    features = Features({"text": Value("string"), "label": ClassLabel(names=["bad", "good"])})
    with pytest.raises(InputError, match=r"train rows have no column 'label' of labels; they have text, verdict: name"):
        glue.infer_task({"train": rows(text=["a b"], verdict=["x"])})
    named = Dataset.from_dict({"text": ["a"], "label": [1]}, features)
    assert glue.infer_task({"train": named}).labels == ("bad", "good")
    pair = {"id": ["x", "y"], "sentence2": ["b", "c"], "sentence1": ["a", "d"], "label": ["c", "d"]}
    assert glue.infer_task({"train": rows(**pair)}).columns == ("sentence1", "sentence2")
    with pytest.raises(InputError, match=r"column of text besides label; they have x \(int64, not text\)"):
        glue.infer_task({"train": rows(label=[0], x=[1])})
    with pytest.raises(InputError, match=r"column of text besides label; they have no other"):
        glue.infer_task({"train": rows(label=["a b"])})


SENTENCES = ["a long film", "a short one", "a good film", "a bad one"]
CHINESE = ["2019年很好", "3天", "10元", "7点"]


@pytest.mark.parametrize(
    ("columns", "expected", "unread"),
    [
        ({"key": ["r0", "r1", "r2", "r3"], "a": SENTENCES, "b": SENTENCES}, ("a", "b"), "key (values without spaces"),
        ({"user": ["u1", "u1", "u2", "u2"], "a": SENTENCES}, ("a",), "user (values without spaces"),
        ({"a": SENTENCES, "year": [1, 2, 3, 4], "tags": [["x"]] * 4}, ("a",), "year (int64, not text), tags (List"),
        ({"sentence1": SENTENCES, "comment": SENTENCES, "sentence2": SENTENCES}, glue.SENTENCE_COLUMNS, "comment"),
        ({"a": SENTENCES, "b": ["", None, "", " "]}, ("a",), "b (empty)"),
        ({"word": ["cat", "dog", "bird", "fish"]}, ("word",), ""),
        ({"aspect": ["food", "food", "price", "food"], "a": SENTENCES}, ("aspect", "a"), ""),
        ({"a": CHINESE, "b": CHINESE[::-1]}, ("a", "b"), ""),
        ({"label_text": ["no", "yes", "no", "yes"], "a": SENTENCES}, ("a",), "label_text (one value for each label)"),
        ({"label_text": ["no", "yes", "no", "yes"]}, ("label_text",), ""),
    ],
)
def test_text_columns(columns, expected, unread, caplog):
    assert glue.choose_text_columns(rows(**columns, label=[0, 1, 0, 1]), "train", "label") == expected
    assert unread in caplog.text and ("not read" in caplog.text) == bool(unread)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": SENTENCES, "b": SENTENCES, "c": SENTENCES}, "3 columns of text: a, b, c; .*--text_column_names"),
        (
            {"name": ["ann", "bob", "eve", "joe"], "a": SENTENCES},
            "distinct single words in the column 'name'.* name, a",
        ),
        ({"x": ["r0", "r1", "r2", "r3"], "y": [0, 1, 2, 3]}, r"no column of text .* x \(.*identifiers\), y \(int64"),
        ({"example_id": ["x", "y", "z", "w"]}, "no column of text"),
    ],
)
def test_ambiguous_text_columns(columns, message):
    with pytest.raises(InputError, match=message):
        glue.choose_text_columns(rows(**columns, label=[0, 1, 0, 1]), "train", "label")


def test_labels_that_may_be_mistakes(caplog):
    """One label is an error. Spellings of one label, very many labels and whole decimals give a warning."""
    texts = [f"text number {i}" for i in range(400)]
    with pytest.raises(InputError, match="2 train rows have only the label 'yes' in the column 'label'"):
        glue.infer_task({"train": rows(text=texts[:2], label=["yes", "yes"])})
    glue.infer_task({"train": rows(text=texts[:4], label=["yes", "no", "maybe", "Maybe not"])})
    assert not caplog.text
    glue.infer_task({"train": rows(text=texts[:4], label=["neutral", "neutral ", "Yes", "no"])})
    assert "labels 'neutral', 'neutral ' in the column 'label' differ only in case or spaces" in caplog.text
    glue.infer_task({"train": rows(text=texts, label=[i % 199 for i in range(400)])})
    assert "has 199 different labels in 400 rows: LABEL_0, LABEL_1, LABEL_2," in caplog.text
    assert "LABEL_9 and 189 more." in caplog.text and "LABEL_10," not in caplog.text
    caplog.clear()
    assert glue.infer_task({"train": rows(text=texts[:2], label=[0.0, 1.0])}).labels is None
    assert "--do_regression false" in caplog.text


def test_a_cell_that_is_no_number_among_numbers(tmp_path):
    """It would make a class of each number. Names, versions and whole numbers may be labels, also beside each other."""

    def labels_of(*labels, **options):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": "a b", "label": x}) + "\n" for x in labels))
        train = read_table(tmp_path / "train.jsonl")
        with input_errors(source_of(train, "train")):
            return glue.infer_task({"train": train}, **options).labels

    half, whole = [str(n / 2) for n in range(12)], [str(n % 4) for n in range(12)]
    for odd in ("nan", "NA", "null", "None", "-", "1,5"):
        for numbers in (half,) if odd == "1,5" else (half, whole):
            with pytest.raises(InputError, match=f"train.jsonl: .* have '{odd}' in row 3 .*; .* --do_regression false"):
                labels_of(*numbers[:2], odd, *numbers[2:])
            assert odd in labels_of(*numbers, odd, regression=False)
    for labels in ("1.0 2.0 3.0", "1.0 2.0 other", "yes no -", "1.2 2.5 beta new", "1 2 2.5 other", "1 -", "nan yes 1"):
        assert set(labels_of(*12 * labels.split())) == set(labels.split())


@pytest.mark.parametrize("name", ["id", "idx", "guid", "ID", "example_id"])
def test_columns_of_identifiers_are_no_texts(name):
    assert glue.infer_task({"train": rows(**{name: ["x", "y"]}, text=["a", "b"], label=[0, 1])}).columns == ("text",)
    named = glue.infer_task({"train": rows(**{name: ["x", "y"]}, text=["a", "b"], label=[0, 1])}, columns=[name])
    assert named.columns == (name,)


@pytest.mark.parametrize("task", [glue.TASKS["cola"], glue.GlueTask(("sentence",), None, ("pearson",))])
def test_lists_of_labels_in_a_task_with_one_label(tokenizer, task):
    data = rows(sentence=["a", "b"], label=[[0, 1], [1]])
    message = r"train rows have \[0, 1\] in row 1 of the column 'label'"
    with pytest.raises(InputError, match=message):
        glue.infer_task({"train": data}, regression=True)
    with pytest.raises(InputError, match=message):
        encode_texts(data, "train", task, tokenizer, 16, task.labels)


def rows_with_label_lists(labels: list, kind=None) -> Dataset:
    features = kind and Features({"text": Value("string"), "label": List(kind)})
    return Dataset.from_dict({"text": ["a"] * len(labels), "label": labels}, features)


@pytest.mark.parametrize(
    ("train", "names"),
    [
        (rows_with_label_lists([["red", "big"], [], ["old"]]), ("big", "old", "red")),
        (rows_with_label_lists([[2, 1], [], [0]]), ("LABEL_0", "LABEL_1", "LABEL_2")),
        (rows_with_label_lists([[7, 3], [], [5]]), ("3", "5", "7")),
        (rows_with_label_lists([[2, 0], [], [1]], ClassLabel(names=["x", "y", "z"])), ("x", "y", "z")),
    ],
    ids=["names", "numbers", "numbers not from zero", "ClassLabel"],
)
def test_lists_of_labels(tokenizer, train, names):
    """They become a 0 or 1 for each label, in the model's order."""
    task = glue.infer_task({"train": train})
    assert (task.labels, task.multi_label, task.metrics[0]) == (names, True, "f1_micro")
    backwards = names[::-1]
    inputs = encode_texts(train, "train", task, tokenizer, 16, backwards)
    number = {value: index for index, value in enumerate(sorted({v for row in train["label"] for v in row}))}
    by_hand = [[float(2 - c in {number[value] for value in row}) for c in range(3)] for row in train["label"]]
    assert inputs["labels"][:] == by_hand and inputs.features["labels"].feature.dtype == "float64"


def test_invalid_lists_of_labels(tokenizer):
    task = glue.infer_task({"train": rows_with_label_lists([["red"], ["big", "old"], []])})
    cases = [
        (rows_with_label_lists([["red"], ["blue"]]), "validation rows .*: 'blue'; .* big, old, red"),
        (rows_with_label_lists([["red"], None]), "1 of 2 validation rows"),
        (
            rows(text=["a"], label=["red"]),
            "list of labels .* validation rows have 'red'",
        ),
    ]
    for data, message in cases:
        with pytest.raises(InputError, match=message):
            encode_texts(data, "validation", task, tokenizer, 16, task.labels)
    for unlabelled in (rows_with_label_lists([["red"], None]), rows(text=["a"], label=[None]), rows(text=["a"])):
        assert "labels" not in encode_texts(unlabelled, "test", task, tokenizer, 16, task.labels).column_names
    with pytest.raises(InputError, match="train rows have no labels in the column 'label'"):
        glue.infer_task({"train": rows_with_label_lists([[], []])})
    for incomplete in ([["red"], [None]], [["red"], [" "]]):
        with pytest.raises(InputError, match="validation rows have unknown labels .* the first in row 2"):
            encode_texts(rows_with_label_lists(incomplete), "validation", task, tokenizer, 16, task.labels)
    with pytest.raises(InputError, match=r"train rows have \[0, 1, 0\] .* 0 or 1 for each label"):
        glue.infer_task({"train": rows_with_label_lists([[1], [0, 1, 0]])})
    for flags in (rows_with_label_lists([[0.0, 1.0]]), rows_with_label_lists([[False, True]])):
        with pytest.raises(InputError, match="lists of names or integers"):
            glue.infer_task({"train": flags})


def test_multi_label_predictions(tmp_path):
    task = glue.GlueTask(("text",), ("big", "old", "red"), glue.MULTI_LABEL_METRICS, multi_label=True)
    logits = np.array([[2.0, -1.0, 0.1], [-1.0, -2.0, -900.0]], dtype=np.float32)
    glue.write_glue_predictions(tmp_path, task, "own", "test", LabelLogits(logits, ("red", "big", "old"), True))
    table = (tmp_path / "predict_results_own.txt").read_text()
    assert table == "index\tprediction\n0\tred, old\n1\t\n"
    first, second = map(json.loads, (tmp_path / "predictions_own.jsonl").read_text().splitlines())
    assert (first["prediction"], second["prediction"]) == (["red", "old"], [])
    assert first["probabilities"]["big"] == pytest.approx(1 / (1 + math.e))


def test_a_column_of_numbers_is_text(tokenizer):
    data = rows(title=["the cat", None], year=[1999, 0], label=[0, 1])
    task = glue.infer_task({"train": data}, columns=["title", "year"])
    inputs = encode_texts(data, "train", task, tokenizer, 16, task.labels)
    assert inputs["input_ids"][:] == [tokenizer("the cat", "1999")["input_ids"], tokenizer("", "0")["input_ids"]]
    lists = rows(title=[["the", "cat"]], label=[0])
    with pytest.raises(InputError, match=r"train rows have \['the', 'cat'\] in row 1 of the column 'title'"):
        encode_texts(lists, "train", glue.GlueTask(("title",), ("0", "1"), ()), tokenizer, 16, ("0", "1"))


def test_numeric_labels_not_from_zero(tokenizer):
    data = rows(text=["a", "b"], label=[1, 5])
    task = glue.infer_task({"train": data})
    assert encode_texts(data, "train", task, tokenizer, 16, task.labels)["labels"] == [0, 1]


def test_configuration_of_the_metric():
    """Each task of GLUE has its own; own rows have that of their kind of labels."""
    for name, task in glue.TASKS.items():
        assert glue.metric_configuration(task) == name
    own = glue.GlueTask(("text",), ("a", "b"), glue.CLASS_METRICS)
    assert glue.metric_configuration(own) == "classification"
    assert glue.metric_configuration(replace(own, multi_label=True)) == "multi_label"
    assert glue.metric_configuration(replace(own, labels=None)) == "regression"


def test_prediction_files(tmp_path):
    logits = np.array([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    model = ("contradiction", "entailment", "neutral")
    glue.write_glue_predictions(tmp_path, glue.TASKS["mnli"], "mnli", "test_mismatched", LabelLogits(logits, model))
    assert (tmp_path / "MNLI-mm.tsv").read_text() == "index\tprediction\n0\tentailment\n1\tcontradiction\n"
    assert (tmp_path / "predict_results_mnli_mismatched.txt").read_text().splitlines()[1] == "0\tentailment"
    lines = (tmp_path / "predictions_mnli_mismatched.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    assert row["prediction"] == "entailment" and sum(row["probabilities"].values()) == pytest.approx(1)
    glue.write_glue_predictions(
        tmp_path, glue.TASKS["sst2"], "sst2", "test", LabelLogits(logits[:, :2], ("positive", "negative"))
    )
    assert (tmp_path / "SST-2.tsv").read_text() == "index\tprediction\n0\t0\n1\t1\n"
    glue.write_glue_predictions(
        tmp_path, glue.TASKS["stsb"], "stsb", "test", LabelLogits(np.array([5.4, -0.2, 2.5]), None)
    )
    assert (tmp_path / "STS-B.tsv").read_text() == "index\tprediction\n0\t5.000\n1\t0.000\n2\t2.500\n"


def test_labels_of_any_type(tokenizer):
    data = rows(text=["a", "b"], label=[True, False])
    task = glue.infer_task({"train": data})
    inputs = encode_texts(data, "train", task, tokenizer, 16, task.labels)
    assert inputs["labels"] == [1, 0] and inputs.features["labels"].dtype == "int64"
    numbers = glue.infer_task({"train": rows(text=["a"], label=[2])}, regression=True)
    assert encode_texts(rows(text=["a"], label=[2]), "train", numbers, tokenizer, 16, None)["labels"] == [2.0]


def test_labels_that_look_like_numbers(tokenizer):
    """They are names, and -1 may be one; a ClassLabel counts from 0, whatever its names are."""
    task = glue.infer_task({"train": rows(text=["a", "b"], label=[-1, 1])})
    assert encode_texts(rows(text=["a", "b"], label=[1, -1]), "train", task, tokenizer, 16, task.labels)["labels"] == [
        1,
        0,
    ]
    with pytest.raises(InputError, match="validation rows .*: 0; .* -1, 1$"):
        encode_texts(rows(text=["a"], label=[0]), "validation", task, tokenizer, 16, task.labels)
    features = Features({"text": Value("string"), "label": ClassLabel(names=["1", "2", "3"])})
    stars = Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 2]}, features)
    task = glue.infer_task({"train": stars})
    assert encode_texts(stars, "train", task, tokenizer, 16, task.labels)["labels"] == [0, 1, 2]


def test_rows_without_labels(tokenizer, caplog):
    cases = [("sst2", [1, None]), ("sst2", ["positive", " "]), ("stsb", [0.5, None]), ("stsb", [0.5, math.nan])]
    for name, label in cases:
        task = glue.TASKS[name]
        data = rows(sentence=["a", "b"], sentence1=["a", "b"], sentence2=["a", "b"], label=label)
        with pytest.raises(
            InputError, match="1 of 2 train rows have no label in the column 'label', the first is row 2"
        ):
            encode_texts(data, "train", task, tokenizer, 16, task.labels)
        caplog.clear()
        assert len(encode_texts(data, "test", task, tokenizer, 16, task.labels)) == 2
        assert "1 of 2 test rows have no label in the column 'label', the first is row 2: the pred" in caplog.text
        with pytest.raises(InputError, match="row 2"):
            glue.infer_task({"train": data}, columns=["sentence"])


def test_labels_of_a_regression_are_finite_numbers(tokenizer):
    task = glue.GlueTask(("text",), None, ("pearson",))
    numbers = rows(text=["a", "b"], label=["1.5", "2"])
    assert encode_texts(numbers, "train", task, tokenizer, 16, None)["labels"] == [1.5, 2.0]
    for labels in ([1.0, math.inf], ["1", "entailment"], ["0", "nan"]):
        with pytest.raises(InputError, match=r"test rows have .* in row 2 of the column 'label', but .* are numbers"):
            encode_texts(rows(text=["a", "b"], label=labels), "test", task, tokenizer, 16, None)


def test_numbers_in_other_types(tokenizer):
    """A csv column of integers with gaps is read as floats, and jsonl may hold strings."""
    for task, labels in (
        ((("no", "yes")), [1.0, 0.0, None]),
        (("1", "2"), [2.0, 1.0, None]),
        (("a", "b"), ["1", "0", ""]),
    ):
        task = glue.GlueTask(("text",), task, ("accuracy",))
        inputs = encode_texts(rows(text=["a", "b", "c"], label=labels), "test", task, tokenizer, 16, task.labels)
        assert inputs["labels"] == [1, 0, -1]
    with pytest.raises(InputError, match=r"unknown labels .*: 1\.5; .*another --label_column_name"):
        encode_texts(rows(text=["a"], label=[1.5]), "test", task, tokenizer, 16, task.labels)


def test_numbers_in_place_of_names(tokenizer, caplog):
    """A warning shows how they are read, except where GLUE defines the numbers."""
    own = glue.GlueTask(("sentence",), ("no", "yes"), ("accuracy",))
    data = rows(sentence=["a", "b"], label=[1, 0])
    assert encode_texts(data, "test", own, tokenizer, 16, own.labels)["labels"] == [1, 0]
    assert "labels of the test rows are numbers, and are read as 0 no, 1 yes." in caplog.text
    caplog.clear()
    numbered = glue.GlueTask(("sentence",), ("LABEL_0", "LABEL_1"), ("accuracy",))
    for task in (glue.TASKS["sst2"], numbered):
        encode_texts(data, "test", task, tokenizer, 16, task.labels)
    assert "are read as" not in caplog.text


def test_missing_texts_are_empty_with_a_warning(tokenizer, caplog):
    task = glue.GlueTask(("text",), ("a", "b"), ("accuracy",))
    encode_texts(rows(text=["a", " ", None], label=["a", "b", "a"]), "train", task, tokenizer, 16, task.labels)
    assert "train: 2 of 3 rows have no text in the column 'text', the first is row 2; they are read as" in caplog.text
    with pytest.raises(InputError, match=r"b'a' in row 1 of the column 'text', which must hold text"):
        encode_texts(rows(text=[b"a"], label=["a"]), "test", task, tokenizer, 16, task.labels)
