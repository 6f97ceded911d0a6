"""Inputs and labels that a head does not take raise a ValueError with the rule, the value and the way out."""

import numpy
import pytest
import torch
from numerics import assert_equal_but_for_rounding, tiny_inputs, tiny_model

import hf_deberta

SEQUENCE, TOKENS = hf_deberta.HfDebertaForSequenceClassification, hf_deberta.HfDebertaForTokenClassification
CHOICE, ENTITIES = hf_deberta.HfDebertaForMultipleChoice, hf_deberta.HfDebertaForEntityChoice
REPLACED, WORDS = hf_deberta.HfDebertaForPreTraining, hf_deberta.HfDebertaForMaskedLM
ANSWERS, MODEL = hf_deberta.HfDebertaForQuestionAnswering, hf_deberta.HfDebertaModel
IDS = tiny_inputs((4, 4))["input_ids"]
MULTI_LABEL = {"num_labels": 3, "problem_type": "multi_label_classification"}
SPANS = torch.tensor([[[1, 2]], [[3, 0]]])

# class, config fields, inputs, message
WRONG = {
    "a class too large": (
        SEQUENCE,
        {"num_labels": 3},
        {"labels": torch.tensor([0, 3])},
        "labels must be below 3, .*not 3",
    ),
    "half a class": (SEQUENCE, {"num_labels": 3}, {"labels": torch.tensor([0, 0.5])}, "whole numbers, .*not 0.5"),
    "one number": (SEQUENCE, {"num_labels": 3}, {"labels": torch.tensor(1)}, r"must be of shape \(2,\), not \(\)"),
    "no target": (SEQUENCE, {"num_labels": 1}, {"labels": torch.tensor([0, torch.nan])}, "finite, not nan; drop rows"),
    "two labels of one": (SEQUENCE, MULTI_LABEL, {"labels": torch.full((2, 3), 2)}, r"must lie in \[0, 1\], .*not 2"),
    "several classes, no problem type": (
        SEQUENCE,
        {"num_labels": 3},
        {"labels": torch.tensor([[1.0, 1, 0], [0, 1, 0]])},
        "distributions over the classes, which must sum to 1, not 2; .*problem_type",
    ),
    "a token's class": (TOKENS, {"num_labels": 3}, {"labels": IDS * 0 + 10**6}, "labels must be below 3, .*not 1e"),
    "labels of tokens as a list": (TOKENS, {}, {"labels": (IDS * 0).tolist()}, "labels must be a tensor, not list"),
    "a choice too large": (CHOICE, {}, {"input_ids": IDS[None], "labels": torch.tensor([2])}, "labels must be below 2"),
    "an order of choices": (
        CHOICE,
        {},
        {"input_ids": IDS[:1, None], "attention_mask": IDS[None] > 0},
        r"attention_mask must begin with \[B, choices\] = \(1, 1\)",
    ),
    "an entity's label": (
        ENTITIES,
        {},
        {"entity_indices": SPANS, "labels": torch.tensor([[1], [2]])},
        "labels must be 0 or 1, or -100 to be ignored, not 2",
    ),
    "an entity outside": (ENTITIES, {}, {"entity_indices": SPANS + 1}, r"entity_indices .*in \[0, 4\), not 4"),
    "an entity before": (ENTITIES, {}, {"entity_indices": SPANS - 1}, r"entity_indices .*in \[0, 4\), not -1"),
    "entities of one row": (ENTITIES, {}, {"entity_indices": SPANS[:1]}, r"with B = 2, not \(1, 1, 2\)"),
    "packed entities": (
        ENTITIES,
        {},
        {"entity_indices": SPANS, "cu_seq_lens_q": torch.tensor([0, 4])},
        "does not support packed rows",
    ),
    "a replaced token": (REPLACED, {}, {"labels": IDS * 0 + 10**6}, "labels must be 0 or 1, .*not 1e"),
    "a word": (WORDS, {}, {"labels": IDS * 0 + 128}, "labels must be below 128, .*not 128"),
    "a start without an end": (ANSWERS, {}, {"start_positions": torch.tensor([1, 1])}, "both .* or neither"),
    "half a position": (
        ANSWERS,
        {},
        {"start_positions": torch.tensor([1, 1]), "end_positions": torch.tensor([1, 1.5])},
        "end_positions must be whole numbers, .*not 1.5",
    ),
    "a list of ids": (
        MODEL,
        {},
        {"input_ids": IDS.tolist()},
        "input_ids must be a tensor, not list; pass torch.tensor",
    ),
    "an array of ids": (MODEL, {}, {"input_ids": IDS.numpy()}, "input_ids must be a tensor, not ndarray"),
    "an array as mask": (MODEL, {}, {"attention_mask": numpy.ones((2, 4))}, "attention_mask must be a tensor, not nda"),
    "ids with a fraction": (
        MODEL,
        {},
        {"input_ids": IDS.float()},
        "input_ids must be of type int64 or int32, not torch",
    ),
    "narrow embeddings": (MODEL, {}, {"input_ids": None, "inputs_embeds": torch.ones(2, 4, 8)}, r"\[B, N, 32\]"),
    "types of one row too few": (
        MODEL,
        {"type_vocab_size": 2},
        {"token_type_ids": IDS[:, 1:] * 0},
        r"token_type_ids must be \[B, N\] = \(2, 4\), not \(2, 3\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_and_labels_are_refused(case):
    model_class, fields, inputs, message = WRONG[case]
    model = tiny_model(model_class, **fields)
    with pytest.raises(ValueError, match=message) as caught:
        model(**{"input_ids": IDS, **inputs})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model_class, fields, labels, dtype",
    [
        (SEQUENCE, {"num_labels": 3}, torch.tensor([0, 2]), torch.float32),
        (SEQUENCE, {"num_labels": 3}, torch.tensor([0, 2]), torch.uint8),
        (TOKENS, {"num_labels": 3}, IDS % 3, torch.float32),
        (TOKENS, {"num_labels": 2}, IDS % 2, torch.bool),
        (REPLACED, {}, IDS % 2, torch.bool),
        (REPLACED, {}, IDS % 2, torch.uint8),
        (REPLACED, {}, IDS % 2, torch.float32),
        (WORDS, {"sparse_prediction": False}, IDS, torch.int32),
    ],
)
def test_labels_of_any_type_mean_the_same(model_class, fields, labels, dtype):
    """bool and uint8 cannot hold -100, the label of padding."""
    model = tiny_model(model_class, **fields)
    inputs = {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    expected = model(**inputs, labels=labels).loss
    assert_equal_but_for_rounding(model(**inputs, labels=labels.to(dtype)).loss, expected)


def test_labels_at_padding_may_be_anything():
    inputs = {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    wild = torch.where(inputs["attention_mask"] > 0, 1, 10**6)
    for model_class in (TOKENS, REPLACED, WORDS):
        model = tiny_model(model_class)
        torch.testing.assert_close(model(**inputs, labels=wild).loss, model(**inputs, labels=wild.clamp(max=1)).loss)


def test_a_row_may_have_no_entity():
    model = tiny_model(ENTITIES)
    output = model(IDS, entity_indices=torch.zeros(2, 0, 2, dtype=torch.long), labels=torch.zeros(2, 0))
    assert output.logits.shape == (2, 0) and output.loss == 0
