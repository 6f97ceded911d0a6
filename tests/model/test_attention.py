"""disentangled_attention: query subsets, packing, padding, windows of the table, lengths, backends and errors."""

import pytest
import torch
from numerics import TERMS, gradients, tiny_inputs, tiny_model, whole_window
from numerics import attend as attend_with
from transformers import AttentionInterface

from hf_deberta import HfDebertaForMaskedLM
from hf_deberta.model.attention import BACKENDS, Backend, disentangled_attention
from hf_deberta.model.batch_layout import document_numbers
from hf_deberta.model.relative_position import rows_of_distances

TABLES = {"buckets": (64, 16), "clipped": (6, 0)}  # k, buckets
HEADS, SIZE = 2, 4


def span(table):
    return TABLES[table][1] or TABLES[table][0]


def random_inputs(length, batch=2, table="buckets", seed=0):
    """Query, key and value of every position, and the whole relative tables, all with gradients."""
    torch.manual_seed(seed)
    states = {name: torch.randn(batch, HEADS, length, SIZE) for name in ("query", "key", "value")}
    rows = {name: torch.randn(HEADS, 2 * span(table), SIZE) for name in ("position_key", "position_query")}
    return {name: tensor.double().requires_grad_() for name, tensor in {**states, **rows}.items()}


def attend(inputs, table="buckets", **options):
    return attend_with(**inputs, rows_of_distance=rows_of_distances(*TABLES[table]), **options)


def windowed(inputs, table="buckets"):
    """The same inputs with only the rows that the length uses, and the first of these rows."""
    rows = whole_window(rows_of_distances(*TABLES[table])).for_length(inputs["query"].shape[2])
    tables = {name: inputs[name][:, rows.first : rows.end] for name in ("position_key", "position_query")}
    return {**inputs, **tables}, rows.first


def weighted(context):
    """The context with different weights for its channels, so that their gradients differ."""
    return context * torch.arange(1, context.shape[-1] + 1, dtype=context.dtype)


def assert_same(context, expected, inputs):
    """Compare two contexts, and their gradients."""
    torch.testing.assert_close(context, expected)
    torch.testing.assert_close(gradients(weighted(context), inputs), gradients(weighted(expected), inputs))


def ragged(batch, length):
    return torch.arange(length) < torch.tensor([length, length - 4])[:batch, None]


MASKS = {
    "full": (2, lambda length: {}),
    "padding": (2, lambda length: {"mask": ragged(2, length)}),
    "pairs": (2, lambda length: {"mask": ragged(2, length)[:, None].expand(-1, length, -1).tril()}),
    "packed": (1, lambda length: {"cu_seqlens": torch.tensor([0, 3, 4, length], dtype=torch.int32)}),
    "documents": (2, lambda length: {"documents": (torch.arange(length) >= torch.tensor([[4], [9]])).long()}),
    "causal": (2, lambda length: {"mask": ragged(2, length), "causal": True}),
    "packed and padded": (1, lambda length: {"cu_seqlens": torch.tensor([0, 5, length]), "mask": ragged(1, length)}),
}


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_subset_of_queries_gives_those_rows_of_the_full_result(mask, terms):
    length = 11
    batch, options = MASKS[mask][0], MASKS[mask][1](length)
    inputs = random_inputs(length, batch)
    chosen = torch.tensor([[10, 0, 4, 4], [2, 9, 8, 0]])[:batch]
    index = chosen[:, None, :, None].expand(-1, HEADS, -1, -1)
    full = attend(inputs, terms=TERMS[terms], **options)
    some = attend(
        {**inputs, "query": inputs["query"].gather(2, index.expand(-1, -1, -1, SIZE))},
        terms=TERMS[terms],
        query_positions=chosen,
        **options,
    )
    expected = [tensor.gather(2, index.expand(-1, -1, -1, tensor.shape[-1])) for tensor in full]
    assert_same(some[0], expected[0], inputs)
    torch.testing.assert_close(some[1], expected[1])
    assert mask == "full" or not full[1].all()


@pytest.mark.parametrize("length", [1, 2, 7, 16, 17, 40, 150])
@pytest.mark.parametrize("table", TABLES)
def test_rows_in_use_equal_the_whole_table(table, length):
    inputs = random_inputs(length, batch=1, table=table)
    window, first = windowed(inputs, table)
    assert first > 0 or length >= span(table)
    whole, part = attend(inputs, table), attend(window, table, first_row=first)
    assert_same(part[0], whole[0], inputs)
    torch.testing.assert_close(part[1], whole[1])


def test_terms_default_to_those_with_a_table():
    inputs = random_inputs(5)
    for dropped, terms in (((), "both"), (("position_query",), "c2p"), (("position_key",), "p2c")):
        given = {name: tensor for name, tensor in inputs.items() if name not in dropped}
        torch.testing.assert_close(attend(given), attend(inputs, terms=TERMS[terms]))
    content = {name: inputs[name] for name in ("query", "key", "value")}
    torch.testing.assert_close(disentangled_attention(**content)[0], attend(inputs, terms=())[0])


def test_scale_probabilities_and_dropout_are_passed_on():
    inputs = random_inputs(6)
    torch.testing.assert_close(attend(inputs, scale=(3 * SIZE) ** -0.5), attend(inputs))
    assert not torch.allclose(attend(inputs, scale=1.0)[0], attend(inputs)[0])
    assert attend(inputs, backend="sdpa")[1] is None
    torch.manual_seed(0)
    _, probabilities = attend(inputs, dropout_p=0.5)
    assert 0 < (probabilities == 0).double().mean() < 1


BOOLEAN = torch.ones(3, 5, 5, dtype=torch.bool)
AGREE, TABLE = "must agree in B, H and d, not", "needs its table"
# name: (change of random_inputs(5), message)
WRONG = {
    "key and value differ": (lambda x: {"value": x["value"][:, :, :3]}, AGREE + r".* \(2, 2, 3, 4\)"),
    "another batch size": (lambda x: {"query": x["query"][:1]}, AGREE + r" \(1, 2, 5, 4\)"),
    "another head size": (lambda x: {"query": x["query"][..., :3]}, AGREE + r" \(2, 2, 5, 3\)"),
    "a table of one head": (lambda x: {"position_key": x["position_key"][:1]}, f"'c2p' {TABLE} with .* 2 heads"),
    "p2p without position_key": (lambda x: {"position_key": None, "terms": ("p2p",)}, f"'p2p' {TABLE}"),
    "p2p without position_query": (lambda x: {"position_query": None, "terms": ("p2p",)}, f"'p2p' {TABLE}"),
    "unknown term": (lambda x: {"terms": ("c2p", "c2q")}, "c2q"),
    "fewer queries, no positions": (lambda x: {"query": x["query"][:, :, :3]}, r"need query_positions \[B, Q\]"),
    "positions of another number": (lambda x: {"query_positions": torch.zeros(2, 3).long()}, r"\(2, 5\), not \(2, 3\)"),
    "integer mask": (lambda x: {"mask": torch.ones(2, 5).long()}, "mask must be boolean.*not torch.int64"),
    "mask of another length": (lambda x: {"mask": BOOLEAN[:2, 0, :4]}, r"= \(2, 5, 5\), not \(2, 4\)"),
    "mask of another batch": (lambda x: {"mask": BOOLEAN}, r"not \(3, 5, 5\)"),
    "cu_seqlens with a batch": (lambda x: {"cu_seqlens": torch.tensor([0, 5])}, "one packed row, not a batch of 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_raises_a_clear_error(case):
    inputs = random_inputs(5)
    arguments = {**inputs, "rows_of_distance": rows_of_distances(*TABLES["buckets"])}
    attend_with(**arguments)
    change, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        attend_with(**{**arguments, **change(inputs)})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_document_numbers(dtype):
    assert document_numbers(torch.tensor([0, 2, 5], dtype=dtype), 5).tolist() == [0, 0, 1, 1, 1]
    assert document_numbers(torch.tensor([0, 5], dtype=dtype), 5).tolist() == [0] * 5
    assert document_numbers(torch.tensor([0, 1, 1, 3], dtype=dtype), 3).tolist() == [0, 2, 2]  # an empty document
    assert document_numbers(torch.tensor([0, 2], dtype=dtype), 4).tolist() == [0, 0, 1, 1]  # the rest is one more


# ---- backends ----------------------------------------------------------------------------------------------------


def test_a_new_backend_is_one_entry_and_falls_back_with_one_warning(monkeypatch, warnings_so_far):
    def unsupported_reason(query, key, value, positions, mask, dropout_p):
        return "it supports no dropout" if dropout_p > 0 else None

    doubled = Backend(lambda query, key, value, *rest: (2 * value, None), unsupported_reason)
    monkeypatch.setitem(BACKENDS, "doubled", doubled)
    inputs = random_inputs(5)
    assert torch.equal(attend(inputs, backend="doubled")[0], 2 * inputs["value"])
    for _ in range(2):
        torch.manual_seed(0)
        found = attend(inputs, backend="doubled", dropout_p=0.5)
        torch.manual_seed(0)
        torch.testing.assert_close(found, attend(inputs, dropout_p=0.5, backend="sdpa"))
    (message,) = warnings_so_far()
    assert "'doubled'" in message and "it supports no dropout" in message


# ---- functions registered with Transformers ----------------------------------------------------------------------


@pytest.fixture
def recorded():
    """Calls of an attention function that is registered as "recording" and calls the reference."""
    calls = []

    def recording(query, key, value, positions, mask, dropout_p):
        calls.append((positions, mask))
        return disentangled_attention(query, key, value, positions, mask, scale=1.0, dropout_p=dropout_p)[0]

    AttentionInterface.register("recording", recording)
    yield calls
    AttentionInterface._global_mapping.pop("recording")


def test_a_function_registered_with_transformers(recorded):
    model = tiny_model(HfDebertaForMaskedLM).eval()
    inputs = tiny_inputs()
    expected = model(**inputs).logits
    model.set_attn_implementation("recording")
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(model(**inputs).logits[real], expected[real])
    assert len(recorded) == 3  # a layer, and two steps of the decoder
    positions, mask = recorded[0]
    assert positions.terms == ("c2p", "p2c") and mask.mask.shape == (3, 9)
    model(**inputs, output_attentions=True)
    assert len(recorded) == 3  # a pass with probabilities uses eager in all layers and the decoder


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "nothing"])
def test_attention_functions_of_transformers_are_refused(name):
    states = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="choose one of auto, eager, sdpa, triton, or register"):
        disentangled_attention(states, states, states, backend=name)


def test_a_registered_function_must_return_the_context_alone():
    AttentionInterface.register("pair", lambda query, *rest: (query, None))
    try:
        states = torch.zeros(1, 1, 2, 4)
        with pytest.raises(TypeError, match="'pair' must return the context"):
            disentangled_attention(states, states, states, backend="pair")
    finally:
        AttentionInterface._global_mapping.pop("pair")
