"""`run_squad.py`, `run_race.py`, `run_ner.py` and `run_superglue.py` as users start them.

`test_run_glue` has what all scripts share, such as resuming.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from example_rows import PASSAGE, official_squad, superglue_rows
from fine_tuning_models import (
    CPU,
    RUN,
    read_json_lines,
    read_predicted_rows,
    results,
    run_script,
    save_models,
    write_json_lines,
)
from transformers import AutoConfig, AutoTokenizer

from hf_deberta.demos import conll_text, house_rows, location_rows, match_rows
from hf_deberta.fine_tuning.tasks import ner, race, squad, superglue
from hf_deberta.metrics.squad import squad_scores
from hf_deberta.metrics.squad_v2 import squad_v2_scores
from hf_deberta.training.data_files import Source

SQUAD = ["--max_seq_length", "32", "--doc_stride", "8"]
RACE = ["--max_seq_length", "48", "--per_device_train_batch_size", "4"]
SUPERGLUE = ["--max_seq_length", "64", "--per_device_train_batch_size", "4"]
SUPERGLUE_TASKS = ["boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc"]
COMMANDS = {  # the script and the flags of a task; its rows are in a folder with its name
    "squad1": ["run_squad.py", *SQUAD],
    "squad2": ["run_squad.py", *SQUAD],
    "race": ["run_race.py", "--task_name", "race", *RACE],
    "swag": ["run_race.py", *RACE],
    "conll": ["run_ner.py", "--recipe", "none", "--return_entity_level_metrics"],
    **{name: ["run_superglue.py", "--task_name", name, *SUPERGLUE] for name in SUPERGLUE_TASKS},
}
TAGS = ["O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER"]


# Rows and models


def write_race(folder: Path, rows: list[dict], splits: dict[str, slice]) -> None:
    """The release of RACE, and the same rows in the format of SWAG, with hidden test answers."""
    for split, part in splits.items():
        swag = []
        for row in rows[part]:
            level = "middle" if row["example_id"].startswith("middle") else "high"
            path = folder / "race" / split.replace("validation", "dev") / level / row["example_id"].removeprefix(level)
            path.parent.mkdir(parents=True, exist_ok=True)
            released = {name: [row[name.removesuffix("s")]] for name in ("questions", "answers")}
            released |= {"options": [row["options"]], "article": row["article"], "id": row["example_id"]}
            path.write_text(json.dumps(released))
            endings = {f"ending{i}": option for i, option in enumerate(row["options"])}
            label = -1 if split == "test" else "ABCD".index(row["answer"])
            swag.append({"sent1": row["article"], "sent2": "she is", **endings, "label": label})
        write_json_lines(folder / "swag" / f"{split}.jsonl", swag)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder of official files for each task; models of three families."""
    folder = tmp_path_factory.mktemp("tasks")
    for name in (*COMMANDS, "axb", "axg", "tags"):
        (folder / name).mkdir()
    houses, places = house_rows(60, 0), location_rows(32, 0)
    for name, some in {"squad1": [row for row in houses if row["answers"]["text"]], "squad2": houses}.items():
        for split, kept in {"train": some[:24], "validation": some[24:36], "test": some[36:]}.items():
            (folder / name / f"{split}.json").write_text(json.dumps(official_squad(kept)))
    write_race(folder, places, {"train": slice(16), "validation": slice(16, 24), "test": slice(24, 32)})
    for seed, (split, sentences) in enumerate({"train": 40, "valid": 20, "test": 15}.items()):
        path = folder / "conll" / f"{split}.txt"
        path.write_text(conll_text(sentences, seed))
        words = ner.read_conll(path)["tokens"][:]
        tags = [["NN" if word.istitle() else "XY" for word in row] for row in words]
        rows = [{"tokens": row, "pos_tags": of_row} for row, of_row in zip(words, tags, strict=True)]
        write_json_lines(
            folder / "tags" / f"{split}.jsonl", rows if split != "test" else [{"tokens": w} for w in words]
        )
    for name in superglue.TASKS:
        for split, number in {"train": 12, "val": 6, "test": 5}.items():
            labelled = split != "test" or name in ("axb", "axg")
            write_json_lines(folder / name / f"{split}.jsonl", superglue_rows(name, number, labelled))
    texts = [text for row in houses for text in (row["context"], row["question"])] + [PASSAGE] * 10
    texts += [text for row in places for text in (row["article"], row["question"], *row["options"])]
    texts += [*map(" ".join, ner.read_conll(folder / "conll" / "train.txt")["tokens"])]
    texts += [row["passage"]["text"] for row in match_rows(50, 0)]
    save_models(folder, texts * 2)
    return folder


@pytest.fixture
def run(data):
    """Return a function that runs the script of a task with a model on the rows of the task, or on others."""

    def run_task(task: str, out: Path, *words: object, model: object = "ours", rows: object = None) -> None:
        script, *flags = COMMANDS[task]
        given = ["--data_dir", data / task] if rows is None else rows
        run_script(script, "--model_name_or_path", data / str(model), *given, "--output_dir", out, *RUN, *flags, *words)

    return run_task


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def read_columns(path: Path) -> tuple[list[list[str]], list[list[str]], list[list[str]]]:
    """Words, labels and predictions by sentence."""
    blocks = [block.split("\n") for block in path.read_text().strip().split("\n\n")]
    sentences = [[line.split(" ") for line in block] for block in blocks if not block[0].startswith("-DOCSTART-")]
    return tuple([[fields[column] for fields in sentence] for sentence in sentences] for column in range(3))


# Training


def check_squad(folder: Path, out: Path, task: str) -> None:
    """The metrics agree with the files, and the predicted texts are parts of the contexts."""
    for split, prefix in {"validation": "eval", "test": "predict"}.items():
        rows = squad.squad_rows(squad.read_squad(folder / f"{split}.json"), Source(split))
        golds = {row["id"]: row["answers"]["text"] for row in rows}
        predictions = read(out / f"{prefix}_predictions.json")
        assert set(predictions) == set(read(out / f"{prefix}_nbest_predictions.json")) == set(golds)
        assert all(predictions[row["id"]] in row["context"] for row in rows)
        assert (out / f"{prefix}_null_odds.json").exists() == (task == "squad2")
        for line, row in zip(read_predicted_rows(out, f"predictions_{split}"), rows, strict=True):
            assert row.items() <= line.items() and line["prediction"] == predictions[row["id"]]
            assert 0 < line["probability"] <= 1
        expected = squad_scores(predictions, golds)
        if task == "squad2":
            odds = read(out / f"{prefix}_null_odds.json")
            assert all((predictions[x] == "") == (odds[x] > 0) for x in golds)
            expected = squad_v2_scores(predictions, golds, dict.fromkeys(golds, 0.0), threshold=0)
            expected = {x: v for x, v in expected.items() if "NoAns" not in x and "best" not in x}
        found = {name: results(out)[f"{prefix}_{name}"] for name in expected}
        assert found == pytest.approx(expected)


def check_race(folder: Path, out: Path, task: str) -> None:
    lines = read_predicted_rows(out, "predictions")
    for line, row in zip(lines, race.read_choices(folder / "test"), strict=True):
        assert row.items() <= line.items() and max(line["probabilities"].values()) <= 1
    table = [f"{index}\t{line['prediction']}" for index, line in enumerate(lines)]
    assert (out / "predict_results.txt").read_text().splitlines()[1:] == table
    correct = [line["prediction"] == line["answer"] for line in lines]
    high = [right for line, right in zip(lines, correct, strict=True) if line["id"].startswith("high")]
    metrics = results(out)
    assert metrics["predict_accuracy"] == pytest.approx(sum(correct) / len(correct))
    assert metrics["predict_accuracy_high"] == pytest.approx(sum(high) / len(high))
    assert {"eval_accuracy", "eval_accuracy_middle", "eval_accuracy_high"} <= set(metrics)


def check_ner(folder: Path, out: Path, task: str) -> None:
    """The metrics agree with seqeval's on the file of predictions."""
    assert list(AutoConfig.from_pretrained(out).id2label.values()) == TAGS
    words, gold, predicted = read_columns(out / "predictions_test.txt")
    sentences = ner.convert_to_iob2(ner.sentences_from_table(ner.read_conll(folder / "test.txt")))
    assert words == [s.words for s in sentences] and gold == [s.tags for s in sentences]
    for line, row_words, tags in zip(read_predicted_rows(out, "predictions_test"), words, predicted, strict=True):
        assert (line["tokens"], line["prediction"]) == (row_words, tags)
        assert len(line["probability"]) == len(tags) and all(1 / len(TAGS) < p <= 1 for p in line["probability"])
    assert {"eval_f1", "eval_PER_recall", "eval_LOC_number"} <= results(out).keys()
    metrics = pytest.importorskip("seqeval.metrics")
    assert results(out)["predict_f1"] == pytest.approx(metrics.f1_score(gold, predicted, zero_division=0))
    assert results(out)["predict_accuracy"] == pytest.approx(metrics.accuracy_score(gold, predicted))


def check_superglue(folder: Path, out: Path, name: str) -> None:
    """Metrics, and the file of a submission with the official ids."""
    task = superglue.TASKS[name]
    assert all(0 <= results(out)[f"eval_{metric}"] <= 1 for metric in task.metrics)
    assert not any(key.startswith("test_") for key in results(out))
    submitted = read_json_lines(out / f"{task.submission_name}.jsonl")
    assert [line["idx"] for line in submitted] == list(range(5))
    lines = read_predicted_rows(out, f"predictions_{name}")
    assert len(lines) == 5 * (1 + (name == "multirc")) and set(task.columns) <= set(lines[0])
    if name == "multirc":
        answers = [a for line in submitted for q in line["passage"]["questions"] for a in q["answers"]]
        assert [answer["idx"] for answer in answers] == list(range(10))
    elif name == "record":
        for line, row in zip(submitted, superglue_rows("record", 5), strict=True):
            text = row["passage"]["text"]
            assert line["label"] in [text[e["start"] : e["end"] + 1] for e in row["passage"]["entities"]]
    else:
        assert all(line["label"] in (task.submission_labels or task.labels) for line in submitted)
    assert f"SuperGLUE {task.submission_name}" in (out / "README.md").read_text()


CHECKS = {"run_squad.py": check_squad, "run_race.py": check_race, "run_ner.py": check_ner}
HEADS = {"run_squad.py": "QuestionAnswering", "run_race.py": "MultipleChoice", "run_ner.py": "TokenClassification"}
HEADS |= {"copa": "MultipleChoice", "record": "EntityChoice"}
MODELS = [(task, model) for task in ("race", "conll", "cb", "copa") for model in ("ours", "in_tree", "bert")]
MODELS += [("squad2", "ours"), ("squad1", "in_tree"), ("squad2", "bert")]
MODELS += [(task, "ours") for task in ("boolq", "multirc", "record", "rte", "wic", "wsc")]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model"), MODELS)
def test_any_model(data, run, tmp_path, task, model, caplog):
    """The model, its metrics and its files, for SuperGLUE with SiFT."""
    script, is_superglue = COMMANDS[task][0], COMMANDS[task][0] == "run_superglue.py"
    run(task, tmp_path, "--max_steps", 3, *["--sift"] * is_superglue, model=model)
    head = HEADS.get(task) or HEADS.get(script, "SequenceClassification")
    family = "Bert" if model == "bert" else "HfDeberta"
    assert AutoConfig.from_pretrained(tmp_path).architectures == [f"{family}For{head}"]
    CHECKS.get(script, check_superglue)(data / task, tmp_path, task)
    assert (tmp_path / "README.md").exists() and results(tmp_path)["eval_loss"] > 0
    assert ("train_sift_loss" in results(tmp_path)) == is_superglue
    assert script == "run_ner.py" or "no published settings for" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("task", ["squad1", "conll", "record"])
def test_a_tokenizer_that_pads_on_the_left(data, run, tmp_path, task):
    """Answers, words and entities have the same positions in padded inputs."""
    left = shutil.copytree(data / "ours", tmp_path / "left")
    config = read(left / "tokenizer_config.json") | {"padding_side": "left"}
    (left / "tokenizer_config.json").write_text(json.dumps(config))
    for name, model in {"of_left": left, "of_ours": "ours"}.items():
        run(task, tmp_path / name, "--max_steps", 2, model=model)
    (file,) = (path.name for path in (tmp_path / "of_left").glob("predictions*.jsonl") if "validation" not in path.name)
    predictions = [(tmp_path / name / file).read_text() for name in ("of_left", "of_ours")]
    assert predictions[0] == predictions[1]


# SQuAD


@pytest.mark.slow
def test_questions_alone(run, tmp_path):
    """Windows and "no answer" are those of the training; rows without answers have no metrics."""
    trained, test = tmp_path / "trained", tmp_path / "test.jsonl"
    write_json_lines(test, [{x: row[x] for x in ("id", "context", "question")} for row in house_rows(9, 5)])
    run("squad2", trained, "--max_steps", 2)
    run("squad2", tmp_path / "plain", "--do_predict", model=trained, rows=["--test_file", test])
    assert len(read(tmp_path / "plain" / "predict_predictions.json")) == 9
    assert not (tmp_path / "plain" / "all_results.json").exists()
    command = ["--model_name_or_path", trained, "--test_file", test, "--do_predict", *CPU]
    run_script("run_squad.py", *command, "--output_dir", tmp_path / "alone")
    for name in ("predict_predictions", "predict_null_odds"):
        assert read(tmp_path / "alone" / f"{name}.json") == read(tmp_path / "plain" / f"{name}.json")
    config = read(trained / "config.json")
    config["fine_tuning_flags"] |= {"doc_stride": 24}  # too long for the following inputs
    (trained / "config.json").write_text(json.dumps(config))
    run_script("run_squad.py", *command, "--max_seq_length", 20, "--output_dir", tmp_path / "short")
    assert len(read(tmp_path / "short" / "predict_predictions.json")) == 9


@pytest.mark.slow
def test_version_2_may_be_switched_on_and_off(data, run, tmp_path):
    """Alone, as in `run_qa.py`, or with a value. test_any_model infers it from the rows."""
    run("squad1", tmp_path / "on", "--max_steps", 1, "--version_2_with_negative")
    assert "eval_exact" in results(tmp_path / "on")
    rows = ["--validation_file", data / "squad2" / "validation.json"]
    run("squad1", tmp_path / "off", "--do_eval", "--version_2_with_negative", "False", model=tmp_path / "on", rows=rows)
    assert "eval_exact_match" in results(tmp_path / "off")


# Multiple choice


@pytest.mark.slow
def test_one_level_of_the_release(run, tmp_path):
    run("race", tmp_path, "--task_name", "race-middle", "--max_steps", 1)
    assert results(tmp_path)["eval_accuracy"] == results(tmp_path)["eval_accuracy_middle"]
    assert "eval_accuracy_high" not in results(tmp_path)


@pytest.mark.slow
def test_anli_from_the_official_files(run, tmp_path):
    names = ("obs1", "obs2", "hyp1", "hyp2")
    rows = [dict(zip(names, ("Ann left .", f"It rained {n} times .", "wet", "dry"), strict=True)) for n in range(8)]
    for split in ("train", "dev", "test"):
        write_json_lines(tmp_path / f"{split}.jsonl", rows)
    for split in ("train", "dev"):
        (tmp_path / f"{split}-labels.lst").write_text("1\n2\n" * 4)
    out, words = tmp_path / "out", ["--task_name", "anli", "--data_dir", tmp_path]
    run("swag", out, "--max_steps", 2, rows=words)
    labels = ["AB".index(line["prediction"]) + 1 for line in read_predicted_rows(out, "predictions")]
    assert (out / "anli.lst").read_text().split() == list(map(str, labels)) and len(labels) == 8
    assert 0 <= results(out)["eval_accuracy"] <= 1
    (tmp_path / "dev-labels.lst").write_text("1\n")
    with pytest.raises(SystemExit, match="dev-labels.lst has 1 labels for the 8 rows of .*dev.jsonl"):
        run("swag", out, "--do_eval", rows=words)


# Named entities


@pytest.mark.slow
def test_the_recipe_and_the_context_of_conll2003(data, tmp_path, caplog):
    out, validation = tmp_path / "out", data / "conll" / "valid.txt"
    run_script("run_ner.py", "--model_name_or_path", data / "ours", "--task_name", "CoNLL-2003", "--data_dir",
               data / "conll", "--output_dir", out, *CPU, "--max_steps", 1,
               "--token_classifier", "projection")  # fmt: skip
    assert AutoConfig.from_pretrained(out).token_classifier == "projection"
    assert "published settings for conll2003" in caplog.text and "Document context: merged" in caplog.text
    arguments = torch.load(out / "training_args.bin", weights_only=False)
    assert (arguments.per_device_train_batch_size, arguments.num_train_epochs) == (16, 15)
    lines = validation.read_text().splitlines(keepends=True)
    (tmp_path / "valid.txt").write_text("".join(line for line in lines if "-DOCSTART-" not in line))
    without = "some rows have none: using none"
    for file, message in {validation: "Document context: merged", tmp_path / "valid.txt": without}.items():
        caplog.clear()
        run_script("run_ner.py", "--model_name_or_path", out, "--validation_file", file, "--do_eval", *CPU,
                   "--output_dir", tmp_path / "evaluated")  # fmt: skip
        assert message in caplog.text  # as it was trained


@pytest.mark.slow
def test_a_table_of_parts_of_speech(data, run, tmp_path):
    """Labels that are no entities have an accuracy only; the test split has no labels."""
    run("conll", tmp_path, "--max_steps", 3, "--label_column_name", "pos_tags", "--pad_to_max_length",
        "--max_seq_length", 600, rows=["--data_dir", data / "tags"])  # fmt: skip
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 600  # pipelines truncate to it
    assert 0 <= results(tmp_path)["eval_accuracy"] <= 1 and "eval_f1" not in results(tmp_path)
    assert "predict_accuracy" not in results(tmp_path)
    assert [*read_predicted_rows(tmp_path, "predictions_test")[0]][:2] == ["tokens", "prediction"]
    first = (tmp_path / "predictions_test.txt").read_text().split("\n")[0].split(" ")
    assert len(first) == 2 and first[1] in ("NN", "XY")


# SuperGLUE


@pytest.mark.slow
def test_the_diagnostics(data, run, tmp_path):
    out, alone = tmp_path / "out", tmp_path / "alone"
    run("rte", out, "--axb_file", data / "axb" / "test.jsonl", "--axg_file", data / "axg" / "test.jsonl",
        "--max_steps", 2)  # fmt: skip
    assert {"axb_matthews_correlation", "axg_accuracy", "axg_gender_parity"} <= results(out).keys()
    for file in ("RTE", "AX-b", "AX-g"):
        assert [line["idx"] for line in read_json_lines(out / f"{file}.jsonl")] == list(range(5))
    run("rte", alone, "--task_name", "axg", "--do_predict", model=out,
        rows=["--test_file", data / "axg" / "test.jsonl"])  # fmt: skip
    assert (alone / "AX-g.jsonl").read_text() == (out / "AX-g.jsonl").read_text()
    assert results(alone)["predict_gender_parity"] == results(out)["axg_gender_parity"]


# Invalid input


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("squad", "--data_dir {data}/squad1 --task_name squad_v3", "--task_name .*'squad_v3'"),
        ("squad", "--data_dir {data}/squad1 --cls_dropout 0.2", "--cls_dropout 0.2"),
        ("squad", "--data_dir {data}/squad1 --validation_file {own}/words.txt", "words.txt"),
        ("race", "--task_name rice", "--task_name .*'rice'"),
        ("race", "--train_file {data}/swag/test.jsonl", "test.jsonl, rows 1, 2, .* no label .*no row of 8"),
        ("race", "--train_file {data}/nowhere", "nowhere"),
        ("ner", "--train_file {own}/words.txt", "words.txt"),  # without labels
        ("ner", "--train_file {data}/tags/train.jsonl", "'ner_tags'; .*tokens, pos_tags"),
        ("ner", "--do_predict --test_file {own}/words.txt --model_name_or_path {own}/mixture", "mixture"),
        ("ner", "--do_eval --validation_file {data}/conll/valid.txt", "B-LOC"),  # labels that the model does not have
        ("ner", "--document_context all", "--document_context.* 'all'"),
        ("ner", "--task_name wnut", "--task_name .*'wnut'"),
        ("ner", "--train_file {data}/conll/train.txt --token_classifier crf", "linear, projection"),
        ("superglue", "--train_file {data}/cb/train.jsonl", "--task_name .*boolq"),
        ("superglue", "--task_name mnli", "--task_name .*'mnli'"),
        ("superglue", "--task_name cb --train_file {data}/cb/train.jsonl --validation_file {data}/cb/test.jsonl",
         "validation rows have no column 'label'"),
        ("superglue", "--task_name cb --axb_file {data}/cb/val.jsonl", "--axb_file .*rte, not cb"),
    ],
)  # fmt: skip
def test_invalid_input(data, tmp_path, script, words, message):
    """One line names the script, and the flag or the file."""
    (tmp_path / "words.txt").write_text("a\nb\n")
    shutil.copytree(data / "ours", tmp_path / "mixture")
    fields = read(tmp_path / "mixture" / "config.json")
    fields |= {"id2label": {"0": "B-PER", "1": "LOC"}, "label2id": {"B-PER": 0, "LOC": 1}}
    (tmp_path / "mixture" / "config.json").write_text(json.dumps(fields))
    words = words.format(own=tmp_path, data=data).split()
    with pytest.raises(SystemExit, match=rf"^run_{script}\.py: .*{message}"):
        run_script(f"run_{script}.py", "--model_name_or_path", data / "ours", "--output_dir", tmp_path / "out", *RUN,
                   *words)  # fmt: skip
