"""Timing decides the type of attention beside int8."""

import pytest
import torch

from hf_deberta.serving import choices


def test_timing_gives_a_choice():
    """Not which one: that depends on the processor. The next random numbers do not depend on the choice."""
    random_state = torch.get_rng_state()
    choices.bfloat16_attention_ratio.cache_clear()
    assert choices.attention_dtype(torch.int8) in (torch.float32, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("last_turn", "limit", "ratio"),
    [([[9, 9, 9], [2, 2, 2]], 3, 4.5), ([[1, 1, 1], [2, 2, 2]], 3, 0.5), ([], 0, 9)],
    ids=["slower", "faster", "no turn begins after the limit"],
)
def test_median_of_the_turns_decides(last_turn, limit, ratio, monkeypatch):
    """The first turn, in which oneDNN compiles, and one turn in which the processor was slow do not count."""
    seconds = iter([[9, 9, 9], [1, 1, 1], [1, 3, 5], [2, 4, 6], *last_turn])
    monkeypatch.setattr(choices.timeit, "repeat", lambda *args, **kwargs: next(seconds))
    monkeypatch.setattr(choices, "MAX_SECONDS_OF_TURNS", limit)
    monkeypatch.setattr(choices, "MAX_TURNS", 3)
    assert choices.bfloat16_attention_ratio.__wrapped__(1) == ratio
