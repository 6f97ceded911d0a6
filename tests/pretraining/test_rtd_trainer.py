"""The trainer of generator and discriminator: counting, accumulation, logs, decoupled steps, and exact resume."""

import pytest
import torch
from numerics import assert_same_by_name
from tiny_pairs import DROPOUT, WORDS, batch_of, run, tiny_pair, tiny_rows, trained, trainer_of

from hf_deberta.pretraining import rtd_trainer
from hf_deberta.pretraining.gradient_disentangled_embedding import SHARINGS
from hf_deberta.pretraining.rtd_pretraining import HfDebertaForRtdPretraining

pytestmark = pytest.mark.usefixtures("unpad_tiny_models")


def test_the_step_is_that_of_one_batch(tmp_path):
    model, batch = tiny_pair(), batch_of(tiny_rows())
    output, gradients = trained(model, **batch)
    parameters, logs = run(trainer_of(tiny_pair(), tmp_path, max_steps=1))
    expected = {name: weight.detach() - 1e-2 * gradients[name] for name, weight in model.named_parameters()}
    assert_same_by_name(parameters, expected)
    assert logs[0]["loss"] == pytest.approx(output.loss.item())
    assert logs[0]["loss"] == pytest.approx(logs[0]["lm_loss"] + 50 * logs[0]["rtd_loss"])
    statistics = {name: value.item() for name, value in output.statistics.items()}
    assert logs[0]["masked_accuracy"] == pytest.approx(statistics["masked_correct"] / statistics["masked"])
    assert logs[0]["original_kept"] == pytest.approx(statistics["original_kept"] / statistics["original"])


def test_trainer_counts_both_kinds_of_items(tmp_path):
    trainer = trainer_of(tiny_pair(), tmp_path)
    rows = tiny_rows()
    batches = [batch_of(rows[:4]), batch_of(rows[4:])]
    items = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    labels, real = (batch_of(rows)[name] for name in ("labels", "attention_mask"))
    assert items.tolist() == [(labels >= 0).sum(), real.sum()]
    packed = [{name: batch[name] for name in ("input_ids", "labels")} for batch in batches]
    assert trainer._get_num_items_in_batch(packed, torch.device("cpu")).tolist() == items.tolist()
    assert trainer._get_num_items_in_batch([], torch.device("cpu")) is None


def test_logs_are_means_since_the_last_log(tmp_path):
    rows = tiny_rows()
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "eval_dataset": rows[:7]}
    each = trainer_of(tiny_pair(), tmp_path, **arguments)
    _, logs = run(each)
    both = run(trainer_of(tiny_pair(), tmp_path, logging_steps=2, **arguments))[1]
    assert len(logs) == 2 and len(both) == 1
    for name in ("lm_loss", "rtd_loss", "masked_accuracy", "original_kept"):  # the same rows, so as many tokens
        if name != "original_kept":
            assert both[0][name] == pytest.approx((logs[0][name] + logs[1][name]) / 2, rel=1e-5)
    evaluated = [entry for entry in each.state.log_history if "eval_loss" in entry]
    with torch.no_grad():
        whole = each.model.eval()(**batch_of(rows[:7]))
    assert evaluated[-1]["eval_lm_loss"] == pytest.approx(whole.lm_loss.item(), rel=1e-5)
    assert evaluated[-1]["eval_rtd_loss"] == pytest.approx(whole.rtd_loss.item(), rel=1e-5)
    assert evaluated[-1]["eval_loss"] == pytest.approx(whole.loss.item(), rel=1e-5)
    assert each.evaluate()["eval_loss"] == pytest.approx(whole.loss.item(), rel=1e-5)


@pytest.mark.parametrize(("bias", "warnings"), [(-10.0, 1), (10.0, 0)])
def test_a_discriminator_that_finds_nothing_is_warned_of_once(tmp_path, monkeypatch, caplog, bias, warnings):
    monkeypatch.setattr(rtd_trainer, "STEPS_BEFORE_WARNING", 1)
    pair = tiny_pair("es")
    torch.nn.init.constant_(pair.discriminator.mask_predictions.classifier.bias, bias)
    run(trainer_of(pair, tmp_path, max_steps=4, warmup_steps=1, learning_rate=1e-9))
    messages = [record.getMessage() for record in caplog.records if record.name == rtd_trainer.__name__]
    assert len(messages) == warnings
    for message in messages:
        assert "At step 2 the discriminator finds 0.0% of the replaced tokens" in message
        assert "--embedding_sharing gdes (now es)" in message and "--learning_rate (now 1e-09" in message


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_decoupled_by_hand(sharing, optim, tmp_path):
    """The generator steps first; the discriminator uses the new table and the tokens sampled before.

    The gradients of each model are clipped, and a step leaves the other model, its decay and its moments alone.
    """
    fields = {"max_grad_norm": 0.1, "optim": optim, "weight_decay": 0.1, "max_steps": 2}
    fields |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    model = tiny_pair(sharing)
    trainer = trainer_of(model, tmp_path, True, **fields)
    optimizer, (batch,) = trainer.create_optimizer(), trainer.get_train_dataloader()
    for _ in range(2):
        generated = model(**batch, only="generator")
        detect = {**batch, "only": "discriminator", "replaced_ids": generated.replaced_ids}
        for make_loss in (lambda: generated.loss, lambda: model(**detect).loss):  # noqa: B023
            make_loss().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    found, _ = run(trainer_of(tiny_pair(sharing), tmp_path, True, **fields))
    assert_same_by_name(found, expected)
    joint, _ = run(trainer_of(tiny_pair(sharing), tmp_path, **fields))
    assert not torch.allclose(joint[WORDS], expected[WORDS], atol=1e-6)


@pytest.mark.parametrize("decoupled", [False, True], ids=["joint", "decoupled"])
@pytest.mark.parametrize("sharing", ["gdes", "es"])
def test_resumes_to_the_bit(sharing, decoupled, tmp_path):
    """With dropout and sampling, from a checkpoint in the middle of an epoch."""
    arguments = {"max_steps": 5, "optim": "adamw_torch", "lr_scheduler_type": "linear", "max_grad_norm": 1.0}
    arguments |= {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3}

    def fresh():
        return trainer_of(tiny_pair(sharing, temperature=1.0, **DROPOUT), tmp_path, decoupled, **arguments)

    whole, logs = run(fresh())
    resumed = fresh()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, whole[name]), name
    last = [entry for entry in resumed.state.log_history if "loss" in entry]
    assert [entry["lm_loss"] for entry in last] == [entry["lm_loss"] for entry in logs]
    loaded = HfDebertaForRtdPretraining.from_pretrained(tmp_path / "checkpoint-5")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, whole[name]), name


def test_arguments_that_decoupled_training_needs(tmp_path):
    for decoupled, given, expected in ((True, None, True), (True, False, False), (False, None, None)):
        trainer = trainer_of(tiny_pair(), tmp_path, decoupled, ddp_find_unused_parameters=given)
        assert trainer.args.ddp_find_unused_parameters is expected
