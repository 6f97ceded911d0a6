"""Enhanced mask decoder: sparse equals dense prediction, the last layer runs only for queries, absolute positions."""

import pytest
import torch
from numerics import (
    V1_ATTENTION,
    assert_equal_but_for_rounding,
    assert_same_by_name,
    tiny_inputs,
    tiny_model,
    train_step,
)
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import find_labels

from hf_deberta import HfDebertaForMaskedLM
from hf_deberta.engines import linear_cross_entropy as engine
from hf_deberta.model.enhanced_mask_decoder import HfDebertaMaskedLMOutput, labelled_positions
from hf_deberta.pretraining.rtd_pretraining import HfDebertaForRtdPretraining

pytestmark = pytest.mark.usefixtures("unpad_tiny_models")

INPUTS = tiny_inputs((9, 5, 7, 9))
REAL = INPUTS["attention_mask"].bool()
VARIANTS = {
    "everything": {},
    "v1 attention": V1_ATTENTION,
    "one step": {"emd_steps": 1},
    "three steps": {"emd_steps": 3},
    "no decoder": {"emd_steps": 0},
    "absolute input": {"position_biased_input": True},
}


def labels_where(mask):
    return (INPUTS["input_ids"] * 11 % 128).masked_fill(~mask, -100)


def random_mask():
    return (torch.rand(REAL.shape, generator=torch.Generator().manual_seed(0)) < 0.4) & REAL


LABEL_MASKS = {
    "at random": random_mask,
    "rows without labels": lambda: random_mask() & torch.tensor([[True], [False], [True], [False]]),
    "one": lambda: torch.arange(36).view(4, 9) == 13,
    "all real tokens": lambda: REAL,
    "real tokens and padding": lambda: torch.ones_like(REAL),
    "none": lambda: torch.zeros_like(REAL),
}


def assert_matches_logits(output, logits, labels):
    """Check losses and predictions of labelled positions against their logits [M, vocabulary]."""
    assert_equal_but_for_rounding(output.losses, nn.functional.cross_entropy(logits, labels, reduction="none"))
    assert torch.equal(output.predictions, logits.argmax(-1))
    assert not output.losses.requires_grad


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mask", LABEL_MASKS)
@pytest.mark.parametrize("unpad", [True, False], ids=["unpadded", "padded"])
def test_sparse_equals_dense_prediction(mask, variant, unpad):
    model = tiny_model(HfDebertaForMaskedLM, num_hidden_layers=3, unpad_inputs=unpad, **VARIANTS[variant])
    labels = labels_where(LABEL_MASKS[mask]())
    sparse, sparse_gradients = train_step(model, **INPUTS, labels=labels)
    model.config.sparse_prediction = False
    dense, dense_gradients = train_step(model, **INPUTS, labels=labels)
    labelled = (labels != -100) & REAL
    assert sparse.logits is None and dense.logits.shape == (4, 9, 128)
    assert_matches_logits(sparse, dense.logits[labelled], labels[labelled])
    assert_equal_but_for_rounding(sparse.loss, dense.loss)
    assert (sparse.loss > 0) == (mask != "none")
    assert_same_by_name(sparse_gradients, dense_gradients)


def patch_forward_of_head(model):
    head = model.lm_predictions.lm_head
    head.forward = lambda states: type(head).forward(head, states)


@pytest.mark.parametrize("variant", ["everything", "v1 attention", "no decoder"])
@pytest.mark.parametrize("mask", LABEL_MASKS)
@pytest.mark.parametrize("unused", [2, 100])
def test_bounded_equals_counted_number_of_labels(mask, variant, unused, request):
    """`max_predictions_per_row` changes no loss and no gradient, also if it is larger than necessary."""
    labels = labels_where(LABEL_MASKS[mask]())
    model = tiny_model(HfDebertaForMaskedLM, **VARIANTS[variant])
    counted, gradients = train_step(model, **INPUTS, labels=labels)
    bound = int(((labels != -100) & REAL).sum(1).max()) + unused
    request.getfixturevalue("values_are_not_read")
    for options in ({}, {"num_real_tokens": 30}):
        bounded, bounded_gradients = train_step(
            model, **INPUTS, labels=labels, max_predictions_per_row=bound, **options
        )
        predicted = bounded.labels != -100
        assert_equal_but_for_rounding(bounded.loss, counted.loss)
        assert_same_by_name(bounded_gradients, gradients)
        assert_equal_but_for_rounding(bounded.losses[predicted], counted.losses)
        assert torch.equal(bounded.predictions[predicted], counted.predictions)
        assert torch.equal(bounded.labels[predicted], counted.labels)
        assert not bounded.losses[~predicted].any()


def test_prediction_in_a_packed_row(request):
    model = tiny_model(HfDebertaForMaskedLM)
    input_ids = torch.arange(1, 22)[None]
    inputs = {"input_ids": input_ids, "labels": torch.where(input_ids % 4 == 1, input_ids, -100)}
    inputs["cu_seq_lens_q"] = torch.tensor([0, 9, 14, 21], dtype=torch.int32)
    dense, gradients = train_step(model, **inputs, sparse_prediction=False)
    counted, counted_gradients = train_step(model, **inputs)
    labelled = inputs["labels"] != -100
    assert_matches_logits(counted, dense.logits[labelled], inputs["labels"][labelled])
    assert_same_by_name(counted_gradients, gradients)
    request.getfixturevalue("values_are_not_read")
    bounded, bounded_gradients = train_step(model, **inputs, max_predictions_per_row=9)
    assert bounded.losses.shape == (9,) and counted.losses.shape == (6,)
    assert_equal_but_for_rounding(bounded.loss, dense.loss)
    assert_same_by_name(bounded_gradients, gradients)


def test_trainer_takes_no_other_input_for_labels():
    """`Trainer` computes no evaluation loss if an input with "label" in its name is missing."""
    assert find_labels(HfDebertaForMaskedLM) == find_labels(HfDebertaForRtdPretraining) == ["labels"]


def test_more_labels_than_the_bound():
    inputs = {**INPUTS, "labels": labels_where(REAL)}
    with pytest.raises(ValueError, match=r"9 labels.*max_predictions_per_row = 8"):
        tiny_model(HfDebertaForMaskedLM)(**inputs, max_predictions_per_row=8)


def test_more_labels_than_the_bound_where_values_cannot_be_read(values_are_not_read):
    inputs = {**INPUTS, "labels": labels_where(torch.arange(9).expand(4, -1) < 4)}
    model = tiny_model(HfDebertaForMaskedLM)
    assert model(**inputs, max_predictions_per_row=3).loss.isnan()
    assert not model(**inputs, max_predictions_per_row=4).loss.isnan()


@pytest.mark.slow
def test_bounded_training_step_is_one_graph():
    """A compiled step predicts labelled positions only, in one graph that serves other labels."""
    model = tiny_model(HfDebertaForMaskedLM, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        mask = (torch.rand(REAL.shape, generator=torch.Generator().manual_seed(seed)) < 0.3) & REAL
        inputs = {**INPUTS, "labels": labels_where(mask)}
        expected, gradients = train_step(model, **inputs)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            output, compiled_gradients = train_step(compiled, **inputs, max_predictions_per_row=6)
        assert output.predictions.shape == (4 * 6,)
        assert_equal_but_for_rounding(output.loss, expected.loss)
        names = {name.removeprefix("_orig_mod."): gradient for name, gradient in compiled_gradients.items()}
        assert_same_by_name(names, gradients)


MODIFICATIONS = {
    "hook": lambda model: model.get_output_embeddings().register_forward_hook(lambda *_: None),
    "patched forward": patch_forward_of_head,
    "parametrized matrix": lambda model: nn.utils.parametrize.register_parametrization(
        model.get_output_embeddings(), "weight", nn.Identity()
    ),
}


@pytest.mark.parametrize("modification", MODIFICATIONS)
def test_a_hooked_or_modified_output_matrix_is_called(modification, monkeypatch):
    """Losses, predictions and gradients stay the same."""
    labels = labels_where(random_mask())
    plain, plain_gradients = train_step(tiny_model(HfDebertaForMaskedLM), **INPUTS, labels=labels)
    model = tiny_model(HfDebertaForMaskedLM)
    MODIFICATIONS[modification](model)
    monkeypatch.setattr(engine, "linear_cross_entropy", None)  # calling it is an error
    output = model(**INPUTS, labels=labels)
    output.loss.backward()
    assert plain.logits is None and output.logits is None
    assert_equal_but_for_rounding(output.loss, plain.loss)
    assert_equal_but_for_rounding(output.losses, plain.losses)
    assert torch.equal(output.predictions, plain.predictions)
    name = "deberta.encoder.layer.0.output.dense.weight"
    assert_same_by_name({name: model.get_parameter(name).grad}, {name: plain_gradients[name]})


def test_sparse_prediction_argument():
    """The argument takes precedence over the configuration, in evaluation as in training."""
    model, labels = tiny_model(HfDebertaForMaskedLM), labels_where(random_mask())
    for training in (True, False):
        model.train(training)
        sparse = model(**INPUTS, labels=labels, sparse_prediction=True)
        dense = model(**INPUTS, labels=labels, sparse_prediction=False)
        assert sparse.logits is None and dense.losses is None
        assert_matches_logits(sparse, dense.logits[labels != -100], labels[labels != -100])
        model.config.sparse_prediction = not training
        assert model(**INPUTS, labels=labels).logits is not None
        model.config.sparse_prediction = True
    unlabelled = model(**INPUTS, sparse_prediction=True)
    assert unlabelled.logits.shape == (4, 9, 128) and unlabelled.losses is None


def test_output_class_and_fields():
    labels = labels_where(random_mask())
    model = tiny_model(HfDebertaForMaskedLM)
    assert list(model(**INPUTS)) == ["logits"]
    output = model(**INPUTS, labels=labels)
    assert type(output) is HfDebertaMaskedLMOutput and isinstance(output, MaskedLMOutput)
    assert list(output) == ["loss", "losses", "predictions", "labels"]
    assert list(model.eval()(**INPUTS, labels=labels)) == ["loss", "logits"]


def record_projections(model):
    """Return a dictionary that will collect the input shapes of the last layer's projections: {name: [shapes]}."""
    attention = model.deberta.encoder.layer[-1].attention.self
    calls = {name: [] for name in ("query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj")}
    for name, shapes in calls.items():
        getattr(attention, name).register_forward_pre_hook(
            lambda module, arguments, shapes=shapes: shapes.append(tuple(arguments[0].shape))
        )
    return calls


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_last_layer_runs_only_for_queries(training, steps):
    labels = labels_where(random_mask() & (torch.arange(9) < 7))
    for unpad in (True, False):
        model = tiny_model(HfDebertaForMaskedLM, emd_steps=steps, share_att_key=False, unpad_inputs=unpad)
        calls = record_projections(model.train(training))
        model(**INPUTS, labels=labels)
        keys = (1, int(REAL.sum())) if unpad else (4, 9)
        queries = (keys[0], int((labels != -100)[REAL if unpad else ...].view(keys).sum(1).max())) if training else keys
        assert queries[1] < keys[1] or not training
        assert calls["query_proj"] == [(*queries, 32)] * steps
        assert calls["key_proj"] == calls["value_proj"] == [(*keys, 32)]
        assert calls["pos_key_proj"] == calls["pos_query_proj"] == [(17, 32)]


def test_absolute_positions_change_the_decoder_only():
    other = torch.arange(9).flip(0)[None]  # with a mask, positions do not mark documents
    for steps in (0, 2):
        model = tiny_model(HfDebertaForMaskedLM, emd_steps=steps).eval()
        plain, permuted = model(**INPUTS).logits, model(**INPUTS, position_ids=other).logits
        states = model.deberta(**INPUTS).last_hidden_state
        assert torch.equal(states, model.deberta(**INPUTS, position_ids=other).last_hidden_state)
        assert torch.equal(plain, permuted) == (steps == 0)
        if steps:
            assert (plain - permuted)[REAL].abs().max() > 0.01


def test_labelled_positions():
    labels = torch.tensor([[-100, 5, -100, 0], [-100] * 4, [7, -100, -100, -100]])
    positions = labelled_positions(labels != -100)
    assert positions.shape == (3, 2)
    assert positions[0].tolist() == [1, 3] and positions[2, 0] == 0
    assert labels.gather(1, positions).tolist() == [[5, 0], [-100, -100], [7, -100]]
    assert labelled_positions(torch.zeros(2, 3, dtype=torch.bool)).shape == (2, 1)
    assert labelled_positions(torch.tensor([[5, 6, 7, -100], [-100] * 4]) > 0).shape == (2, 3)
    assert labelled_positions(torch.tensor([[5, 6, 7, 8], [-100] * 4]) > 0) is None  # nearly all
