"""GLUE and a user's own rows: the task that is inferred, targets, inputs, submission files."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from fine_tuning_models import encode_texts

from hf_deberta.fine_tuning.task import LabelPredictions
from hf_deberta.fine_tuning.tasks import glue
from hf_deberta.fine_tuning.tasks.expand_rows import with_numbers
from hf_deberta.fine_tuning.tasks.labels import read_targets
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.data_files import Source, read_table
from hf_deberta.training.errors import InputError, RowError

WORDS = "the cat sat on a mat while many old birds sang in some tall trees"
PAIR = {"sentence1": ["a"], "sentence2": ["b"]}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([WORDS] * 5, 300, "bpe")


@pytest.fixture
def encode(tokenizer):
    """Return a function that returns the inputs for a task, its name, or labels of one text column."""

    def encode_rows(task, data, split="train", model_labels=None, length=16):
        if not isinstance(task, glue.GlueTask):
            own = glue.GlueTask("classification" if task else "regression", ("text",), task)
            task = glue.TASKS[task] if isinstance(task, str) else own
        data = data if isinstance(data, Dataset) else rows(**data)
        return encode_texts(data, split, task, tokenizer, length, model_labels or task.labels)

    return encode_rows


def rows(**columns) -> Dataset:
    return Dataset.from_dict(columns)


def infer(data, source=Source("train"), **options) -> glue.GlueTask:  # noqa: B008  # it is frozen
    return glue.infer_task(data if isinstance(data, Dataset) else rows(**data), source, **options)


def class_labels(values: list, names: list[str], wrap=lambda feature: feature) -> Dataset:
    features = Features({"text": Value("string"), "label": wrap(ClassLabel(names=names))})
    return Dataset.from_dict({"text": ["a"] * len(values), "label": values}, features)


def texts(*labels) -> dict[str, list]:
    return {"text": ["a"] * len(labels), "label": list(labels)}


# The task of a user's own rows


@pytest.mark.parametrize(
    ("data", "options", "columns", "labels"),
    [
        (texts("yes", "no"), {}, ("text",), ("no", "yes")),
        (texts(True, False), {}, ("text",), ("False", "True")),
        (texts(0, 1, 2), {}, ("text",), ("LABEL_0", "LABEL_1", "LABEL_2")),
        (texts(1, 5), {}, ("text",), ("1", "5")),
        (texts(-1, 1), {}, ("text",), ("-1", "1")),
        (texts(0.5, 2.0), {}, ("text",), None),
        (texts(1, 5), {"regression": True}, ("text",), None),
        (texts(1.0, 2.0), {"regression": False}, ("text",), ("1", "2")),
        (texts("1,5", "2,0"), {"regression": False}, ("text",), ("1,5", "2,0")),
        (class_labels([1], ["bad", "good"]), {}, ("text",), ("bad", "good")),
        ({"id": ["x", "y"], **texts("a", "b")}, {"columns": ["id"]}, ("id",), ("a", "b")),
        (texts(["red"], []), {}, ("text",), ("red",)),
    ],
)
def test_infer_task(data, options, columns, labels):
    task = infer(data, **options)
    assert (task.columns, task.labels) == (columns, labels)


CODES = ["x", "y"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["a"], ("a",)),
        (["comment", "sentence2", "sentence1"], glue.SENTENCE_COLUMNS),
        (["hypothesis", "premise"], glue.NLI_COLUMNS),
        (["idx", "guid", "a", "ID", "example_id"], ("a",)),
    ],
)
def test_text_columns(columns, expected):
    data = rows(**dict.fromkeys(columns, CODES), year=[1, 2], tags=[["x"]] * 2, label=["no", "yes"])
    assert glue.choose_text_columns(data, Source("train"), "label") == expected


@pytest.mark.parametrize("columns", [["a", "label_text"], ["a", "b", "c"], ["example_id"], []])
def test_ambiguous_text_columns(columns):
    texts = ", ".join(name for name in columns if name != "example_id")
    data = rows(**dict.fromkeys(columns, CODES), label=[0, 1])
    with pytest.raises(InputError, match=rf"text \({texts}\).*--text_column_names"):
        glue.choose_text_columns(data, Source("train"), "label")


@pytest.mark.parametrize("kind", ["large_string", "string_view"])
def test_columns_of_other_kinds_of_strings(kind):
    task = infer(rows(**texts("yes", "no")).cast(Features({"text": Value(kind), "label": Value(kind)})))
    assert (task.columns, task.labels) == (("text",), ("no", "yes"))


def test_labels_that_may_be_mistakes(caplog):
    """Whole decimals give a warning."""
    assert infer(texts(0.0, 1.0)).labels is None and "--do_regression false" in caplog.text


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        (["3.50", "4"], None),
        (["007", "012"], ("007", "012")),
        (["+1", "-1"], ("+1", "-1")),
        (["True", "False"], ("False", "True")),
    ],
)
def test_labels_of_csv_that_numbers_would_change(tmp_path, fields, labels):
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"a b,{field}\n" for field in fields))
    source = Source("train", {"train.csv": len(fields)})
    train = with_numbers(read_table(tmp_path / "train.csv"), ["label"], source)
    task = infer(train, source)
    assert task.labels == labels
    targets = read_targets(train, source, task.labels)
    assert list(targets) == (list(map(float, fields)) if labels is None else list(map(labels.index, fields)))


def test_a_cell_that_is_no_number_among_numbers(tmp_path):
    """It would make a class of each number. Names, versions and whole numbers may be labels, also beside each other."""

    def labels_of(*labels, **options):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": "a b", "label": x}) + "\n" for x in labels))
        return infer(read_table(tmp_path / "train.jsonl"), **options).labels

    half, whole = [str(n / 2) for n in range(12)], [str(n % 4) for n in range(12)]
    for odd in ("nan", "NA", "null", "None", "-", "1,5"):
        for numbers in (half,) if odd == "1,5" else (half, whole):
            with pytest.raises(InputError, match=f"row 3: '{odd}' in .*--do_regression false"):
                labels_of(*numbers[:2], odd, *numbers[2:])
            assert odd in labels_of(*numbers, odd, regression=False)
    for labels in ("1.0 2.0 3.0", "1.0 2.0 other", "yes no -", "1.2 2.5 beta new", "1 2 2.5 other", "1 -", "nan yes 1"):
        assert set(labels_of(*12 * labels.split())) == set(labels.split())


# Targets


@pytest.mark.parametrize("order", [glue.THREE_WAY_ENTAILMENT, ("contradiction", "entailment", "neutral")])
def test_targets_are_in_the_order_of_the_model(encode, order):
    """Rows number labels as GLUE does; -1 is a hidden label, which the loss ignores."""
    names = ["contradiction", "entailment", "neutral"]
    pairs = {"premise": ["a"] * 3, "hypothesis": ["b"] * 3}
    assert encode("mnli", {**pairs, "label": names}, "train", order)["labels"] == [order.index(x) for x in names]
    numbers = encode("mnli", {**pairs, "label": [2, 0, -1]}, "test", order)["labels"]
    assert numbers == [order.index("contradiction"), order.index("entailment"), -100]


@pytest.mark.parametrize(
    ("labels", "values", "expected"),
    [
        (("no", "yes"), [1.0, 0.0, None], [1, 0, -100]),
        (("1", "2"), [2.0, 1.0, None], [1, 0, -100]),
        (("a", "b"), ["1", "0", ""], [1, 0, -100]),
        (("-1", "1"), [1, -1], [1, 0]),  # names that look like numbers, and -1 is one
        (("1", "5"), [1, 5], [0, 1]),
        (("LABEL_0", "LABEL_1"), [True, False], [1, 0]),
        (("False", "True"), [True, False], [1, 0]),
        (None, ["1.5", "2"], [1.5, 2.0]),
        (None, [2], [2.0]),
    ],
)
def test_targets(encode, labels, values, expected):
    assert encode(labels, texts(*values), "test")["labels"] == expected


def test_class_labels_have_names(encode):
    """A ClassLabel counts from 0, also if its names are numbers; the names win over another order of the labels."""
    assert encode(("1", "2", "3"), class_labels([0, 1, 2], ["1", "2", "3"]))["labels"] == [0, 1, 2]
    assert encode(("-1", "1"), class_labels([0, 1, -1], ["-1", "1"]), "test")["labels"] == [0, 1, -100]
    assert encode(("pos", "neg"), class_labels([0, 1], ["neg", "pos"]))["labels"] == [1, 0]
    assert encode(("POS", "NEG"), class_labels([0, 1], ["neg", "pos"]))["labels"] == [1, 0]
    assert encode(("no", "NO", "on"), class_labels([0, 1, 2], ["NO", "no", "On"]))["labels"] == [1, 0, 2]
    # of a split without some of the classes, whose others have other numbers
    assert encode(("1", "2", "3"), class_labels([0, 1], ["1", "3"]))["labels"] == [0, 2]
    with pytest.raises(InputError, match="'mixed'; known are neg, pos$"):
        encode(("neg", "pos"), class_labels([0, 1], ["mixed", "neg"]))


def label_lists(*lists) -> Dataset:
    return Dataset.from_dict(texts(*lists))


@pytest.mark.parametrize(
    ("train", "names"),
    [
        (label_lists(["red", "big"], [], ["old"]), ("big", "old", "red")),
        (label_lists([2, 1], [], [0]), ("LABEL_0", "LABEL_1", "LABEL_2")),
        (label_lists([7, 3], [], [5]), ("3", "5", "7")),
        (class_labels([[2, 0], [], [1]], ["x", "y", "z"], List), ("x", "y", "z")),
    ],
    ids=["names", "numbers", "numbers not from zero", "ClassLabel"],
)
def test_lists_of_labels(encode, train, names):
    """They become a 0 or 1 for each label, in the model's order."""
    task = infer(train)
    assert (task.labels, task.metric) == (names, "multi_label")
    inputs = encode(task, train, model_labels=names[::-1])
    number = {value: index for index, value in enumerate(sorted({v for row in train["label"] for v in row}))}
    by_hand = [[float(2 - c in {number[value] for value in row}) for c in range(3)] for row in train["label"]]
    assert inputs["labels"][:] == by_hand and inputs.features["labels"].feature.dtype == "float64"


@pytest.mark.parametrize("label", [[["red"], None], [None], "no column"], ids=str)
def test_multi_label_test_rows_without_labels(encode, label):
    data = {"text": ["a"] * len(label)} if label == "no column" else texts(*label)
    task = glue.GlueTask("multi_label", ("text",), ("big", "red"))
    assert "labels" not in encode(task, data, "test").column_names


MULTI_LABEL = glue.GlueTask("multi_label", ("text",), ("big", "old", "red"))


@pytest.mark.parametrize(
    ("task", "data", "split", "message"),
    [
        ("rte", {**PAIR, "label": ["maybe"]}, "validation", "row 1: .*: 'maybe'; .* entailment, not_entailment"),
        ("rte", {**PAIR, "label": [2]}, "train", ": 2; known are entailment, not_entailment"),
        ("mrpc", {"sentence1": ["a"], "label": [1]}, "train", "'sentence2'.* sentence1, label: .*--text_column_names"),
        ("mrpc", PAIR, "train", "'label'; .*sentence1, sentence2: .*--label_column_name"),
        (("-1.5", "1.0"), texts(0), "validation", ": 0; .* -1.5, 1.0$"),
        (("a", "b"), texts(1.5), "test", r": 1\.5; .*--label_column_name"),
        (("a", "b"), texts([0, 1], [1]), "train", r"\[0, 1\] in row 1 of the column 'label'"),
        (None, texts(1.0, math.inf), "test", "row 2: .* 'label': inf"),
        (None, texts("1", "entailment"), "test", "row 2: .*'entailment'; .* numbers"),
        (("0", "1"), {"text": [["the", "cat"]], "label": [0]}, "train", r"\['the', 'cat'\] in row 1 of .* 'text'"),
        (("a", "b"), {"text": [b"a"], "label": ["a"]}, "test", "b'a' in row 1 of the column 'text'"),
        (MULTI_LABEL, texts(["red"], ["blue"]), "validation", "'blue'; .* big, old, red"),
        (MULTI_LABEL, texts(["red"], None), "validation", "row 2: no label"),
        (MULTI_LABEL, texts("red"), "validation", "list of labels.* 'red'"),
        (MULTI_LABEL, texts(["red"], [None]), "validation", "row 2"),
    ],
)
def test_rows_that_do_not_fit_the_task(encode, task, data, split, message):
    with pytest.raises(InputError, match=message) as error:
        encode(task, data, split)
    assert f"{split} row" in str(error.value)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({"text": ["a b"], "verdict": ["x"]}, {}, "'label'; .* text, verdict: name"),
        (texts("yes", "yes"), {}, "2 train rows .*'yes' .*'label'"),
        (texts([], []), {}, "no row has labels in the column 'label'"),
        (texts([1], [0, 1, 0]), {}, r"\[0, 1, 0\]"),
        (texts([0, 1], [1, 0]), {}, r"\[0, 1\]"),
        (texts([0.0, 1.0]), {}, "lists of names or integers"),
        (texts("[]", "['red', 'old']"), {}, "'label' are such as '\\[\\]': write lists to jsonl"),
        (texts("1,5", "-2,0"), {}, "'1,5': .*numbers with a point; .*--do_regression false"),
    ],
)
def test_rows_without_a_task(data, options, message):
    with pytest.raises(InputError, match=message):
        infer(data, **options)


@pytest.mark.parametrize(
    ("name", "label"),
    [("sst2", [1, None]), ("sst2", ["positive", " "]), ("stsb", [0.5, None]), ("stsb", [0.5, math.nan])],
)
def test_rows_without_labels(encode, caplog, name, label):
    data = rows(sentence=["a", "b"], sentence1=["a", "b"], sentence2=["a", "b"], label=label)
    with pytest.raises(InputError, match="^train row 2: no label in the column 'label': add"):
        encode(name, data)
    caplog.clear()
    assert len(encode(name, data, "test")) == 2
    assert "test row 2: no label in the column 'label': the predictions are" in caplog.text
    with pytest.raises(InputError, match="row 2"):
        infer(data, columns=["sentence"])


@pytest.mark.parametrize(
    ("labels", "values", "is_named"), [("abc", "ab", True), ("abc", "abc", False), ("ab", "a", False)]
)
def test_labels_that_no_row_has_are_named(encode, caplog, labels, values, is_named):
    """F1 is the mean over classes, of which scikit-learn leaves out those that occur nowhere."""
    encode(tuple(labels), texts(*values), "validation")
    assert ("No validation row has these labels: c; f1 leaves them out" in caplog.text) == is_named
    caplog.clear()
    encode(tuple(labels), texts("a", None), "test")
    assert "f1 leaves" not in caplog.text  # without all labels it is not computed


# Inputs


def test_inputs_are_truncated_with_a_warning(encode, tokenizer, caplog):
    inputs = encode("cola", {"sentence": [WORDS * 3, "the cat"], "label": [1, 0]}, length=12)
    assert "1 of 2 inputs fill --max_seq_length 12" in caplog.text
    assert len(inputs[0]["input_ids"]) == 12 < len(tokenizer(WORDS * 3)["input_ids"])


def test_numbers_and_missing_texts(encode, tokenizer, caplog):
    """A number is a text, and a missing text an empty one, with a warning."""
    data = rows(title=["the cat", None], year=[1999, 0], label=[0, 1])
    inputs = encode(infer(data, columns=["title", "year"]), data)
    assert inputs["labels"][:] == [0, 1] and "title" not in inputs.column_names
    assert inputs["input_ids"][:] == [tokenizer("the cat", "1999")["input_ids"], tokenizer("", "0")["input_ids"]]
    assert "train row 2: no text in the column 'title'; read as an empty text" in caplog.text
    glue.require_text_columns(data, ["year"], Source("train"), require_texts=True)
    with pytest.raises(RowError, match="row 2: no text in the column 'title'"):
        glue.require_text_columns(data, ["year", "title"], Source("train"), require_texts=True)


# Predictions


def write(folder, task, name, split, logits, labels) -> dict[str, list]:
    """Write the files of a benchmark; return the columns of the other files of predictions."""
    logits = LabelPredictions.from_logits(np.array(logits, dtype=np.float32), labels)
    made = glue.Classification(None, SimpleNamespace(name=name), None)
    made.task = task
    made.write(folder, split, logits)
    return made.prediction_columns(split, logits)


def test_prediction_files(tmp_path):
    """A submission has names or numbers of labels in the task's order, and numbers from 0 to 5."""
    model = ("contradiction", "entailment", "neutral")
    found = write(tmp_path, glue.TASKS["mnli"], "mnli", "test_mismatched", [[0, 2, 0], [3, 0, 0]], model)
    assert (tmp_path / "MNLI-mm.tsv").read_text() == "index\tprediction\n0\tentailment\n1\tcontradiction\n"
    assert (tmp_path / "predict_results_mnli_mismatched.txt").read_text().splitlines()[1] == "0\tentailment"
    assert found["prediction"][0] == "entailment" and sum(found["probabilities"][0].values()) == pytest.approx(1)
    write(tmp_path, glue.TASKS["sst2"], "sst2", "test", [[0, 2], [3, 0]], ("positive", "negative"))
    assert (tmp_path / "SST-2.tsv").read_text() == "index\tprediction\n0\t0\n1\t1\n"
    write(tmp_path, glue.TASKS["stsb"], "stsb", "test", [5.4, -0.2, 2.5], None)
    assert (tmp_path / "STS-B.tsv").read_text() == "index\tprediction\n0\t5.000\n1\t0.000\n2\t2.500\n"
