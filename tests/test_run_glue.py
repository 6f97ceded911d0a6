"""`run_glue.py` as a user starts it: every kind of task, seeds, going on, other models, and bad input."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset
from fine_tuning_models import RUN, results, runner, save_models
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from hf_deberta import HfDebertaConfig
from hf_deberta.demos.glue import review_rows


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Rows of a sentence task, of a pair task and of a regression; models of three families."""
    folder = tmp_path_factory.mktemp("glue")
    sentences = review_rows(64, 0)
    pairs = [
        {"premise": a["sentence"], "hypothesis": b["sentence"], "label": (a["label"] + b["label"]) % 3}
        for a, b in itertools.pairwise(sentences)
    ]
    values = [{"sentence1": r["sentence"], "sentence2": "good", "label": 5.0 * r["label"]} for r in sentences]
    for name, rows in {"sst2": sentences, "mnli": pairs, "stsb": values}.items():
        (folder / name).mkdir()
        validations = ["validation_matched", "validation_mismatched"] if name == "mnli" else ["validation"]
        for split in ("train", *validations, "test"):
            kept = rows[:40] if split == "train" else rows[40:56]
            if split == "test":
                kept = [{**row, "label": -1} for row in kept]
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    save_models(folder, [row["sentence"] for row in sentences])
    return folder


@pytest.fixture
def run_glue(monkeypatch):
    return runner(monkeypatch, "run_glue.py")


def test_the_demonstration_learns(run_glue, tmp_path):
    run_glue("--demo", *RUN[:3], "--output_dir", tmp_path / "out")
    assert results(tmp_path / "out")["eval_accuracy"] > 0.9
    assert len((tmp_path / "out" / "SST-2.tsv").read_text().splitlines()) == 51


@pytest.mark.parametrize("model", ["ours", "in_tree", "bert"])
def test_any_model(run_glue, made, tmp_path, model):
    out = tmp_path / "out"
    run_glue("--model_name_or_path", made / model, "--task_name", "sst2", "--data_dir", made / "sst2",
             "--output_dir", out, *RUN, "--max_steps", 3, "--recipe", "none")  # fmt: skip
    assert 0 <= results(out)["eval_accuracy"] <= 1
    kept = AutoModelForSequenceClassification.from_pretrained(out)
    assert type(kept).__name__ == (
        "BertForSequenceClassification" if model == "bert" else "HfDebertaForSequenceClassification"
    )
    assert kept.config.id2label == {0: "negative", 1: "positive"}
    assert kept.config.label2id == {"negative": 0, "positive": 1}  # zero-shot pipelines ask for it
    assert len((out / "SST-2.tsv").read_text().splitlines()) == 17
    assert (out / "README.md").exists()


def test_both_validations_and_sift(run_glue, made, tmp_path):
    out = tmp_path / "out"
    run_glue("--model_name_or_path", made / "ours", "--task_name", "MNLI", "--data_dir", made / "mnli", "--sift",
             "--output_dir", out, *RUN, "--max_steps", 2)  # fmt: skip
    assert {"eval_accuracy", "eval_accuracy_mismatched"} <= set(results(out))


def test_the_other_validation_alone(run_glue, made, tmp_path):
    rows = made / "mnli"
    files = ["--train_file", rows / "train.jsonl", "--validation_file", rows / "validation_mismatched.jsonl"]
    run_glue("--model_name_or_path", made / "ours", "--task_name", "mnli", *files, "--output_dir", tmp_path / "a", *RUN)
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train", "validation_mismatched"):
        shutil.copy(rows / f"{name}.jsonl", folder)
    run_glue("--model_name_or_path", made / "ours", "--task_name", "mnli", "--data_dir", folder,
             "--output_dir", tmp_path / "b", *RUN)  # fmt: skip
    assert results(tmp_path / "b")["eval_accuracy"] == results(tmp_path / "a")["eval_accuracy"]


@pytest.mark.parametrize("model", ["ours", "bert"])
def test_a_tokenizer_without_limit(run_glue, made, tmp_path, model, caplog):
    """Positions of BERT end, whatever its tokenizer says; ours need none."""
    folder = shutil.copytree(made / model, tmp_path / model)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about.pop("model_max_length", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": "good " * 600, "label": i % 2}) for i in range(8)))
    run_glue("--model_name_or_path", folder, "--train_file", tmp_path / "long.jsonl", "--output_dir", tmp_path / "out",
             *RUN, "--max_steps", 1, "--recipe", "none", "--max_seq_length", 700, "--save_strategy", "no")  # fmt: skip
    assert ("--max_seq_length 700 is more than the model takes: 512" in caplog.text) == (model == "bert")


def test_the_card(run_glue, made, tmp_path):
    """Ours; that of another model is Trainer's."""
    cards = {}
    for model in ("ours", "bert"):
        out = tmp_path / model
        run_glue("--model_name_or_path", made / model, "--task_name", "sst2", "--data_dir", made / "sst2",
                 "--output_dir", out, *RUN, "--num_train_epochs", 2, "--recipe", "none")  # fmt: skip
        cards[model] = ModelCard.load(out / "README.md")
    (result,) = cards["ours"].data.eval_results
    assert (result.metric_type, result.dataset_name) == ("accuracy", "sst2")
    assert result.metric_value == results(tmp_path / "ours")["eval_accuracy"]
    evaluations = [line.split("|")[1].strip() for line in cards["ours"].text.splitlines() if line.count("|") == 4]
    assert evaluations == ["step", "--:", "5", "10"]
    assert "on the sst2 dataset" in cards["bert"].text and "- Accuracy: " in cards["bert"].text


def test_a_regression(run_glue, made, tmp_path):
    out = tmp_path / "out"
    run_glue("--model_name_or_path", made / "ours", "--task_name", "stsb", "--data_dir", made / "stsb",
             "--output_dir", out, *RUN, "--num_train_epochs", 2)  # fmt: skip
    assert {"eval_pearson", "eval_spearmanr"} <= set(results(out))
    assert [json.loads(line)["index"] for line in (out / "predictions_stsb.jsonl").open()] == list(range(16))


def test_it_goes_on_exactly(run_glue, made, tmp_path):
    """In the middle of an epoch, with inputs grouped by length and dropout on."""
    command = ["--model_name_or_path", made / "ours", "--task_name", "sst2", "--data_dir", made / "sst2", *RUN]
    command += ["--num_train_epochs", 3, "--save_steps", 4, "--save_strategy", "steps", "--eval_strategy", "no"]
    command += ["--train_sampling_strategy", "group_by_length", "--save_total_limit", 9]
    run_glue(*command, "--output_dir", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for path in (tmp_path / "stopped").iterdir():
        if path.name != "checkpoint-8":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run_glue(*command, "--output_dir", tmp_path / "stopped")
    whole, stopped = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert results(tmp_path / "whole")["eval_loss"] == results(tmp_path / "stopped")["eval_loss"]


def test_the_best_model_is_kept(run_glue, made, tmp_path):
    """By the task's metric and not by the loss; by what the user says, if he does."""
    rows = [{"text": text, "label": label} for label, text in enumerate(("a lovely film", "a dull film")) for _ in "ab"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "--model_name_or_path",
        made / "ours",
        "--train_file",
        tmp_path / "rows.jsonl",
        *RUN,
        "--validation_file",
    ]
    command += [tmp_path / "rows.jsonl", "--num_train_epochs", 20, "--warmup_steps", 0, "--learning_rate", 1e-2]
    for name, flags in {"accuracy": [], "loss": ["--metric_for_best_model", "eval_loss"]}.items():
        out = tmp_path / name
        run_glue(*command, *flags, "--output_dir", out)
        log = json.loads((out / "trainer_state.json").read_text())["log_history"]
        found = [entry[f"eval_{name}"] for entry in log if f"eval_{name}" in entry]
        assert len(set(found)) > 1  # or nothing is tested
        assert results(out)[f"eval_{name}"] == (max if name == "accuracy" else min)(found)


def test_a_finished_run_is_taken_up_and_another_refused(run_glue, made, tmp_path):
    out = tmp_path / "out"
    command = ["--model_name_or_path", made / "ours", "--task_name", "sst2", "--data_dir", made / "sst2", *RUN]
    command += ["--max_steps", 3, "--output_dir", out]
    run_glue(*command)
    before, when = results(out), (out / "model.safetensors").stat().st_mtime_ns
    (out / "SST-2.tsv").unlink()
    run_glue(*command)
    assert (out / "model.safetensors").stat().st_mtime_ns == when and (out / "SST-2.tsv").exists()
    after = results(out)
    assert (after["eval_loss"], after["train_loss"]) == (before["eval_loss"], before["train_loss"])
    with pytest.raises(SystemExit, match=r"run with other settings: learning_rate 0.001, now 0.5; take another"):
        run_glue(*command, "--learning_rate", 0.5)
    for flag, value in {"--max_seq_length": 8, "--cls_dropout": 0.5, "--adam_epsilon": 1e-3, "--seed": 7}.items():
        with pytest.raises(SystemExit, match=f"run with other settings: {flag[2:]} "):
            run_glue(*command, flag, value)
    card = (out / "README.md").read_text()
    harmless = ["--logging_steps", 1, "--per_device_eval_batch_size", 2, "--num_seeds", 1, "--do_train", "--do_predict"]
    run_glue(*command, *harmless, "--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2)
    assert (out / "README.md").read_text() == card
    with pytest.raises(SystemExit, match=r"without --do_train a fine-tuned model .* classifier.weight, .* random wei"):
        run_glue(*command, "--do_predict")
    (out / "README.md").unlink()  # killed before it was written
    run_glue(*command)
    assert "## Training" in (out / "README.md").read_text()
    file = made / "sst2" / "train.jsonl"
    flipped = file.read_text().replace('"label": 0', '"label": 2').replace('"label": 1', '"label": 0')
    shutil.copytree(made / "sst2", tmp_path / "sst2")
    run_glue(*command, "--data_dir", tmp_path / "sst2", "--output_dir", tmp_path / "copied")
    (tmp_path / "sst2" / "train.jsonl").write_text(flipped.replace('"label": 2', '"label": 1'))
    with pytest.raises(SystemExit, match="run with other settings: content of rows [0-9a-f]{16}, now "):
        run_glue(*command, "--data_dir", tmp_path / "sst2", "--output_dir", tmp_path / "copied")
    run_glue(*command, "--learning_rate", 0.5, "--resume_from_checkpoint", "false")
    assert results(out)["eval_loss"] != before["eval_loss"]


def test_seeds(run_glue, made, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["--model_name_or_path", made / "ours", "--task_name", "sst2", "--data_dir", made / "sst2", *RUN]
    command += ["--max_steps", 3, "--num_seeds", 2, "--seed", 7, "--output_dir", out]
    run_glue(*command)
    summary = json.loads((out / "seeds.json").read_text())
    assert set(summary["seeds"]) == {"7", "8"}
    accuracies = [summary["seeds"][seed]["eval_accuracy"] for seed in ("7", "8")]
    assert summary["eval_accuracy"]["mean"] == pytest.approx(sum(accuracies) / 2)
    best = load_file(out / f"seed-{summary['best_seed']}" / "model.safetensors")
    kept = load_file(out / "model.safetensors")
    assert all(torch.equal(best[name], kept[name]) for name in best)
    when = (out / "seed-7" / "model.safetensors").stat().st_mtime_ns
    shutil.rmtree(out / "seed-8")
    run_glue(*command)  # the first is done, the second is not
    assert (out / "seed-7" / "model.safetensors").stat().st_mtime_ns == when
    again = json.loads((out / "seeds.json").read_text())["seeds"]
    assert [again[seed]["eval_loss"] for seed in again] == [summary["seeds"][seed]["eval_loss"] for seed in again]
    assert "median" in capsys.readouterr().out


def test_the_best_seed_is_that_of_the_named_metric(run_glue, made, tmp_path):
    out = tmp_path / "out"
    run_glue("--model_name_or_path", made / "ours", "--task_name", "sst2", "--data_dir", made / "sst2", *RUN,
             "--max_steps", 3, "--num_seeds", 3, "--metric_for_best_model", "loss", "--output_dir", out)  # fmt: skip
    summary = json.loads((out / "seeds.json").read_text())
    losses = {seed: found["eval_loss"] for seed, found in summary["seeds"].items()}
    assert str(summary["best_seed"]) == min(losses, key=losses.get)
    card = ModelCard.load(out / "README.md")
    assert card.data.model_name == "out" and 'from_pretrained("out"' in card.text


@pytest.mark.parametrize("model", ["ours", "bert"])
def test_an_intermediate_task_of_as_many_labels(run_glue, made, tmp_path, model):
    """Nothing is left of the old classifier if the labels are others; with the same labels it stays."""
    first = tmp_path / "first"
    rows = ["--data_dir", made / "sst2", *RUN, "--max_steps", 1, "--learning_rate", "1e-12", "--recipe", "none"]
    run_glue("--model_name_or_path", made / model, "--task_name", "sst2", *rows, "--output_dir", first)
    (tmp_path / "own.csv").write_text("text,label\na lovely film,good\na dull one,bad\n")
    run_glue("--intermediate", first, "--train_file", tmp_path / "own.csv", "--output_dir", tmp_path / "own", *rows[2:],
             "--seed", 7)  # fmt: skip
    run_glue("--intermediate", first, "--task_name", "sst2", *rows, "--output_dir", tmp_path / "same")
    before, own, same = (
        load_file(tmp_path / name / "model.safetensors")["classifier.weight"] for name in ("first", "own", "same")
    )
    assert not torch.allclose(before, own, atol=1e-4) and torch.allclose(before, same, atol=1e-6)


def test_from_an_intermediate_task(run_glue, made, tmp_path):
    first, second = tmp_path / "mnli", tmp_path / "sst2"
    run_glue("--model_name_or_path", made / "ours", "--task_name", "mnli", "--data_dir", made / "mnli",
             "--output_dir", first, *RUN, "--max_steps", 2)  # fmt: skip
    run_glue("--intermediate", first, "--task_name", "sst2", "--data_dir", made / "sst2", "--output_dir", second,
             *RUN, "--max_steps", 1, "--learning_rate", "1e-12")  # fmt: skip
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert after["classifier.weight"].shape[0] == 2
    assert torch.allclose(before["pooler.dense.weight"], after["pooler.dense.weight"])


def renumbered(folder: Path, order: list[int], labels: list[str]) -> None:
    """The same model with its classes in another order, and so called."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        for parameter in (model.classifier.weight, model.classifier.bias):
            parameter.copy_(parameter[order].clone())
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {label: number for number, label in enumerate(labels)}
    model.save_pretrained(folder)


@pytest.mark.parametrize("spelt", [str.lower, str.upper])  # the released MNLI checkpoints shout
def test_evaluation_alone_keeps_the_order_of_labels(run_glue, made, tmp_path, spelt):
    """A checkpoint that numbers the same labels otherwise says the same of every row."""
    trained, evaluated = tmp_path / "trained", tmp_path / "evaluated"
    command = ["--task_name", "mnli", "--data_dir", made / "mnli", *RUN]
    run_glue(*command, "--model_name_or_path", made / "ours", "--output_dir", trained, "--num_train_epochs", 3)
    renumbered(trained, [2, 0, 1], [spelt(label) for label in ("contradiction", "entailment", "neutral")])
    run_glue(*command, "--model_name_or_path", trained, "--output_dir", evaluated, "--do_eval", "--do_predict")
    assert results(evaluated)["eval_accuracy"] == results(trained)["eval_accuracy"]
    before, after = (
        [json.loads(line)["probabilities"] for line in (folder / "predictions_mnli.jsonl").read_text().splitlines()]
        for folder in (trained, evaluated)
    )
    assert len(before) == 16 and max(before[0].values()) - min(before[0].values()) > 1e-3
    assert all(found == pytest.approx(by_name, abs=1e-5) for found, by_name in zip(after, before, strict=True))
    assert not (evaluated / "model.safetensors").exists()


def test_f1_is_that_of_the_task_s_class(run_glue, made, tmp_path):
    trained, evaluated = tmp_path / "trained", tmp_path / "evaluated"
    rows = [{"sentence1": r["sentence"], "sentence2": "", "label": int(i % 3 > 0)}
            for i, r in enumerate(review_rows(30, 0))]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--task_name", "mrpc", "--validation_file", tmp_path / "rows.jsonl", *RUN]
    run_glue(*command, "--model_name_or_path", made / "ours", "--train_file", tmp_path / "rows.jsonl", "--output_dir",
             trained, "--num_train_epochs", 4)  # fmt: skip
    renumbered(trained, [1, 0], ["equivalent", "not_equivalent"])
    run_glue(*command, "--model_name_or_path", trained, "--output_dir", evaluated, "--do_eval")
    assert results(evaluated)["eval_f1"] == results(trained)["eval_f1"] > 0


def test_names_of_class_labels_count_in_evaluation_alone(run_glue, made, tmp_path):
    """Rows number neg, pos; the checkpoint pos, neg."""
    trained = tmp_path / "trained"
    rows = [{"text": r["sentence"], "label": ("neg", "pos")[r["label"]]} for r in review_rows(24, 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbered = Dataset.from_list(rows).cast_column("label", ClassLabel(names=["neg", "pos"]))
    numbered.to_parquet(tmp_path / "rows.parquet")
    run_glue("--model_name_or_path", made / "ours", "--train_file", tmp_path / "rows.jsonl", "--output_dir", trained,
             *RUN, "--num_train_epochs", 1)  # fmt: skip
    renumbered(trained, [1, 0], ["pos", "neg"])
    for kind in ("jsonl", "parquet"):
        file = tmp_path / f"rows.{kind}"
        run_glue("--model_name_or_path", trained, "--validation_file", file, "--test_file", file, "--output_dir",
                 tmp_path / kind, *RUN, "--do_eval", "--do_predict")  # fmt: skip
    said = (tmp_path / "parquet" / "predict_results_own.txt").read_text().split()[3::2]
    right = sum(a == row["label"] for a, row in zip(said, rows, strict=True)) / len(rows)
    for kind in ("jsonl", "parquet"):
        assert results(tmp_path / kind)["eval_accuracy"] == pytest.approx(right)


def test_a_regression_of_negative_numbers_is_scored(run_glue, made, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text,label\na lovely film,1.5\na dull one,-1.5\na third,-0.5\n")
    run_glue("--model_name_or_path", made / "ours", "--train_file", file, "--test_file", file, "--do_regression",
             "--output_dir", tmp_path / "out", *RUN, "--max_steps", 1)  # fmt: skip
    assert "predict_pearson" in results(tmp_path / "out")


def test_predictions_for_rows_of_ones_own(run_glue, made, tmp_path):
    """Without a task's name and without labels: those of the checkpoint."""
    trained, rows = tmp_path / "trained", tmp_path / "rows.csv"
    rows.write_text("text\na lovely film\na dull one\n")
    run_glue("--model_name_or_path", made / "ours", "--train_file", made / "sst2/train.jsonl", "--output_dir", trained,
             *RUN, "--max_steps", 1)  # fmt: skip
    run_glue("--model_name_or_path", trained, "--test_file", rows, "--output_dir", tmp_path / "out", "--do_predict",
             *RUN)  # fmt: skip
    said = (tmp_path / "out" / "predict_results_own.txt").read_text().splitlines()
    assert len(said) == 3 and said[1].startswith("0\tLABEL_")


def test_a_checkpoint_tells_its_labels(run_glue, made, tmp_path):
    """Rows that hold some of its classes, rows without labels, a regression."""
    text = "text,label\na lovely film,2\na dull one,1\na third,3\n"
    (tmp_path / "train.csv").write_text(text)
    (tmp_path / "some.csv").write_text(text.replace("a third,3\n", ""))
    (tmp_path / "numbers.csv").write_text("text,label\na lovely film,2.5\na dull one,1.0\n")
    three, numbers = tmp_path / "three", tmp_path / "numbers"
    model = ["--model_name_or_path", made / "ours", *RUN, "--max_steps", 1]
    run_glue(*model, "--train_file", tmp_path / "train.csv", "--output_dir", three)
    run_glue("--model_name_or_path", three, "--validation_file", tmp_path / "some.csv", "--test_file",
             tmp_path / "some.csv", "--do_eval", "--do_predict", "--output_dir", tmp_path / "a", *RUN)  # fmt: skip
    found = results(tmp_path / "a")
    assert found["eval_accuracy"] == found["predict_accuracy"]
    run_glue(*model, "--train_file", tmp_path / "numbers.csv", "--output_dir", numbers)
    (tmp_path / "rows.csv").write_text("text\na lovely film\n")
    run_glue("--model_name_or_path", numbers, "--test_file", tmp_path / "rows.csv", "--do_predict", "--output_dir",
             tmp_path / "b", *RUN)  # fmt: skip
    float((tmp_path / "b" / "predict_results_own.txt").read_text().split()[-1])
    with pytest.raises(SystemExit, match="which has 2 labels: go on from it with --intermediate"):
        run_glue("--model_name_or_path", three, "--task_name", "sst2", "--data_dir", made / "sst2", "--output_dir",
                 tmp_path / "c", *RUN)  # fmt: skip


LISTS = [{"text": " ".join(names) or "dull", "label": names}
         for names in ([], ["film"], ["cast", "music"], ["music", "film"]) for _ in range(4)]  # fmt: skip


def write_rows(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_lists_of_labels_are_learnt(run_glue, made, tmp_path):
    """And the checkpoint tells what they are."""
    rows, trained = write_rows(tmp_path / "rows.jsonl", LISTS), tmp_path / "trained"
    untold = write_rows(tmp_path / "test.jsonl", [{"text": row["text"]} for row in LISTS])
    run_glue("--model_name_or_path", made / "ours", "--train_file", rows, "--validation_file", rows, "--test_file",
             untold, *RUN, "--warmup_steps", 0, "--learning_rate", 5e-3, "--cls_dropout", 0, "--max_steps", 80,
             "--eval_strategy", "no", "--save_strategy", "no", "--output_dir", trained)  # fmt: skip
    found = results(trained)
    assert found["eval_f1_micro"] > 0.75 and "eval_f1_macro" in found  # each label for every row: 0.59
    config = HfDebertaConfig.from_pretrained(trained)
    assert config.problem_type == "multi_label_classification"
    assert config.id2label == {0: "cast", 1: "film", 2: "music"} and config.label2id["music"] == 2
    said = [json.loads(line)["prediction"] for line in (trained / "predictions_own.jsonl").open()]
    right = [sorted(row["label"]) == names for row, names in zip(LISTS, said, strict=True)]
    assert found["eval_accuracy"] == pytest.approx(sum(right) / len(LISTS))
    file = (trained / "predict_results_own.txt").read_text()
    assert file.splitlines()[1:] == [f"{i}\t{', '.join(names)}" for i, names in enumerate(said)]
    run_glue("--model_name_or_path", trained, "--validation_file", rows, "--test_file", rows, *RUN, "--do_eval",
             "--do_predict", "--output_dir", tmp_path / "again")  # fmt: skip
    again = results(tmp_path / "again")
    assert again["eval_f1_micro"] == again["predict_f1_micro"] == found["eval_f1_micro"]
    assert (tmp_path / "again" / "predict_results_own.txt").read_text() == file


def test_lists_of_labels_with_sift_and_before_another_task(run_glue, made, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", LISTS)
    command = ["--model_name_or_path", made / "ours", "--train_file", rows, *RUN, "--max_steps", 2]
    for name, flags in {"plain": [], "sift": ["--sift"]}.items():
        run_glue(*command, *flags, "--output_dir", tmp_path / name)
    assert results(tmp_path / "sift")["train_loss"] > results(tmp_path / "plain")["train_loss"]
    run_glue("--intermediate", tmp_path / "sift", "--train_file", made / "sst2/train.jsonl", *RUN, "--max_steps", 1,
             "--output_dir", tmp_path / "single")  # fmt: skip
    assert HfDebertaConfig.from_pretrained(tmp_path / "single").problem_type == "single_label_classification"


def test_one_label_that_a_row_may_have(run_glue, made, tmp_path):
    """Also where the model is not ours."""
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "film", "label": ["film"]}, {"text": "a", "label": []}] * 4)
    for model in ("ours", "bert"):
        run_glue("--model_name_or_path", made / model, "--train_file", file, "--validation_file", file, "--test_file",
                 file, *RUN, "--max_steps", 2, "--recipe", "none", "--output_dir", tmp_path / model)  # fmt: skip
        row = json.loads((tmp_path / model / "predictions_own.jsonl").read_text().splitlines()[0])
        assert row["prediction"] in ([], ["film"]) and 0 < row["probabilities"]["film"] < 1


def test_a_json_file_of_flags(run_glue, made, tmp_path):
    flags = {"model_name_or_path": str(made / "ours"), "task_name": "sst2", "data_dir": str(made / "sst2")}
    flags |= {"output_dir": str(tmp_path / "out"), "max_steps": 1, "use_cpu": True, "disable_tqdm": True}
    path = tmp_path / "flags.json"
    path.write_text(json.dumps(flags))
    run_glue(path)
    assert (tmp_path / "out" / "model.safetensors").exists()
    path.write_text(json.dumps({**flags, "max_step": 1}))
    with pytest.raises(SystemExit, match="fields that are no flags: max_step"):
        run_glue(path)


def test_the_recipe_is_said_and_flags_win(run_glue, made, tmp_path, caplog):
    out = tmp_path / "out"
    run_glue("--model_name_or_path", made / "ours", "--task_name", "cola", "--train_file", made / "sst2/train.jsonl",
             "--output_dir", out, "--use_cpu", "--max_steps", 1, "--learning_rate", "1e-4")  # fmt: skip
    arguments = torch.load(out / "training_args.bin", weights_only=False)
    assert arguments.learning_rate == 1e-4
    assert (arguments.per_device_train_batch_size, arguments.warmup_steps) == (32, 100)
    assert AutoModelForSequenceClassification.from_pretrained(out).config.cls_dropout == 0.15
    assert "none was published for cola, this size; as v1-base; learning rate times 4" in caplog.text
    assert "--warmup_steps 100; yours: --" not in caplog.text and "yours: --learning_rate" in caplog.text
    assert "--warmup_steps 100 is not less than the 1 steps of the run" in caplog.text


def test_bad_input(run_glue, made, tmp_path):
    sst2 = made / "sst2"
    model = ["--model_name_or_path", made / "ours", "--output_dir", tmp_path / "out", *RUN]
    (tmp_path / "no.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"\n')
    (tmp_path / "none.csv").write_text("text,label\na,good\nb,\n")
    lists = write_rows(tmp_path / "lists.jsonl", LISTS)
    (tmp_path / "flags.json").write_text("{'a': 1}")
    (tmp_path / "list.json").write_text("[]")
    HfDebertaConfig.from_preset("tiny", vocab_size=300, hidden_size=96).save_pretrained(tmp_path / "wide")
    cases = [
        (["--output_dir", tmp_path / "out"], "say which checkpoint"),
        ([*model, "--task_name", "cora"], "--task_name is one of cola"),
        ([*model, "--recipe", "mine"], "--recipe is auto or none"),
        ([*model], "say which data"),
        ([*model, "--task_name", "mrpc", "--train_file", sst2 / "train.jsonl"], "have no column 'sentence1'"),
        (
            [*model, "--task_name", "sst2", "--validation_file", sst2 / "validation.jsonl"],
            "--do_train needs train rows",
        ),
        (["--model_name_or_path", tmp_path, "--task_name", "sst2", "--data_dir", sst2], "config.json"),
        ([*model, "--train_file", tmp_path / "no.jsonl"], "have no labels in a column 'label'"),
        ([*model, "--train_file", tmp_path / "bad.jsonl"], "is no table of rows"),
        ([*model, "--train_file", tmp_path / "none.csv"], "1 of 2 train rows have no label"),
        ([*model, "--train_file", lists, "--label_smoothing_factor", 0.1], "is for labels that are classes, one each"),
        ([*model, "--train_file", lists, "--do_regression"], "needs one label, a number or a name"),
        ([*model, "--train_file", lists, "--validation_file", tmp_path / "none.csv"], "needs a list of labels"),
        ([*model, "--num_seeds", 0], "--num_seeds is 1 or more, not 0"),
        ([*model, "--num_seeds", 2, "--push_to_hub"], "--push_to_hub knows one model"),
        ([*model, "--train_file", sst2 / "train.jsonl", "--early_stopping_patience", 1], "needs validation rows"),
        ([tmp_path / "flags.json"], "is not JSON"),
        ([tmp_path / "list.json"], "must hold flags by name"),
        ([*model, "--train_sampling_strategy", "sequential"], "is random or group_by_length here, not sequential"),
        (
            [*model, "--task_name", "sst2", "--data_dir", sst2, "--metric_for_best_model", "acuracy"],
            "--metric_for_best_model is one of accuracy, loss for this task, not acuracy",
        ),
        (
            [*model, "--task_name", "sst2", "--data_dir", sst2, "--config_name", tmp_path / "wide"],
            "have other sizes than --config_name",
        ),
        ([*model, "--train_file", sst2 / "train.jsonl", "--do_train", "--do_eval"], "--do_eval needs validation rows"),
    ]
    for arguments, said in cases:
        with pytest.raises(SystemExit, match=said):
            run_glue(*arguments)
