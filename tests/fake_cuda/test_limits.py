"""What a layer of sdpa, the default on devices, may cost on a GPU: base size, bfloat16, counted.

No more memory traffic than in-tree; no more launches up to 2048 tokens and at most 4 times as many beyond; at most 1.2
times its FLOPs up to 512 tokens and 1.9 times beyond; a packed row at most 20 % more launches than the padded batch.
And what a pretraining step may cost. `make gpu-counts` prints the numbers.
"""

from functools import lru_cache
from itertools import accumulate

import pytest
import torch
from counter import with_values
from layer_counts import count_layer, count_step, with_mask

SHAPES = {"8x128": (8, 128), "32x512": (32, 512), "4x2048": (4, 2048), "1x8192": (1, 8192)}
MODES = {"eval": False, "training": True}
# quantity -> the largest allowed multiple of in-tree's, by shape
LIMITS = {
    "gflop": {"8x128": 1.2, "32x512": 1.2, "4x2048": 1.6, "1x8192": 1.9},
    "gigabytes": dict.fromkeys(SHAPES, 1.0),
    "launches": {"8x128": 1.0, "32x512": 1.0, "4x2048": 1.0, "1x8192": 4.0},
}
DOCUMENTS = [20 + 7 * i % 41 for i in range(32)]  # lengths as in MNLI
counts_of = lru_cache(count_layer)


@pytest.mark.parametrize("quantity", LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_sdpa_against_in_tree(mode, shape, quantity):
    ours, in_tree = (counts_of(peer, *SHAPES[shape], MODES[mode]) for peer in ("sdpa", "in-tree"))
    assert getattr(ours, quantity) <= LIMITS[quantity][shape] * getattr(in_tree, quantity)


# objective -> launches and GB of a step of v3-base on 32 x 512 tokens with the kernels
STEPS = {"mlm": (1_395, 88), "rtd": (2_100, 129)}


@pytest.mark.parametrize("objective", STEPS)
def test_a_pretraining_step(objective):
    counts, (launches, gigabytes) = count_step(objective, "triton", 32, 512), STEPS[objective]
    assert counts.launches + counts.triton_launches <= launches
    assert counts.gigabytes <= gigabytes


@pytest.mark.parametrize("shape", ["32x512", "1x8192"])
@pytest.mark.parametrize("mode", MODES)
def test_triton_has_fewer_launches_than_in_tree(mode, shape):
    ours, in_tree = (counts_of(peer, *SHAPES[shape], MODES[mode]) for peer in ("triton", "in-tree"))
    assert ours.launches + ours.triton_launches <= in_tree.launches


@pytest.mark.parametrize("mode", MODES)
def test_packed_row_has_few_more_launches_than_padded_batch(mode):
    packed = count_layer("sdpa", 1, sum(DOCUMENTS), MODES[mode], one_row_of_documents)
    padded = count_layer("sdpa", len(DOCUMENTS), max(DOCUMENTS), MODES[mode], with_mask)
    assert packed.launches <= 1.2 * padded.launches


def one_row_of_documents(batch, length):
    bounds = with_values([0, *accumulate(DOCUMENTS)])
    longest = {"max_length_q": max(DOCUMENTS), "max_length_k": max(DOCUMENTS)}
    ids = torch.ones(batch, length, dtype=torch.long)
    return {"input_ids": ids, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **longest}
