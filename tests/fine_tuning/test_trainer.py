"""What the fine-tuning scripts share: the trainer of a finished run, several seeds, and what is refused."""

import gc
import weakref

import pytest
import torch
from datasets import Dataset
from transformers import BertConfig, BertForQuestionAnswering, default_data_collator

from hf_deberta import (
    HfDebertaConfig,
    HfDebertaForEntityChoice,
    HfDebertaForMultipleChoice,
    HfDebertaForQuestionAnswering,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
)
from hf_deberta.fine_tuning import trainer as fine_tuning
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.trainer import FineTuningTrainer, over_seeds, train_and_evaluate, write_card_and_push

ROWS = Dataset.from_dict({"input_ids": [[1, n + 5, 2] for n in range(8)], "labels": [0, 1] * 4})


def arguments(folder, **fields) -> FineTuningArguments:
    given = {"do_train": True, "max_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": "none", **fields}
    return FineTuningArguments(str(folder), **given)


def trainer(args: FineTuningArguments, kind=HfDebertaForSequenceClassification, **fields) -> FineTuningTrainer:
    model = kind(HfDebertaConfig.from_preset("tiny", **fields))
    return FineTuningTrainer(model, args, default_data_collator, ROWS)


def test_a_finished_run_is_loaded_without_the_files_of_a_checkpoint(tmp_path, monkeypatch):
    """Which Trainer asks for under FSDP, and which a finished model has not."""
    torch.manual_seed(0)
    first = trainer(arguments(tmp_path))
    train_and_evaluate(first, {})
    second = trainer(arguments(tmp_path))
    monkeypatch.setattr(second, "_load_from_checkpoint", lambda *_: pytest.fail("asks for a checkpoint"))
    train_and_evaluate(second, {})
    assert not second.trained and second.state.global_step == 1
    found = second.model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in first.model.state_dict().items())


def test_the_card_is_written_before_predictions(tmp_path, monkeypatch):
    train_and_evaluate(trainer(arguments(tmp_path)), {})
    card = tmp_path / "README.md"
    assert "## Training" in card.read_text()
    stopped = trainer(arguments(tmp_path, seed=7, resume_from_checkpoint="false"))
    monkeypatch.setattr(stopped, "create_model_card", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train_and_evaluate(stopped, {})
    assert "## Training" not in card.read_text()
    train_and_evaluate(trainer(arguments(tmp_path, seed=7)), {})
    assert "## Training" in card.read_text() and "| seed | 7 |" in card.read_text()
    card.write_text(card.read_text() + "by hand")
    train_and_evaluate(trainer(arguments(tmp_path, seed=7)), {})
    assert card.read_text().endswith("by hand")


def test_scores_of_predictions_come_to_the_card_of_a_run_that_was_stopped(tmp_path):
    train_and_evaluate(trainer(arguments(tmp_path)), {})  # killed while predicting
    card = tmp_path / "README.md"
    card.write_text(before := card.read_text() + "by hand")
    for scores in ({}, {"predict_accuracy": 0.75, "predict_runtime": 3.5}):
        again = trainer(arguments(tmp_path))
        train_and_evaluate(again, {})
        again.save_metrics("predict", scores)
        assert card.read_text() == before  # until prediction is through
        write_card_and_push(again)
    heading = "| result | |\n|---|--:|\n"
    assert card.read_text() == before.replace(heading, heading + "| predict_accuracy | 0.75 |\n") != before


def test_the_model_of_a_seed_goes_before_the_next_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(fine_tuning, "destroy_process_group", lambda: None)
    models = []

    def run(args: FineTuningArguments) -> dict[str, float]:
        assert not models or models[-1]() is None
        one = trainer(args)
        models.append(weakref.ref(one.model))
        return train_and_evaluate(one, {})

    gc.disable()  # it would come at a time of its own
    try:
        over_seeds(arguments(tmp_path, num_seeds=2), run)
    finally:
        gc.enable()
    assert len(models) == 2


def test_labels_that_are_classes_are_smoothed(tmp_path):
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    said = r"--label_smoothing_factor 0\.1 is for labels that are classes, one each: of sequences, words or choices"
    numbers = {"num_labels": 1, "problem_type": "regression"}
    for kind, fields in [
        (HfDebertaForSequenceClassification, numbers),
        (HfDebertaForEntityChoice, {}),
        (HfDebertaForQuestionAnswering, {}),
    ]:
        with pytest.raises(ValueError, match=said):
            trainer(args, kind, **fields)
        trainer(arguments(tmp_path), kind, **fields)
    bert = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=100)
    with pytest.raises(ValueError, match=said):
        FineTuningTrainer(BertForQuestionAnswering(bert), args, default_data_collator, ROWS)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (HfDebertaForSequenceClassification, (4,)),
        (HfDebertaForTokenClassification, (4, 3)),
        (HfDebertaForMultipleChoice, (4,)),
    ],
)
def test_smoothing_of_each_kind_of_class(tmp_path, kind, shape):
    """(1 - e) of the loss of the labels and e of the mean over all classes; a batch cut in two gives the same."""
    run = trainer(arguments(tmp_path, label_smoothing_factor=0.25), kind)
    run.model.eval()
    choices = kind is HfDebertaForMultipleChoice
    inputs = {"input_ids": torch.randint(5, 90, (4, 2, 3) if choices else (4, 3)), "labels": torch.randint(0, 2, shape)}
    if kind is HfDebertaForTokenClassification:
        inputs["labels"][1, 1:] = -100
    counted = inputs["labels"] >= 0
    logs = run.model(inputs["input_ids"]).logits.log_softmax(-1)[counted]
    picked = logs.gather(-1, inputs["labels"][counted][:, None]).mean()
    expected = -0.75 * picked - 0.25 * logs.mean()
    items = counted.sum()
    torch.testing.assert_close(run.compute_loss(run.model, dict(inputs), num_items_in_batch=items), expected)
    halves = [{name: value[part] for name, value in inputs.items()} for part in (slice(0, 1), slice(1, 4))]
    summed = sum(run.compute_loss(run.model, half, num_items_in_batch=items) for half in halves)
    torch.testing.assert_close(summed, expected)
