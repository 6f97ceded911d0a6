"""`run_superglue.py` as a user starts it: every task, SiFT, the diagnostics, other models, and bad input."""

import json
from pathlib import Path

import pytest
import torch
from fine_tuning_models import RUN as EIGHT
from fine_tuning_models import results, runner, save_models
from transformers import AutoModelForSequenceClassification

from hf_deberta import HfDebertaForEntityChoice
from hf_deberta.demos.superglue import match_rows
from hf_deberta.fine_tuning.tasks import superglue

RUN = [*EIGHT, "--per_device_train_batch_size", "4"]
PAIR = ("entailment", "not_entailment")
TEXT = "Ann met Bob in old Rome , it rained and the dog was wet ."


def rows_of(name: str, number: int, labelled: bool = True) -> list[dict]:
    """Official rows of a task."""
    if name == "record":
        rows = match_rows(number, 0)
        if not labelled:
            for row in rows:
                del row["qas"][0]["answers"]
        return rows
    return [one_row(name, n, labelled) for n in range(number)]


def one_row(name: str, n: int, labelled: bool) -> dict:
    label = {"label": n % 2 == 0} if labelled else {}
    if name == "boolq":
        return {"question": "is Rome old", "passage": TEXT, "idx": n, **label}
    if name == "cb":
        names = ("entailment", "contradiction", "neutral")
        return {"premise": TEXT, "hypothesis": "Rome is old", "idx": n, **({"label": names[n % 3]} if labelled else {})}
    if name in ("rte", "axg", "axb"):
        first, second = ("sentence1", "sentence2") if name == "axb" else ("premise", "hypothesis")
        told = {"label": PAIR[n % 2]} if labelled else {}
        return {first: ("he", "she")[n % 2] + f" met {n // 2} dogs", second: "Rome is old", "idx": n, **told}
    if name == "copa":
        told = {"label": n % 2} if labelled else {}
        asked = ("cause", "effect")[n % 2]
        return {"premise": "it rained", "choice1": "dog wet", "choice2": TEXT, "question": asked, "idx": n, **told}
    if name == "wic":
        spans = {"start1": 0, "end1": 3, "start2": 4, "end2": 7}
        return {"word": "dog", "sentence1": "dog was wet", "sentence2": "the dog", "idx": n, **spans, **label}
    if name == "wsc":
        spans = {"span1_text": "Ann", "span1_index": 0, "span2_text": "it", "span2_index": 7}
        return {"text": TEXT, "target": spans, "idx": n, **label}
    told = [{"label": 1}, {"label": 0}] if labelled else [{}, {}]
    answers = [{"text": text, "idx": 2 * n + i, **told[i]} for i, text in enumerate(("Rome", "Bob"))]
    return {"idx": n, "passage": {"text": TEXT, "questions": [{"question": "who", "idx": n, "answers": answers}]}}


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The official folders of all tasks, models of three families."""
    folder = tmp_path_factory.mktemp("superglue")
    for name in superglue.TASKS:
        (folder / name).mkdir()
        for split, number in {"train": 12, "val": 6, "test": 5}.items():
            write(folder / name / f"{split}.jsonl", rows_of(name, number, split != "test" or name in ("axb", "axg")))
    texts = [TEXT, *(row["passage"]["text"] for row in match_rows(50, 0))] * 5
    save_models(folder, texts, 320)
    return folder


@pytest.fixture
def run_superglue(monkeypatch):
    return runner(monkeypatch, "run_superglue.py")


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_demonstration_learns(run_superglue, tmp_path):
    out = tmp_path / "out"
    run_superglue("--demo", *RUN[:3], "--output_dir", out)
    assert results(out)["eval_exact_match"] > 0.9
    assert len(lines_of(out / "ReCoRD.jsonl")) == 50


@pytest.mark.parametrize("name", ["boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc"])
def test_every_task(run_superglue, made, tmp_path, name):
    """With SiFT, from official files: its metrics, its submission with the official numbers, its model card."""
    out, task = tmp_path / "out", superglue.TASKS[name]
    run_superglue("--model_name_or_path", made / "ours", "--task_name", task.submission_name, "--data_dir", made / name,
                  "--output_dir", out, *RUN, "--max_steps", 2, "--sift", "--max_seq_length", 64)  # fmt: skip
    assert {f"eval_{metric}" for metric in task.metrics} <= results(out).keys()
    assert all(0 <= results(out)[f"eval_{metric}"] <= 1 for metric in task.metrics)
    assert not any(key.startswith("test_") for key in results(out))
    submitted = lines_of(out / f"{task.submission_name}.jsonl")
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


def test_windows_of_a_passage(run_superglue, made, tmp_path):
    out, rows = tmp_path / "out", rows_of("record", 8)
    for row in rows:  # no input holds all entities
        shift = len("it rained . " * 8)
        row["passage"]["text"] = "it rained . " * 8 + row["passage"]["text"]
        for place in (*row["passage"]["entities"], *row["qas"][0]["answers"]):
            place["start"], place["end"] = place["start"] + shift, place["end"] + shift
        row["passage"]["entities"].append({"start": 3, "end": 8})
    file = write(tmp_path / "rows.jsonl", rows)
    run_superglue("--model_name_or_path", made / "ours", "--task_name", "record", "--train_file", file,
                  "--validation_file", file, "--test_file", file, "--output_dir", out, *RUN, "--max_steps", 2,
                  "--max_seq_length", 32, "--doc_stride", 8, "--pad_to_max_length")  # fmt: skip
    told = lines_of(out / "predictions_record.jsonl")
    assert len(told) == 8 and all(len({a["text"] for a in line["answers"]}) == 3 for line in told)
    assert results(out)["predict_f1"] == results(out)["eval_f1"]
    assert HfDebertaForEntityChoice.from_pretrained(out).config.architectures == ["HfDebertaForEntityChoice"]


def test_the_diagnostics(run_superglue, made, tmp_path):
    out = tmp_path / "out"
    run_superglue("--model_name_or_path", made / "ours", "--task_name", "rte", "--data_dir", made / "rte",
                  "--axb_file", made / "axb" / "test.jsonl", "--axg_file", made / "axg" / "test.jsonl",
                  "--output_dir", out, *RUN, "--max_steps", 2)  # fmt: skip
    assert {"axb_matthews_correlation", "axg_accuracy", "axg_gender_parity"} <= results(out).keys()
    for file in ("RTE", "AX-b", "AX-g"):
        assert [line["idx"] for line in lines_of(out / f"{file}.jsonl")] == list(range(5))
    alone = tmp_path / "alone"
    run_superglue("--model_name_or_path", out, "--task_name", "axg", "--test_file", made / "axg" / "test.jsonl",
                  "--output_dir", alone, "--use_cpu", "--do_predict")  # fmt: skip
    assert (alone / "AX-g.jsonl").read_text() == (out / "AX-g.jsonl").read_text()
    assert results(alone)["predict_gender_parity"] == results(out)["axg_gender_parity"]


@pytest.mark.parametrize("model", ["in_tree", "bert"])
@pytest.mark.parametrize("name", ["cb", "copa"])
def test_other_models(run_superglue, made, tmp_path, model, name):
    out = tmp_path / "out"
    run_superglue("--model_name_or_path", made / model, "--task_name", name, "--data_dir", made / name,
                  "--output_dir", out, *RUN, "--max_steps", 2, "--max_seq_length", 64)  # fmt: skip
    assert 0 <= results(out)["eval_accuracy"] <= 1 and len(lines_of(out / f"{name.upper()}.jsonl")) == 5


def test_evaluation_alone_keeps_the_order_of_labels(run_superglue, made, tmp_path):
    trained, evaluated = tmp_path / "trained", tmp_path / "evaluated"
    command = ["--task_name", "cb", "--data_dir", made / "cb", *RUN]
    run_superglue(*command, "--model_name_or_path", made / "ours", "--output_dir", trained, "--num_train_epochs", 3)
    model = AutoModelForSequenceClassification.from_pretrained(trained)
    with torch.no_grad():
        for parameter in (model.classifier.weight, model.classifier.bias):
            parameter.copy_(parameter[[2, 0, 1]].clone())
    model.config.id2label = {0: "neutral", 1: "entailment", 2: "contradiction"}
    model.config.label2id = {label: number for number, label in model.config.id2label.items()}
    model.save_pretrained(trained)
    run_superglue(*command, "--model_name_or_path", trained, "--output_dir", evaluated, "--do_eval", "--do_predict")
    for metric in ("eval_f1", "eval_accuracy"):
        assert results(evaluated)[metric] == results(trained)[metric]
    assert (evaluated / "CB.jsonl").read_text() == (trained / "CB.jsonl").read_text()


def test_bad_input(run_superglue, made, tmp_path):
    cb, record = made / "cb", made / "record"
    rows = rows_of("cb", 4)
    other = write(tmp_path / "other.jsonl", [{**row, "label": "perhaps"} for row in rows])
    bare = write(tmp_path / "bare.jsonl", rows_of("cb", 4, labelled=False))
    flat = write(tmp_path / "flat.jsonl", [{"passage": "text", "query": "x"}])
    (tmp_path / "empty.jsonl").write_text("")
    ours = ["--model_name_or_path", made / "ours", "--output_dir", tmp_path / "out", *RUN]
    bert = ["--model_name_or_path", made / "bert", *ours[2:]]
    train = [*ours, "--task_name", "cb", "--train_file", cb / "train.jsonl"]
    cases = [
        ([*ours, "--data_dir", cb], "--task_name is one of boolq"),
        ([*ours, "--task_name", "mnli"], "--task_name is one of boolq.*not 'mnli'"),
        ([*ours, "--task_name", "boolq", "--data_dir", cb], "of boolq have no column 'question', 'passage'"),
        (
            [*ours, "--task_name", "record", "--train_file", flat],
            "no column 'entity_spans' .nor 'qas', as in the official",
        ),
        ([*train, "--validation_file", other], "unknown labels: 'perhaps'; known are entailment"),
        ([*train, "--validation_file", bare], "the validation rows of cb have no labels"),
        ([*train, "--validation_file", tmp_path / "empty.jsonl"], "empty.jsonl is empty"),
        ([*ours, "--task_name", "cb", "--validation_file", cb / "val.jsonl"], "--do_train needs train rows"),
        ([*train, "--axb_file", cb / "val.jsonl"], "are for --task_name rte, not cb"),
        ([*ours, "--task_name", "record", "--data_dir", record, "--max_seq_length", 8], "leaves no room for the"),
        ([*bert, "--task_name", "record", "--data_dir", record], "is not a DeBERTa, and Transformers has no such head"),
    ]
    for arguments, said in cases:
        with pytest.raises(SystemExit, match=said):
            run_superglue(*arguments)
