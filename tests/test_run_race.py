"""`run_race.py` as a user starts it: RACE and SWAG, other models, SiFT, going on, predictions, and bad input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from fine_tuning_models import RUN as EIGHT
from fine_tuning_models import results, runner, save_models
from safetensors.torch import load_file
from transformers import (
    AutoModelForMultipleChoice,
    AutoTokenizer,
)

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.demos.race import location_rows
from hf_deberta.fine_tuning.tasks import race

RUN = [*EIGHT, "--per_device_train_batch_size", "4", "--max_seq_length", "48"]


def as_swag(row: dict) -> dict:
    endings = {f"ending{i}": option for i, option in enumerate(row["options"])}
    return {"sent1": row["article"], "sent2": "she is", **endings, "label": "ABCD".index(row["answer"])}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The release of RACE, the same rows in SWAG's form; models of three families and one fine-tuned on pairs."""
    folder = tmp_path_factory.mktemp("race")
    rows = location_rows(32, 0)
    splits = {"train": rows[:16], "validation": rows[16:24], "test": rows[24:]}
    (folder / "swag").mkdir()
    for split, kept in splits.items():
        swag = [as_swag(row) | ({"label": -1} if split == "test" else {}) for row in kept]
        (folder / "swag" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in swag))
        for row in kept:
            level = "middle" if row["example_id"].startswith("middle") else "high"
            path = (
                folder
                / "RACE"
                / {"validation": "dev"}.get(split, split)
                / level
                / row["example_id"].removeprefix(level)
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            released = {name: [row[name.removesuffix("s")]] for name in ("questions", "answers")}
            released |= {"options": [row["options"]], "article": row["article"], "id": row["example_id"]}
            path.write_text(json.dumps(released))
    texts = [text for row in rows for text in (row["article"], row["question"], *row["options"])]
    words = save_models(folder, texts * 5)
    pairs = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny", **words, num_labels=3))
    pairs.save_pretrained(folder / "mnli")
    AutoTokenizer.from_pretrained(folder / "ours").save_pretrained(folder / "mnli")
    return folder


@pytest.fixture
def run_race(monkeypatch):
    return runner(monkeypatch, "run_race.py")


def test_the_demonstration_learns(run_race, tmp_path):
    out = tmp_path / "out"
    run_race("--demo", *RUN[:3], "--output_dir", out)
    assert results(out)["eval_accuracy"] > 0.9 and results(out)["predict_accuracy_high"] > 0.9
    assert len((out / "predict_results.txt").read_text().splitlines()) == 51


@pytest.mark.parametrize("model", ["ours", "in_tree", "bert"])
def test_race_by_any_model(run_race, made, tmp_path, model):
    out = tmp_path / "out"
    run_race("--model_name_or_path", made / model, "--task_name", "race", "--data_dir", made / "RACE",
             "--output_dir", out, *RUN, "--max_steps", 3)  # fmt: skip
    found = results(out)
    kept = AutoModelForMultipleChoice.from_pretrained(out)
    assert type(kept).__name__ == ("BertForMultipleChoice" if model == "bert" else "HfDebertaForMultipleChoice")
    rows = race.choice_rows(race.read_choices(made / "RACE" / "test"), "test")
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == rows["id"][:]
    right = [line["label"] == label for line, label in zip(lines, rows["label"], strict=True)]
    assert found["predict_accuracy"] == pytest.approx(sum(right) / len(right))
    levels = [line["id"].startswith("high") for line in lines]
    high = [ok for ok, is_high in zip(right, levels, strict=True) if is_high]
    assert found["predict_accuracy_high"] == pytest.approx(sum(high) / len(high))
    assert {"eval_accuracy", "eval_accuracy_middle", "eval_accuracy_high"} <= set(found)
    assert (out / "README.md").exists()


def test_one_level_of_the_release(run_race, made, tmp_path):
    run_race("--model_name_or_path", made / "ours", "--task_name", "race-middle", "--data_dir", made / "RACE",
             "--output_dir", tmp_path, *RUN, "--max_steps", 1)  # fmt: skip
    assert results(tmp_path)["eval_accuracy"] == results(tmp_path)["eval_accuracy_middle"]
    assert "eval_accuracy_high" not in results(tmp_path)


def test_swag_from_mnli_with_sift_and_seeds(run_race, made, tmp_path):
    """The hidden labels of a test split are no labels."""
    run_race("--intermediate", made / "mnli", "--data_dir", made / "swag", "--sift", "--num_seeds", 2,
             "--output_dir", tmp_path, *RUN, "--max_steps", 2)  # fmt: skip
    assert set(json.loads((tmp_path / "seeds.json").read_text())["seeds"]) == {"42", "43"}
    assert "predict_accuracy" not in results(tmp_path)
    assert len((tmp_path / "predict_results.txt").read_text().splitlines()) == 9
    assert load_file(tmp_path / "model.safetensors")["classifier.weight"].shape[0] == 1


def test_it_goes_on_exactly(run_race, made, tmp_path):
    """In the middle of an epoch, with rows grouped by their longest choice and dropout on."""
    command = ["--model_name_or_path", made / "ours", "--data_dir", made / "swag", *RUN, "--num_train_epochs", 3]
    command += ["--save_steps", 3, "--save_strategy", "steps", "--eval_strategy", "no", "--save_total_limit", 9]
    command += ["--train_sampling_strategy", "group_by_length"]
    run_race(*command, "--output_dir", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for path in (tmp_path / "stopped").iterdir():
        if path.name != "checkpoint-6":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run_race(*command, "--output_dir", tmp_path / "stopped")
    whole, stopped = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_evaluation_alone_and_padding(run_race, made, tmp_path):
    command = ["--data_dir", made / "swag", *RUN]
    run_race(*command, "--model_name_or_path", made / "ours", "--output_dir", tmp_path / "trained", "--max_steps", 2)
    run_race(*command, "--model_name_or_path", tmp_path / "trained", "--output_dir", tmp_path / "padded", "--do_eval",
             "--pad_to_max_length")  # fmt: skip
    found = [results(tmp_path / name)["eval_loss"] for name in ("trained", "padded")]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert not (tmp_path / "padded" / "model.safetensors").exists()


def test_the_recipe_of_race(run_race, made, tmp_path, caplog):
    run_race("--model_name_or_path", made / "ours", "--task_name", "race", "--data_dir", made / "RACE", "--use_cpu",
             "--output_dir", tmp_path, "--max_steps", 1, "--max_seq_length", 40)  # fmt: skip
    assert "none was published for race, this size; as v1-base" in caplog.text
    assert AutoModelForMultipleChoice.from_pretrained(tmp_path).config.cls_dropout == 0.2


def test_bad_input(run_race, made, tmp_path):
    swag = made / "swag"
    model = ["--model_name_or_path", made / "ours", "--output_dir", tmp_path / "out", *RUN]
    row = location_rows(1, 0)[0]
    files = {
        "columns": [{"text": "a"}],
        "fewer": [row, {**row, "options": row["options"][:3], "answer": "A"}],
        "answer": [{**row, "answer": "E"}],
        "long": [{**row, "options": ["at the harbour " * 30] * 4}],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = [
        (["--output_dir", tmp_path / "out"], "say which checkpoint"),
        ([*model, "--task_name", "rice"], "--task_name is one of race, race_middle, race_high, swag, not 'rice'"),
        ([*model], "say which data"),
        ([*model, "--train_file", tmp_path / "columns.jsonl"], "the train rows have no column sent1, sent2"),
        ([*model, "--train_file", tmp_path / "fewer.jsonl"], "must have the same number of choices"),
        ([*model, "--train_file", tmp_path / "answer.jsonl"], "must be a letter from A to D or a number from 0 to 3"),
        ([*model, "--train_file", tmp_path / "long.jsonl"], "leaves room for 44: raise it, or shorten the choice"),
        ([*model, "--train_file", tmp_path / "nowhere"], "there is no file or folder"),
        ([*model, "--validation_file", swag / "validation.jsonl"], "--do_train needs train rows"),
        ([*model, "--train_file", swag / "test.jsonl"], "the answer of train row '0' must be .* not -1"),
    ]
    for arguments, said in cases:
        with pytest.raises(SystemExit, match=said):
            run_race(*arguments)
