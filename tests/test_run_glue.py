"""`run_glue.py` as users start it; its functions are tested without training where that is enough."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from fine_tuning_models import (
    RUN,
    classification,
    read_json_lines,
    read_predicted_rows,
    results,
    run_script,
    save_models,
    write_json_lines,
)
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.demos import review_rows
from hf_deberta.fine_tuning.tasks import glue

LISTS = [
    {"text": " ".join(labels) or "dull", "label": labels}
    for labels in ([], ["film"], ["cast", "music"], ["music", "film"])
    for _ in range(4)
]


def run_glue(*arguments: object) -> None:
    run_script("run_glue.py", *arguments)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Rows of a sentence task and a regression; models of three families."""
    folder = tmp_path_factory.mktemp("glue")
    sentences = review_rows(64, 0)
    values = [{"sentence1": r["sentence"], "sentence2": "good", "label": 5.0 * r["label"]} for r in sentences]
    for name, rows in {"sst2": sentences, "stsb": values}.items():
        (folder / name).mkdir()
        hidden = [{**row, "label": -1} for row in rows[40:56]]
        for split, split_rows in {"train": rows[:40], "validation": rows[40:56], "test": hidden}.items():
            write_json_lines(folder / name / f"{split}.jsonl", split_rows)
    save_models(folder, [row["sentence"] for row in sentences])
    return folder


def save_classifier(data: Path, folder: Path, **fields) -> Path:
    """A checkpoint of a classifier that was not trained."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(data / "ours")
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = HfDebertaConfig.from_preset("tiny", **words, **fields)
    HfDebertaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Training


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ours", "in_tree", "bert"])
def test_any_model(data, tmp_path, model, caplog, capsys):
    """The model, its card, its metrics and predictions, and a last line whose command works."""
    out = tmp_path / "out"
    run_glue("--model_name_or_path", data / model, "--task_name", "sst2", "--data_dir", data / "sst2",
             "--output_dir", out, *RUN, "--num_train_epochs", 2, "--recipe", "none")  # fmt: skip
    last_line = caplog.records[-1].message
    assert last_line.startswith(f"\n{out}: model, predictions_sst2.csv, all_results.json, README.md. Try: python -c '")
    exec(last_line.split("'")[1], {})
    assert "'label': '" in capsys.readouterr().out
    accuracy = results(out)["eval_accuracy"]
    saved = AutoModelForSequenceClassification.from_pretrained(out)
    assert type(saved).__name__ == ("Bert" if model == "bert" else "HfDeberta") + "ForSequenceClassification"
    assert saved.config.id2label == {0: "negative", 1: "positive"}
    assert saved.config.label2id == {"negative": 0, "positive": 1}  # zero-shot pipelines need it
    assert len((out / "SST-2.tsv").read_text().splitlines()) == 17
    card = ModelCard.load(out / "README.md")
    assert "on the sst2 dataset" in card.text and f"- accuracy: {accuracy:g}"[:16] in card.text
    assert ("from_pretrained(" in card.text) == (model != "bert")
    assert 'pipeline("text-classification", "out")("A text")' in card.text and "| 1 | positive |" in card.text
    assert "- rows: train 40, validation 16\n" in card.text
    assert str(tmp_path) not in card.text and "More information needed" not in card.text
    (result,) = card.data.eval_results
    assert (result.metric_type, result.dataset_name, result.metric_value) == ("accuracy", "sst2", accuracy)
    evaluations = [line.split("|")[3].strip() for line in card.text.splitlines() if line.count("|") == 6]
    assert evaluations == ["Step", ":----:", "5", "10"]


def test_a_regression_from_a_json_file_of_flags(data, tmp_path, caplog):
    out, file = tmp_path / "out", tmp_path / "flags.json"
    flags = {"model_name_or_path": str(data / "ours"), "task_name": "stsb", "data_dir": str(data / "stsb")}
    flags |= {"output_dir": str(out), "max_steps": 2, "use_cpu": True, "disable_tqdm": True}
    file.write_text(json.dumps(flags))
    run_glue(file)
    assert "no published settings for stsb" in caplog.text
    assert {"eval_pearson", "eval_spearmanr"} <= set(results(out))
    rows = read_json_lines(data / "stsb" / "test.jsonl")
    for line, row in zip(read_predicted_rows(out, "predictions_stsb"), rows, strict=True):
        assert row.items() <= line.items() and isinstance(line["prediction"], float)
    assert not any(name.startswith("predict_pearson") for name in results(out))  # labels are -1: hidden


@pytest.mark.slow
def test_several_seeds(data, tmp_path, capsys):
    """The best seed is that of --metric_for_best_model; finished seeds are skipped."""
    out = tmp_path / "out"
    command = ["--model_name_or_path", data / "ours", "--task_name", "sst2", "--data_dir", data / "sst2", *RUN]
    command += ["--max_steps", 3, "--num_seeds", 2, "--seed", 7, "--metric_for_best_model", "loss"]
    command += ["--output_dir", out]
    run_glue(*command)
    summary = json.loads((out / "seeds.json").read_text())
    losses = {seed: metrics["eval_loss"] for seed, metrics in summary["seeds"].items()}
    assert set(losses) == {"7", "8"} and str(summary["best_seed"]) == min(losses, key=losses.get)
    accuracies = [metrics["eval_accuracy"] for metrics in summary["seeds"].values()]
    assert summary["eval_accuracy"]["mean"] == pytest.approx(sum(accuracies) / 2)
    best = load_file(out / f"seed-{summary['best_seed']}" / "model.safetensors")
    kept = load_file(out / "model.safetensors")
    assert all(torch.equal(best[name], kept[name]) for name in best)
    card = ModelCard.load(out / "README.md")
    assert card.data.model_name == "out" and 'from_pretrained("out"' in card.text
    written = (out / "seed-7" / "model.safetensors").stat().st_mtime_ns
    shutil.rmtree(out / "seed-8")
    run_glue(*command)
    assert (out / "seed-7" / "model.safetensors").stat().st_mtime_ns == written
    again = json.loads((out / "seeds.json").read_text())["seeds"]
    assert {seed: metrics["eval_loss"] for seed, metrics in again.items()} == losses
    assert "median" in capsys.readouterr().out


@pytest.mark.slow
def test_multi_label_classification_learns(data, tmp_path):
    """And the checkpoint knows its labels when it evaluates and predicts."""
    rows, trained = write_json_lines(tmp_path / "rows.jsonl", LISTS), tmp_path / "trained"
    unlabelled = write_json_lines(tmp_path / "test.jsonl", [{"text": row["text"]} for row in LISTS])
    run_glue("--model_name_or_path", data / "ours", "--train_file", rows, "--validation_file", rows, "--test_file",
             unlabelled, *RUN, "--warmup_steps", 0, "--learning_rate", 5e-3, "--cls_dropout", 0, "--max_steps", 80,
             "--eval_strategy", "no", "--save_strategy", "no", "--output_dir", trained)  # fmt: skip
    metrics = results(trained)
    assert metrics["eval_f1_micro"] > 0.75 and "eval_f1_macro" in metrics  # with every label for every row: 0.59
    config = HfDebertaConfig.from_pretrained(trained)
    assert config.problem_type == "multi_label_classification"
    assert config.id2label == {0: "cast", 1: "film", 2: "music"} and config.label2id["music"] == 2
    predicted = [line["prediction"] for line in read_predicted_rows(trained, "predictions_own")]
    correct = [sorted(row["label"]) == labels for row, labels in zip(LISTS, predicted, strict=True)]
    assert metrics["eval_accuracy"] == pytest.approx(sum(correct) / len(LISTS))
    table = (trained / "predict_results_own.txt").read_text()
    assert table.splitlines()[1:] == [f"{i}\t{', '.join(labels)}" for i, labels in enumerate(predicted)]
    run_glue("--model_name_or_path", trained, "--validation_file", rows, "--test_file", rows, *RUN, "--do_eval",
             "--do_predict", "--output_dir", tmp_path / "again")  # fmt: skip
    again = results(tmp_path / "again")
    assert again["eval_f1_micro"] == again["predict_f1_micro"] == metrics["eval_f1_micro"]
    assert (tmp_path / "again" / "predict_results_own.txt").read_text() == table


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ours", "bert"])
def test_a_single_label_that_a_row_may_have(data, tmp_path, model):
    rows = write_json_lines(tmp_path / "rows.jsonl", [{"text": "film", "label": ["film"]}, {"text": "a", "label": []}])
    run_glue("--model_name_or_path", data / model, "--train_file", rows, "--test_file", rows, *RUN,
             "--max_steps", 1, "--recipe", "none", "--output_dir", tmp_path / "out")  # fmt: skip
    first = read_predicted_rows(tmp_path / "out", "predictions_own")[0]
    assert first["prediction"] in ([], ["film"]) and 0 < first["probabilities"]["film"] < 1


# Evaluation and predictions with a trained model


@pytest.mark.slow
def test_labels_come_from_the_checkpoint(data, tmp_path):
    """Rows that have some of its labels, no labels, or numbers."""
    three = save_classifier(data, tmp_path / "three", num_labels=3, id2label={0: "1", 1: "2", 2: "3"})
    (tmp_path / "some.csv").write_text("text,label\na lovely film,2\na dull one,1\n")
    (tmp_path / "rows.csv").write_text("text\na lovely film\na dull one\n")
    run_glue("--model_name_or_path", three, "--validation_file", tmp_path / "some.csv", "--test_file",
             tmp_path / "some.csv", "--do_eval", "--do_predict", "--output_dir", tmp_path / "a", *RUN)  # fmt: skip
    assert results(tmp_path / "a")["eval_accuracy"] == results(tmp_path / "a")["predict_accuracy"]
    run_glue("--model_name_or_path", three, "--test_file", tmp_path / "rows.csv", "--output_dir", tmp_path / "b",
             "--do_predict", *RUN)  # fmt: skip
    lines = (tmp_path / "b" / "predict_results_own.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", "0", "1"] and lines[1].split("\t")[1] in ("1", "2", "3")
    regression = save_classifier(data, tmp_path / "regression", num_labels=1, problem_type="regression")
    run_glue("--model_name_or_path", regression, "--test_file", tmp_path / "rows.csv", "--do_predict", "--output_dir",
             tmp_path / "c", *RUN)  # fmt: skip
    float((tmp_path / "c" / "predict_results_own.txt").read_text().split()[-1])


# Functions


SENTENCE = glue.GlueTask("classification", ("text",), ("a", "b"))
REGRESSION = glue.GlueTask("regression", ("text",), None)
MULTI_LABEL = glue.GlueTask("multi_label", ("text",), ("a", "b"))


@pytest.mark.parametrize(
    ("task", "labels", "labelled"),
    [
        (SENTENCE, [0, 1], True),
        (SENTENCE, [0, -1], False),
        (REGRESSION, [1.5, -1.5, -1.0], True),
        (REGRESSION, [-1.0, -1.0], False),
        (MULTI_LABEL, [["a"], []], True),
    ],
)
def test_hidden_test_labels(task, labels, labelled):
    rows = Dataset.from_dict({"text": ["x"] * len(labels), "label": labels})
    made = classification({"test": rows}, task)
    assert made.has_labels("test") == labelled
    assert made.model_args.reading_flags == {"text_column_names": ["text"]}  # kept in config.json for later runs


def test_metrics_of_several_labels_are_in_the_order_of_the_task():
    rows = Dataset.from_dict({"text": ["x"] * 2, "label": [["a"], ["a"]]})
    task = classification({"test": rows}, MULTI_LABEL, ("b", "a"))
    predicted = task.read_outputs("test", np.array([[-0.1, 0.1], [-0.1, 0.1]]), rows)
    assert task.metrics("test", predicted)["accuracy"] == 1


def test_f1_is_that_of_the_second_class_of_the_task():
    logits = np.array([[2.0, 1.0], [2.0, 1.0], [0.0, 1.0]])

    def f1_and_accuracy(targets: list, labels: tuple[str, str], outputs=logits) -> dict[str, float]:
        """`targets` number the labels as the model does."""
        rows = Dataset.from_dict({"text": ["x"] * 3, "label": [labels[number] for number in targets]})
        task = classification({"test": rows}, SENTENCE, labels)
        return task.metrics("test", task.read_outputs("test", outputs, rows))

    for labels in (("a", "b"), ("b", "a")):
        scores = f1_and_accuracy([0, 1, 1], labels)
        assert scores == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3)}  # b: 1 right, 1 missed
    # one of the two classes is never right now
    assert f1_and_accuracy([1, 1, 1], ("a", "b"))["f1"] == pytest.approx(0.5)
    assert f1_and_accuracy([1, 1, 1], ("b", "a"))["f1"] == 0.0
    assert f1_and_accuracy([1, 1, 1], ("a", "b"), (logits, "hidden states"))["f1"] == 0.5


# Invalid input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task_name", "cora"], "--task_name .* cola"),
        (["--text_column_names", "a", "b", "c"], "--text_column_names .*not a b c"),
        (["--text_column_names", "label"], "--text_column_names .*label"),
        (["--task_name", "rte", "--text_column_names", "a"], "sentence1, sentence2"),
        (["--label_smoothing_factor", 0.1], "--label_smoothing_factor 0.1"),
        (["--do_regression"], "label"),
        (["--validation_file", "{none}"], r"none\.csv"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_invalid_input(data, tmp_path, words, message):
    """Lists of labels with flags that do not fit; one line names the script and the flag or the file."""
    (tmp_path / "none.csv").write_text("text,label\na,good\nb,\n")
    train = write_json_lines(tmp_path / "lists.jsonl", LISTS)
    words = [tmp_path / "none.csv" if word == "{none}" else word for word in words]
    with pytest.raises(SystemExit, match=rf"^run_glue\.py: .*{message}"):
        run_glue("--model_name_or_path", data / "ours", "--output_dir", tmp_path / "out", *RUN, "--train_file", train,
                 *words)  # fmt: skip
