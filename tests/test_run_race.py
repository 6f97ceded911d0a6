"""`run_race.py` as users start it: RACE and SWAG, other models, SiFT, predictions, and invalid input."""

import json
from pathlib import Path

import pytest
from fine_tuning_models import RUN as BATCHES_OF_EIGHT
from fine_tuning_models import ensemble_metrics, read_json_lines, results, run_script, save_models, write_json_lines
from safetensors.torch import load_file
from transformers import AutoModelForMultipleChoice, AutoTokenizer

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.demos.race import location_rows
from hf_deberta.fine_tuning.tasks import race

RUN = [*BATCHES_OF_EIGHT, "--per_device_train_batch_size", "4", "--max_seq_length", "48"]


def as_swag(row: dict) -> dict:
    endings = {f"ending{i}": option for i, option in enumerate(row["options"])}
    return {"sent1": row["article"], "sent2": "she is", **endings, "label": "ABCD".index(row["answer"])}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The official files of RACE, the same rows in the format of SWAG; models of three families, and one for pairs."""
    folder = tmp_path_factory.mktemp("race")
    rows = location_rows(32, 0)
    splits = {"train": rows[:16], "validation": rows[16:24], "test": rows[24:]}
    (folder / "swag").mkdir()
    for split, kept in splits.items():
        swag = [as_swag(row) | ({"label": -1} if split == "test" else {}) for row in kept]
        write_json_lines(folder / "swag" / f"{split}.jsonl", swag)
        for row in kept:
            level = "middle" if row["example_id"].startswith("middle") else "high"
            release = folder / "RACE" / {"validation": "dev"}.get(split, split)
            path = release / level / row["example_id"].removeprefix(level)
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


def run_race(*arguments: object) -> None:
    run_script("run_race.py", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ours", "in_tree", "bert"])
def test_any_model(data, tmp_path, model, caplog):
    out = tmp_path / "out"
    run_race("--model_name_or_path", data / model, "--task_name", "race", "--data_dir", data / "RACE",
             "--output_dir", out, *RUN, "--max_steps", 3)  # fmt: skip
    assert "for race, this model size" in caplog.text
    metrics = results(out)
    saved = AutoModelForMultipleChoice.from_pretrained(out)
    assert type(saved).__name__ == ("BertForMultipleChoice" if model == "bert" else "HfDebertaForMultipleChoice")
    rows = race.choice_rows(race.read_choices(data / "RACE" / "test"), "test")
    lines = read_json_lines(out / "predictions.jsonl")
    assert [line["id"] for line in lines] == rows["id"][:]
    correct = [line["label"] == label for line, label in zip(lines, rows["label"], strict=True)]
    assert metrics["predict_accuracy"] == pytest.approx(sum(correct) / len(correct))
    levels = [line["id"].startswith("high") for line in lines]
    high = [ok for ok, is_high in zip(correct, levels, strict=True) if is_high]
    assert metrics["predict_accuracy_high"] == pytest.approx(sum(high) / len(high))
    assert {"eval_accuracy", "eval_accuracy_middle", "eval_accuracy_high"} <= set(metrics)
    assert (out / "README.md").exists()


@pytest.mark.slow
def test_one_level_of_the_release(data, tmp_path):
    run_race("--model_name_or_path", data / "ours", "--task_name", "race-middle", "--data_dir", data / "RACE",
             "--output_dir", tmp_path, *RUN, "--max_steps", 1)  # fmt: skip
    assert results(tmp_path)["eval_accuracy"] == results(tmp_path)["eval_accuracy_middle"]
    assert "eval_accuracy_high" not in results(tmp_path)


@pytest.mark.slow
def test_swag_from_mnli_with_sift_and_seeds(data, tmp_path):
    """Hidden labels of the test split are not scored."""
    run_race("--intermediate", data / "mnli", "--data_dir", data / "swag", "--sift", "--num_seeds", 2,
             "--output_dir", tmp_path, *RUN, "--max_steps", 2)  # fmt: skip
    assert set(json.loads((tmp_path / "seeds.json").read_text())["seeds"]) == {"42", "43"}
    assert "predict_accuracy" not in results(tmp_path)
    assert len((tmp_path / "predict_results.txt").read_text().splitlines()) == 9
    assert load_file(tmp_path / "model.safetensors")["classifier.weight"].shape[0] == 1
    assert set(ensemble_metrics(tmp_path)) == {"seed-42", "seed-43", "ensemble"}
    scores = read_json_lines(tmp_path / "ensemble" / "scores_test.jsonl")[1:]
    for row, mean in zip(read_json_lines(tmp_path / "ensemble" / "predictions.jsonl"), scores, strict=True):
        assert row["probabilities"] == pytest.approx([*mean.values()], rel=1e-4)


@pytest.mark.slow
def test_anli_from_the_official_files(data, tmp_path):
    names = ("obs1", "obs2", "hyp1", "hyp2")
    rows = [dict(zip(names, ("Ann left .", f"It rained {n} times .", "wet", "dry"), strict=True)) for n in range(8)]
    for split in ("train", "dev", "test"):
        write_json_lines(tmp_path / f"{split}.jsonl", rows)
    for split in ("train", "dev"):
        (tmp_path / f"{split}-labels.lst").write_text("1\n2\n" * 4)
    out = tmp_path / "out"
    run_race("--model_name_or_path", data / "ours", "--task_name", "anli", "--data_dir", tmp_path, *RUN,
             "--max_steps", 2, "--output_dir", out)  # fmt: skip
    labels = [line["label"] + 1 for line in read_json_lines(out / "predictions.jsonl")]
    assert (out / "anli.lst").read_text().split() == list(map(str, labels)) and len(labels) == 8
    assert 0 <= results(out)["eval_accuracy"] <= 1
    (tmp_path / "dev-labels.lst").write_text("1\n")
    with pytest.raises(SystemExit, match="dev-labels.lst has 1 labels for the 8 rows of .*dev.jsonl"):
        run_race("--model_name_or_path", out, "--task_name", "anli", "--data_dir", tmp_path, *RUN, "--do_eval")


@pytest.mark.slow
def test_padding_and_evaluation_without_training(data, tmp_path):
    command = ["--data_dir", data / "swag", *RUN]
    run_race(*command, "--model_name_or_path", data / "ours", "--output_dir", tmp_path / "trained", "--max_steps", 2)
    run_race(*command, "--model_name_or_path", tmp_path / "trained", "--output_dir", tmp_path / "padded", "--do_eval",
             "--pad_to_max_length")  # fmt: skip
    losses = [results(tmp_path / name)["eval_loss"] for name in ("trained", "padded")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert not (tmp_path / "padded" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task_name", "rice"], "--task_name .*'rice'"),
        (["--train_file", "{data}/test.jsonl"], "train row '0' .* not -1"),
        (["--train_file", "{data}/nowhere"], "nowhere"),
    ],
    ids=["task", "hidden answers", "no file"],
)
def test_invalid_input(data, tmp_path, words, message):
    words = [word.format(data=data / "swag") for word in words]
    with pytest.raises(SystemExit, match=rf"^run_race\.py: .*{message}"):
        run_race("--model_name_or_path", data / "ours", "--output_dir", tmp_path, *RUN, *words)
