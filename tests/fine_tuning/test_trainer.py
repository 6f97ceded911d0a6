"""The trainer of the fine-tuning scripts: finished runs, model cards, several seeds, and label smoothing."""

import gc
import json
import weakref

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from tiny_trainers import CLASS_ROWS as ROWS
from tiny_trainers import classifier
from tiny_trainers import fine_tuning_arguments as arguments
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    DebertaV2ForSequenceClassification,
    default_data_collator,
)
from transformers.trainer_pt_utils import LabelSmoother

from hf_deberta import (
    HfDebertaConfig,
    HfDebertaForEntityChoice,
    HfDebertaForMultipleChoice,
    HfDebertaForQuestionAnswering,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
)
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.run import run_seeds
from hf_deberta.fine_tuning.task import Task
from hf_deberta.fine_tuning.trainer import (
    FineTuningTrainer,
    validation_splits,
)
from hf_deberta.training import checkpoints
from hf_deberta.training.errors import InputError
from hf_deberta.training.run_lock import LOCK

BERT = BertConfig(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=100,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def make_trainer(
    args: FineTuningArguments, model_class=HfDebertaForSequenceClassification, **fields
) -> FineTuningTrainer:
    model = model_class(HfDebertaConfig.from_preset("tiny", **fields))
    return FineTuningTrainer(model, args, default_data_collator, ROWS)


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        (["train", "test"], {}),
        (["validation", "train"], {"": "validation"}),
        (
            ["validation_matched", "validation_mismatched"],
            {"": "validation_matched", "_mismatched": "validation_mismatched"},
        ),
        (["validation_mismatched", "test"], {"": "validation_mismatched"}),
        (["validation_a", "validation"], {"_a": "validation_a", "": "validation"}),
    ],
)
def test_validation_splits_by_the_suffix_of_their_metrics(splits, expected):
    assert validation_splits(splits) == expected


def test_metrics_are_those_of_the_split(tmp_path):
    """While training those of the main validation split, afterwards those of the split in question."""
    scored, written = [], []

    class Counting(Task):
        def read_outputs(self, split, outputs, inputs):
            return len(outputs)

        def metrics(self, split, predicted):
            scored.append((split, predicted))
            return {"rows": predicted}

        def has_labels(self, split):
            return split != "test_bare"

        def write_predictions(self, folder, split, predicted):
            written.append((split, predicted))

    splits = {"train": ROWS, "validation_mismatched": ROWS.select(range(3)), "validation_matched": ROWS.select([0])}
    splits |= {"test": ROWS.select(range(5)), "test_bare": ROWS.select(range(4))}
    model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny"))
    args = arguments(tmp_path, do_eval=True, max_steps=-1, num_train_epochs=1)
    task = Counting(None, None, args)
    trainer = FineTuningTrainer(model, args, default_data_collator, splits=splits, task=task)
    found = trainer.train_and_evaluate()
    assert (found["eval_rows"], found["eval_rows_mismatched"]) == (1, 3) and "eval_runtime_mismatched" not in found
    assert trainer.predict_split("test")["predict_rows"] == 5
    bare = trainer.predict_split("test_bare")  # its labels are hidden
    assert "predict_bare_rows" not in bare and "predict_bare_loss" not in bare
    main, other = ("validation_matched", 1), ("validation_mismatched", 3)
    assert scored == [main, other, main, ("test", 5)] and written == [("test", 5), ("test_bare", 4)]
    assert "predict_rows" in json.loads((tmp_path / "all_results.json").read_text())
    trainer.get_test_dataloader = lambda rows: FineTuningTrainer.get_test_dataloader(trainer, rows.select(range(4)))
    with pytest.raises(ValueError, match="there are 4 predictions for the 5 rows of test"):
        trainer.predict_split("test")


def test_rows_of_several_choices_are_grouped_by_their_longest(tmp_path):
    rows = Dataset.from_dict({"input_ids": [[[1] * 3, [1] * n] for n in (2, 9, 4)], "labels": [0, 1, 0]})
    args = arguments(tmp_path, train_sampling_strategy="group_by_length")
    model = HfDebertaForMultipleChoice(HfDebertaConfig.from_preset("tiny"))
    trainer = FineTuningTrainer(model, args, default_data_collator, rows)
    assert list(trainer._get_train_sampler().lengths) == [3, 9, 4]


def test_a_finished_run_is_loaded_without_the_files_of_a_checkpoint(tmp_path, monkeypatch):
    """Under FSDP, Trainer would need files that a finished model does not have."""
    torch.manual_seed(0)
    first = make_trainer(arguments(tmp_path))
    first.train_and_evaluate()
    second = make_trainer(arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2))
    monkeypatch.setattr(second, "_load_from_checkpoint", lambda *_: pytest.fail("loads a checkpoint"))
    second.train_and_evaluate()
    assert not second.trained and second.state.global_step == 1
    loaded = second.model.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in first.model.state_dict().items())
    monkeypatch.setattr(checkpoints, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(InputError, match=f"{tmp_path} is finished, and with ZeRO-3 .* --do_train false"):
        make_trainer(arguments(tmp_path)).train_and_evaluate()
    flipped = Dataset.from_dict({"input_ids": ROWS["input_ids"][:], "labels": [1, 0] * 4})
    with pytest.raises(InputError, match="hash of rows [0-9a-f]{16}, now "):
        FineTuningTrainer(first.model, arguments(tmp_path), default_data_collator, flipped).train_and_evaluate()


def test_the_card_of_an_interrupted_run_is_written_when_it_is_repeated(tmp_path):
    """Its own settings and metrics, not those of an earlier run; a card that is complete is not written again."""
    card = tmp_path / "README.md"
    first = make_trainer(arguments(tmp_path))
    first.train_and_evaluate()
    first.write_card_and_push()
    assert "## Training" in card.read_text()
    make_trainer(arguments(tmp_path, seed=7, resume_from_checkpoint="false")).train_and_evaluate()  # interrupted then
    assert "## Training" not in card.read_text()
    again = make_trainer(arguments(tmp_path, seed=7))
    again.train_and_evaluate()
    again.save_metrics("predict", {"predict_accuracy": 0.75, "predict_runtime": 3.5})
    again.write_card_and_push()
    text = card.read_text()
    assert "## Training" in text and "- seed: 7" in text and "predict_accuracy: 0.75" in text
    assert "predict_runtime" not in text and "train_loss" not in text
    card.write_text(card.read_text() + "by hand")
    finished = make_trainer(arguments(tmp_path, seed=7))
    finished.train_and_evaluate()
    finished.write_card_and_push()
    assert card.read_text().endswith("by hand")


def test_the_card_inherits_licence_and_base_model_of_a_local_checkpoint(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\nbase_model: microsoft/deberta-v3-base\n---\n")
    run = classifier(tmp_path / "out")
    run.card_fields = {"data": "train.csv", "base": str(tmp_path / "base")}
    run.train_and_evaluate()
    run.write_card_and_push()
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.base_model) == ("mit", "microsoft/deberta-v3-base")
    assert str(tmp_path) not in card.text and "More information needed" not in card.text


def test_the_model_of_a_seed_is_freed_before_the_next_is_loaded(tmp_path, caplog):
    """The folder of each seed is locked; without validation rows no seed is the best."""
    models = []

    def run(args: FineTuningArguments) -> dict[str, float]:
        assert (args.output_folder / LOCK).exists()
        assert not models or models[-1]() is None
        trainer = make_trainer(args)
        models.append(weakref.ref(trainer.model))
        return trainer.train_and_evaluate()

    gc.disable()  # it would run at a random time
    try:
        run_seeds(arguments(tmp_path, num_seeds=2), run)
    finally:
        gc.enable()
    assert len(models) == 2 and not list(tmp_path.rglob(LOCK))
    assert "No validation rows say which seed is the best" in caplog.text


def test_label_smoothing_needs_classes(tmp_path):
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    message = r"--label_smoothing_factor 0\.1 needs one class"
    regression = {"num_labels": 1, "problem_type": "regression"}
    for model_class, fields in [
        (HfDebertaForSequenceClassification, regression),
        (HfDebertaForEntityChoice, {}),
        (HfDebertaForQuestionAnswering, {}),
    ]:
        with pytest.raises(InputError, match=message):
            make_trainer(args, model_class, **fields)
        make_trainer(arguments(tmp_path), model_class, **fields)
    for factor in (1.0, -0.5):
        with pytest.raises(InputError, match=f"--label_smoothing_factor must be .* not {factor:g}"):
            make_trainer(arguments(tmp_path, label_smoothing_factor=factor))
    with pytest.raises(InputError, match=message):
        FineTuningTrainer(BertForQuestionAnswering(BERT), args, default_data_collator, ROWS)


@pytest.mark.parametrize(
    ("model_class", "shape"),
    [
        (HfDebertaForSequenceClassification, (4,)),
        (HfDebertaForTokenClassification, (4, 3)),
        (HfDebertaForMultipleChoice, (4,)),
    ],
)
def test_label_smoothing(tmp_path, model_class, shape):
    """(1 - e) times the loss plus e times the mean over all classes; the same for a batch in two parts."""
    run = make_trainer(arguments(tmp_path, label_smoothing_factor=0.25), model_class)
    run.model.eval()
    choices = model_class is HfDebertaForMultipleChoice
    inputs = {"input_ids": torch.randint(5, 90, (4, 2, 3) if choices else (4, 3)), "labels": torch.randint(0, 2, shape)}
    if model_class is HfDebertaForTokenClassification:
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


def test_label_smoothing_of_old_releases_is_refused_with_accumulation(tmp_path, monkeypatch):
    monkeypatch.setattr(LabelSmoother, "__call__", lambda self, model_output, labels, shift_labels=False: None)
    make_trainer(arguments(tmp_path, label_smoothing_factor=0.1))
    with pytest.raises(InputError, match="needs Transformers 5.15 or later"):
        make_trainer(arguments(tmp_path, label_smoothing_factor=0.1, gradient_accumulation_steps=2))


@pytest.mark.parametrize("model_class", [BertForSequenceClassification, BertForQuestionAnswering])
def test_accumulation_with_a_model_that_takes_the_mean_of_a_batch(tmp_path, model_class):
    """BERT accepts num_items_in_batch, and ignores it."""
    answers = {"start_positions": [0, 1] * 4, "end_positions": [1, 2] * 4}
    rows, losses = ROWS, []
    if model_class is BertForQuestionAnswering:
        rows = Dataset.from_dict({"input_ids": ROWS["input_ids"][:], **answers})
    for size, pieces in ((8, 1), (2, 4), (3, 3)):  # of 3, 3 and 2 rows
        torch.manual_seed(0)
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": pieces}
        run = FineTuningTrainer(model_class(BERT), arguments(tmp_path, **sizes), default_data_collator, rows)
        losses.append(run.train().training_loss)
    assert losses[1:] == pytest.approx(2 * losses[:1], rel=1e-4)


def test_a_run_that_stops_early_says_why_and_which_checkpoint_is_best(tmp_path, caplog):
    caplog.set_level("INFO")
    run = classifier(
        tmp_path, learning_rate=0.0, max_steps=9, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, do_eval=True, metric_for_best_model="loss", early_stopping_patience=2,
    )  # fmt: skip
    run.train_and_evaluate()
    assert "Stopped early at step 3 of 9: eval_loss has not improved in 2 evaluations" in caplog.text
    assert f"that of step 1, with {run.state.best_metric:.4g}: it is the model." in caplog.text


def test_the_final_model_in_the_format_of_transformers(tmp_path):
    """It has no custom code, its checkpoints are ours, and a finished run is loaded again."""
    fields = {"save_format": "transformers", "save_strategy": "steps", "save_steps": 1}
    run = classifier(tmp_path, **fields)
    run.train_and_evaluate()
    run.write_card_and_push()
    assert not list(tmp_path.glob("*.py")) and list(tmp_path.glob("checkpoint-1/modeling_*.py"))
    assert "trust_remote_code" not in (tmp_path / "README.md").read_text()
    plain = DebertaV2ForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = torch.tensor(ROWS["input_ids"][:])
    torch.testing.assert_close(plain(ids).logits, run.model.eval()(ids).logits, atol=1e-5, rtol=0)
    again = classifier(tmp_path, **fields)
    again.train_and_evaluate()
    assert not again.trained and torch.equal(again.model.classifier.weight, run.model.classifier.weight)


def test_a_head_that_transformers_lacks_is_refused_before_training(tmp_path):
    model = HfDebertaForMultipleChoice(HfDebertaConfig.from_preset("v1-base", hidden_size=8, num_attention_heads=1))
    with pytest.raises(InputError, match="--save_format transformers: .* no head like that of HfDebertaForMultiple"):
        FineTuningTrainer(model, arguments(tmp_path, save_format="transformers"))
