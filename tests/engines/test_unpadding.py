"""Unpadding: the same numbers at real tokens, zeros at padding, documents that do not see one another."""

import pytest
import torch
from numerics import lengths_mask, tiny_config, tiny_inputs, tiny_model
from test_modeling_hf_deberta import first_tensor, loss_of, name_of, with_labels

from hf_deberta import (
    HfDebertaForMaskedLM,
    HfDebertaForMultipleChoice,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
    HfDebertaModel,
)
from hf_deberta.engines import attention_sdpa, unpadding
from hf_deberta.engines.unpadding import (
    round_up,
    unpadding_of_counted_mask,
    unpadding_of_documents,
    unpadding_of_mask,
)
from hf_deberta.model.batch_layout import BatchLayout

REAL_COSTS = unpadding.COST_OF_EXTRA_CALLS, unpadding.COST_OF_EXTRA_LAUNCHES

pytestmark = pytest.mark.usefixtures("unpad_tiny_models")


def test_real_tokens_in_a_row():
    """Shortest document first; where lengths are not read, in the order of the batch."""
    mask = lengths_mask(4, 2, 3, 2)
    read, counted = unpadding_of_mask(mask, 768), unpadding_of_counted_mask(mask, 11, 768)
    assert read.lengths == (2, 2, 3, 4) and counted.lengths is None
    assert read.lengths[-1] == 4 and read.shape == counted.shape == (4, 4)
    assert read.index.tolist() == [4, 5, 12, 13, 8, 9, 10, 0, 1, 2, 3]
    assert counted.index.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10, 12, 13]
    assert read.cu_seqlens.tolist() == [0, 2, 4, 7, 11] and counted.cu_seqlens.tolist() == [0, 4, 6, 9, 11, 11]
    assert [part.tolist() for part in read.first_token_positions()] == [[0, 2, 4, 7], [1, 3, 2, 0]]
    assert [part.tolist() for part in counted.first_token_positions()] == [[0, 4, 6, 9], [0, 1, 2, 3]]
    assert unpadding_of_counted_mask(lengths_mask(8, 7), 15, 768) is None  # too little padding


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(3, 9, dtype=torch.bool),  # no padding
        torch.zeros(3, 9, dtype=torch.bool),  # only padding
        lengths_mask(9, 3).flip(1),  # padding on the left
        lengths_mask(9, 3) & (torch.arange(9) != 1),  # a hole
        lengths_mask(*[64] * 9, 40),  # too little
    ],
    ids=["none", "all", "left", "hole", "little"],
)
def test_masks_that_are_not_unpadded(mask):
    assert unpadding_of_mask(mask, 768) is None


def test_what_unpadding_saves_must_exceed_its_cost(monkeypatch):
    """The calls of attention for each length of documents, and on devices more launches."""
    monkeypatch.setattr(unpadding, "COST_OF_EXTRA_CALLS", REAL_COSTS[0])
    monkeypatch.setattr(unpadding, "COST_OF_EXTRA_LAUNCHES", REAL_COSTS[1])
    mask = lengths_mask(12, 9, 7, 5)
    assert unpadding_of_mask(mask, 64) is None and unpadding_of_mask(mask, 2048) is not None
    assert unpadding_of_mask(lengths_mask(*range(24, 1, -2)), 256) is None  # twelve lengths
    assert unpadding_of_mask(lengths_mask(12, *[2] * 63), 256) is not None  # two
    mask = lengths_mask(*[101] * 8, *[40] * 24)
    real = int(mask.sum())
    assert unpadding_of_counted_mask(mask, real, 768) is not None
    assert unpadding_of_counted_mask(mask, real, 384) is None
    assert unpadding_of_counted_mask(mask[::8], real // 8, 768) is None


def test_rows_of_documents():
    found = unpadding_of_documents(torch.tensor([[0, 0, 0, 1, 2], [0, 0, 0, 0, 0]]))
    assert found.lengths == (1, 1, 3, 5)
    assert found.index.tolist() == [3, 4, 0, 1, 2, 5, 6, 7, 8, 9]


@pytest.fixture(params=["read", "counted", "counted, attention of devices"])
def mask_is(request, monkeypatch):
    """Whether the model reads the mask, or is given the number of real tokens."""
    if request.param != "read":
        request.getfixturevalue("values_are_not_read")
    if request.param == "counted, attention of devices":
        monkeypatch.setattr(attention_sdpa, "uses_device_path", lambda query: True)
    return request.param


def rows_seen(model, **inputs):
    """Shapes of the states that reach the layers."""
    shapes, handles = [], []
    encoder = getattr(model, "deberta", model).encoder
    for layer in encoder.layer:
        hook = lambda module, given: shapes.append(tuple(given[0].shape[:2]))  # noqa: E731
        handles.append(layer.register_forward_pre_hook(hook))
    model(**inputs)
    for handle in handles:
        handle.remove()
    return shapes


def test_a_wrong_number_of_real_tokens():
    model, inputs = tiny_model(HfDebertaModel), tiny_inputs((9, 4, 7))
    with pytest.raises(ValueError, match="num_real_tokens is 19, but attention_mask has 20 real tokens"):
        model(**inputs, num_real_tokens=19)
    with_a_hole = inputs["attention_mask"].index_fill(1, torch.tensor(2), 0)
    with pytest.raises(ValueError, match="num_real_tokens is for rows padded on the right"):
        model(inputs["input_ids"], with_a_hole, num_real_tokens=17)
    inputs["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="none of them empty"):
        model(**inputs, num_real_tokens=16)


@pytest.mark.parametrize(
    "fields, flags, unpadded",
    [
        ({}, {}, True),
        ({"unpad_inputs": False}, {}, False),
        ({}, {"output_attentions": True}, False),
        ({"attn_implementation": "eager"}, {}, False),
    ],
    ids=str,
)
def test_when_layers_see_real_tokens_only(fields, flags, unpadded):
    model = tiny_model(HfDebertaForSequenceClassification, **fields)
    assert rows_seen(model, **tiny_inputs((9, 4, 7)), **flags) == [(1, 20) if unpadded else (3, 9)] * 2


@pytest.mark.parametrize("model_class", [HfDebertaModel, HfDebertaForMaskedLM])
def test_a_mask_without_padding_is_left_out(model_class, monkeypatch):
    """Tokenizers return one with every text, and to apply it takes time."""
    layouts, unpad = [], unpadding.unpad
    monkeypatch.setattr(unpadding, "unpad", lambda *args: layouts.append(unpad(*args)) or layouts[-1])
    model = tiny_model(model_class).eval()
    ids = tiny_inputs((7, 7, 7))["input_ids"]
    expected = first_tensor(model(ids))
    assert torch.equal(first_tensor(model(ids, attention_mask=torch.ones_like(ids))), expected)
    assert [layout.attention_mask.mask for layout in layouts] == [None, None]
    with pytest.raises(ValueError, match="num_real_tokens is 20"):
        model.base_model(ids, attention_mask=torch.ones_like(ids), num_real_tokens=20)


def test_the_mask_decoder_decodes_the_padded_batch_if_lengths_are_not_read(values_are_not_read):
    inputs = {**with_labels(HfDebertaForMaskedLM, tiny_inputs((9, 4, 7))), "num_real_tokens": 20}
    assert rows_seen(tiny_model(HfDebertaForMaskedLM, emd_steps=2), **inputs) == [(1, 20), (3, 9)]


def test_losses_and_predictions_of_labels_are_in_the_order_of_the_batch(mask_is):
    inputs = {**with_labels(HfDebertaForMaskedLM, tiny_inputs((9, 4, 7))), "num_real_tokens": 20}
    found, expected = (tiny_model(HfDebertaForMaskedLM, unpad_inputs=unpad)(**inputs) for unpad in (True, False))
    torch.testing.assert_close(found.losses, expected.losses)
    assert torch.equal(found.predictions, expected.predictions) and found.predictions.unique().numel() > 1


@pytest.mark.parametrize(
    "model_class", [HfDebertaModel, HfDebertaForMaskedLM, HfDebertaForTokenClassification], ids=name_of
)
def test_more_tokens_than_are_real(model_class, mask_is, monkeypatch):
    """A rounded number, which CUDA graphs need: the tokens beyond the real ones change nothing."""
    monkeypatch.setattr(unpadding, "TOKEN_BUCKETS", 1)
    inputs = tiny_inputs((12, 2, 1, 1, 1))
    inputs = with_labels(model_class, inputs) if model_class is not HfDebertaModel else inputs
    if model_class is HfDebertaForMaskedLM:  # at every token
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    assert round_up(17) == 32  # more than a row
    results = []
    for number in (17, 32):
        model = tiny_model(model_class, sparse_prediction=False)
        output = model(**inputs, num_real_tokens=number)
        loss = loss_of(output, inputs)
        loss.backward()
        results.append((first_tensor(output), loss, [weight.grad for weight in model.parameters()]))
    torch.testing.assert_close(*results)
    documents = unpadding_of_counted_mask(inputs["attention_mask"].bool(), 32, 768).cu_seqlens
    assert documents[-1] == 32 and documents.diff().max() <= 12  # none is longer than a row, which kernels rely on
    if model_class is HfDebertaModel:
        assert not results[1][0][inputs["attention_mask"] == 0].any()
    if mask_is != "read":
        assert rows_seen(model, **inputs, num_real_tokens=32)[0] == (1, 32)


def test_packed_rows():
    """Classifiers need boundaries. On the CPU the longest length changes nothing, and a too small one is refused."""
    model, ids = tiny_model(HfDebertaForSequenceClassification).eval(), torch.randint(1, 128, (1, 19))
    positions = torch.cat([torch.arange(length) for length in (5, 9, 5)])[None]
    layout = BatchLayout.from_inputs(None, positions, None, (1, 19), positions.device)
    assert layout.attention_mask.mask is None  # no mask of pairs, which a long row has no memory for
    with pytest.raises(ValueError, match="pass their boundaries as cu_seq_lens_q"):
        model(ids, position_ids=positions)
    assert model(ids, position_ids=torch.arange(19)[None]).logits.shape == (1, 2)  # one document
    bounds = torch.tensor([0, 5, 14, 19], dtype=torch.int32)
    expected = model(ids, cu_seq_lens_q=bounds)[0]
    for longest in (9, 19):
        torch.testing.assert_close(model(ids, cu_seq_lens_q=bounds, max_length_q=longest)[0], expected)
    with pytest.raises(ValueError, match="max_length_q is 8, but cu_seq_lens_q has a document of 9 tokens"):
        model(ids, cu_seq_lens_q=bounds, max_length_q=8)


# ---- the first token only ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("padded", [True, False], ids=["padding", "no padding"])
def test_first_token_only(padded, layers, backend):
    model = tiny_model(HfDebertaModel, num_hidden_layers=layers, emd_steps=0).eval()
    model.set_attn_implementation(backend)
    inputs = tiny_inputs((9, 4, 7) if padded else (9, 9, 9))
    first = model(**inputs, first_token_only=True)
    torch.testing.assert_close(first.last_hidden_state, model(**inputs).last_hidden_state[:, :1])
    both = model(**inputs, first_token_only=True, output_hidden_states=True)
    torch.testing.assert_close(both.last_hidden_state, first.last_hidden_state)
    assert both.hidden_states[-1].shape == (3, 9, 32)


@pytest.mark.parametrize("model_class", [HfDebertaForSequenceClassification, HfDebertaForMultipleChoice], ids=name_of)
def test_the_last_layer_of_a_classifier_sees_one_query_per_sequence(model_class):
    model = tiny_model(model_class, unpad_inputs=False)
    queries = []
    model.deberta.encoder.layer[-1].intermediate.register_forward_pre_hook(
        lambda module, given: queries.append(tuple(given[0].shape[:2]))
    )
    inputs = tiny_inputs((9, 4, 7))
    if model_class is HfDebertaForMultipleChoice:
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    model(**inputs)
    assert queries == [(3, 1)]


# ---- where unpadding must not be visible -------------------------------------------------------------------------


def test_gradients_of_hidden_states():
    model = tiny_model(HfDebertaForSequenceClassification)
    output = model(**with_labels(HfDebertaForSequenceClassification, tiny_inputs((9, 4, 7))), output_hidden_states=True)
    for state in output.hidden_states[:-1]:
        state.retain_grad()
    output.loss.backward()
    assert all(state.grad is not None for state in output.hidden_states[:-1])


def test_on_the_meta_device():
    """Its tensors have no values: whatever would wait for a GPU fails."""
    inputs = {name: tensor.to("meta") for name, tensor in tiny_inputs((9, 4, 7)).items()}
    with torch.device("meta"):
        model = HfDebertaModel(tiny_config())
    assert model(**inputs).last_hidden_state.shape == (3, 9, 32)
    assert model(**inputs, num_real_tokens=20).last_hidden_state.shape == (3, 9, 32)
    assert rows_seen(model, **inputs, num_real_tokens=20) == [(1, 20)] * 2
    assert rows_seen(model, **inputs, num_real_tokens=20, first_token_only=True) == [(1, 20)] * 2


def test_numbers_of_real_tokens_are_not_compiled_one_by_one():
    """It computes padding; a graph per number would be compiled again and again. PyTorch 2.11 makes a second graph."""
    model, graphs = tiny_model(HfDebertaForSequenceClassification).eval(), []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True)
    for lengths in ((9, 4, 7), (9, 5, 3), (9, 2, 1)):
        inputs = tiny_inputs(lengths)
        with torch.no_grad():
            found = compiled(**inputs, num_real_tokens=sum(lengths)).logits
        torch.testing.assert_close(found, model(**inputs).logits)
    assert len(graphs) <= 2


def test_padding_may_exceed_the_position_embeddings(unpad_tiny_models):
    """Absolute positions of real tokens count; without unpadding those of padding do too."""
    model = tiny_model(HfDebertaForMaskedLM, max_position_embeddings=32).eval()
    ids, mask = torch.randint(4, 120, (3, 40)), torch.arange(40) < torch.tensor([[20], [30], [5]])
    expected = model(ids[:, :30], attention_mask=mask[:, :30]).logits[mask[:, :30]]
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask], expected)
    with pytest.raises(ValueError, match="40 positions, and max_position_embeddings is 32"):
        model(ids, attention_mask=torch.ones_like(ids))
