"""Multiple choice: RACE and SWAG files, the text of a choice, inputs, collator, metrics, predictions, invalid input."""

import json

import pytest
from datasets import Dataset

from hf_deberta.fine_tuning.tasks.race import (
    ChoiceArguments,
    MultipleChoice,
    answer_index,
    choice_rows,
    flatten_articles,
    join_question_and_option,
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
    {"id": "high1.txt", "context": LINE, "choices": [f"{question} {option}" for option in options], "label": 1}
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
    assert list(choice_rows(*flatten_articles(rows, Source("train")))) == EXPECTED


def test_swag(tmp_path):
    Dataset.from_list(SWAG).to_csv(tmp_path / "swag.csv")
    assert list(choice_rows(read_choices(tmp_path / "swag.csv"), Source("train"))) == [
        {"id": "s1", "context": "Ann sits down.", "choices": ["She eats.", "She flies."], "label": 0},
        {"id": "s2", "context": "Why is it dark?", "choices": ["Sun.", "Night."], "label": 1},
    ]


@pytest.mark.parametrize("endings", [("None", "NA"), ("4", "5")])
def test_missing_values_and_numbers_are_text(tmp_path, endings):
    changed = {"sent1": "NA", "ending0": endings[0], "ending1": endings[1]}
    Dataset.from_list([{**row, **changed} for row in SWAG]).to_csv(tmp_path / "swag.csv")
    rows = choice_rows(read_choices(tmp_path / "swag.csv"), Source("train"))
    assert rows["context"][0] == "NA" and rows["choices"][1] == list(endings)


def test_endings_are_in_the_order_of_their_numbers():
    endings = {f"ending{i}": f"e{i}" for i in (10, 2, 1, 0, 9, 3, 4, 5, 6, 7, 8)}
    row = {"sent1": "a", "sent2": "b", **endings, "label": 10}
    rows = choice_rows(Dataset.from_list([row]), Source("train"))
    assert rows[0]["choices"] == [f"b e{i}" for i in range(11)] and rows[0]["id"] == "0"


def test_blanks():
    assert join_question_and_option("The ___ is \\1 _ .", "old \\1 man", True) == "The old \\1 man is \\1 old \\1 man ."
    assert join_question_and_option("Ann went _ .", "home") == "Ann went _ . home"
    assert join_question_and_option("_ went home.", "Ann") == "went home. Ann"  # as in the official code
    assert join_question_and_option("Who?", "") == join_question_and_option("Who?", "", True) == "Who?"
    rows = choice_rows(Dataset.from_list(FLAT), Source("train"), fill_blanks=True)
    assert rows[1]["choices"][0] == "Ann went home ."


def test_answer_index():
    assert [answer_index(answer, 3) for answer in ("A", " C ", 2, "1")] == [0, 2, 2, 1]
    for answer in ("D", "AB", "", None, -1, 3, "the first", "5", 1.5, True):
        with pytest.raises(InputError, match="letter from A to C"):
            answer_index(answer, 3)


def test_rows_without_answers():
    """The column is missing, or -1 as in the test split of SWAG."""
    without = Dataset.from_list(FLAT).remove_columns("answer")
    hidden = Dataset.from_list([{**row, "label": -1} for row in SWAG])
    for rows in (without, hidden):
        assert choice_rows(rows, Source("test"), with_labels=False).column_names == ["id", "context", "choices"]
    assert choice_rows(Dataset.from_list(FLAT), Source("test"), with_labels=False)["label"][:] == [1, 1]
    with pytest.raises(InputError, match="validation rows .* 'answer'; .* example_id, article"):
        choice_rows(without, Source("validation"))
    with pytest.raises(InputError, match=r"train rows 1, 2: .* not -1"):
        choice_rows(hidden, Source("train"))


def test_rows_of_anli(tmp_path):
    row = {"observation_1": "Ann left.", "observation_2": "It  rained.", "hypothesis_1": "wet", "hypothesis_2": "dry"}
    [found] = choice_rows(Dataset.from_list([{**row, "label": 2}]), Source("train"))
    assert found == {"id": "0", "context": "Ann left. It rained.", "choices": ["wet", "dry"], "label": 1}
    assert "label" not in choice_rows(Dataset.from_list([row]), Source("test"), with_labels=False).column_names
    with pytest.raises(InputError, match="train row 1: the label must be 1 or 2, .* not 0"):
        choice_rows(Dataset.from_list([{**row, "label": 0}]), Source("train"))


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
        choice_rows(Dataset.from_list(rows), Source("train"))


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


def encode_choices(rows: Dataset, tokenizer, length: int) -> Dataset:
    task = MultipleChoice(None, ChoiceArguments(), None)
    task.rows = {"train": rows}
    return task.encode("train", tokenizer, length)


def test_inputs_are_article_question_and_choice(tokenizer):
    rows = choice_rows(Dataset.from_list(FLAT), Source("train"))
    features = encode_choices(rows, tokenizer, 128)
    assert set(features.column_names) == {*tokenizer.model_input_names, "labels"}
    for row, inputs in zip(rows, features, strict=True):
        assert inputs["labels"] == row["label"]
        for number, choice in enumerate(row["choices"]):
            expected = tokenizer(row["context"], choice)
            assert {name: inputs[name][number] for name in expected} == dict(expected)
    assert "labels" not in encode_choices(rows.remove_columns("label"), tokenizer, 128).column_names


def test_articles_are_truncated_and_choices_are_not(tokenizer, caplog):
    rows = choice_rows(Dataset.from_list([*FLAT, {**FLAT[0], "article": "Ann"}]), Source("train"))
    complete = encode_choices(rows, tokenizer, 128)
    longest = max(len(ids) for row in complete["input_ids"][:] for ids in row)
    encode_choices(rows, tokenizer, longest + 1)
    assert "are truncated" not in caplog.text
    for length in (40, 20):  # at 20 a choice is longer than what is left of its article
        features = encode_choices(rows, tokenizer, length)
        assert f"2 of 3 inputs fill --max_seq_length {length}; longer ones are truncated" in caplog.text
        for cut, full, row in zip(features, complete, rows, strict=True):
            for ids, all_ids, choice in zip(cut["input_ids"], full["input_ids"], row["choices"], strict=True):
                kept = len(tokenizer(choice, add_special_tokens=False)["input_ids"]) + 2
                assert len(ids) == min(length, len(all_ids))
                assert ids[-kept:] == all_ids[-kept:] and ids[:-kept] == all_ids[: len(ids) - kept]


def test_a_choice_longer_than_the_input(tokenizer):
    rows = choice_rows(Dataset.from_list([FLAT[0], {**FLAT[1], "options": ["a sailor " * 30] * 3}]), Source("train"))
    with pytest.raises(InputError, match=r"choice of 'high1.txt' has \d+ tokens .* 32 leaves room for 28"):
        encode_choices(rows, tokenizer, 32)
