"""SQuAD: file formats, the labelled tokens, the text of predicted answers, and invalid input."""

import copy
import gzip
import json

import datasets
import numpy as np
import pytest
from datasets import Dataset

from hf_deberta.fine_tuning.answer_spans import (
    CLS_POSITION,
    SquadEncoder,
    best_spans,
    find_answers,
    first_answer_span,
    token_character_spans,
)
from hf_deberta.fine_tuning.tasks.squad import read_squad, squad_rows
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.data_files import Source
from hf_deberta.training.errors import InputError

CONTEXT = (
    "  The “Zoë” museum, in Paris,\u00a0opened in 1999 and cost 6½ million – about 東京 prices 😀 – "  # noqa: RUF001
    "said Zoe\u0308 Müller.\n"
    "Its director (Dr. O'Neil) didn't like the colour; nobody   asked why it is so blue."
)
ANSWERS = ["Zoë", "“Zoë” museum", "Paris", "1999", "6½ million", "東京", "😀", "Zoe\u0308", "Zoe\u0308 Müller"]
ANSWERS += ["(Dr. O'Neil)", "didn't", "nobody   asked", "blue.", "The", "O'Neil", "colour; nobody"]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request):
    return train_tokenizer([CONTEXT, "What is asked here, and where?", "who why when"] * 20, 400, request.param)


def rows_of(answers, context: str = CONTEXT) -> Dataset:
    """A question for each answer, or list of answers."""
    lists = [[answer] if isinstance(answer, str) else answer for answer in answers]
    columns = {
        "id": [f"q{i}" for i in range(len(lists))],
        "context": [context] * len(lists),
        "question": [f" What is asked here {i}?" for i in range(len(lists))],
        "answers": [{"text": x, "answer_start": [context.index(text) for text in x]} for x in lists],
    }
    return squad_rows(Dataset.from_dict(columns), Source("train"))


def logits_for(features: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a model that finds the answer of each window."""
    longest = max(map(len, features["input_ids"]))
    logits = np.zeros((2, len(features), longest), np.float32)
    for kind, column in enumerate(("start_positions", "end_positions")):
        logits[kind, np.arange(len(features)), np.array(features[column])] = 9
    return tuple(logits)


# Rows

PARIS = {"id": "a", "question": "What is?", "answers": [{"text": "Paris", "answer_start": 0}] * 2}
WHERE = {"id": "b", "question": "Where?", "answers": [{"text": "old", "answer_start": 9}], "is_impossible": True}
WHERE["plausible_answers"] = [{"text": "old", "answer_start": 9}]
FIRST = [{"context": "Paris is old.", "qas": [PARIS, WHERE]}, {"context": "Rome.", "qas": []}]
SECOND = [{"context": "Rome is too.", "qas": [{"id": "c", "question": "Who?"}]}]
ARTICLES = {"version": "v2.0", "data": [{"title": "One", "paragraphs": FIRST}, {"title": "Two", "paragraphs": SECOND}]}
NO_ANSWER = {"text": [], "answer_start": []}
TWICE = {"text": ["Paris"] * 2, "answer_start": [0, 0]}
FLAT = [
    {"id": "a", "context": "Paris is old.", "question": "What is?", "answers": TWICE},
    {"id": "b", "context": "Paris is old.", "question": "Where?", "answers": NO_ANSWER},
    {"id": "c", "context": "Rome is too.", "question": "Who?", "answers": NO_ANSWER},
]


LINES = "".join(json.dumps(row) + "\n" for row in FLAT)
OFFICIAL = json.dumps(ARTICLES)
FILES = {"official.json": OFFICIAL, "official.json.gz": OFFICIAL, "data.json": json.dumps({"data": FLAT})}
FILES |= {"list.json": json.dumps(FLAT), "lines.json": LINES, "rows.jsonl": LINES}


@pytest.mark.parametrize("name", FILES)
def test_file_formats(tmp_path, name):
    content = FILES[name].encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert list(squad_rows(read_squad(tmp_path / name), Source("validation"))) == FLAT


def test_answers_as_lists_of_dicts(tmp_path):
    """Some datasets of the Hub have them; an empty text is no answer."""
    answers = [[{"text": "Rome", "answer_start": 0}], [{"text": "", "answer_start": -1}], []]
    rows = [{"id": n, "context": "Rome", "question": "?", "answers": of_row} for n, of_row in enumerate(answers, 1)]
    rows = squad_rows(Dataset.from_list(rows), Source("validation"))
    assert rows["id"][:] == ["1", "2", "3"] and [x["text"] for x in rows["answers"]] == [["Rome"], [], []]


def test_a_test_file_needs_no_answers(tmp_path):
    path = tmp_path / "test.json"
    path.write_text(json.dumps({"data": ARTICLES["data"][1:]}), encoding="utf-8")
    rows = squad_rows(read_squad(path), Source("test"), with_answers=False)
    assert rows.column_names == ["id", "context", "question"]
    with pytest.raises(InputError, match="validation rows .* 'answers'; .* id, context, question"):
        squad_rows(read_squad(path), Source("validation"))


@pytest.mark.parametrize("answers", [None, {"text": ["Rome"], "answer_start": [0]}])
def test_hidden_answers_are_no_missing_answers(answers):
    """Metrics would count questions with hidden answers, null, as unanswerable ones."""
    row = {"context": "Rome", "question": "?"}
    rows = Dataset.from_list([{**row, "id": 1, "answers": answers}, {**row, "id": 2, "answers": None}])
    assert squad_rows(rows, Source("test"), with_answers=False).column_names == ["id", "context", "question"]


def test_invalid_files(tmp_path):
    for articles, place in (("[]", ""), ('[{"paragraphs": [{"context": "c"}]}]', r".*data\[0\].paragraphs\[0\].qas")):
        (tmp_path / "x.json").write_text(f'{{"data": {articles}}}')
        with pytest.raises(InputError, match=f"x.json{place}"):
            read_squad(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "b"}, "2 validation rows have the id 'b'"),
        ({"answers": {"text": ["x"], "answer_start": []}}, "row 1: answers must hold as many text as answer_start"),
    ],
)
def test_invalid_rows(change, message):
    with pytest.raises(InputError, match=message):
        squad_rows(Dataset.from_list([{**FLAT[0], **change}, *FLAT[1:]]), Source("validation"))


def test_training_rows_may_share_an_id():
    assert len(squad_rows(Dataset.from_list([FLAT[0], FLAT[0]]), Source("train"))) == 2


# Inputs


@pytest.mark.parametrize(("length", "stride"), [(384, 128), (64, 20), (48, 0)])
def test_labelled_tokens_give_the_answers_exactly(tokenizer, length, stride):
    """Every answer is labelled in some window, and its tokens give its text character by character."""
    rows = rows_of(ANSWERS)
    features = SquadEncoder(tokenizer, length, stride).evaluation_features(rows)
    assert max(map(len, features["input_ids"])) <= length
    if stride:
        predicted = {
            row for row, end in zip(features["row"], features["end_positions"], strict=True) if end != CLS_POSITION
        }
        assert predicted == set(range(len(ANSWERS)))
    for window in features:
        if window["end_positions"] == CLS_POSITION:
            assert window["start_positions"] == CLS_POSITION
            continue
        begin, end = window["start_positions"] - window["first"], window["end_positions"] - window["first"]
        assert CONTEXT[window["starts"][begin] : window["ends"][end]] == ANSWERS[window["row"]]
    predicted = find_answers(rows, features, *logits_for(features), max_answer_length=60)
    if stride:
        assert list(predicted.predictions.values()) == ANSWERS


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("stride", [0, 20])
def test_labelled_tokens_are_all_of_the_answer(tokenizer, stride, side):
    """A window may begin or end between two tokens of a character, and other windows then have its answer."""
    tokenizer, rows = copy.deepcopy(tokenizer), rows_of(ANSWERS)
    tokenizer.truncation_side = side

    def labelled(length):
        for window in SquadEncoder(tokenizer, length, stride).evaluation_features(rows):
            start, end = window["start_positions"], window["end_positions"]
            if end != CLS_POSITION:
                yield window["row"], window["input_ids"][start : end + 1]

    expected = dict(labelled(384))
    assert len(expected) == len(ANSWERS)
    for length in range(48, 70):
        found = list(labelled(length))
        assert all(ids == expected[row] for row, ids in found)
        assert stride == 0 or {row for row, _ in found} == set(expected)


def test_training_features_have_no_other_columns(tokenizer):
    rows = rows_of([*ANSWERS[:3], []])
    features = SquadEncoder(tokenizer, 48, 16).training_features(rows)
    assert set(features.column_names) == {*tokenizer.model_input_names, "start_positions", "end_positions"}
    with_characters = SquadEncoder(tokenizer, 48, 16).evaluation_features(rows)
    for column in features.column_names:
        assert features[column][:] == with_characters[column][:]


def test_first_answer_span():
    assert first_answer_span({"text": [" Paris  ", "x"], "answer_start": [5, 0]}) == (6, 11)
    assert first_answer_span({"text": [], "answer_start": []}) is None


@pytest.mark.parametrize(
    ("context", "pieces", "offsets", "texts"),
    [
        ("The fox", ["▁The", "▁fox"], [(0, 3), (3, 7)], ["The", "fox"]),
        ("The fox", ["▁The", "▁fox"], [(0, 4), (4, 7)], ["The", "fox"]),
        ("a  b", ["▁a", "▁", "▁b"], [(0, 1), (1, 2), (2, 4)], ["a", "", "b"]),
        # with spaces around punctuation, offsets include the character before
        ("“ok”", ["▁", "“", "▁ok", "▁", "”"], [(0, 1), (0, 1), (0, 3), (2, 3), (3, 4)], ["", "“", "ok", "", "”"]),
        # several tokens of one character
        ("6½ x", ["▁6", "1", "⁄", "2", "▁x"], [(0, 1), (1, 2), (1, 2), (1, 2), (2, 4)], ["6", "½", "½", "½", "x"]),  # noqa: RUF001
        ("é\u0301 x", ["Ãī", "Ġx"], [(0, 1), (2, 4)], ["é\u0301", "x"]),
        ("\u00a0x\u200b.", ["▁x", "▁", "."], [(0, 2), (2, 3), (3, 4)], ["x", "", "."]),
    ],
)
def test_token_character_spans(context, pieces, offsets, texts):
    starts, ends = token_character_spans(pieces, offsets, context)
    assert [context[start:end] for start, end in zip(starts, ends, strict=True)] == texts
    assert starts == sorted(starts) and ends == sorted(ends)


def test_an_answer_longer_than_the_windows(tokenizer, caplog):
    rows = rows_of([CONTEXT.strip(), "Paris"])
    features = SquadEncoder(tokenizer, 48, 8).training_features(rows)
    assert "1 of 2 questions have an answer that no window of 48 tokens" in caplog.text
    assert sum(end != CLS_POSITION for end in features["end_positions"]) >= 1


def test_misplaced_answers_are_dropped(tokenizer, caplog):
    rows = rows_of(["Paris", "1999"])
    moved = rows.map(
        lambda row: {"answers": {**row["answers"], "answer_start": [row["answers"]["answer_start"][0] + 1]}}
    )
    features = SquadEncoder(tokenizer, 128, 8).training_features(datasets.concatenate_datasets([rows, moved]))
    assert len(features) == len(SquadEncoder(tokenizer, 128, 8).training_features(rows))
    assert "2 of 4 training rows are dropped, because their answer_start is wrong" in caplog.text
    assert "'q0' has the answer 'Paris' at 24, where the context has 'aris,'" in caplog.text
    with pytest.raises(InputError, match="no answer is where its answer_start says"):
        SquadEncoder(tokenizer).training_features(moved)


def test_a_question_that_leaves_no_room(tokenizer):
    rows = rows_of(["Paris"]).map(lambda row: {"question": "What is asked here, and where? " * 20})
    with pytest.raises(InputError, match=r"question of 'q0' has \d+ tokens, .* 64 .* 16 leaves room for 44"):
        SquadEncoder(tokenizer, 64, 16).evaluation_features(rows)
    features = SquadEncoder(tokenizer, 64, 16, max_query_length=10).evaluation_features(rows)
    assert set(features["first"]) <= {12, 13} and features["end_positions"][0] != CLS_POSITION  # a token may be split
    cut = tokenizer.decode(features[0]["input_ids"][1 : features["first"][0] - 1])
    assert cut.strip() and rows["question"][0].startswith(cut.strip())


@pytest.mark.parametrize(("length", "expected"), [(384, 128), (64, None)])
def test_the_default_stride_fits_the_window(tokenizer, length, expected):
    """128 tokens, or half of what the question leaves for the context."""
    rows = rows_of(["Paris", "1999"])
    questions = [question.strip() for question in rows["question"]]
    longest = max(map(len, tokenizer(questions, add_special_tokens=False)["input_ids"]))
    expected = expected or (length - 3 - longest) // 2
    features = SquadEncoder(tokenizer, length).evaluation_features(rows)
    explicit = SquadEncoder(tokenizer, length, expected).evaluation_features(rows)
    assert features["input_ids"][:] == explicit["input_ids"][:]


def test_the_default_stride_is_that_of_each_question(tokenizer):
    """The windows of a row do not depend on the other rows of its file."""
    rows, encoder = rows_of(["Paris"] * 3), SquadEncoder(tokenizer, 64)
    rows = rows.map(lambda row, n: {"question": "What? " * (3 * n + 1)}, with_indices=True)
    features = encoder.evaluation_features(rows)
    for n in range(3):
        alone = encoder.evaluation_features(rows.select([n]))["input_ids"][:]
        assert [window["input_ids"] for window in features if window["row"] == n] == alone


@pytest.mark.parametrize(("field", "value"), [("doc_stride", 384), ("doc_stride", -1), ("max_query_length", 0)])
def test_invalid_settings(tokenizer, field, value):
    with pytest.raises(InputError, match=f"{field} .*not {value}"):
        SquadEncoder(tokenizer, **{field: value})


# Answers


def all_spans(start_logits, end_logits, starts, ends, most):
    """The scores of all spans from a token with text to another by their characters, best first."""
    texts, scores = [i for i in range(len(starts)) if ends[i] > starts[i]], {}
    for i, j in ((i, j) for i in texts for j in texts if i <= j < i + most):
        characters, score = (starts[i], ends[j]), start_logits[i] + end_logits[j]
        scores[characters] = max(score, scores.get(characters, score))
    return sorted(scores.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize(("tokens", "number", "most"), [(1, 3, 5), (7, 4, 3), (30, 20, 8), (30, 1, 100), (5, 99, 5)])
def test_best_spans_against_exhaustive_search(tokens, number, most, repeats):
    """With several tokens for a character too."""
    rng = np.random.default_rng(tokens)
    lengths = rng.integers(0, 3, tokens)
    ends = lengths.cumsum().repeat(repeats)
    starts = ends - lengths.repeat(repeats)
    logits = rng.normal(size=(2, tokens * repeats))
    expected = all_spans(*logits, starts, ends, most)[:number]
    spans = sorted(best_spans(logits, starts, ends, number, most), key=lambda span: -span.score)
    assert [(x.start, x.end) for x in spans] == [characters for characters, _ in expected]
    assert [x.score for x in spans] == pytest.approx([score for _, score in expected])


ROWS = rows_of(["one"], "one two three")
# "one two" and "two three", after 2 other tokens
WINDOWS = Dataset.from_dict({"row": [0, 0], "first": [2, 2], "starts": [[0, 4], [4, 8]], "ends": [[3, 7], [7, 13]]})


def test_best_span_over_windows():
    start, end = np.zeros((2, 2, 5))
    start[:, :] = [[1, 99, 0, 2, 99], [0, 99, 3, 0, 99]]  # question and [SEP] cannot be the answer
    end[:, :] = [[1, 99, 0, 2, 99], [0, 99, 1, 5, 99]]
    predicted = find_answers(ROWS, WINDOWS, start, end, n_best_size=10)
    assert predicted.predictions == predicted.texts == {"q0": "two three"} and not predicted.null_odds
    texts = [entry["text"] for entry in predicted.nbest["q0"]]
    assert texts == ["two three", "three", "two", "one two", "one"]
    two = predicted.nbest["q0"][2]
    assert (two["start_logit"], two["end_logit"]) == (2, 2)  # of the better window
    scores = np.array([8, 5, 4, 2, 0])
    expected = np.exp(scores) / np.exp(scores).sum()
    assert [entry["probability"] for entry in predicted.nbest["q0"]] == pytest.approx(expected)
    assert find_answers(ROWS, WINDOWS, start, end, max_answer_length=1).predictions == {"q0": "three"}
    assert len(find_answers(ROWS, WINDOWS, start, end, n_best_size=2).nbest["q0"]) == 2


@pytest.mark.parametrize(("threshold", "prediction"), [(-9.0, ""), (-6.5, ""), (-6.0, "two three"), (0.0, "two three")])
def test_null_odds(threshold, prediction):
    """The score of no answer is its lowest over the windows, here 2; that of the best span is 8."""
    start, end = np.zeros((2, 2, 5))
    start[:, :] = [[1, 0, 0, 2, 0], [5, 0, 3, 0, 0]]
    end[:, :] = [[1, 0, 0, 2, 0], [5, 0, 1, 5, 0]]
    predicted = find_answers(ROWS, WINDOWS, start, end, version_2=True, null_score_diff_threshold=threshold)
    assert predicted.null_odds == {"q0": -6.0} and predicted.predictions == {"q0": prediction}
    assert predicted.texts == {"q0": "two three"}
    no_answer = next(entry for entry in predicted.nbest["q0"] if entry["text"] == "")
    assert (no_answer["start_logit"], no_answer["end_logit"]) == (1, 1)
    assert sum(entry["probability"] for entry in predicted.nbest["q0"]) == pytest.approx(1)


def test_an_empty_context(tokenizer):
    rows = squad_rows(Dataset.from_list([{**FLAT[1], "context": "  "}, FLAT[0]]), Source("validation"))
    features = SquadEncoder(tokenizer, 64, 8).evaluation_features(rows)
    for version_2 in (False, True):
        predicted = find_answers(rows, features, *logits_for(features), version_2=version_2)
        assert predicted.predictions == {"b": "", "a": "Paris"}
    assert predicted.null_odds["b"] > 1000 and predicted.null_odds["a"] < 0


def test_invalid_arguments():
    logits = np.zeros((2, 5))
    with pytest.raises(ValueError, match="shorter"):
        find_answers(ROWS, WINDOWS, logits[:1], logits)
    with pytest.raises(InputError, match="max_answer_length .* not 0"):
        find_answers(ROWS, WINDOWS, logits, logits, max_answer_length=0)
