"""The official metrics of SQuAD 2.0 against values computed by hand."""

import pytest

from hf_deberta.metrics.squad_v2 import best_threshold, squad_v2_scores

GOLDS = {"paris": ["Paris", "the city of Paris"], "rome": ["Rome"], "none": [], "nothing": []}
TEXTS = {"paris": "city Paris", "rome": "Rome", "none": "", "nothing": "Berlin"}
PARIS_F1 = 2 * 2 / (2 + 3)  # against "city of paris"


def test_version_2_predicts_no_answer_above_the_threshold():
    odds = {"rome": -4.0, "paris": -1.0, "nothing": 2.0, "none": 3.0}
    low, middle, high = (squad_v2_scores(TEXTS, GOLDS, odds, threshold) for threshold in (-9.0, 0.0, 9.0))
    assert (low["exact"], low["HasAns_f1"], low["NoAns_f1"]) == (50, 0, 100)
    assert (middle["exact"], middle["f1"]) == pytest.approx((75, 100 * (PARIS_F1 + 3) / 4))
    assert {name: high[name] for name in squad_v2_scores(TEXTS, GOLDS)} == pytest.approx(squad_v2_scores(TEXTS, GOLDS))
    for metrics in (low, middle, high):  # the best threshold does not depend on the one in use
        assert (metrics["best_exact"], metrics["best_exact_thresh"]) == (75, -4.0)
        assert (metrics["best_f1"], metrics["best_f1_thresh"]) == pytest.approx((100 * (PARIS_F1 + 3) / 4, -1.0))
    at_threshold = squad_v2_scores(TEXTS, GOLDS, odds, threshold=2.0)  # equal is not above
    assert at_threshold["NoAns_exact"] == 50


def test_answers_without_a_word_are_left_out():
    """Articles and punctuation alone are no answer, as in the official script; a question with no other has none."""
    scores = squad_v2_scores({"a": "", "b": ""}, {"a": ["the", "."], "b": ["the", "Rome"]})
    assert scores["exact"] == 50


def test_answering_no_question_can_be_best():
    """Then the threshold is 0, as in the official script."""
    odds, answerable = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": False, "b": False, "c": True}
    assert best_threshold(dict.fromkeys("abc", "x"), dict.fromkeys("abc", 0.0), odds, answerable) == (200 / 3, 0.0)
