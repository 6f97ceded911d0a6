"""Batches that leave out padding on a simulated CUDA device: nothing waits for it, and less is computed."""

from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from example_rows import MNLI_LENGTHS
from layer_counts import count_layer, with_mask
from test_models import BATCH, HEADS, LENGTH, MODES, assert_never_waits, padded, run, tiny

from hf_deberta.engines import unpadding

MNLI_SHAPE = (len(MNLI_LENGTHS), max(MNLI_LENGTHS))
HEADS_AND_BACKENDS = [(head, "sdpa") for head in HEADS if head not in ("causal", "frozen layers", "generator")]
HEADS_AND_BACKENDS += [(head, "triton") for head in ("sequence", "tokens", "masked LM")]
counts_of = lru_cache(count_layer)


def with_counted_mask(batch: int, length: int) -> dict[str, torch.Tensor | int]:
    return {**with_mask(batch, length), "num_real_tokens": sum(MNLI_LENGTHS)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("head", "backend"), HEADS_AND_BACKENDS)
def test_head(head, backend, mode, monkeypatch):
    monkeypatch.setattr(unpadding, "COST_OF_EXTRA_LAUNCHES", 0)
    model_class, labels = HEADS[head]
    rows = BATCH * 3 if head == "choices" else BATCH
    inputs = lambda: {**padded(), **labels(), "num_real_tokens": rows * LENGTH * 5 // 8}  # noqa: E731
    gather = unpadding.Unpadding.gather
    with patch.object(unpadding.Unpadding, "gather", autospec=True, side_effect=gather) as gathered:
        assert_never_waits(run(model_class, tiny(), inputs, **MODES[mode], backend=backend))
    assert gathered.called


@pytest.mark.parametrize("mode", [False, True], ids=["eval", "training"])
def test_pairs_of_mnli_with_sdpa(mode):
    """About half of the batch is padding. The rest is no more work than BERT's with all of it, in training 1 % more."""
    unpadded = counts_of("sdpa", *MNLI_SHAPE, mode, with_counted_mask)
    with_padding = counts_of("sdpa", *MNLI_SHAPE, mode, with_mask)
    assert unpadded.gflop < 0.6 * with_padding.gflop
    assert unpadded.gigabytes < 0.9 * with_padding.gigabytes
    assert unpadded.launches < 1.25 * with_padding.launches
    assert unpadded.milliseconds() < 1.02 * counts_of("bert", *MNLI_SHAPE, mode, with_mask).milliseconds()
