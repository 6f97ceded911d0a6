"""The official metrics of SQuAD 2.0 against values computed by hand."""

from hf_deberta.metrics.squad_v2 import best_threshold, squad_v2_scores

GOLDS = {"paris": ["Paris", "the city of Paris"], "rome": ["Rome"], "none": [], "nothing": []}
TEXTS = {"paris": "city Paris", "rome": "Rome", "none": "", "nothing": "Berlin"}


def test_no_answer_is_predicted_above_the_threshold():
    """Equal is not above."""
    odds = {"rome": -4.0, "paris": -1.0, "nothing": 2.0, "none": 3.0}
    exact = [squad_v2_scores(TEXTS, GOLDS, odds, threshold)["NoAns_exact"] for threshold in (1.9, 2.0)]
    assert exact == [100, 50]


def test_answers_without_a_word_are_left_out():
    """Articles and punctuation alone are no answer, as in the official script; a question with no other has none."""
    scores = squad_v2_scores({"a": "", "b": ""}, {"a": ["the", "."], "b": ["the", "Rome"]}, {"a": 0, "b": 0}, 0)
    assert scores["exact"] == 50


def test_answering_no_question_can_be_best():
    """Then the threshold is 0, as in the official script."""
    odds, answerable = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": False, "b": False, "c": True}
    assert best_threshold(dict.fromkeys("abc", "x"), dict.fromkeys("abc", 0.0), odds, answerable) == (200 / 3, 0.0)
