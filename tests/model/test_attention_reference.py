"""The reference against a triple loop of equation 4, against finite differences, and in half precision."""

import math

import pytest
import torch
from numerics import TERMS, gradients, largest
from numerics import attend as attend_with

from hf_deberta.model.attention_reference import softmax_attention
from hf_deberta.model.relative_position import RelativePositions, rows_of_distances

VISIBLE = {
    "all seen": lambda queries, keys: None,
    "causal": lambda queries, keys: torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(),
    "one query fully masked": lambda queries, keys: fully_masked_query(queries, keys),
}


def fully_masked_query(queries, keys):
    """In the second batch row, the first query sees nothing; in both, the last key is hidden from the others."""
    visible = torch.ones(2, 1, queries, keys, dtype=torch.bool)
    visible[:, :, :-1, -1] = False
    visible[1, :, 0] = False
    return visible


def random_inputs(queries, keys, batch=2, heads=2, size=3, rows=5, dtype=torch.float64, grad=False, spread=1.0):
    torch.manual_seed(queries * 100 + keys)
    shapes = {
        "query": (batch, heads, queries, size),
        "key": (batch, heads, keys, size),
        "value": (batch, heads, keys, size),
        "position_key": (heads, rows, size),
        "position_query": (heads, rows, size),
    }
    tensors = {name: (spread * torch.randn(shape)).to(dtype).requires_grad_(grad) for name, shape in shapes.items()}
    return tensors, torch.randint(rows, (batch, queries, keys))


def reference_attention(
    query, key, value, position_key, position_query, row, visible, scale, terms=("c2p", "p2c"), dropout_p=0.0
):
    """The reference for any row of each pair, scaled in float32 at least as `disentangled_attention` does."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    positions = relative_positions(position_key, position_query, terms).scaled(scale, dtype)
    return softmax_attention(query.to(dtype) * scale, key, value, positions, row, visible, dropout_p)


def relative_positions(position_key, position_query, terms):
    """Tables without the row of each distance, for calls that give the row of each pair."""
    return RelativePositions.from_tables(position_key, position_query, torch.zeros(1, dtype=torch.long), terms)


def by_hand(query, key, value, position_key, position_query, row, visible, scale, terms):
    """Equation 4 of the paper in Python numbers."""
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    context = torch.zeros(batch, heads, queries, size, dtype=torch.float64)
    probabilities = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    q, k, v, kr, qr = (t.tolist() for t in (query, key, value, position_key, position_query))
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                weight = {}
                for j in range(keys):
                    if visible is not None and not visible[b % visible.shape[0], 0, i, j]:
                        continue
                    delta = int(row[b % row.shape[0], i, j])
                    score = 0.0
                    for c in range(size):
                        score += q[b][h][i][c] * k[b][h][j][c]
                        score += "c2p" in terms and q[b][h][i][c] * kr[h][delta][c]
                        score += "p2c" in terms and k[b][h][j][c] * qr[h][delta][c]
                        score += "p2p" in terms and qr[h][delta][c] * kr[h][delta][c]
                    weight[j] = math.exp(score * scale)
                for j, w in weight.items():
                    probabilities[b, h, i, j] = w / sum(weight.values())
                    for c in range(size):
                        context[b, h, i, c] += w / sum(weight.values()) * v[b][h][j][c]
    return context, probabilities


@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("queries, keys", [(1, 1), (2, 5), (7, 7)])
def test_equals_equation_four_by_hand(queries, keys, terms, visible):
    tensors, row = random_inputs(queries, keys)
    visible, terms = VISIBLE[visible](queries, keys), TERMS[terms]
    scale = ((1 + len(terms)) * 3) ** -0.5
    found = reference_attention(**tensors, row=row, visible=visible, scale=scale, terms=terms)
    expected = by_hand(**tensors, row=row, visible=visible, scale=scale, terms=terms)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("terms", TERMS)
def test_gradients_equal_finite_differences(terms, visible):
    tensors, row = random_inputs(2, 3, heads=1, size=2, rows=3, grad=True)
    visible, terms = VISIBLE[visible](2, 3), TERMS[terms]

    def attention(*arguments):
        return reference_attention(*arguments, row, visible, 0.4, terms)

    assert torch.autograd.gradcheck(attention, tuple(tensors.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [1.0, 50.0], ids=["ordinary", "huge"])
def test_a_query_that_sees_nothing_is_zero_in_value_and_gradient(spread, dtype):
    tensors, row = random_inputs(3, 4, grad=True, dtype=dtype, spread=spread)
    visible = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    visible[1] = False  # a whole batch row, as with padding
    context, probabilities = reference_attention(**tensors, row=row, visible=visible, scale=0.4)
    assert not context[1].any() and not probabilities[1].any()
    assert context[0].all() and context.isfinite().all()
    found = gradients(context, tensors)
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        if not name.startswith("position"):
            assert not gradient[1].any(), name
    assert found["value"][0].any()


def test_dropout_scales_the_probabilities_that_it_keeps_and_follows_the_seed():
    rate, draws = 0.3, 4000
    tensors, row = random_inputs(2, 5, batch=1, heads=1)
    _, plain = reference_attention(**tensors, row=row, visible=None, scale=0.5)
    many = {name: t if name.startswith("pos") else t.expand(draws, -1, -1, -1) for name, t in tensors.items()}

    def draw(seed):
        torch.manual_seed(seed)
        return reference_attention(**many, row=row, visible=None, scale=0.5, dropout_p=rate)

    context, probabilities = draw(0)
    assert torch.equal(context, draw(0)[0]) and not torch.equal(context, draw(1)[0])
    torch.testing.assert_close(context, probabilities @ many["value"])
    dropped = probabilities == 0
    torch.testing.assert_close(probabilities[~dropped], (plain / (1 - rate)).expand_as(probabilities)[~dropped])
    assert dropped.double().mean(0).sub(rate).abs().max() < 5 * (rate * (1 - rate) / draws) ** 0.5  # of each pair


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [2, 60])
def test_autocast_does_not_lower_the_precision_of_scores(spread, dtype, backend):
    """Under autocast as with `fp16=True`: near float64, also if raw products are beyond float16's range."""
    torch.manual_seed(0)
    tensors = [spread * torch.randn(1, 1, 20, 64) for _ in range(2)] + [torch.randn(1, 1, 20, 64)]
    tensors += [spread * torch.randn(1, 40, 64) for _ in range(2)]
    assert spread < 60 or (tensors[0] @ tensors[3].mT).abs().max() > 65504  # would overflow
    tensors = [tensor.to(dtype) for tensor in tensors]
    arguments = {"rows_of_distance": rows_of_distances(20), "backend": backend}
    exact, _ = attend_with(*[tensor.double() for tensor in tensors], **arguments)
    with torch.autocast("cpu", dtype):
        found, _ = attend_with(*tensors, **arguments)
    assert found.isfinite().all()
    if backend == "eager":
        assert largest(found.double() - exact) <= torch.finfo(dtype).eps * largest(tensors[2])
