"""The sdpa backend that a saved folder has, without the package: equal to the reference, forward and backward."""

import pytest
import torch
from numerics import attend, lengths_mask
from test_attention_sdpa import (
    HEADS,
    KINDS,
    TABLES,
    WIDTH,
    assert_dropout_keeps_the_mean,
    assert_equal_to_the_reference,
    leaf,
)

from hf_deberta.model import attention_sdpa
from hf_deberta.model.attention import BACKENDS, Backend
from hf_deberta.model.relative_position import rows_of_distances


@pytest.fixture(params=[512, 16, 7], ids="blocks of {}".format)
def plain_backend(request, monkeypatch):
    monkeypatch.setitem(BACKENDS, "sdpa", Backend(attention_sdpa.sdpa_attention))
    monkeypatch.setattr(attention_sdpa, "QUERY_BLOCK", request.param)
    monkeypatch.setattr(attention_sdpa, "TRAINING_BLOCK", request.param)


@pytest.mark.parametrize("kind", [*KINDS, "documents", "some queries, documents, causal"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.usefixtures("plain_backend")
def test_output_and_gradients_equal_the_reference(table, kind):
    assert_equal_to_the_reference(table, kind)


@pytest.mark.parametrize("buckets", [0, 256], ids=["v1", "v3"])
def test_far_keys_of_released_tables(buckets, monkeypatch):
    monkeypatch.setitem(BACKENDS, "sdpa", Backend(attention_sdpa.sdpa_attention))
    monkeypatch.setattr(attention_sdpa, "QUERY_BLOCK", 64)
    monkeypatch.setattr(attention_sdpa, "TRAINING_BLOCK", 70)
    torch.manual_seed(0)
    rows, length = rows_of_distances(512, buckets), 1100
    leaves = [leaf(2, 1, length, 2) for _ in range(3)] + [leaf(1, 2 * (buckets or 512), 2) for _ in range(2)]
    options = {"rows_of_distance": rows, "mask": lengths_mask(length, 700), "terms": ("c2p", "p2c", "p2p")}
    results = []
    for backend in ("sdpa", "eager"):
        with torch.no_grad():
            inference, _ = attend(*leaves, **options, backend=backend)
        context, _ = attend(*leaves, **options, backend=backend)
        results.append((inference, context, *torch.autograd.grad(context.square().sum(), leaves)))
    torch.testing.assert_close(*results, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("plain_backend")
@pytest.mark.parametrize("dtype, autocasts", [(torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_half_precision_on_cpus_is_scored_in_float32(dtype, autocasts):
    torch.manual_seed(0)
    shapes = [(1, HEADS, 40, WIDTH)] * 3 + [(HEADS, 24, WIDTH)] * 2
    inputs = [20 * torch.randn(shape).to(dtype) for shape in shapes]
    results = []
    for backend in ("sdpa", "eager"):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
            results.append(attend(*inputs, rows_of_distances(12), backend=backend)[0])
    assert results[0].dtype == results[1].dtype
    torch.testing.assert_close(*results, atol=0.02, rtol=0.02)


@pytest.mark.usefixtures("plain_backend")
def test_dropout_keeps_the_mean():
    assert_dropout_keeps_the_mean()
