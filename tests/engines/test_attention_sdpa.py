"""The sdpa backend against the reference: output and every gradient, in float64."""

from functools import partial
from io import BytesIO
from itertools import product

import pytest
import torch
from numerics import assert_within_budget, attend, lengths_mask, whole_window

from hf_deberta import HfDebertaConfig, HfDebertaModel
from hf_deberta.engines import attention_sdpa
from hf_deberta.engines.attention_sdpa import needs_float32
from hf_deberta.model import attention_sdpa as plain_sdpa
from hf_deberta.model.attention import attention_scale, disentangled_attention
from hf_deberta.model.attention_reference import position_terms, visible_softmax
from hf_deberta.model.batch_layout import AttentionMask
from hf_deberta.model.relative_position import (
    RelativePositions,
    rows_at,
    rows_of_distances,
)

TABLES = {"clipped at 12": (12, 0), "8 buckets to 24": (24, 8), "16 buckets to 64": (64, 16)}
TERMS = [("c2p", "p2c"), ("c2p",), ("p2c",), ("p2p",), ("c2p", "p2c", "p2p"), ()]
SIZES = {  # of a block, a tile and the largest bias
    "one block": (512, 128, 2**22),
    "several tiles": (512, 8, 2**22),
    "several blocks, each head alone": (16, 8, 1),
    "ragged blocks, two heads and one": (7, 3, 2 * 2 * 7 * 40),
}
HEADS, WIDTH = 3, 4


@pytest.fixture
def sizes(request, monkeypatch):
    """Small blocks and tiles."""
    block, tile, bias = SIZES[request.param]
    monkeypatch.setattr(attention_sdpa, "LARGEST_BIAS", bias)
    monkeypatch.setattr(attention_sdpa, "QUERY_BLOCK", block)
    monkeypatch.setattr(attention_sdpa, "TRAINING_BLOCK", block)
    monkeypatch.setattr(attention_sdpa, "TILE", tile)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def mask_arguments(kind, batch, length, queries):
    """Fields of an `AttentionMask`."""
    arguments = {}
    if "padding" in kind:
        arguments["mask"] = lengths_mask(length, length // 2)
    if "documents" in kind:
        arguments["documents"] = (torch.rand(batch, length) < 0.2).cumsum(-1)
    if "causal" in kind:
        arguments["causal"] = True
    if "any mask" in kind:
        arguments["mask"] = torch.rand(batch, length, length) < 0.5
    if "some queries" in kind:
        arguments["query_positions"] = torch.randint(0, length, (batch, queries))
    if "packed" in kind:
        bounds = [0, length // 3, length // 3, 2 * length // 3, length - 1, length, length]  # some are empty
        arguments["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    if "longest" in kind:
        arguments["longest"] = length - 2 * length // 3
    return arguments


KINDS = [
    "all",
    "padding",
    "any mask",
    "some queries, padding",
    "some queries, any mask",
    "packed",
    "some queries, packed",
    "documents, padding, causal",
]


# each pair of sizes and a kind of mask, with one of the tables, so that each of them meets each table
CASES = [
    (size, list(TABLES)[(i + j) % len(TABLES)], kind)
    for (i, size), (j, kind) in product(enumerate(SIZES), enumerate(KINDS))
]


@pytest.mark.parametrize("sizes, table, kind", CASES, indirect=["sizes"])
def test_output_and_gradients_equal_the_reference(sizes, table, kind):
    assert_equal_to_the_reference(table, kind)


@pytest.mark.parametrize("kind", ["packed", "packed, longest", "packed, causal, longest", "some queries, padding"])
def test_on_devices_documents_become_a_padded_batch(kind, monkeypatch):
    monkeypatch.setattr(attention_sdpa, "uses_device_path", lambda query: True)
    rows, attend_plainly = [], plain_sdpa.sdpa_attention

    def counted(query, *call):
        rows.append(len(query))
        return attend_plainly(query, *call)

    monkeypatch.setattr(plain_sdpa, "sdpa_attention", counted)
    assert_equal_to_the_reference("16 buckets to 64", kind)
    assert (max(rows, default=0) > 1) == ("longest" in kind)


def assert_equal_to_the_reference(table, kind):
    k, buckets = TABLES[table]
    rows = rows_of_distances(k, buckets)
    torch.manual_seed(0)
    for length in (1, 2, 17, 40, 90):
        window = whole_window(rows).for_length(length)
        batch, queries = (1 if "packed" in kind else 2), (3 if "some" in kind else length)
        for terms in TERMS:
            leaves = {
                "query": leaf(batch, HEADS, queries, WIDTH),
                "key": leaf(batch, HEADS, length, WIDTH),
                "value": leaf(batch, HEADS, length, WIDTH),
                "position_key": leaf(HEADS, window.end - window.first, WIDTH),
                "position_query": leaf(HEADS, window.end - window.first, WIDTH),
            }
            arguments = mask_arguments(kind, batch, length, queries)
            arguments |= {"terms": terms, "rows_of_distance": rows, "first_row": window.first}
            weight = torch.randn_like(leaves["query"])
            results = {}
            for backend in ("eager", "sdpa"):
                context, _ = attend(**leaves, **arguments, backend=backend)
                with torch.no_grad():
                    inference, _ = attend(**leaves, **arguments, backend=backend)
                gradients = torch.autograd.grad((context * weight).sum(), list(leaves.values()), allow_unused=True)
                found = {"context": context, "inference": inference, **dict(zip(leaves, gradients, strict=True))}
                results[backend] = {name: tensor for name, tensor in found.items() if tensor is not None}
            message = f"{length} tokens, {terms}"
            torch.testing.assert_close(
                results["sdpa"], results["eager"], atol=1e-12, rtol=0, msg=lambda m, message=message: f"{message}: {m}"
            )


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_an_empty_batch(backend):
    states = [leaf(0, HEADS, 9, WIDTH) for _ in range(3)]
    tables = [leaf(HEADS, 24, WIDTH) for _ in range(2)]
    with torch.no_grad():
        context, _ = attend(*states, *tables, rows_of_distance=rows_of_distances(12, 0), backend=backend)
    assert context.shape == (0, HEADS, 9, WIDTH)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
def test_one_mask_serves_calls_of_other_lengths_and_tables(causal, backend):
    torch.manual_seed(0)
    shared = AttentionMask(causal=causal)
    for length, distance in ((1, 12), (9, 12), (9, 24), (5, 12)):
        states = [leaf(1, HEADS, length, WIDTH) for _ in range(3)]
        tables = [leaf(HEADS, 2 * distance, WIDTH) for _ in range(2)]
        positions = RelativePositions.from_tables(*tables, rows_of_distances(distance))
        results = []
        for mask, name in ((AttentionMask(causal=causal), "eager"), (shared, backend)):
            context, _ = disentangled_attention(*states, positions, mask, backend=name)
            results.append((context, *torch.autograd.grad(context.square().sum(), [*states, *tables])))
        torch.testing.assert_close(*results, atol=1e-12, rtol=0)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_any_scale_gives_the_reference_past_the_saturation_distance(scale, monkeypatch):
    """Each block's near and far keys are joined by log sums. With a scale of zero all scores are zero."""
    parts, merge = [], attention_sdpa.merge_partial_attention
    monkeypatch.setattr(attention_sdpa, "merge_partial_attention", lambda each: parts.append(len(each)) or merge(each))
    torch.manual_seed(0)
    rows, length = rows_of_distances(512, 256), 800
    tensors = [torch.randn(1, 1, length, WIDTH, dtype=torch.float64) for _ in range(3)]
    tensors += [torch.randn(1, 512, WIDTH, dtype=torch.float64) for _ in range(2)]
    options = {"rows_of_distance": rows, "terms": ("c2p", "p2c", "p2p"), "scale": scale}
    with torch.no_grad():
        found, _ = attend(*tensors, **options, backend="sdpa")
    expected, _ = attend(*tensors, **options)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert set(parts) == {2}  # far keys on one side; test_half_precision has them on both
    if scale == 0:
        torch.testing.assert_close(found, tensors[2].mean(2, keepdim=True).expand_as(found))


@pytest.mark.parametrize("backend, number_of_warnings", [("sdpa", 1), ("auto", 0)])
def test_attentions_come_from_eager(backend, number_of_warnings, sdpa_warnings):
    model = HfDebertaModel(HfDebertaConfig.from_preset("tiny", attn_implementation=backend)).eval()
    ids = torch.randint(1, 128, (2, 9))
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        output = model(ids, output_attentions=True)
    assert output.attentions[0].shape == (2, 4, 9, 9)
    torch.testing.assert_close(output.last_hidden_state, plain, atol=2e-6, rtol=1e-5)
    messages = sdpa_warnings()
    assert len(messages) == number_of_warnings
    assert all("'sdpa' has no attention probabilities" in message for message in messages)


def test_dropout_keeps_the_mean():
    assert_dropout_keeps_the_mean()


def assert_dropout_keeps_the_mean():
    torch.manual_seed(0)
    states = torch.randn(1, 2, 30, 4)
    table = torch.randn(2, 60, 4, requires_grad=True)
    rows = rows_of_distances(30)
    arguments = {"position_key": table, "position_query": table, "rows_of_distance": rows, "backend": "sdpa"}
    plain, _ = attend(states, states, states, **arguments)
    noisy = torch.stack([attend(states, states, states, **arguments, dropout_p=0.2)[0] for _ in range(400)])
    assert not torch.equal(noisy[0], noisy[1])
    error = noisy.std(0) / 400**0.5
    assert ((noisy.mean(0) - plain).abs() < 5 * error + 1e-6).all()


@pytest.mark.parametrize("kind", ["all", "padding", "packed, longest"])
@pytest.mark.parametrize("sizes", SIZES, indirect=True)
def test_second_derivatives_equal_the_reference(sizes, kind):
    torch.manual_seed(0)
    length, batch = 17, 1 if "packed" in kind else 2
    options = {"rows_of_distance": rows_of_distances(3), **mask_arguments(kind, batch, length, length)}
    leaves = [leaf(batch, 1, length, 2) for _ in range(3)] + [leaf(1, 6, 2) for _ in range(2)]
    weights = [torch.randn_like(tensor) for tensor in leaves]
    for terms in filter(None, TERMS):
        results = []
        for backend in ("sdpa", "eager"):
            context, _ = attend(*leaves, **options, terms=terms, backend=backend)
            first = torch.autograd.grad(context.pow(3).sum(), leaves, create_graph=True, materialize_grads=True)
            along = sum((gradient * weight).sum() for gradient, weight in zip(first, weights, strict=True))
            results.append(torch.autograd.grad(along, leaves, materialize_grads=True))
        torch.testing.assert_close(*results, atol=1e-10, rtol=0, msg=lambda m, terms=terms: f"{terms}: {m}")


def test_function_transforms_past_one_block(monkeypatch):
    """Of the position table alone, as in frozen layers."""
    monkeypatch.setattr(plain_sdpa, "TRAINING_BLOCK", 8)
    query, key, value = (leaf(1, HEADS, 30, WIDTH).detach() for _ in range(3))
    table, other = (leaf(HEADS, 24, WIDTH).detach() for _ in range(2))

    def loss(table, backend):
        positions = RelativePositions.from_tables(table, other, rows_of_distances(12))
        return disentangled_attention(query, key, value, positions, backend=backend)[0].square().sum()

    for transform in (
        lambda loss: torch.func.grad(loss)(table),
        lambda loss: torch.func.grad(lambda tables: torch.func.vmap(loss)(tables).sum())(table[None]),
        lambda loss: torch.func.jvp(loss, (table,), (other,)),
    ):
        found, expected = (transform(partial(loss, backend=backend)) for backend in ("sdpa", "eager"))
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype, largest_score", [(torch.bfloat16, 300), (torch.float16, 300), (torch.float16, 10**5)])
@pytest.mark.parametrize("length", [12, 200])
def test_large_scores_in_half_precision_are_as_exact_as_in_the_reference(
    length, dtype, largest_score, requires_grad, monkeypatch
):
    """A bias in bfloat16 rounds scores of 300 to even numbers; in float16 it ends at 65504."""
    monkeypatch.setattr(attention_sdpa, "QUERY_BLOCK", 64)  # so 200 tokens have far keys
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, length, 16, dtype=torch.float64) * (largest_score / 300) ** 0.5
    tables = torch.randn(2, 2, 64, 16, dtype=torch.float64) * largest_score / 4 / (largest_score / 300) ** 0.5
    low = [tensor.to(dtype).requires_grad_(requires_grad) for tensor in (query, key, value, *tables)]
    rows = rows_of_distances(64, 32)
    exact = attend(*(tensor.double() for tensor in low), rows, backend="eager")[0]
    reference, found = (attend(*low, rows, backend=backend)[0] for backend in ("eager", "sdpa"))
    assert found.dtype == dtype
    assert_within_budget(found, reference.double(), exact)


def test_ordinary_scores_stay_in_bfloat16():
    query = key = torch.randn(1, 2, 12, 16).bfloat16()
    table = torch.randn(2, 64, 16).bfloat16()
    for factor, expected in ((1, False), (1000, True)):
        positions = RelativePositions.from_tables(table * factor, table, rows_of_distances(64, 32))
        assert needs_float32(query, key, positions, 0.1) is expected
        assert not needs_float32(query.float(), key.float(), positions, 0.1)


ON_GPU = {
    "one tile": {},
    "tiles": {"length": 1500},
    "blocks": {"batch": 1, "length": 4500, "heads": 1},
    "padding": {"mask": lengths_mask(700, 333)},
    "causal": {"causal": True},
    "packed": {"batch": 1, "cu_seqlens": torch.tensor([0, 40, 41, 300, 520, 700]), "longest": 259},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ON_GPU)
def test_on_a_gpu(case, dtype):
    torch.manual_seed(0)
    shape = {"batch": 2, "length": 700, "heads": 4} | ON_GPU[case]
    batch, length, heads = (shape.pop(name) for name in ("batch", "length", "heads"))
    mask = {name: value.cuda() if torch.is_tensor(value) else value for name, value in shape.items()}
    states = [torch.randn(batch, length, heads, 64).transpose(1, 2) for _ in range(3)]
    leaves = [tensor.cuda().to(dtype).requires_grad_() for tensor in (*states, *torch.randn(2, heads, 512, 64))]
    weight = torch.randn_like(leaves[0])
    rows = rows_of_distances(512, 256).cuda()

    def results(attention, to):
        context = attention(*[leaf.to(to) for leaf in leaves])
        return context, *torch.autograd.grad((context * weight.to(to)).sum(), leaves)

    def plain(query, key, value, position_key, position_query):
        """Equation 4 with all numbers in the same type, as Transformers computes it."""
        positions = RelativePositions.from_tables(position_key, position_query, rows)
        at = torch.arange(length, device="cuda")
        row = rows_at(at[None, :, None] - at, rows)
        terms = position_terms(query * scale, key, positions.scaled(scale, dtype), row)
        visible = AttentionMask(**mask).visible(length, query.device)
        return visible_softmax(sum(terms.values(), start=query * scale @ key.mT), visible) @ value

    def with_backend(backend):
        return lambda *inputs: attend(*inputs, rows_of_distance=rows, backend=backend, **mask)[0]

    scale = attention_scale(3, 64)
    exact, budget = results(with_backend("eager"), torch.float64), results(plain, dtype)
    for one, low, wanted in zip(results(with_backend("sdpa"), dtype), budget, exact, strict=True):
        assert_within_budget(one, low.double(), wanted.double())


@pytest.mark.parametrize("queries", [None, torch.tensor([[3, 1]])], ids=["all queries", "some queries"])
@pytest.mark.parametrize("frozen", [("query", "key", "value"), ("position_key",), ("query", "position_query")], ids=str)
def test_frozen_inputs_on_devices(frozen, queries, monkeypatch):
    """Only what needs a gradient gets one. No bias needs one alone: on CUDA its gradient would read no log sums."""
    monkeypatch.setattr(attention_sdpa, "uses_device_path", lambda query: True)
    monkeypatch.setattr(plain_sdpa, "TRAINING_BLOCK", 16)
    plain = plain_sdpa.scaled_dot_product_attention

    def checked(query, key, value, attn_mask, **options):
        needed = [tensor.requires_grad for tensor in (query, key, value)]
        assert any(needed) or not attn_mask.requires_grad
        return plain(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(plain_sdpa, "scaled_dot_product_attention", checked)
    monkeypatch.setattr(plain_sdpa, "drops_log_sums", lambda query: True)
    torch.manual_seed(0)
    leaves = {name: leaf(1, HEADS, 40, WIDTH) for name in ("query", "key", "value")}
    leaves |= {name: leaf(HEADS, 24, WIDTH) for name in ("position_key", "position_query")}
    if queries is not None:
        leaves["query"] = leaf(1, HEADS, 2, WIDTH)
    for name in frozen:
        leaves[name].requires_grad_(False)
    needed = [tensor for tensor in leaves.values() if tensor.requires_grad]
    results = []
    for backend in ("sdpa", "eager"):
        options = {"rows_of_distance": rows_of_distances(12), "query_positions": queries, "backend": backend}
        context, _ = attend(**leaves, **options)
        results.append((context, *torch.autograd.grad(context.square().sum(), needed)))
    torch.testing.assert_close(*results, atol=1e-12, rtol=0)


def test_traces_hold_for_other_lengths():
    """jit.trace works, with gradients enabled too; a legacy ONNX export would not, and says so."""
    torch.manual_seed(0)
    config = HfDebertaConfig.from_preset("tiny", return_dict=False)
    model = HfDebertaModel(config).eval()
    ids = torch.randint(5, 99, (2, 16))
    mask = torch.ones_like(ids)
    traced = torch.jit.trace(model, (ids, mask))
    for shape in ((1, 1), (1, 2), (3, 60)):
        ids = torch.randint(5, 99, shape)
        mask = torch.ones_like(ids)
        torch.testing.assert_close(traced(ids, mask)[0], model(ids, mask)[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match=r"hf_deberta\.export"):
        torch.onnx.export(model, (ids, mask), BytesIO(), dynamo=False)
