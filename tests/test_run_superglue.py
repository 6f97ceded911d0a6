"""`run_superglue.py` as users start it: every task, SiFT, the diagnostics, other models, and invalid input."""

from pathlib import Path

import pytest
from fine_tuning_models import RUN as BATCHES_OF_EIGHT
from fine_tuning_models import (
    ensemble_metrics,
    read_json_lines,
    reorder_labels,
    results,
    run_script,
    save_models,
    write_json_lines,
)
from transformers import AutoModelForSequenceClassification

from hf_deberta import HfDebertaForEntityChoice
from hf_deberta.demos.superglue import match_rows
from hf_deberta.fine_tuning.tasks import superglue

RUN = [*BATCHES_OF_EIGHT, "--per_device_train_batch_size", "4"]
PAIR = ("entailment", "not_entailment")
TEXT = "Ann met Bob in old Rome , it rained and the dog was wet ."


def rows_of(name: str, number: int, labelled: bool = True) -> list[dict]:
    """Official rows of a task."""
    rows = match_rows(number, 0) if name == "record" else [{**one_row(name, n), "idx": n} for n in range(number)]
    for row in [] if labelled else rows:
        if name == "record":
            del row["qas"][0]["answers"]
        for part in row["passage"]["questions"][0]["answers"] if name == "multirc" else [row]:
            part.pop("label", None)
    return rows


def one_row(name: str, n: int) -> dict:
    label, old, dogs = n % 2 == 0, "Rome is old", ("he", "she")[n % 2] + f" met {n // 2} dogs"
    match name:
        case "boolq":
            return {"question": "is Rome old", "passage": TEXT, "label": label}
        case "cb":
            return {"premise": TEXT, "hypothesis": old, "label": ("entailment", "contradiction", "neutral")[n % 3]}
        case "axb":
            return {"sentence1": dogs, "sentence2": old, "label": PAIR[n % 2]}
        case "rte" | "axg":
            return {"premise": dogs, "hypothesis": old, "label": PAIR[n % 2]}
        case "copa":
            choices = {"choice1": "dog wet", "choice2": TEXT}
            return {"premise": "it rained", **choices, "question": ("cause", "effect")[n % 2], "label": n % 2}
        case "wic":
            spans = {"start1": 0, "end1": 3, "start2": 4, "end2": 7}
            return {"word": "dog", "sentence1": "dog was wet", "sentence2": "the dog", **spans, "label": label}
        case "wsc":
            spans = {"span1_text": "Ann", "span1_index": 0, "span2_text": "it", "span2_index": 7}
            return {"text": TEXT, "target": spans, "label": label}
    answers = [{"text": text, "idx": 2 * n + i, "label": 1 - i} for i, text in enumerate(("Rome", "Bob"))]
    return {"passage": {"text": TEXT, "questions": [{"question": "who", "idx": n, "answers": answers}]}}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The official folders of all tasks, models of three families."""
    folder = tmp_path_factory.mktemp("superglue")
    for name in superglue.TASKS:
        (folder / name).mkdir()
        for split, number in {"train": 12, "val": 6, "test": 5}.items():
            labelled = split != "test" or name in ("axb", "axg")
            write_json_lines(folder / name / f"{split}.jsonl", rows_of(name, number, labelled))
    texts = [TEXT, *(row["passage"]["text"] for row in match_rows(50, 0))] * 5
    save_models(folder, texts, 320)
    return folder


def run_superglue(*arguments: object) -> None:
    run_script("run_superglue.py", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc"])
def test_every_task(data, tmp_path, name):
    """With SiFT, from official files: metrics, the file of a submission with the official ids, and the model card."""
    out, task = tmp_path / "out", superglue.TASKS[name]
    run_superglue("--model_name_or_path", data / "ours", "--task_name", task.submission_name, "--data_dir", data / name,
                  "--output_dir", out, *RUN, "--max_steps", 2, "--sift", "--max_seq_length", 64)  # fmt: skip
    assert {f"eval_{metric}" for metric in task.metrics} <= results(out).keys()
    assert all(0 <= results(out)[f"eval_{metric}"] <= 1 for metric in task.metrics)
    assert results(out)["train_sift_loss"] > 0 and not any(key.startswith("test_") for key in results(out))
    submitted = read_json_lines(out / f"{task.submission_name}.jsonl")
    assert [line["idx"] for line in submitted] == list(range(5))
    if name == "multirc":
        answers = [a for line in submitted for q in line["passage"]["questions"] for a in q["answers"]]
        assert [answer["idx"] for answer in answers] == list(range(10))
    elif name == "record":
        rows = rows_of("record", 5)
        for line, row in zip(submitted, rows, strict=True):
            text = row["passage"]["text"]
            assert line["label"] in [text[e["start"] : e["end"] + 1] for e in row["passage"]["entities"]]
    else:
        assert all(line["label"] in (task.submission_labels or task.labels) for line in submitted)
    assert f"SuperGLUE {task.submission_name}" in (out / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["boolq", "copa", "multirc", "record"])
def test_the_ensemble_of_two_seeds(data, tmp_path, name):
    submission = f"{superglue.TASKS[name].submission_name}.jsonl"
    run_superglue("--model_name_or_path", data / "ours", "--task_name", name, "--data_dir", data / name,
                  "--output_dir", tmp_path, *RUN, "--max_steps", 2, "--max_seq_length", 64,
                  "--num_seeds", 2)  # fmt: skip
    assert set(ensemble_metrics(tmp_path)) == {"seed-42", "seed-43", "ensemble"}
    scores = read_json_lines(tmp_path / "ensemble" / "scores_test.jsonl")[1:]
    lines, single = (read_json_lines(tmp_path / folder / submission) for folder in ("ensemble", "seed-42"))
    assert [line["idx"] for line in lines] == [line["idx"] for line in single]
    if name == "record":
        assert [line["label"] for line in lines] == [max(row, key=row.get) for row in scores]


@pytest.mark.slow
def test_windows_of_a_passage(data, tmp_path):
    out, rows = tmp_path / "out", rows_of("record", 8)
    for row in rows:  # no input holds all entities
        shift = len("it rained . " * 8)
        row["passage"]["text"] = "it rained . " * 8 + row["passage"]["text"]
        for place in (*row["passage"]["entities"], *row["qas"][0]["answers"]):
            place["start"], place["end"] = place["start"] + shift, place["end"] + shift
        row["passage"]["entities"].append({"start": 3, "end": 8})
    file = write_json_lines(tmp_path / "rows.jsonl", rows)
    run_superglue("--model_name_or_path", data / "ours", "--task_name", "record", "--train_file", file,
                  "--validation_file", file, "--test_file", file, "--output_dir", out, *RUN, "--max_steps", 2,
                  "--max_seq_length", 32, "--doc_stride", 8, "--pad_to_max_length")  # fmt: skip
    predictions = read_json_lines(out / "predictions_record.jsonl")
    assert len(predictions) == 8 and all(len({a["text"] for a in line["answers"]}) == 3 for line in predictions)
    assert results(out)["predict_f1"] == results(out)["eval_f1"]
    assert HfDebertaForEntityChoice.from_pretrained(out).config.architectures == ["HfDebertaForEntityChoice"]


@pytest.mark.slow
def test_the_diagnostics(data, tmp_path):
    out = tmp_path / "out"
    run_superglue("--model_name_or_path", data / "ours", "--task_name", "rte", "--data_dir", data / "rte",
                  "--axb_file", data / "axb" / "test.jsonl", "--axg_file", data / "axg" / "test.jsonl",
                  "--output_dir", out, *RUN, "--max_steps", 2)  # fmt: skip
    assert {"axb_matthews_correlation", "axg_accuracy", "axg_gender_parity"} <= results(out).keys()
    for file in ("RTE", "AX-b", "AX-g"):
        assert [line["idx"] for line in read_json_lines(out / f"{file}.jsonl")] == list(range(5))
    alone = tmp_path / "alone"
    run_superglue("--model_name_or_path", out, "--task_name", "axg", "--test_file", data / "axg" / "test.jsonl",
                  "--output_dir", alone, "--use_cpu", "--do_predict")  # fmt: skip
    assert (alone / "AX-g.jsonl").read_text() == (out / "AX-g.jsonl").read_text()
    assert results(alone)["predict_gender_parity"] == results(out)["axg_gender_parity"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["in_tree", "bert"])
@pytest.mark.parametrize("name", ["cb", "copa"])
def test_other_models(data, tmp_path, model, name):
    out = tmp_path / "out"
    run_superglue("--model_name_or_path", data / model, "--task_name", name, "--data_dir", data / name,
                  "--output_dir", out, *RUN, "--max_steps", 2, "--max_seq_length", 64)  # fmt: skip
    assert 0 <= results(out)["eval_accuracy"] <= 1 and len(read_json_lines(out / f"{name.upper()}.jsonl")) == 5


@pytest.mark.slow
def test_a_checkpoint_with_the_labels_in_another_order(data, tmp_path):
    trained, evaluated = tmp_path / "trained", tmp_path / "evaluated"
    command = ["--task_name", "cb", "--data_dir", data / "cb", *RUN]
    run_superglue(*command, "--model_name_or_path", data / "ours", "--output_dir", trained, "--num_train_epochs", 3)
    labels = ["neutral", "entailment", "contradiction"]
    reorder_labels(trained, AutoModelForSequenceClassification, [2, 0, 1], labels)
    run_superglue(*command, "--model_name_or_path", trained, "--output_dir", evaluated, "--do_eval", "--do_predict")
    for metric in ("eval_f1", "eval_accuracy"):
        assert results(evaluated)[metric] == results(trained)[metric]
    assert (evaluated / "CB.jsonl").read_text() == (trained / "CB.jsonl").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--task_name .*boolq"),
        (["--task_name", "mnli"], "--task_name .*'mnli'"),
        (["--task_name", "cb", "--validation_file", "{own}/bare.jsonl"], "validation rows of cb"),
        (["--task_name", "cb", "--axb_file", "{cb}/val.jsonl"], "--axb_file .*rte, not cb"),
    ],
    ids=["no task", "task", "no labels", "diagnostics"],
)
def test_invalid_input(data, tmp_path, words, message):
    write_json_lines(tmp_path / "bare.jsonl", rows_of("cb", 4, labelled=False))
    words = [word.format(own=tmp_path, cb=data / "cb") for word in words]
    with pytest.raises(SystemExit, match=rf"^run_superglue\.py: .*{message}"):
        run_superglue("--model_name_or_path", data / "ours", "--output_dir", tmp_path / "out", *RUN,
                      "--train_file", data / "cb" / "train.jsonl", *words)  # fmt: skip
