"""Inputs and labels that a head does not take raise a ValueError with the rule, the value and the way out."""

import numpy
import pytest
import torch
from numerics import assert_equal_but_for_rounding, tiny_inputs, tiny_model
from test_modeling_heads import HEADS, build

import hf_deberta

SEQUENCE, TOKENS = hf_deberta.HfDebertaForSequenceClassification, hf_deberta.HfDebertaForTokenClassification
CHOICE, ENTITIES = hf_deberta.HfDebertaForMultipleChoice, hf_deberta.HfDebertaForEntityChoice
REPLACED, WORDS = hf_deberta.HfDebertaForPreTraining, hf_deberta.HfDebertaForMaskedLM
ANSWERS, MODEL = hf_deberta.HfDebertaForQuestionAnswering, hf_deberta.HfDebertaModel
IDS = tiny_inputs((4, 4))["input_ids"]
EMBEDDED = torch.zeros(2, 4, 32, dtype=torch.float64)
NO_IDS = {"input_ids": None}
ONE, THREE, TYPES = {"num_labels": 1}, {"num_labels": 3}, {"type_vocab_size": 2}
MULTI_LABEL = {**THREE, "problem_type": "multi_label_classification"}
SPANS = torch.tensor([[[1, 2]], [[3, 0]]])
MENTIONS = {"entity_indices": SPANS}
FIVE = torch.ones(5, dtype=torch.long)

# class, config fields, inputs, message
WRONG = {
    # tokens
    "neither ids nor embeddings": (MODEL, {}, NO_IDS, "either input_ids or inputs_embeds, not neither"),
    "both": (MODEL, {}, {"inputs_embeds": EMBEDDED}, "either input_ids or inputs_embeds, not both"),
    "no rows": (MODEL, {}, {"input_ids": IDS[:0]}, r"\[B, N\] with at least one row and one token, not \(0, 4\)"),
    "one dimension": (MODEL, {}, {"input_ids": IDS[0]}, r"input_ids must be \[B, N\] .* not \(4,\)"),
    "an id too large": (MODEL, {}, {"input_ids": IDS + 128}, r"input_ids must lie in \[0, 128\), .* to \d+.*tokenizer"),
    "a list of ids": (MODEL, {}, {"input_ids": IDS.tolist()}, "must be a tensor, not list; pass torch.tensor"),
    "ids with a fraction": (MODEL, {}, {"input_ids": IDS.float()}, "must be of type int64 or int32, not torch.float32"),
    "embeddings of one row": (MODEL, {}, {**NO_IDS, "inputs_embeds": EMBEDDED[0]}, r"\[B, N, embedding\] .* \(4, 32\)"),
    "narrow embeddings": (MODEL, {}, {**NO_IDS, "inputs_embeds": EMBEDDED[..., :8]}, r"\[B, N, 32\], .*\(2, 4, 8\)"),
    "types, one too few": (MODEL, TYPES, {"token_type_ids": IDS[:, 1:] * 0}, r"\[B, N\] = \(2, 4\), .*\(2, 3\)"),
    "a type too large": (MODEL, TYPES, {"token_type_ids": IDS * 0 + 2}, r"must lie in \[0, 2\), .* up to 2"),
    # masks and boundaries
    "a mask of three tokens": (MODEL, {}, {"attention_mask": torch.ones(2, 3)}, r"= \(2, 4, 4\), not \(2, 3\)"),
    "a mask of one query": (MODEL, {}, {"attention_mask": torch.ones(2, 1, 4)}, r"not \(2, 1, 4\)"),
    "an array as mask": (MODEL, {}, {"attention_mask": numpy.ones((2, 4))}, "attention_mask must be a tensor, not nda"),
    "an additive mask": (MODEL, {}, {"attention_mask": torch.zeros(2, 4, 4)}, "boolean or integer.* not additive"),
    "an additive mask of tokens": (MODEL, {}, {"attention_mask": IDS * -1e9}, r"holds -.*e\+.*attention_mask == 0"),
    "positions, one too few": (MODEL, {}, {"position_ids": IDS[:, 1:]}, r"position_ids .*\(2, 4\), not \(2, 3\)"),
    "boundaries of a batch": (WORDS, {}, {"cu_seq_lens_q": torch.tensor([0, 4])}, "one packed row, not a batch of 2"),
    "packed entities": (ENTITIES, {}, {**MENTIONS, "cu_seq_lens_q": torch.tensor([0, 4])}, "not support packed rows"),
    # what a head needs
    "no choices": (CHOICE, {}, {}, r"input_ids \[B, choices, N\] .*\(2, 4\)"),
    "a mask without choices": (
        CHOICE,
        {},
        {"input_ids": IDS[:1, None], "attention_mask": IDS[None] > 0},
        r"masks like them, not .*'attention_mask': \(1, 2, 4\)",
    ),
    "no entities": (ENTITIES, {}, {}, r"entity choice needs entity_indices \[B, entities, tokens\]"),
    "an entity outside": (ENTITIES, {}, {"entity_indices": SPANS + 1}, r"entity_indices .*in \[0, 4\), not 4"),
    # labels
    "a word": (WORDS, {}, {"labels": IDS * 0 + 128}, "labels must be below 128, .*not 128"),
    "tokens, one too few": (TOKENS, {}, {"labels": IDS[:, 1:] % 2}, r"\(2, 4\), not \(2, 3\)"),
    "a token's class": (TOKENS, THREE, {"labels": IDS * 0 + 10**6}, "labels must be below 3, .*not 1e"),
    "a replaced token": (REPLACED, {}, {"labels": IDS * 0 + 10**6}, "labels must be 0 or 1, .*not 1e"),
    "a class too large": (SEQUENCE, THREE, {"labels": torch.tensor([0, 3])}, "labels must be below 3, .*not 3"),
    "half a class": (SEQUENCE, THREE, {"labels": torch.tensor([0, 0.5])}, "whole numbers, .*not 0.5"),
    "one number for all": (SEQUENCE, ONE, {"labels": torch.ones(1)}, r"labels .*\(1,\)"),
    "no number": (SEQUENCE, ONE, {"labels": torch.tensor([0, torch.nan])}, "finite, not nan; drop rows"),
    "one distribution for all": (SEQUENCE, THREE, {"labels": torch.ones(1, 3) / 3}, r"labels .*\(1, 3\)"),
    "classes, no problem type": (SEQUENCE, THREE, {"labels": torch.ones(2, 3)}, "must sum to 1, .*problem_type"),
    "a negative share": (SEQUENCE, THREE, {"labels": torch.tensor([[2.0, -1, 0]] * 2)}, "must not be negative, not -1"),
    "several labels, one too few": (SEQUENCE, MULTI_LABEL, {"labels": torch.ones(2, 2)}, r"labels .*\(2, 2\)"),
    "a choice too large": (CHOICE, {}, {"input_ids": IDS[None], "labels": torch.tensor([2])}, "labels must be below 2"),
    "a start without an end": (ANSWERS, {}, {"start_positions": FIVE[:2]}, "both .* or neither"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_and_labels_are_refused(case):
    model_class, fields, inputs, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as caught:
        tiny_model(model_class, **fields)(**{"input_ids": IDS, **inputs})
    assert "\n" not in str(caught.value)


NAN, INFINITE = float("nan"), float("inf")
WRONG_VALUES = {  # by input, or by head for labels that are no classes
    "input_ids": (-1, 128, 10**12),
    "attention_mask": (),
    "entity_indices": (-1, 9, 10**6),
    "labels": (128, 10**9, 0.5, NAN),
    "start_positions": (0.5, NAN),
    "end_positions": (0.5, NAN),
    "regression": (NAN, INFINITE, -INFINITE),
    "multi-label": (2, -1, 1.5, NAN, INFINITE),
    "soft labels": (1, 0, -1, NAN, INFINITE),
    "entities": (2, -1, 10**6, 0.5, NAN),
    "replaced token detection": (2, -1, 10**6, 0.5, NAN),
}
WRONG_VALUES["regression of two numbers"] = WRONG_VALUES["regression"]
WRONG_FORMS = {
    "no rows": lambda values: values[:0],
    "a row too many": lambda values: torch.cat([values, values[:1]]),
    "a column too many": lambda values: torch.stack([values, values], -1),
    "one more dimension": lambda values: values[None],
    "a list": lambda values: values.tolist(),
    "an array": lambda values: values.numpy(),
    "one number": lambda values: values.flatten()[0],
}


@pytest.mark.parametrize("head", HEADS)
def test_no_head_takes_values_or_shapes_that_mean_nothing(head):
    model, inputs = build(head)
    assert model(**inputs).loss.isfinite()
    for name, values in inputs.items():
        wrong = [change(values) for change in WRONG_FORMS.values()]
        key = head if name == "labels" and head in WRONG_VALUES else name
        for value in WRONG_VALUES[key]:
            dtype = values.dtype if isinstance(value, int) else torch.float32
            wrong.append(torch.full_like(values, value, dtype=dtype))
        for each in wrong:
            with pytest.raises(ValueError) as caught:
                model(**{**inputs, name: each})
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
