"""Multiple choice: RACE and SWAG files, the text of a choice, inputs, collator, metrics, predictions, invalid input."""

import json

import pytest
from datasets import Dataset

from hf_deberta.fine_tuning.tasks.race import (
    ChoiceArguments,
    MultipleChoice,
    flatten_articles,
    join_question_and_option,
    read_choice_rows,
    read_choices,
)
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.data_files import Source
from hf_deberta.training.errors import InputError

ARTICLE = "One morning  Ann\nwent to the harbour.\n\nShe met a very old sailor there."
QUESTIONS = ["Who was old?", "Ann went _ ."]
OPTIONS = [["Ann", "a sailor", "the harbour"], ["home", "to the harbour", "to school"]]
FLAT = [
    {"example_id": "high1.txt", "article": ARTICLE, "question": question, "options": options, "answer": "B"}
    for question, options in zip(QUESTIONS, OPTIONS, strict=True)
]
LINE = "One morning Ann went to the harbour. She met a very old sailor there."
EXPECTED = [
    {"id": "high1.txt", "context": LINE, "choices": [f"{question} {option}" for option in options]}
    for question, options in zip(QUESTIONS, OPTIONS, strict=True)
]
RELEASED = {"id": "high1.txt", "article": ARTICLE, "questions": QUESTIONS, "options": OPTIONS, "answers": ["B", "B"]}
SWAG = [
    {"id": "s1", "sent1": "Ann sits down.", "sent2": "She", "ending0": "eats.", "ending1": "flies.", "label": 0},
    {"id": "s2", "sent1": "Why is it dark?", "sent2": "", "ending0": "Sun.", "ending1": "Night.", "label": 1},
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([ARTICLE, *QUESTIONS, *OPTIONS[0], *OPTIONS[1]] * 20, 300, "bpe")


# Rows


@pytest.mark.parametrize(
    ("file", "rows"), [("RACE/high/1.txt", [RELEASED]), ("articles.jsonl", [RELEASED]), ("questions.jsonl", FLAT)]
)
def test_race_formats(tmp_path, file, rows):
    """The first is in a folder of the release."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rows = read_choices(tmp_path / file.partition("/")[0])
    found, answers = read_choice_rows(*flatten_articles(rows, Source("train")))
    assert list(found) == EXPECTED and list(answers) == [1, 1]


def read(rows, split="train", **options):
    return read_choice_rows(rows if isinstance(rows, Dataset) else Dataset.from_list(rows), Source(split), **options)


def test_swag(tmp_path):
    Dataset.from_list(SWAG).to_csv(tmp_path / "swag.csv")
    source = Source("train", {"swag.csv": 2})
    rows, answers = read_choice_rows(read_choices(tmp_path / "swag.csv"), source)
    assert list(rows) == [
        {"id": "s1", "context": "Ann sits down.", "choices": ["She eats.", "She flies."]},
        {"id": "s2", "context": "Why is it dark?", "choices": ["Sun.", "Night."]},
    ]
    assert list(answers) == [0, 1]


@pytest.mark.parametrize("endings", [("None", "NA"), ("4", "5")])
def test_missing_values_and_numbers_are_text(tmp_path, endings):
    changed = {"sent1": "NA", "ending0": endings[0], "ending1": endings[1]}
    Dataset.from_list([{**row, **changed} for row in SWAG]).to_csv(tmp_path / "swag.csv")
    rows, _ = read(read_choices(tmp_path / "swag.csv"))
    assert rows["context"][0] == "NA" and rows["choices"][1] == list(endings)


def test_endings_are_in_the_order_of_their_numbers():
    endings = {f"ending{i}": f"e{i}" for i in (10, 2, 1, 0, 9, 3, 4, 5, 6, 7, 8)}
    row = {"sent1": "a", "sent2": "b", **endings, "label": 10}
    rows, answers = read([row])
    assert answers == [10] and rows[0]["choices"] == [f"b e{i}" for i in range(11)] and rows[0]["id"] == "0"


def test_blanks():
    assert join_question_and_option("The ___ is \\1 _ .", "old \\1 man", True) == "The old \\1 man is \\1 old \\1 man ."
    assert join_question_and_option("Ann went _ .", "home") == "Ann went _ . home"
    assert join_question_and_option("_ went home.", "Ann") == "went home. Ann"  # as in the official code
    assert join_question_and_option("Who?", "") == join_question_and_option("Who?", "", True) == "Who?"
    assert read(FLAT, fill_blanks=True)[0][1]["choices"][0] == "Ann went home ."


@pytest.mark.parametrize("answers", [["C", " A ", "B"], ["2", "0", "1"], [2, 0, 1], [2.0, 0.0, 1.0]])
def test_answers(answers):
    """They are letters, or numbers from 0 on."""
    assert list(read([{**FLAT[0], "answer": answer} for answer in answers])[1]) == [2, 0, 1]


@pytest.mark.parametrize("answer", ["D", "AB", 3, "the first", "5", 1.5, True, "b"])
def test_answers_that_no_choice_has(answer):
    with pytest.raises(InputError, match="train row 1: unknown labels in the column 'answer': .* A, B, C, or 0 to 2"):
        read([{**FLAT[0], "answer": answer}])


def test_rows_without_answers():
    """The column is missing, or -1 as in the test split of SWAG."""
    without = Dataset.from_list(FLAT).remove_columns("answer")
    hidden = [{**row, "label": -1} for row in SWAG]
    assert read(without, "test")[1] is None and list(read(hidden, "test")[1]) == [-1, -1]
    with pytest.raises(InputError, match="validation rows .* 'answer'; .* example_id, article"):
        read(without, "validation")
    with pytest.raises(InputError, match="train rows 1, 2: no label in the column 'label'"):
        read(hidden)
    task = MultipleChoice(None, ChoiceArguments(), None)
    for row, labelled in ((SWAG[1], True), ({**SWAG[1], "label": None}, False)):
        task.sources = {"test": Source("test")}
        task.rows = task.read({"test": Dataset.from_list([SWAG[0], row])})
        assert task.has_labels("test") == labelled


def test_rows_of_anli():
    row = {"observation_1": "Ann left.", "observation_2": "It  rained.", "hypothesis_1": "wet", "hypothesis_2": "dry"}
    [found], answers = read([{**row, "label": 2}])
    assert found == {"id": "0", "context": "Ann left. It rained.", "choices": ["wet", "dry"]} and list(answers) == [1]
    assert read([row], "test")[1] is None
    with pytest.raises(InputError, match="train row 1: unknown labels in the column 'label': 0; known are 1, 2"):
        read([{**row, "label": 0}])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "x"}], r"train rows .* 'ending1', 'label'; .* text\."),
        ([{**FLAT[0], "options": "a, b"}], "row 1: options must be a list, .* 'a, b'"),
        ([FLAT[0], {**FLAT[1], "options": []}], "row 2: a question needs 2 to 26 choices, not 0"),
        ([{**FLAT[0], "options": ["x"] * 27}], "row 1: .* not 27"),
        ([{**SWAG[0], "ending1": None}], "row 1: .* not 1"),
        ([{**SWAG[0], "ending2": "x"}, {**SWAG[1], "ending2": None}], "row 2: 2 choices, but most rows have 3"),
    ],
)
def test_rows_that_are_no_choices(rows, message):
    with pytest.raises(InputError, match=message):
        read(rows)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("high/1.txt", "hello", "high/1.txt, line 1, column 1: not valid JSON"),
        ("high/2.txt", '{"article": "a"}', "2.txt: questions must be a list, not null or missing"),
        ("high/3.txt", json.dumps({**RELEASED, "answers": ["B"]}), "2 questions, 2 lists of options and 1 answers"),
        ("high/1.doc", "", "no article of RACE.* high/1.txt"),
    ],
)
def test_invalid_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_choices(path.parent if "high" in name else path)


# Inputs


def encode_choices(rows: list[dict], tokenizer, length: int, split: str = "train") -> tuple[Dataset, Dataset]:
    """Return the inputs, and the rows as they were read."""
    task = MultipleChoice(None, ChoiceArguments(), None)
    task.sources = {split: Source(split)}
    task.rows = task.read({split: Dataset.from_list(rows)})
    return task.encode(split, tokenizer, length), task.rows[split]


def test_inputs_are_article_question_and_choice(tokenizer):
    features, rows = encode_choices(FLAT, tokenizer, 128)
    assert set(features.column_names) == {*tokenizer.model_input_names, "labels"}
    for row, inputs in zip(rows, features, strict=True):
        assert inputs["labels"] == 1
        for number, choice in enumerate(row["choices"]):
            expected = tokenizer(row["context"], choice)
            assert {name: inputs[name][number] for name in expected} == dict(expected)
    without = [{name: row[name] for name in row if name != "answer"} for row in FLAT]
    assert "labels" not in encode_choices(without, tokenizer, 128, "test")[0].column_names


def test_articles_are_truncated_and_choices_are_not(tokenizer, caplog):
    raw = [*FLAT, {**FLAT[0], "article": "Ann"}]
    complete, rows = encode_choices(raw, tokenizer, 128)
    longest = max(len(ids) for row in complete["input_ids"][:] for ids in row)
    encode_choices(raw, tokenizer, longest + 1)
    assert "are truncated" not in caplog.text
    for length in (40, 20):  # at 20 a choice is longer than what is left of its article
        features, _ = encode_choices(raw, tokenizer, length)
        assert f"2 of 3 inputs fill --max_seq_length {length}; longer ones are truncated" in caplog.text
        for cut, full, row in zip(features, complete, rows, strict=True):
            for ids, all_ids, choice in zip(cut["input_ids"], full["input_ids"], row["choices"], strict=True):
                kept = len(tokenizer(choice, add_special_tokens=False)["input_ids"]) + 2
                assert len(ids) == min(length, len(all_ids))
                assert ids[-kept:] == all_ids[-kept:] and ids[:-kept] == all_ids[: len(ids) - kept]


def test_a_choice_longer_than_the_input(tokenizer):
    rows = [FLAT[0], {**FLAT[1], "options": ["a sailor " * 30] * 3}]
    with pytest.raises(InputError, match=r"choice of 'high1.txt' has \d+ tokens .* 32 leaves room for 28"):
        encode_choices(rows, tokenizer, 32)
