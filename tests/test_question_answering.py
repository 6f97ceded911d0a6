"""`QuestionAnswerer`: the answers of run_squad.py, windows, no answer, several questions, characters, bad input."""

import json
import subprocess
import sys
from unittest import mock

import pytest
import torch
from fine_tuning_models import CPU, run_script
from transformers import AutoModelForQuestionAnswering, AutoTokenizer
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from hf_deberta import HfDebertaConfig, HfDebertaForQuestionAnswering, HfDebertaForSequenceClassification
from hf_deberta.demos import house_rows
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.question_answering import QuestionAnswerer

CONTEXT = "The Zoë museum in 東京 😀 opened in 1999, said Zoe\u0308 Müller. " * 4 + "It is blue."
QUESTION = "Which colour?"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([CONTEXT, QUESTION, "no answer"] * 20, 400, "unigram")


@pytest.fixture
def answerer(tokenizer):
    """With random weights."""
    torch.manual_seed(0)
    config = HfDebertaConfig.from_preset("tiny", vocab_size=len(tokenizer), initializer_range=0.3)
    return QuestionAnswerer(HfDebertaForQuestionAnswering(config), tokenizer, max_batch_tokens=100)


class Finder(torch.nn.Module):
    """Stands in for a model: finds the tokens of a text, and otherwise answers at [CLS]."""

    config = HfDebertaConfig.from_preset("tiny")
    device = torch.device("cpu")

    def __init__(self, tokenizer, text):
        super().__init__()
        tokens = tokenizer.tokenize(text)
        self.answer = tokenizer.convert_tokens_to_ids(tokens[1:] if tokens[0] == "▁" else tokens)  # a space is no text
        self.shapes = []

    def forward(self, input_ids, **inputs):
        self.shapes.append(tuple(input_ids.shape))
        logits = torch.zeros(2, *input_ids.shape)
        logits[:, :, 0] = 5
        size = len(self.answer)
        for row, ids in enumerate(input_ids.tolist()):
            for start in range(len(ids) - size + 1):
                if ids[start : start + size] == self.answer:
                    logits[0, row, start] = logits[1, row, start + size - 1] = 9
                    logits[:, row, 0] = 0
        return QuestionAnsweringModelOutput(start_logits=logits[0], end_logits=logits[1])


def assert_same(entries, expected):
    """Assert equal answers; batches are padded differently, so scores differ by rounding."""
    assert [entry.pop("score") for entry in entries] == pytest.approx([e.pop("score") for e in expected], rel=1e-3)
    assert entries == expected


def test_answers_are_those_of_run_squad(tmp_path):
    run_script("run_squad.py", "--demo", *CPU, "--max_steps", 2, "--max_train_samples", 64, "--output_dir", tmp_path)
    predictions, nbest = (
        json.loads((tmp_path / f"predict_{name}.json").read_text()) for name in ("predictions", "nbest_predictions")
    )
    model, rows = AutoModelForQuestionAnswering.from_pretrained(tmp_path), house_rows(50, 2)
    answer = QuestionAnswerer(model, AutoTokenizer.from_pretrained(tmp_path))  # with the windows of the training
    arguments = {"handle_impossible_answer": True}
    texts = {name: [row[name] for row in rows] for name in ("question", "context")}
    best = answer(**texts, **arguments)
    ranked = answer(**texts, **arguments, top_k=20)
    assert predictions == {row["id"]: entry["answer"] for row, entry in zip(rows, best, strict=True)}
    for row, entries in zip(rows, ranked, strict=True):
        expected = nbest[row["id"]][:20]
        assert [entry["score"] for entry in entries] == pytest.approx([e["probability"] for e in expected], rel=1e-3)
        assert {entry["answer"] for entry in entries} == {entry["text"] for entry in expected}
        assert all(row["context"][e["start"] : e["end"]] == e["answer"] for e in entries)


def test_windows_are_those_of_the_training(answerer, tokenizer, monkeypatch):
    question, lengths = f"{QUESTION} {QUESTION}", {"max_seq_len": 40, "doc_stride": 10, "max_question_len": 4}
    expected = answerer(question, CONTEXT, **lengths)
    assert answerer(question, CONTEXT, **{**lengths, "max_question_len": 8}) != expected
    trained = {"max_seq_length": 40, "doc_stride": 10, "max_query_length": 4}
    monkeypatch.setattr(answerer.model.config, "fine_tuning_flags", trained, raising=False)
    assert answerer(question, CONTEXT) == expected


@pytest.mark.parametrize("text", ["Zo\u00eb", "東京", "\U0001f600", "Zoe\u0308 Müller", "1999"])
def test_characters_of_an_answer(tokenizer, text):
    answer = QuestionAnswerer(Finder(tokenizer, text), tokenizer)(QUESTION, f"In {text} .")
    assert (answer["answer"], answer["start"], answer["end"]) == (text, 3, 3 + len(text))


def test_an_answer_in_a_late_window(tokenizer):
    model = Finder(tokenizer, "blue")
    answer = QuestionAnswerer(model, tokenizer, max_batch_tokens=100)(
        QUESTION, CONTEXT, max_seq_len=40, doc_stride=10, handle_impossible_answer=True
    )
    assert (answer["answer"], answer["start"]) == ("blue", CONTEXT.index("blue")) and answer["score"] > 0.9
    assert len(model.shapes) > 1 and all(rows * tokens <= 100 for rows, tokens in model.shapes)


def test_no_answer(tokenizer):
    answer = QuestionAnswerer(Finder(tokenizer, "blue"), tokenizer)
    arguments = {"question": QUESTION, "context": "It is red", "handle_impossible_answer": True}
    assert answer(**arguments) == {"score": mock.ANY, "start": 0, "end": 0, "answer": ""}
    assert answer(**arguments)["score"] > 0.9
    assert answer(**arguments, null_score_diff_threshold=9.0)["answer"] == ""
    assert answer(**arguments, null_score_diff_threshold=11.0)["answer"] != ""
    assert answer(QUESTION, "It is red")["answer"] != ""
    assert answer(QUESTION, "\u200b")["answer"] in ("", "\u200b")


def test_several_questions_and_candidates(answerer):
    questions, contexts = [QUESTION, "When?", "no answer?"], [CONTEXT, "It is blue.", "opened in 1999"]
    for question, context, entries in zip(questions, contexts, answerer(questions, contexts, top_k=3), strict=True):
        assert [list(entry) for entry in entries] == [["score", "start", "end", "answer"]] * 3
        assert_same([answerer(question, context)], [dict(entries[0])])
        assert_same(answerer(question, context, top_k=3), entries)
    assert_same(answerer(questions, "It is blue."), [answerer(question, "It is blue.") for question in questions])


def test_answers_do_not_depend_on_other_questions(answerer, caplog):
    """Each question has its own stride, and one without room for its context does not refuse the others."""
    questions = ["When?", f"{QUESTION} {QUESTION}", QUESTION * 30, "no answer?"]
    arguments = {"context": CONTEXT, "max_seq_len": 48, "top_k": 3, "handle_impossible_answer": True}
    together = answerer(questions, **arguments)
    assert answerer(questions[2:3], **arguments) == together[2:3]
    assert together.pop(2) == [{"score": 0.0, "start": 0, "end": 0, "answer": ""}]
    assert "1 of 4 questions leave no room for their context in max_seq_len 48" in caplog.text
    for question, entries in zip([*questions[:2], questions[3]], together, strict=True):
        assert_same(entries, answerer(question, **arguments))
    with pytest.raises(ValueError, match="1 of 1 questions leave .* max_seq_len 48 .* or pass max_question_len$"):
        answerer(questions[2], **arguments)


def test_lengths_of_answers_and_questions(answerer, tokenizer):
    entries = answerer(QUESTION, "It is blue.", top_k=20, max_answer_len=1)
    tokens = tokenizer.tokenize("It is blue.")
    assert all(entry["answer"] in {token.strip("▁") for token in tokens} for entry in entries)
    long = QUESTION * 30
    assert answerer(long, CONTEXT, max_seq_len=48, doc_stride=8, max_question_len=10)["answer"] in CONTEXT


def test_a_window_may_be_longer_than_the_tokenizers_limit(answerer, tokenizer):
    windows = []
    answerer.model.register_forward_pre_hook(lambda _, inputs, named: windows.append(named), with_kwargs=True)
    answerer(QUESTION, "no answer " * 400, max_seq_len=2048)
    (window,) = windows
    assert tokenizer.model_max_length == 512 < window["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("question", "context", "arguments", "message"),
    [
        ("", "x", {}, "a question must be a text that is not empty, not ''"),
        ("x", " ", {}, "a context must be .* not ' '"),
        (["x", None], "x", {}, "a question .* not None"),
        ([], "x", {}, "no question"),
        (["x", "y"], ["x"], {}, "2 questions have 1 contexts"),
        ("x", "y", {"top_k": 0}, "top_k must be at least 1, not 0"),
        ("x", "y", {"max_seq_len": 32, "doc_stride": 64}, r"doc_stride must be in \[0, 32\), .* a window, not 64"),
        ("x", "y", {"max_answer_len": 0}, "max_answer_length must be at least 1"),
    ],
)
def test_invalid_arguments(answerer, question, context, arguments, message):
    with pytest.raises(ValueError, match=message):
        answerer(question, context, **arguments)


@pytest.mark.slow
def test_import_of_the_package_alone_does_not_import_it():
    code = "import sys, hf_deberta; assert 'datasets' not in sys.modules; from hf_deberta import QuestionAnswerer as Q"
    subprocess.run(
        [sys.executable, "-c", f"{code}; assert Q is hf_deberta.question_answering.QuestionAnswerer"], check=True
    )


def test_a_model_without_answers(tokenizer):
    model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny", vocab_size=len(tokenizer)))
    with pytest.raises(
        ValueError, match="HfDebertaForSequenceClassification has no answers: pass a model for question"
    ):
        QuestionAnswerer(model, tokenizer)(QUESTION, CONTEXT)
