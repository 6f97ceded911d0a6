"""The official SQuAD metrics against values computed by hand."""

import pytest

from hf_deberta.fine_tuning.tasks.squad_scores import (
    best_threshold,
    compute_exact,
    compute_f1,
    normalize_answer,
    squad_scores,
    squad_v2_scores,
)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower"),
        ("a an the", ""),
        ("Theatre, an anthem; a 'the'", "theatre anthem"),  # articles are whole words, after punctuation is gone
        ("U.S.A.", "usa"),
        ("the-end", "theend"),  # a hyphen is deleted, not replaced by a space
        ("  two\t \nlines\u00a0here ", "two lines here"),
        ("“Zoë” – İ", "“zoë” – i̇"),  # noqa: RUF001, only ASCII punctuation goes
        ("...", ""),
        ("", ""),
    ],
)
def test_normalize_answer(answer, expected):
    assert normalize_answer(answer) == expected


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "overlap"),
    [
        ("the Panthers!", "Panthers", 1, 1),
        ("Carolina Panthers", "Panthers", 0, 2 / 3),
        ("Denver Broncos", "Panthers", 0, 0),
        ("yes yes no", "yes no no", 0, 4 / 6),  # a word counts as often as it is on both sides
        ("", "Panthers", 0, 0),
        ("Panthers", "", 0, 0),
        ("Zoë", "Zoe", 0, 0),
        ("10,000 people", "10000 people", 1, 1),
    ],
)
def test_one_pair(prediction, gold, exact, overlap):
    assert compute_exact(prediction, gold) == exact
    assert compute_f1(prediction, gold) == compute_f1(prediction, gold, if_both_empty=1.0) == pytest.approx(overlap)


def test_answers_that_are_only_articles():
    """In 1.1 they match exactly and have no word in common; in 2.0 they count as no answer."""
    assert (
        compute_exact("the", "a") == 1
        and compute_f1("the", "a") == 0
        and compute_f1("the", "a", if_both_empty=1.0) == 1
    )
    assert squad_scores({"q": "An"}, {"q": ["the"]}) == {"exact_match": 100, "f1": 0}
    metrics = squad_v2_scores({"q": ""}, {"q": ["the"]})
    assert (metrics["exact"], metrics["f1"], metrics["HasAns_total"]) == (100, 100, 1)


def test_version_1_takes_the_best_gold_answer():
    golds = {"a": ["in the city of Paris", "Paris"], "b": ["1999", "the year 1999"], "c": ["x"], "d": []}
    metrics = squad_scores({"a": "Paris.", "b": "year", "c": "y", "d": "anything"}, golds)
    assert metrics == pytest.approx({"exact_match": 25.0, "f1": 100 * (1 + 2 / 3) / 4})


GOLDS = {"paris": ["Paris", "the city of Paris"], "rome": ["Rome"], "none": [], "nothing": []}
TEXTS = {"paris": "city Paris", "rome": "Rome", "none": "", "nothing": "Berlin"}
PARIS_F1 = 2 * 2 / (2 + 3)  # against "city of paris"


def test_version_2_by_hand():
    metrics = squad_v2_scores(TEXTS, GOLDS)
    assert metrics == pytest.approx(
        {
            "exact": 100 * 2 / 4,
            "f1": 100 * (PARIS_F1 + 1 + 1 + 0) / 4,
            "total": 4,
            "HasAns_exact": 50,
            "HasAns_f1": 100 * (PARIS_F1 + 1) / 2,
            "HasAns_total": 2,
            "NoAns_exact": 50,
            "NoAns_f1": 50,
            "NoAns_total": 2,
        }
    )


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


def test_answering_no_question_can_be_best():
    """Then the threshold is 0, as in the official script."""
    odds, answerable = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": False, "b": False, "c": True}
    assert best_threshold(dict.fromkeys("abc", "x"), dict.fromkeys("abc", 0.0), odds, answerable) == (200 / 3, 0.0)


def test_best_threshold_against_exhaustive_search():
    odds = {str(i): (i * 7) % 10 - 4.5 for i in range(10)}
    golds = {x: ["right"] if int(x) % 5 else [] for x in odds}
    texts = {x: "right" if int(x) % 4 else "wrong" for x in odds}
    best = max(squad_v2_scores(texts, golds, odds, threshold)["exact"] for threshold in (-99, *odds.values()))
    metrics = squad_v2_scores(texts, golds, odds)
    assert metrics["best_exact"] == best
    assert squad_v2_scores(texts, golds, odds, metrics["best_exact_thresh"])["exact"] == best


@pytest.mark.parametrize("scores", [squad_scores, squad_v2_scores])
def test_a_question_without_prediction(scores):
    with pytest.raises(ValueError, match="1 of 2 questions have no prediction.* 'b'"):
        scores({"a": "x"}, {"a": ["x"], "b": ["y"]})


def test_null_odds_for_each_question():
    with pytest.raises(ValueError, match="4 of 4 questions have no null odds"):
        squad_v2_scores(TEXTS, GOLDS, {})
