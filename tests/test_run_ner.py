"""`run_ner.py` as users start it: CoNLL files and tables, context, other models, predictions, and invalid input."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from fine_tuning_models import (
    CPU,
    RUN,
    ensemble_metrics,
    read_json_lines,
    reorder_labels,
    results,
    run_script,
    save_models,
    write_json_lines,
)
from transformers import AutoModelForTokenClassification

from hf_deberta.demos.ner import conll_text
from hf_deberta.fine_tuning.tasks import ner

LABELS = ["O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """CoNLL files with documents, the same words in a table with parts of speech; models of three families."""
    folder = tmp_path_factory.mktemp("ner")
    (folder / "conll").mkdir()
    (folder / "table").mkdir()
    for seed, (split, sentences) in enumerate({"train": 40, "valid": 20, "test": 15}.items()):
        path = folder / "conll" / f"{split}.txt"
        path.write_text(conll_text(sentences, seed))
        rows = [
            {"tokens": s.words, "pos_tags": ["NN" if word.istitle() else "XY" for word in s.words]}
            for s in ner.read_conll(path)
        ]
        if split == "test":
            rows = [{"tokens": row["tokens"]} for row in rows]
        write_json_lines(folder / "table" / f"{split}.jsonl", rows)
    texts = [" ".join(sentence.words) for sentence in ner.read_conll(folder / "conll" / "train.txt")]
    save_models(folder, texts)
    return folder


def run_ner(*arguments: object) -> None:
    run_script("run_ner.py", *arguments)


def read_columns(path: Path) -> tuple[list[list[str]], list[list[str]], list[list[str]]]:
    """Words, labels and predictions by sentence."""
    blocks = [block.split("\n") for block in path.read_text().strip().split("\n\n")]
    sentences = [[line.split(" ") for line in block] for block in blocks if not block[0].startswith("-DOCSTART-")]
    return tuple([[fields[column] for fields in sentence] for sentence in sentences] for column in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ours", "in_tree", "bert"])
def test_any_model(data, tmp_path, model):
    """The metrics agree with seqeval's on the file of predictions."""
    out = tmp_path / "out"
    run_ner("--model_name_or_path", data / model, "--data_dir", data / "conll", "--output_dir", out, *RUN,
            "--num_train_epochs", 2, "--recipe", "none", "--return_entity_level_metrics")  # fmt: skip
    saved = AutoModelForTokenClassification.from_pretrained(out)
    assert type(saved).__name__ == (
        "BertForTokenClassification" if model == "bert" else "HfDebertaForTokenClassification"
    )
    assert list(saved.config.id2label.values()) == LABELS
    words, gold, predicted = read_columns(out / "predictions_test.txt")
    sentences = ner.convert_to_iob2(ner.read_conll(data / "conll" / "test.txt"))
    assert words == [s.words for s in sentences] and gold == [s.tags for s in sentences]
    metrics = pytest.importorskip("seqeval.metrics")
    assert results(out)["predict_f1"] == pytest.approx(metrics.f1_score(gold, predicted, zero_division=0))
    assert results(out)["predict_accuracy"] == pytest.approx(metrics.accuracy_score(gold, predicted))
    assert {"eval_f1", "eval_PER_recall", "eval_LOC_number"} <= results(out).keys() and (out / "README.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("context", ner.CONTEXTS)
def test_context_and_windows(data, tmp_path, context, caplog):
    """Every word has a prediction, even where inputs are shorter than sentences."""
    out = tmp_path / "out"
    run_ner("--model_name_or_path", data / "ours", "--data_dir", data / "conll", "--output_dir", out, *RUN, "--sift",
            "--max_steps", 2, "--document_context", context, "--max_seq_length", 16, "--label_all_tokens",
            "--token_classifier", "projection")  # fmt: skip
    words, _, predicted = read_columns(out / "predictions_test.txt")
    assert words == [s.words for s in ner.read_conll(data / "conll" / "test.txt")]
    assert all(tag in LABELS for tags in predicted for tag in tags)
    assert AutoModelForTokenClassification.from_pretrained(out).config.token_classifier == "projection"
    assert "were split into" in caplog.text and f"Document context: {context}" in caplog.text


@pytest.mark.slow
def test_the_recipe_and_the_context_of_conll2003(data, tmp_path, caplog):
    out = tmp_path / "out"
    run_ner("--model_name_or_path", data / "ours", "--task_name", "CoNLL-2003", "--data_dir", data / "conll",
            "--output_dir", out, *CPU, "--max_steps", 1)  # fmt: skip
    assert "published settings for conll2003" in caplog.text and "Document context: merged" in caplog.text
    arguments = torch.load(out / "training_args.bin", weights_only=False)
    assert (arguments.per_device_train_batch_size, arguments.num_train_epochs) == (16, 15)
    caplog.clear()
    run_ner("--model_name_or_path", out, "--validation_file", data / "conll" / "valid.txt", "--do_eval",
            "--output_dir", tmp_path / "evaluated", *CPU)  # fmt: skip
    assert "Document context: merged" in caplog.text  # as it was trained
    lines = (data / "conll" / "valid.txt").read_text().splitlines(keepends=True)
    (tmp_path / "valid.txt").write_text("".join(line for line in lines if "-DOCSTART-" not in line))
    run_ner("--model_name_or_path", out, "--validation_file", tmp_path / "valid.txt", "--do_eval",
            "--output_dir", tmp_path / "single", *CPU)  # fmt: skip
    assert "some rows have none: using none" in caplog.text


@pytest.mark.slow
def test_a_table_of_parts_of_speech(data, tmp_path):
    """Labels that are no entities have an accuracy only; the test split has no labels."""
    out = tmp_path / "out"
    run_ner("--model_name_or_path", data / "ours", "--data_dir", data / "table", "--output_dir", out, *RUN,
            "--max_steps", 3, "--label_column_name", "pos_tags", "--pad_to_max_length",
            "--max_seq_length", 40)  # fmt: skip
    assert 0 <= results(out)["eval_accuracy"] <= 1 and "eval_f1" not in results(out)
    assert "predict_accuracy" not in results(out)
    first = (out / "predictions_test.txt").read_text().split("\n")[0].split(" ")
    assert len(first) == 2 and first[1] in ("NN", "XY")


@pytest.mark.slow
def test_a_checkpoint_with_the_labels_in_another_order(data, tmp_path):
    """It gives the same metrics, and needs no training rows. Of several seeds, the best model is kept."""
    trained, evaluated = tmp_path / "trained", tmp_path / "evaluated"
    run_ner("--model_name_or_path", data / "ours", "--data_dir", data / "conll", "--output_dir", trained, *RUN,
            "--num_train_epochs", 4, "--num_seeds", 2, "--eval_strategy", "no", "--save_strategy", "no",
            "--learning_rate", 5e-3, "--warmup_steps", 0)  # fmt: skip
    summary = json.loads((trained / "seeds.json").read_text())
    assert set(summary["seeds"]) == {"42", "43"} and (trained / "predictions_test.txt").exists()
    metrics = ensemble_metrics(trained)
    assert metrics["ensemble"]["f1"] > 0 and set(metrics) == {"seed-42", "seed-43", "ensemble"}
    words, _, tags = read_columns(trained / "ensemble" / "predictions_test.txt")
    scores = iter(read_json_lines(trained / "ensemble" / "scores_test.jsonl")[1:])
    assert [tag for row in tags for tag in row] == [max(row, key=row.get) for row in scores] and words
    order = [3, 1, 0, 2, 6, 5, 4]
    reorder_labels(trained, AutoModelForTokenClassification, order, [LABELS[number] for number in order])
    run_ner("--model_name_or_path", trained, "--data_dir", data / "conll", "--output_dir", evaluated, *RUN,
            "--do_eval")  # fmt: skip
    best = summary["seeds"][str(summary["best_seed"])]
    assert best["eval_f1"] == summary["eval_f1"]["max"] > 0
    for metric in ("eval_f1", "eval_accuracy"):
        assert results(evaluated)[metric] == best[metric]
    assert not (evaluated / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["conll/train.txt", "table/train.jsonl"])
def test_gzipped_files(data, tmp_path, name):
    path = tmp_path / (Path(name).name + ".gz")
    path.write_bytes(gzip.compress((data / name).read_bytes()))
    read_file = ner.read_file
    assert list(read_file(str(path))) == list(read_file(str(data / name)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train_file", "{own}/words.txt"], "words.txt"),  # without labels
        (["--train_file", "{data}/table/train.jsonl"], "'ner_tags'; .*tokens, pos_tags"),
        (["--do_predict", "--test_file", "{own}/words.txt", "--model_name_or_path", "{own}/mixture"], "mixture"),
        (["--do_eval", "--validation_file", "{data}/conll/valid.txt"], "B-LOC"),  # labels that the model does not have
        (["--document_context", "all"], "--document_context .*'all'"),
        (["--task_name", "wnut"], "--task_name .*'wnut'"),
        (["--train_file", "{data}/conll/train.txt", "--token_classifier", "crf"], "linear, projection"),
    ],
    ids=["unlabelled", "column", "mixture", "labels", "context", "task", "classifier"],
)
def test_invalid_input(data, tmp_path, words, message):
    (tmp_path / "words.txt").write_text("a\nb\n")
    shutil.copytree(data / "ours", tmp_path / "mixture")
    fields = json.loads((tmp_path / "mixture" / "config.json").read_text())
    fields |= {"id2label": {"0": "B-PER", "1": "LOC"}, "label2id": {"B-PER": 0, "LOC": 1}}
    (tmp_path / "mixture" / "config.json").write_text(json.dumps(fields))
    words = [word.format(own=tmp_path, data=data) for word in words]
    with pytest.raises(SystemExit, match=rf"^run_ner\.py: .*{message}"):
        run_ner("--model_name_or_path", data / "ours", "--output_dir", tmp_path / "out", *RUN, *words)
