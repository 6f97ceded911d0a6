"""The official metrics of SQuAD 1.1 against values computed by hand."""

import pytest

from hf_deberta.metrics.squad import compute_exact, compute_f1, normalize_answer, squad_scores
from hf_deberta.metrics.squad_v2 import squad_v2_scores


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
    assert (compute_exact("the", "a"), compute_f1("the", "a")) == (1, 0)
    assert compute_f1("the", "a", if_both_empty=1.0) == 1
    assert squad_scores({"q": "An"}, {"q": ["the"]}) == {"exact_match": 100, "f1": 0}
    metrics = squad_v2_scores({"q": ""}, {"q": ["the"]})
    assert (metrics["exact"], metrics["f1"], metrics["HasAns_total"]) == (100, 100, 1)


@pytest.mark.parametrize("scores", [squad_scores, squad_v2_scores])
def test_a_question_without_prediction(scores):
    with pytest.raises(ValueError, match="1 of 2 .*'b'"):
        scores({"a": "x"}, {"a": ["x"], "b": ["y"]})
