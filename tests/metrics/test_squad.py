"""The official metrics of SQuAD 1.1 against values computed by hand."""

from functools import partial

import pytest

from hf_deberta.metrics.squad import normalize_answer, squad_scores
from hf_deberta.metrics.squad_v2 import squad_v2_scores


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Theatre, an anthem; a 'the'", "theatre anthem"),  # articles are whole words, after punctuation is gone
        ("the-end", "theend"),  # a hyphen is deleted, not replaced by a space
        ("  two\t \nlines\u00a0here ", "two lines here"),
        ("“Zoë” – İ", "“zoë” – i̇"),  # noqa: RUF001, only ASCII punctuation goes
    ],
)
def test_normalize_answer(answer, expected):
    assert normalize_answer(answer) == expected


def test_a_question_without_prediction():
    texts, golds = {"a": "x"}, {"a": ["x"], "b": ["y"]}
    for scores in (squad_scores, partial(squad_v2_scores, null_odds={"a": 0, "b": 0}, threshold=0)):
        with pytest.raises(ValueError, match="1 of 2 .*'b'"):
            scores(texts, golds)
