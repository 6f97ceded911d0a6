"""Losses: torch's own on ordinary input, the same at any split of a batch, and 0 where nothing is labelled."""

import pytest
import torch
import transformers
from numerics import assert_equal_but_for_rounding, assert_same_by_name, gradients, tiny_inputs, tiny_model
from torch.nn import functional

import hf_deberta
from hf_deberta.model.batch_loss import (
    binary_cross_entropy,
    cross_entropy,
    mean_over_items,
    mean_squared_error,
    soft_cross_entropy,
)

SPLITS = [(6,), (3, 3), (1, 5), (2, 1, 3), (1,) * 6]
COUNTS = {"int": int, "tensor": torch.tensor, "float tensor": lambda count: torch.tensor(float(count))}


def random_like(labels, classes=None):
    torch.manual_seed(0)
    shape = labels.shape if classes is None else (*labels.shape, classes)
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def distributions():
    torch.manual_seed(1)
    return torch.rand(6, 4).softmax(-1)


# name: loss, classes, labels, torch's own mean
FUNCTIONS = {
    "cross entropy": (cross_entropy, 4, torch.tensor([0, 3, 1, 2, 2, 0]), functional.cross_entropy),
    "cross entropy per token": (
        cross_entropy,
        4,
        torch.tensor([[0, -100, 3], [1, 1, 2], [-100, -100, -100], [0, 2, 1], [3, -100, 1], [2, 2, 2]]),
        lambda logits, labels: functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100),
    ),
    "soft cross entropy": (soft_cross_entropy, None, distributions(), functional.cross_entropy),
    "binary cross entropy": (
        binary_cross_entropy,
        None,
        torch.tensor([[0, 1, 1]] * 3 + [[1, 0, 0]] * 3),
        lambda logits, labels: functional.binary_cross_entropy_with_logits(logits, labels.double()),
    ),
    "binary cross entropy with gaps": (
        binary_cross_entropy,
        None,
        torch.tensor([[0, 1, -100]] * 2 + [[-100, -100, 0]] * 3 + [[-100] * 3]),
        lambda logits, labels: functional.binary_cross_entropy_with_logits(
            logits[labels >= 0], labels[labels >= 0].double()
        ),
    ),
    "squared error": (mean_squared_error, None, torch.linspace(-1, 2, 6), functional.mse_loss),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mean_is_that_of_torch(name):
    loss, classes, labels, torch_mean = FUNCTIONS[name]
    logits = random_like(labels, classes)
    found, expected = loss(logits, labels), torch_mean(logits, labels)
    assert found.dim() == 0
    assert_equal_but_for_rounding(found, expected)
    assert_same_by_name(gradients(found, {"logits": logits}), gradients(expected, {"logits": logits}))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_split_batch_gives_the_same_loss(name, split, count):
    loss, classes, labels, _ = FUNCTIONS[name]
    logits = random_like(labels, classes)
    items = COUNTS[count](int((labels != -100).sum()))  # what Trainer counts
    pieces = zip(logits.split(split), labels.split(split), strict=True)
    found, expected = sum(loss(*piece, items) for piece in pieces), loss(logits, labels)
    assert_equal_but_for_rounding(found, expected)
    assert_same_by_name(gradients(found, {"logits": logits}), gradients(expected, {"logits": logits}))


@pytest.mark.parametrize("loss", [cross_entropy, binary_cross_entropy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0), 5, torch.tensor(5)], ids=str)
def test_nothing_labelled_is_zero_and_not_nan(loss, items):
    labels = torch.full((2, 3), -100)
    logits = random_like(labels, 4 if loss is cross_entropy else None)
    found = loss(logits, labels, items)
    assert found.item() == 0
    assert not gradients(found, {"logits": logits})["logits"].any()


def test_losses_of_half_precision_are_float32():
    labels = torch.tensor([0, 3, 1, 2, 2, 0])
    logits = random_like(labels, 4).detach().bfloat16().requires_grad_()
    found = cross_entropy(logits, labels)
    assert found.dtype == torch.float32
    assert_equal_but_for_rounding(found, functional.cross_entropy(logits.float(), labels))
    found.backward()
    assert logits.grad.dtype == torch.bfloat16


def test_every_negative_label_is_ignored():
    labels = torch.tensor([0, -1, 1, -100, 2, -7])
    logits = random_like(labels, 4)
    assert_equal_but_for_rounding(
        cross_entropy(logits, labels), cross_entropy(logits[labels >= 0], labels[labels >= 0])
    )


def test_mean_over_items_never_counts_what_is_not_counted():
    losses = torch.tensor([1.0, float("nan"), 3.0])
    counted = torch.tensor([True, False, True])
    assert mean_over_items(losses, counted).item() == 2
    assert mean_over_items(losses, counted, 8).item() == 0.5


# ---- through the heads -------------------------------------------------------------------------------------------

LENGTHS = (9, 5, 7, 3, 9, 4)


def token_labels(classes, keep=2):
    """One in `keep` of the tokens that are not padding; the fourth row has none."""
    ids, mask = tiny_inputs(LENGTHS).values()
    labels = (ids * 7 % classes).masked_fill((ids % keep != 0) | (mask == 0), -100)
    labels[3] = -100
    return labels


def entities():
    indices = torch.zeros(6, 3, 2, dtype=torch.long)
    indices[:, 0], indices[:, 1, 0] = torch.tensor([1, 2]), 2
    indices[1::2, 2, 1] = 1  # every other row has a third
    labels = torch.tensor([[1, 0, 0], [0, 1, 1]] * 3).masked_fill(~(indices > 0).any(-1), -100)
    return {"entity_indices": indices, "labels": labels}


def heads():
    """name: class, configuration, what the model gets besides ids and mask."""
    sequence, mask = hf_deberta.HfDebertaForSequenceClassification, tiny_inputs(LENGTHS)["attention_mask"]
    masked, words = hf_deberta.HfDebertaForMaskedLM, {"labels": token_labels(128, keep=3)}
    positions = {"start_positions": torch.tensor([1, 0, 3, 2, 8, 1]), "end_positions": torch.tensor([4, 0, 3, 2, 8, 3])}
    return {
        "regression": (sequence, {"num_labels": 1}, {"labels": torch.linspace(-1, 3, 6)}),
        "several regressions": (
            sequence,
            {"num_labels": 2, "problem_type": "regression"},
            {"labels": torch.linspace(-1, 3, 12).view(6, 2)},
        ),
        "one label of several": (sequence, {"num_labels": 4}, {"labels": torch.tensor([0, 3, -100, 2, 2, 1])}),
        "one label in a column": (
            sequence,
            {"num_labels": 4},
            {"labels": torch.tensor([[0], [3], [1], [2], [2], [1]])},
        ),
        "several labels": (
            sequence,
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            {"labels": torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]] * 2)},
        ),
        "soft labels": (sequence, {"num_labels": 4}, {"labels": distributions()}),
        "tokens": (hf_deberta.HfDebertaForTokenClassification, {"num_labels": 5}, {"labels": token_labels(5)}),
        "answers": (hf_deberta.HfDebertaForQuestionAnswering, {}, positions),
        "choices": (hf_deberta.HfDebertaForMultipleChoice, {}, {"labels": torch.tensor([0, 1, 1, 0, -100, 1])}),
        "entities": (hf_deberta.HfDebertaForEntityChoice, {}, entities()),
        "replaced tokens": (
            hf_deberta.HfDebertaForPreTraining,
            {},
            {"labels": token_labels(2, keep=1).clamp(min=-100).masked_fill(mask == 0, -100)},
        ),
        "words, sparse": (masked, {"sparse_prediction": True}, words),
        "words, dense": (masked, {"sparse_prediction": False}, words),
        "words, no decoder": (masked, {"emd_steps": 0}, words),
        "next words": (hf_deberta.HfDebertaForCausalLM, {"conv_kernel_size": 0}, words),
    }


HEADS = heads()


def head(name):
    model_class, fields, labels = HEADS[name]
    inputs = {**tiny_inputs(LENGTHS), **labels}
    if name == "choices":
        for key in ("input_ids", "attention_mask"):
            inputs[key] = torch.stack([inputs[key], inputs[key].roll(1, 0)], 1)
    return tiny_model(model_class, **fields), inputs


def counted(name, inputs):
    """As Trainer does: what is predicted from the token before is not counted where there is none."""
    labels = inputs["labels"] if "labels" in inputs else inputs["start_positions"]
    return int(((labels[:, 1:] if name == "next words" else labels) != -100).sum())


def loss_and_gradients(model, batches, items):
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward()
        total = total + loss.detach()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return total, found


@pytest.mark.parametrize("count", ["int", "tensor"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_give_the_same_loss_and_gradients_at_any_split(name, count):
    model, inputs = head(name)
    expected, expected_gradients = loss_and_gradients(model, [inputs], None)
    assert expected > 0
    items = COUNTS[count](counted(name, inputs))
    for split in SPLITS:
        pieces = zip(*(tensor.split(split) for tensor in inputs.values()), strict=True)
        batches = [dict(zip(inputs, piece, strict=True)) for piece in pieces]
        found, found_gradients = loss_and_gradients(model, batches, items)
        assert_equal_but_for_rounding(found, expected, message=str(split))
        assert_same_by_name(found_gradients, expected_gradients)


UNLABELLED = [name for name in HEADS if "regression" not in name and name != "soft labels"]


@pytest.mark.parametrize("items", [None, torch.tensor(0), 5], ids=str)
@pytest.mark.parametrize("name", UNLABELLED)
def test_heads_without_any_label_lose_nothing_and_learn_nothing(name, items):
    model, inputs = head(name)
    for key in HEADS[name][2].keys() - {"entity_indices"}:
        inputs[key] = torch.full_like(inputs[key], -100)
    loss, found = loss_and_gradients(model, [inputs], items)
    assert loss.item() == 0
    assert found.keys() == {key for key, _ in model.named_parameters()}  # zero, not None: DDP waits for all
    assert not [key for key, gradient in found.items() if gradient.any() or not gradient.isfinite().all()]


def test_answers_outside_the_window_are_not_counted():
    model, inputs = head("answers")
    inside = slice(0, 3)
    inputs["start_positions"][3:], inputs["end_positions"][3:] = 9, 50
    expected = model(**{key: tensor[inside] for key, tensor in inputs.items()}).loss
    assert_equal_but_for_rounding(model(**inputs).loss, expected)


# ---- through Trainer ---------------------------------------------------------------------------------------------

TRAINED = {
    "one label of several": {"labels": torch.tensor([0, 3, 1, 2, 2, 1, 0, 3])},
    "tokens": None,
    "words, sparse": None,
    "answers": {
        "start_positions": torch.tensor([1, 0, 3, 2, 8, 1, 0, 1]),
        "end_positions": torch.tensor([4, 0, 3, 2, 8, 3, 1, 1]),
    },
}


FIRST = "deberta.encoder.layer.0.output.dense.weight"


def samples(name):
    """Eight, with very different numbers of labels."""
    inputs = tiny_inputs((9, 5, 7, 3, 9, 4, 2, 6))
    ids, mask = inputs.values()
    labels = TRAINED[name]
    if labels is None:
        classes, keep = (5, 1) if name == "tokens" else (128, 2)
        labels = {"labels": (ids * 7 % classes).masked_fill((ids % keep != 0) | (mask == 0), -100)}
    columns = {**inputs, **labels}
    return [{key: column[i] for key, column in columns.items()} for i in range(8)]


def untrained(name):
    model_class, fields, _ = HEADS[name]
    return tiny_model(model_class, dtype=torch.float32, **fields)


def one_step(name, dataset, folder, batch_size, accumulation):
    model = untrained(name)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        logging_steps=1,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=dataset)
    trainer.train()
    return trainer.state.log_history[0], {key: p.detach() for key, p in model.named_parameters()}


@pytest.mark.parametrize("name", TRAINED)
def test_trainer_takes_the_same_step_with_and_without_accumulation(name, tmp_path):
    logged, weights = one_step(name, samples(name), tmp_path, 8, 1)
    logged_in_pieces, weights_in_pieces = one_step(name, samples(name), tmp_path, 2, 4)
    for key in ("loss", "grad_norm"):
        assert logged[key] > 0
        assert_equal_but_for_rounding(*(torch.tensor(log[key]).float() for log in (logged_in_pieces, logged)))
    assert_same_by_name(weights_in_pieces, weights)
    assert not torch.equal(weights[FIRST], dict(untrained(name).named_parameters())[FIRST])


def test_trainer_learns_nothing_in_a_step_without_labels(tmp_path):
    name = "words, sparse"
    unlabelled = [{**sample, "labels": torch.full_like(sample["labels"], -100)} for sample in samples(name)]
    logged, weights = one_step(name, unlabelled, tmp_path, 4, 2)
    assert logged["grad_norm"] == 0
    for key, weight in untrained(name).named_parameters():
        assert torch.equal(weights[key], weight), key


def test_answers_at_padding_are_not_counted():
    """As labels at padding are not, and as the padding's logits are not: the loss stays small and finite."""
    model, inputs = head("answers")
    inputs["attention_mask"][0, 5:] = 0
    inputs["start_positions"][:3], inputs["end_positions"][:3] = torch.tensor([1, 0, 1]), torch.tensor([6, 1, 1])
    loss = model(**inputs).loss
    inputs["end_positions"][0] = -100
    assert loss < 20
    assert_equal_but_for_rounding(loss, model(**inputs).loss)
