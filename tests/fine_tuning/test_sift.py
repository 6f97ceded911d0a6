"""SiFT: official tensors, all kinds of heads, other model families, training with Trainer and on two processes."""

import sys
from pathlib import Path
from types import SimpleNamespace

import golden_cases
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from golden_cases import part
from numerics import assert_same_by_name, largest, tiny_inputs, tiny_model
from torch.distributed.fsdp import fully_shard
from torch.distributions import Bernoulli, Categorical, kl_divergence
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from two_processes import fork_two, run_script

from hf_deberta import (
    HfDebertaConfig,
    HfDebertaForEntityChoice,
    HfDebertaForMultipleChoice,
    HfDebertaForQuestionAnswering,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
)
from hf_deberta.fine_tuning import sift
from hf_deberta.fine_tuning.sift import (
    PerturbedEmbeddings,
    SiftArguments,
    SiftTrainer,
    embedding_layer_norms,
    share_of_batch,
    sift_loss,
)

pytestmark = pytest.mark.usefixtures("unpad_tiny_models")

TENSOR_TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}  # of tests/golden, as the official tensors' README derives them
GRADIENT_TOLERANCE = 1e-4  # of the largest component
LARGE_STEPS = SiftArguments(sift_learning_rate=0.05)  # steps larger than the noise


class MyTrainer(SiftTrainer, Trainer):
    pass


def noise_from_embeddings(self, x):
    """Replaces the noise by a function of the embeddings, so that it does not depend on the position in a batch."""
    return self.settings.sift_init_perturbation * torch.sin(50 * x.detach())


@pytest.fixture
def deterministic_noise(monkeypatch):
    monkeypatch.setattr(PerturbedEmbeddings, "draw_noise", noise_from_embeddings)


@pytest.fixture
def steps(monkeypatch):
    """Records (deltas, gradients, new deltas) of each ascent."""
    found, original = [], sift.ascend

    def ascend(deltas, gradients, rate):
        found.append((deltas, gradients, original(deltas, gradients, rate)))
        return found[-1][-1]

    monkeypatch.setattr(sift, "ascend", ascend)
    return found


def record_outputs(model):
    """A list that receives the outputs of all later forward passes."""
    found = []
    model.register_forward_hook(lambda *called: found.append(called[-1]))
    return found


def both_losses(model, inputs, settings=LARGE_STEPS, **given):
    """The loss of the task and the adversarial loss."""
    with PerturbedEmbeddings(model, settings) as embeddings:
        outputs = model(**inputs)
        return outputs.loss, sift_loss(model, inputs, outputs, embeddings, **given)


def total_gradients(model, inputs, settings=LARGE_STEPS):
    task, adversarial = both_losses(model, inputs, settings)
    model.zero_grad()
    (task + settings.sift_lambda * adversarial).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


# ---- the official tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["case09a_sift_symkl", "case09b_sift_kl", "case09c_sift_mse"])
def test_official_tensors(case, tmp_path, monkeypatch, steps):
    tensors, info = golden_cases.tensors(case), golden_cases.info(case)
    given, expected = part(tensors, "in/"), part(tensors, "out/")
    model = golden_cases.load(HfDebertaForSequenceClassification, case, tmp_path, num_labels=3)
    numbers = (info["vat_lambda"], info["vat_learning_rate"], info["vat_init_perturbation"], info["loss_fn"])
    monkeypatch.setattr(PerturbedEmbeddings, "draw_noise", lambda self, x: expected["delta_initial"].clone())
    seen = []
    model.deberta.embeddings.LayerNorm.register_forward_hook(lambda *called: seen.append(called[1][0]))
    outputs = record_outputs(model)
    task, adversarial = both_losses(model, given, SiftArguments(True, *numbers))
    total = task + info["vat_lambda"] * adversarial
    total.backward()

    torch.testing.assert_close(seen[0], expected["perturbation_input"], **TENSOR_TOLERANCE)
    for output, name in zip(
        outputs, ("clean_logits", "perturbed_logits_first", "perturbed_logits_second"), strict=True
    ):
        torch.testing.assert_close(output.logits, expected[name], **TENSOR_TOLERANCE)
    logits = (expected["clean_logits"], expected["perturbed_logits_second"])
    entropies = sum(Categorical(logits=one).entropy().mean() for one in logits)  # which the official loss includes
    torch.testing.assert_close(task, expected["task_loss"], **TENSOR_TOLERANCE)
    torch.testing.assert_close(adversarial + entropies, expected["adv_loss"], **TENSOR_TOLERANCE)
    official_total = total + info["vat_lambda"] * entropies
    torch.testing.assert_close(official_total, expected["total_loss"], **TENSOR_TOLERANCE)
    [([_], [gradient], [updated])] = steps
    # the gradient is that of a difference between two probabilities, each rounded
    divergence = largest(expected["perturbed_logits_first"].softmax(-1) - expected["clean_logits"].softmax(-1))
    rounding = max(GRADIENT_TOLERANCE, 8 * torch.finfo(torch.float32).eps / divergence)
    assert largest(gradient - expected["delta_grad"]) <= rounding * largest(expected["delta_grad"])
    step = info["vat_learning_rate"] * 2 * rounding  # of a quotient of two such numbers
    torch.testing.assert_close(updated, expected["delta_updated"], atol=1e-6 + step, rtol=0)
    found = dict(model.named_parameters())
    for name, value in part(expected, "grad/").items():
        assert largest(found[name].grad - value) <= GRADIENT_TOLERANCE * largest(value), name
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, expected["logits_without_hook"], **TENSOR_TOLERANCE)


# ---- kinds of heads ----------------------------------------------------------------------------------------------


def divergence(one, other):
    """Divergences in both directions by torch.distributions."""
    return kl_divergence(one, other) + kl_divergence(other, one)


def class_divergence(clean, perturbed):
    return divergence(Categorical(logits=clean), Categorical(logits=perturbed))


LENGTHS = (9, 5, 7)
REAL = tiny_inputs(LENGTHS)["attention_mask"].bool()
LABELS = (torch.arange(9) % 3).repeat(3, 1).index_fill(1, torch.tensor([0, 2]), -100)  # padding has labels too


def mean_of_classes(counted=...):
    """Return a function that returns the mean divergence over the predictions that count."""
    return lambda clean, perturbed: class_divergence(clean["logits"], perturbed["logits"])[counted].mean()


def mean_of_labels(counted=...):
    """The same for a sigmoid of each logit."""

    def mean(clean, perturbed):
        return divergence(*(Bernoulli(logits=output["logits"]) for output in (clean, perturbed)))[counted].mean()

    return mean


def mean_square(clean, perturbed):
    return (clean["logits"] - perturbed["logits"]).square().mean()


def mean_of_spans(clean, perturbed):
    """Over real tokens, row by row."""
    found = []
    for name in ("start_logits", "end_logits"):
        for row, length in enumerate(LENGTHS):
            found.append(class_divergence(clean[name][row, :length], perturbed[name][row, :length]))
    return torch.stack(found).mean()


Sequence = HfDebertaForSequenceClassification
MULTI = {"num_labels": 4, "problem_type": "multi_label_classification"}
SPANS = {"start_positions": torch.tensor([1, 0, 2]), "end_positions": torch.tensor([3, 0, 5])}
ENTITIES = torch.tensor([[[1, 2], [3, 0]], [[2, 0], [0, 0]], [[4, 5], [1, 0]]])
ENTITY_LABELS = torch.tensor([[0, 1], [1, -100], [0, 0]])
TWO_NUMBERS = {"num_labels": 2, "problem_type": "regression"}
THREE = {"num_labels": 3}
Tokens, Spans = HfDebertaForTokenClassification, HfDebertaForQuestionAnswering
HEADS = {
    "classes": (Sequence, THREE, {"labels": torch.tensor([0, 2, 1])}, mean_of_classes()),
    "a row without label": (Sequence, THREE, {"labels": torch.tensor([0, -100, 1])}, mean_of_classes([0, 2])),
    "distributions": (Sequence, THREE, {"labels": torch.eye(3)}, mean_of_classes()),
    "labels": (Sequence, MULTI, {"labels": torch.tensor([[0, 1, 1, 0.0]] * 3)}, mean_of_labels()),
    "a number": (Sequence, {"num_labels": 1}, {"labels": torch.tensor([0.1, -2, 3])}, mean_square),
    "numbers": (Sequence, TWO_NUMBERS, {"labels": torch.tensor([[0.1, 3], [-2, 1], [4, 0]])}, mean_square),
    "tokens": (Tokens, THREE, {"labels": LABELS}, mean_of_classes(REAL & (LABELS != -100))),
    "spans": (Spans, {}, SPANS, mean_of_spans),
    "entities": (
        HfDebertaForEntityChoice,
        {},
        {"entity_indices": ENTITIES, "labels": ENTITY_LABELS},
        mean_of_labels(ENTITY_LABELS >= 0),
    ),
}


@pytest.mark.parametrize("loss", sift.LOSSES)
@pytest.mark.parametrize("head", HEADS)
def test_heads(head, loss, steps):
    model_class, fields, labels, expected = HEADS[head]
    model = tiny_model(model_class, dtype=torch.float32, **fields)
    inputs, settings = {**tiny_inputs(LENGTHS), **labels}, SiftArguments(sift_loss=loss, sift_learning_rate=0.1)
    outputs = record_outputs(model)
    _, adversarial = both_losses(model, inputs, settings)
    clean, noisy, perturbed = outputs
    torch.testing.assert_close(adversarial, expected(clean, perturbed))
    assert noisy.loss is None and perturbed.loss is None
    # the step finds what is worse than noise
    assert expected(clean, perturbed) > expected(clean, noisy)
    [([noise], [gradient], [delta])] = steps
    assert noise.shape == (3, 9, 32) and largest(noise) <= 0.02
    assert largest(delta - noise) == pytest.approx(0.1, rel=0.1)
    reached = REAL & torch.tensor([True, head != "a row without label", True])[:, None]
    assert torch.equal(gradient.any(-1), reached)
    adversarial.backward()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters() if weight.grad is not None)


def test_multiple_choice(steps):
    model = tiny_model(HfDebertaForMultipleChoice, dtype=torch.float32)
    inputs = {name: value.view(2, 2, -1) for name, value in tiny_inputs((9, 5, 7, 8)).items()}
    outputs = record_outputs(model)
    _, adversarial = both_losses(model, {**inputs, "labels": torch.tensor([0, 1])})
    torch.testing.assert_close(adversarial, mean_of_classes()(outputs[0], outputs[2]))
    assert steps[0][0][0].shape == (4, 9, 32)


# ---- the step ----------------------------------------------------------------------------------------------------


def test_steps_ignore_gradients_that_are_not_finite():
    deltas, good = [torch.randn(2, 3, 4), torch.randn(2, 3, 4)], torch.randn(2, 3, 4)
    bad = good.clone()
    bad[1, 2, 3] = float("nan")
    found = sift.ascend(deltas, [bad, good], 0.1)
    assert torch.equal(found[0], deltas[0])
    torch.testing.assert_close((found[1] - deltas[1]).abs().amax(-1), torch.full((2, 3), 0.1), rtol=1e-4, atol=0)


def test_noise_is_clamped():
    noise = PerturbedEmbeddings(tiny_model(Sequence)).draw_noise(torch.zeros(50, 20, 32))
    assert largest(noise) == pytest.approx(0.02, rel=1e-6) and noise.std().item() == pytest.approx(0.0096, rel=0.02)


def test_passes_with_one_context_have_noise_of_their_own(steps):
    model = tiny_model(Sequence, dtype=torch.float32)
    with PerturbedEmbeddings(model) as embeddings:
        for lengths in ((9, 5), (4, 3)):
            inputs = {**tiny_inputs(lengths), "labels": torch.tensor([0, 1])}
            sift_loss(model, inputs, model(**inputs), embeddings)
    assert [[x.shape for x in noise] for noise, *_ in steps] == [[(2, 9, 32)], [(2, 4, 32)]]


def test_shared_dropout_leaves_the_perturbation_alone():
    """With masks of their own, passes differ without any perturbation; noise differs from step to step."""
    torch.manual_seed(0)
    model = tiny_model(HfDebertaForSequenceClassification, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    inputs = {**tiny_inputs((7, 5)), "labels": torch.tensor([0, 1])}
    model.train()
    nearly_none = {"sift_learning_rate": 1e-12, "sift_init_perturbation": 1e-12}
    found = {}
    for dropout in ("independent", "shared"):
        for name, size in (("none", nearly_none), ("large", {"sift_learning_rate": 0.3})):
            settings = SiftArguments(sift_dropout=dropout, **size)
            found[dropout, name] = [both_losses(model, inputs, settings)[1].item() for _ in range(2)]
    assert min(found["independent", "none"]) > 1e-4 and max(map(abs, found["shared", "none"])) < 1e-9
    assert min(found["shared", "large"]) > 1e-6 and len(set(found["shared", "large"])) == 2


def test_frozen_parameters_stay_frozen_and_hooks_are_removed(monkeypatch):
    model = tiny_model(Sequence, dtype=torch.float32)
    model.deberta.embeddings.requires_grad_(False)
    before = [weight.requires_grad for weight in model.parameters()]
    inputs = {**tiny_inputs(), "labels": torch.tensor([0, 1, 0])}
    train = []
    model.register_forward_hook(lambda *_: train.append(any(weight.requires_grad for weight in model.parameters())))
    both_losses(model, inputs)
    assert train == [True, False, True]
    assert [weight.requires_grad for weight in model.parameters()] == before
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        both_losses(model, inputs)
    assert [weight.requires_grad for weight in model.parameters()] == before
    assert not model.deberta.embeddings.LayerNorm._forward_pre_hooks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, deterministic_noise, steps):
    model = tiny_model(Sequence, dtype=torch.float32, num_labels=3)
    inputs = {**tiny_inputs(), "labels": torch.tensor([0, 1, 2])}
    expected = both_losses(model, inputs)[1]
    with torch.autocast("cpu", dtype):
        _, adversarial = both_losses(model, inputs)
    adversarial.backward()
    assert adversarial.dtype == torch.float32
    # a small difference of logits, each of which is rounded
    assert adversarial.item() == pytest.approx(expected.item(), rel=64 * torch.finfo(dtype).eps)
    assert all(delta.dtype == torch.float32 for delta in steps[1][2])
    assert torch.isfinite(model.classifier.weight.grad).all() and largest(steps[1][1][0]) > 0


def test_gradient_checkpointing_with_dropout():
    model = tiny_model(Sequence, dtype=torch.float32, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    inputs, found = {**tiny_inputs(), "labels": torch.tensor([0, 1, 0])}, []
    for _ in range(2):
        torch.manual_seed(3)
        found.append({name: gradient.clone() for name, gradient in total_gradients(model, inputs).items()})
        model.gradient_checkpointing_enable()
    assert_same_by_name(*found)


# ---- other models ------------------------------------------------------------------------------------------------

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}
FAMILIES = {
    "bert": ("LayerNorm", {}),
    "modernbert": ("norm", {"pad_token_id": 0, "global_attn_every_n_layers": 2}),
    "deberta-v2": ("LayerNorm", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}),
    "deberta": ("LayerNorm", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "electra": ("LayerNorm", {"embedding_size": 16}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, steps):
    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, **fields, vocab_size=128, num_labels=3, initializer_range=0.1)
    model = AutoModelForSequenceClassification.from_config(config).train()
    [layer_norm] = embedding_layer_norms(model)
    paths = [path for path, module in model.named_modules() if module is layer_norm]
    assert paths[0].endswith(f"embeddings.{name}")
    inputs = {**tiny_inputs(), "labels": torch.tensor([0, 1, 2])}
    found = total_gradients(model, inputs)
    [([noise], [gradient], [delta])] = steps
    assert noise.shape == (3, 9, fields.get("embedding_size", 32)) and gradient[REAL].any(-1).all()
    assert largest(delta - noise) == pytest.approx(0.05, rel=0.01)
    assert not any(torch.isnan(gradient).any() for gradient in found.values())
    assert embedding_layer_norms(model, f"embeddings.{name}") == [layer_norm]


def test_each_of_several_layer_norms_has_a_delta(steps):
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = BartConfig(vocab_size=128, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, num_labels=3, **sizes)
    model = BartForSequenceClassification(config).train()
    with pytest.raises(ValueError, match="BartForSequenceClassification has no LayerNorm after its word embeddings"):
        embedding_layer_norms(model)
    ids = torch.randint(3, 128, (3, 9))
    ids[:, -1] = config.eos_token_id
    settings = SiftArguments(sift_layer="layernorm_embedding", sift_learning_rate=0.05)
    both_losses(model, {"input_ids": ids, "labels": torch.tensor([0, 1, 2])}, settings)
    [(noise, gradients, _)] = steps
    assert len(noise) == 2 and not torch.equal(*noise) and all(map(largest, gradients))


def test_models_without_a_layer_norm_to_perturb():
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2))
    with pytest.raises(ValueError, match="no LayerNorm after its word embeddings.*sift_layer"):
        PerturbedEmbeddings(model)
    with pytest.raises(ValueError, match="name that ends with 'norm0'; it has transformer.h.0.ln_1"):
        PerturbedEmbeddings(model, SiftArguments(sift_layer="norm0"))


@pytest.mark.parametrize(("field", "value"), [("sift_loss", "js"), ("sift_lambda", -1.0), ("sift_learning_rate", 0.0)])
def test_invalid_arguments(field, value):
    with pytest.raises(ValueError, match=f"{field} .*{value}"):
        SiftArguments(**{field: value})


# ---- Trainer -----------------------------------------------------------------------------------------------------


def make_rows() -> Dataset:
    """Rows with different lengths and numbers of labels."""
    torch.manual_seed(5)
    ids, labels = torch.randint(5, 128, (16, 8)), torch.randint(0, 3, (16, 8))
    real = torch.arange(8) < torch.randint(3, 9, (16, 1))
    labels = labels.masked_fill(~real | (torch.rand(16, 8) < 0.3), -100)
    columns = {"input_ids": ids * real, "attention_mask": real.long(), "labels": labels}
    return Dataset.from_dict({name: value.tolist() for name, value in columns.items()})


def train(folder, trainer=MyTrainer, dropout=0.0, resume=None, settings=None, **arguments):
    """The trainer after a few steps, and the number of forward passes."""
    torch.manual_seed(0)
    config = HfDebertaConfig.from_preset(
        "tiny", num_labels=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, initializer_range=0.15
    )
    model = HfDebertaForTokenClassification(config)
    defaults = {"max_steps": 4, "learning_rate": 1e-2, "optim": "sgd", "per_device_train_batch_size": 4, "seed": 7}
    defaults |= {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none", "logging_steps": 1}
    given = {} if trainer is Trainer else {"sift": settings}
    run = trainer(
        model, TrainingArguments(str(folder), **{**defaults, **arguments}), train_dataset=make_rows(), **given
    )
    outputs = record_outputs(model)
    run.train(resume_from_checkpoint=resume)
    return run, len(outputs)


def weights(run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


SWITCHED_ON = SiftArguments(sift=True, sift_learning_rate=0.05)


def test_without_sift_nothing_changes(tmp_path):
    expected, calls = train(tmp_path, Trainer, dropout=0.1)
    for settings in (None, SiftArguments()):
        found, as_many = train(tmp_path, dropout=0.1, settings=settings)
        torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=0)
        assert as_many == calls == 4


@pytest.mark.parametrize("fields", [{}, {"label_smoothing_factor": 0.1, "bf16": True}], ids=str)
def test_the_trainer_adds_the_loss_of_the_function(tmp_path, deterministic_noise, fields):
    run, calls = train(tmp_path, settings=SWITCHED_ON, **fields)
    assert calls == 16 and all(torch.isfinite(value).all() for value in weights(run).values())
    inputs = {name: torch.tensor(value) for name, value in make_rows()[:4].items()}
    run.model.train()
    _, adversarial = both_losses(run.model, inputs, SWITCHED_ON)
    task = Trainer.compute_loss(run, run.model, dict(inputs))  # takes the labels out of its inputs
    torch.testing.assert_close(run.compute_loss(run.model, inputs), task + 5 * adversarial, rtol=1e-3, atol=0)
    loss, outputs = run.compute_loss(run.model, dict(inputs), return_outputs=True)
    assert loss > task and outputs.logits.shape == (4, 8, 3) and "labels" in inputs
    assert run.evaluate(make_rows())["eval_loss"] > 0  # without SiFT, which needs gradients


@pytest.mark.parametrize("pieces", [1, 2])
def test_both_losses_are_logged(tmp_path, pieces):
    sizes = {"per_device_train_batch_size": 4 // pieces, "gradient_accumulation_steps": pieces, "logging_steps": 3}
    run, _ = train(tmp_path, settings=SWITCHED_ON, **sizes)
    first, last = run.state.log_history  # after three steps of four, and the whole training
    assert 0 < first["sift_loss"] < first["task_loss"]
    assert first["loss"] == pytest.approx(first["task_loss"] + 5 * first["sift_loss"], rel=1e-5)
    assert last["train_loss"] == pytest.approx(last["train_task_loss"] + 5 * last["train_sift_loss"], rel=1e-5)
    assert last["train_task_loss"] != first["task_loss"]
    run, _ = train(tmp_path, logging_steps=3)
    assert not any("sift" in name or "task" in name for entry in run.state.log_history for name in entry)


def test_the_log_says_what_the_perturbation_explains(tmp_path):
    """Measuring it changes no number of the training."""
    shares, trained = {}, {}
    for steps in (2, 9):
        run, _ = train(tmp_path, dropout=0.1, settings=SWITCHED_ON, logging_steps=steps)
        trained[steps] = weights(run)
        shares[steps] = [entry["sift_share"] for entry in run.state.log_history if "sift_share" in entry]
    assert len(shares[2]) == 2 and all(0 < share < 1 for share in shares[2]) and not shares[9]
    torch.testing.assert_close(trained[2], trained[9], rtol=0, atol=0)
    run, _ = train(tmp_path, settings=SWITCHED_ON, average_tokens_across_devices=False)
    assert [entry["sift_share"] for entry in run.state.log_history[:-1]] == pytest.approx([1.0] * 4, abs=1e-4)
    run, _ = train(tmp_path, dropout=0.1, settings=SiftArguments(sift=True, sift_dropout="shared"))
    assert not any("sift_share" in entry for entry in run.state.log_history)


def test_a_resumed_run_is_bit_identical(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "dropout": 0.1, "settings": SWITCHED_ON}
    whole, _ = train(tmp_path / "whole", **saving)
    resumed, calls = train(tmp_path / "resumed", **saving, resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert calls == 8  # two steps of three passes, and one to measure what is logged
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


# ---- several processes -------------------------------------------------------------------------------------------


def train_in_loop(model, rows) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for row in rows:
        task, adversarial = both_losses(model, row)
        loss = task + adversarial
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def batches() -> list[dict[str, torch.Tensor]]:
    return [{**tiny_inputs((6, 6, 6, 6), seed=seed), "labels": torch.tensor([0, 1, 1, 0])} for seed in range(3)]


class Engine(torch.nn.Module):
    """Stands in for DeepSpeed's engine: a forward pass needs a backward pass before the next one."""

    def __init__(self, module):
        super().__init__()
        self.module, self.passes = module, 0
        self.config = {"zero_optimization": {"stage": 2}}  # not that of the model

    def forward(self, **inputs):
        self.passes += 1
        return self.module(**inputs)


def test_the_engine_of_deepspeed_runs_one_pass(deterministic_noise, monkeypatch):
    model, inputs = tiny_model(Sequence, dtype=torch.float32, problem_type="multi_label_classification"), batches()[0]
    inputs["labels"] = torch.eye(2)[inputs["labels"]]
    expected = both_losses(model, inputs)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(DeepSpeedEngine=Engine))
    engine = Engine(model)
    assert both_losses(engine, inputs) == expected and engine.passes == 1


def one_of_two(rank: int, folder: Path) -> None:
    PerturbedEmbeddings.draw_noise = noise_from_embeddings
    rows = [{name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()} for batch in batches()]
    model = tiny_model(Sequence, dtype=torch.float32)
    model.gradient_checkpointing_enable()
    for layer in model.deberta.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    losses = torch.tensor(train_in_loop(model, rows))
    dist.all_reduce(losses)
    if rank == 0:
        torch.save(losses / 2, folder / "losses.pt")
    dist.barrier()


def test_the_share_of_a_batch_of_answers():
    """One item for each answered question, half for its start and half for its end; none for a question with -100."""
    inputs = {"input_ids": torch.ones(4, 5, dtype=torch.long), "start_positions": torch.tensor([1, 2, 0, -100])}
    inputs |= {"end_positions": torch.tensor([2, 2, 0, -100])}
    assert share_of_batch(inputs, 6) == 0.5
    padded = {**inputs, "attention_mask": torch.tensor([[1] * 5, [1] * 2 + [0] * 3, [1] * 5, [1] * 5])}
    assert share_of_batch(padded, 4) == 0.5  # the second answer is at padding
    assert share_of_batch({"labels": torch.tensor([1, 0, -100])}, 8) == 0.25


@pytest.mark.slow
def test_two_processes_train_as_one(deterministic_noise, tmp_path):
    """In a loop with FSDP2; test_uneven_batches has Trainer."""
    run_script(__file__, tmp_path)
    expected = train_in_loop(tiny_model(Sequence, dtype=torch.float32), batches())
    assert torch.load(tmp_path / "losses.pt").tolist() == pytest.approx(expected, rel=1e-4)


# ---- documentation -----------------------------------------------------------------------------------------------


def test_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "sift.md").read_text(encoding="utf-8")
    model, labels = tiny_model(Sequence, dtype=torch.float32), torch.tensor([1, 0, 0])
    arguments = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none")
    names = {"model": model, "batch": {**tiny_inputs(), "labels": labels}, "arguments": arguments}
    names["optimizer"] = torch.optim.SGD(model.parameters(), 1e-3)
    names["rows"] = [{"input_ids": [5, 6, 7], "labels": 1}] * 4
    snippets = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    assert len(snippets) == 1
    for snippet in snippets:
        exec(snippet, names)


if __name__ == "__main__":
    fork_two(one_of_two)
