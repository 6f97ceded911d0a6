"""Heads: losses and gradients do not depend on how a batch is split."""

import pytest
import torch
from numerics import assert_equal_but_for_rounding, assert_same_by_name, gradients_of, tiny_inputs, tiny_model
from transformers import Trainer, TrainingArguments

import hf_deberta

SPLITS = [(6,), (3, 3), (1, 5), (2, 1, 3), (1,) * 6]
COUNTS = {"int": int, "tensor": torch.tensor, "float tensor": lambda count: torch.tensor(float(count))}
LENGTHS = (9, 5, 7, 3, 9, 4)


def token_labels(classes, keep=2):
    """Return labels for about one in `keep` real tokens, and none in the fourth row."""
    ids, mask = tiny_inputs(LENGTHS).values()
    labels = (ids * 7 % classes).masked_fill((ids % keep != 0) | (mask == 0), -100)
    labels[3] = -100
    return labels


def entities():
    indices = torch.zeros(6, 3, 2, dtype=torch.long)
    indices[:, 0], indices[:, 1, 0] = torch.tensor([1, 2]), 2
    indices[1::2, 2, 1] = 1  # every other row has a third entity
    labels = torch.tensor([[1, 0, 0], [0, 1, 1]] * 3).masked_fill(~(indices > 0).any(-1), -100)
    return {"entity_indices": indices, "labels": labels}


SEQUENCE, MASKED_LM = hf_deberta.HfDebertaForSequenceClassification, hf_deberta.HfDebertaForMaskedLM
FOUR = {"num_labels": 4}
WORDS = {"labels": token_labels(128, keep=3)}
NUMBERS = torch.linspace(-1, 3, 6)
REPLACED = {"labels": token_labels(2, keep=1).masked_fill(tiny_inputs(LENGTHS)["attention_mask"] == 0, -100)}
ANSWERS = {"start_positions": torch.tensor([1, 0, 3, 2, 8, 1]), "end_positions": torch.tensor([4, 0, 3, 2, 8, 3])}
SOFT = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)).softmax(-1)
SEVERAL = {"num_labels": 3, "problem_type": "multi_label_classification"}
PAIRS = {"num_labels": 2, "problem_type": "regression"}

# name: (class, config fields, inputs besides ids and mask)
HEADS = {
    "regression": (SEQUENCE, {"num_labels": 1}, {"labels": NUMBERS}),
    "regression of two numbers": (SEQUENCE, PAIRS, {"labels": torch.stack([NUMBERS, NUMBERS.flip(0)], 1)}),
    "single label": (SEQUENCE, FOUR, {"labels": torch.tensor([0, 3, -100, 2, 2, 1])}),
    "single label in a column": (SEQUENCE, FOUR, {"labels": torch.tensor([[0, 3, 1, 2, 2, 1]]).mT}),
    "multi-label": (SEQUENCE, SEVERAL, {"labels": torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]] * 2)}),
    "soft labels": (SEQUENCE, FOUR, {"labels": SOFT}),
    "tokens": (hf_deberta.HfDebertaForTokenClassification, {"num_labels": 5}, {"labels": token_labels(5)}),
    "question answering": (hf_deberta.HfDebertaForQuestionAnswering, {}, ANSWERS),
    "multiple choice": (hf_deberta.HfDebertaForMultipleChoice, {}, {"labels": torch.tensor([0, 1, 1, 0, -100, 1])}),
    "entities": (hf_deberta.HfDebertaForEntityChoice, {}, entities()),
    "replaced token detection": (hf_deberta.HfDebertaForPreTraining, {}, REPLACED),
    "masked LM, sparse": (MASKED_LM, {"sparse_prediction": True}, WORDS),
    "masked LM, dense": (MASKED_LM, {"sparse_prediction": False}, WORDS),
    "masked LM, no decoder": (MASKED_LM, {"emd_steps": 0}, WORDS),
    "causal LM": (hf_deberta.HfDebertaForCausalLM, {"conv_kernel_size": 0}, WORDS),
}


def build(name):
    """Return the model and its inputs."""
    model_class, fields, labels = HEADS[name]
    inputs = {**tiny_inputs(LENGTHS), **{key: tensor.clone() for key, tensor in labels.items()}}  # tests change them
    if name == "multiple choice":
        for key in ("input_ids", "attention_mask"):
            inputs[key] = torch.stack([inputs[key], inputs[key].roll(1, 0)], 1)
    return tiny_model(model_class, **fields), inputs


def count_items(name, inputs):
    """Return the number of labelled items as Trainer counts it: causal labels are shifted first."""
    labels = inputs["labels"] if "labels" in inputs else inputs["start_positions"]
    return int(((labels[:, 1:] if name == "causal LM" else labels) != -100).sum())


def loss_and_gradients(model, batches, items):
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward()
        total = total + loss.detach()
    return total, gradients_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.usefixtures("unpad_tiny_models")
def test_split_batch_has_the_same_loss_and_gradients(name, count):
    model, inputs = build(name)
    expected, expected_gradients = loss_and_gradients(model, [inputs], None)
    assert expected > 0
    items = COUNTS[count](count_items(name, inputs))
    for split in SPLITS:
        pieces = zip(*(tensor.split(split) for tensor in inputs.values()), strict=True)
        batches = [dict(zip(inputs, piece, strict=True)) for piece in pieces]
        actual, actual_gradients = loss_and_gradients(model, batches, items)
        assert_equal_but_for_rounding(actual, expected, message=str(split))
        assert_same_by_name(actual_gradients, expected_gradients)


HEADS_THAT_IGNORE_LABELS = [name for name in HEADS if "regression" not in name and name != "soft labels"]


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0), 5], ids=str)
@pytest.mark.parametrize("name", HEADS_THAT_IGNORE_LABELS)
@pytest.mark.usefixtures("unpad_tiny_models")
def test_without_labels_loss_and_gradients_are_zero(name, items):
    model, inputs = build(name)
    for key in HEADS[name][2].keys() - {"entity_indices"}:
        inputs[key] = torch.full_like(inputs[key], -100)
    loss, gradients = loss_and_gradients(model, [inputs], items)
    assert loss.item() == 0
    assert gradients.keys() == {key for key, _ in model.named_parameters()}  # zero, not None: DDP waits for all
    assert not [key for key, gradient in gradients.items() if gradient.any() or not gradient.isfinite().all()]


@pytest.mark.usefixtures("unpad_tiny_models")
def test_states_and_attentions_of_choices():
    model, inputs = build("multiple choice")
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert [tuple(states.shape) for states in output.hidden_states] == [(12, 9, 32)] * 3
    assert [tuple(attention.shape) for attention in output.attentions] == [(12, 4, 9, 9)] * 2


@pytest.mark.usefixtures("unpad_tiny_models")
def test_answers_outside_the_window_are_ignored():
    model, inputs = build("question answering")
    inside = slice(0, 3)
    inputs["start_positions"][3:], inputs["end_positions"][3:] = 9, 50
    expected = model(**{key: tensor[inside] for key, tensor in inputs.items()}).loss
    assert_equal_but_for_rounding(model(**inputs).loss, expected)


@pytest.mark.usefixtures("unpad_tiny_models")
def test_answers_at_padding_are_ignored():
    """Like labels at padding; the logits at padding do not count either, so the loss stays small."""
    model, inputs = build("question answering")
    inputs["attention_mask"][0, 5:] = 0
    inputs["start_positions"][:3], inputs["end_positions"][:3] = torch.tensor([1, 0, 1]), torch.tensor([6, 1, 1])
    loss = model(**inputs).loss
    inputs["end_positions"][0] = -100
    assert loss < 20
    assert_equal_but_for_rounding(loss, model(**inputs).loss)


# ---- padding -----------------------------------------------------------------------------------------------------

CLASSIFIERS = {
    "sequence": (hf_deberta.HfDebertaForSequenceClassification, {"labels": torch.tensor([1, 0])}),
    "choice": (hf_deberta.HfDebertaForMultipleChoice, {"labels": torch.tensor([1])}),
}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_row_of_padding_only_has_a_finite_gradient(name, backend):
    """From scratch its states are constant, and each LayerNorm would multiply the gradient by 1 / sqrt(1e-7)."""
    torch.manual_seed(0)
    model_class, labels = CLASSIFIERS[name]
    config = hf_deberta.HfDebertaConfig.from_preset("tiny", num_hidden_layers=12, hidden_dropout_prob=0.0)
    model = model_class(config).train()
    model.set_attn_implementation(backend)
    inputs = tiny_inputs((9, 1))
    inputs["attention_mask"][1] = 0
    if name == "choice":
        inputs = {key: tensor[None] for key, tensor in inputs.items()}
    output = model(**inputs, **labels)
    output.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) > 12 and max(float(gradient.abs().max()) for gradient in gradients) < 10
    alone = {key: tensor[..., 1:, :1] for key, tensor in inputs.items()}
    torch.testing.assert_close(output.logits.flatten()[-1], model(**alone).logits.flatten()[-1])


def test_absolute_positions_count_from_the_first_real_token():
    """Padding between real tokens is counted, and positions that were passed are kept."""
    model = tiny_model(hf_deberta.HfDebertaForMaskedLM, conv_kernel_size=0).eval()
    ids, mask = torch.tensor([[9, 9, 5, 9, 7, 9]]), torch.tensor([[0, 0, 1, 0, 1, 0]])
    expected = model(ids[:, 2:5], attention_mask=mask[:, 2:5]).logits[0, ::2]
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[0, 2:5:2], expected)
    positions = torch.arange(6)[None]
    assert not torch.allclose(model(ids, attention_mask=mask, position_ids=positions).logits[0, 2:5:2], expected)


def test_trainer_gives_the_number_of_items_to_heads_that_take_it(tmp_path):
    class OwnHead(SEQUENCE):
        def forward(self, input_ids, attention_mask, labels):
            return super().forward(input_ids, attention_mask, labels=labels)

    heads = [each for name, each in vars(hf_deberta).items() if name.startswith("HfDebertaFor")]
    for head in [*heads, OwnHead]:
        trainer = Trainer(tiny_model(head), TrainingArguments(str(tmp_path), use_cpu=True))
        assert trainer.model_accepts_loss_kwargs == (head is not OwnHead), head
