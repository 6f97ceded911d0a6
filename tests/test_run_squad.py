"""`run_squad.py` as users start it: both versions of SQuAD, other models, SiFT, files, and invalid input."""

import json
from pathlib import Path

import pytest
from fine_tuning_models import CPU, RUN, run_script, save_models, write_json_lines
from transformers import AutoModelForQuestionAnswering

from hf_deberta.demos.squad import house_rows
from hf_deberta.fine_tuning.tasks import squad
from hf_deberta.metrics.squad import squad_scores
from hf_deberta.metrics.squad_v2 import squad_v2_scores

SHORT = ["--max_seq_length", "32", "--doc_stride", "8"]


def official(rows: list[dict]) -> dict:
    """Rows in the format of the official files."""
    paragraphs = []
    for row in rows:
        answers = [dict(zip(row["answers"], pair, strict=True)) for pair in zip(*row["answers"].values(), strict=True)]
        question = {"id": row["id"], "question": row["question"], "answers": answers, "is_impossible": not answers}
        paragraphs.append({"context": row["context"], "qas": [question]})
    return {"version": "v2.0", "data": [{"title": "houses", "paragraphs": paragraphs}]}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Official files of both versions; models of three families."""
    folder = tmp_path_factory.mktemp("squad")
    rows = house_rows(60, 0)
    answered = [row for row in rows if row["answers"]["text"]]
    for name, some in {"v1": answered, "v2": rows}.items():
        (folder / name).mkdir()
        for split, kept in {"train": some[:24], "validation": some[24:36], "test": some[36:]}.items():
            (folder / name / f"{split}.json").write_text(json.dumps(official(kept)))
    save_models(folder, [text for row in rows for text in (row["context"], row["question"])] * 5)
    return folder


def run_squad(*arguments: object) -> None:
    run_script("run_squad.py", *arguments)


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "version"), [("ours", "v2"), ("in_tree", "v1"), ("bert", "v2")])
def test_any_model(data, tmp_path, model, version, caplog):
    """The metrics agree with the files, and the predicted texts are parts of the contexts."""
    out, folder = tmp_path / "out", data / version
    run_squad("--model_name_or_path", data / model, "--data_dir", folder, *SHORT, "--output_dir", out, *RUN,
              "--max_steps", 3)  # fmt: skip
    saved = AutoModelForQuestionAnswering.from_pretrained(out)
    assert type(saved).__name__ == ("BertForQuestionAnswering" if model == "bert" else "HfDebertaForQuestionAnswering")
    assert "no published settings for squad" in caplog.text
    results = read(out / "all_results.json")
    for split, prefix in {"validation": "eval", "test": "predict"}.items():
        rows = squad.squad_rows(squad.read_squad(folder / f"{split}.json"), split)
        golds = {row["id"]: row["answers"]["text"] for row in rows}
        predictions = read(out / f"{prefix}_predictions.json")
        nbest = read(out / f"{prefix}_nbest_predictions.json")
        assert set(predictions) == set(nbest) == set(golds)
        assert all(predictions[row["id"]] in row["context"] for row in rows)
        assert (out / f"{prefix}_null_odds.json").exists() == (version == "v2")
        expected = squad_scores(predictions, golds)
        if version == "v2":
            odds = read(out / f"{prefix}_null_odds.json")
            assert all((predictions[x] == "") == (odds[x] > 0) for x in golds)
            expected = {x: v for x, v in squad_v2_scores(predictions, golds).items() if "NoAns" not in x}
        for name, value in expected.items():
            assert results[f"{prefix}_{name}"] == pytest.approx(value)
    assert results["eval_loss"] > 0 and (out / "README.md").exists()


@pytest.mark.slow
def test_sift_several_seeds_and_a_threshold(data, tmp_path):
    out = tmp_path / "out"
    run_squad("--model_name_or_path", data / "ours", "--data_dir", data / "v2", *SHORT, "--output_dir", out, *RUN,
              "--sift", "--max_steps", 2, "--num_seeds", 2, "--null_score_diff_threshold", -1e9)  # fmt: skip
    assert set(read(out / "seeds.json")["seeds"]) == {"42", "43"}
    assert set(read(out / "eval_predictions.json").values()) == {""}  # every null odds exceeds the threshold
    assert read(out / "all_results.json")["eval_NoAns_exact"] == 100
    assert read(out / "ensemble" / "ensemble.json")["metrics"]["validation"]["ensemble"]["NoAns_exact"] == 100


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_ensemble_of_two_seeds(data, tmp_path, version):
    out = tmp_path / "out"
    run_squad("--model_name_or_path", data / "ours", "--data_dir", data / version, *SHORT, "--output_dir", out, *RUN,
              "--max_steps", 2, "--num_seeds", 2)  # fmt: skip
    ids = [*read(out / "predict_predictions.json")]
    ensemble = out / "ensemble"
    answers, nbest = read(ensemble / "predict_predictions.json"), read(ensemble / "predict_nbest_predictions.json")
    assert [*answers] == [*nbest] == ids
    members = [read(out / f"seed-{seed}" / "predict_nbest_predictions.json") for seed in (42, 43)]
    for row in ids:
        means: dict[str, float] = {}
        for member in members:
            for entry in member[row]:
                means[entry["text"]] = means.get(entry["text"], 0) + entry["probability"] / 2
        found = {entry["text"]: entry["probability"] for entry in nbest[row]}
        assert found == pytest.approx(means, rel=1e-4)
        if version == "v1":
            assert answers[row] == max(found, key=found.get)
    metrics = read(ensemble / "ensemble.json")["metrics"]
    assert set(metrics["validation"]) == set(metrics["test"]) == {"seed-42", "seed-43", "ensemble"}
    assert (ensemble / "scores_test.jsonl").read_text().startswith('{"rows": ')
    assert (ensemble / "predict_null_odds.json").exists() == (version == "v2")


@pytest.mark.slow
def test_version_2_may_be_switched_on_and_off(data, tmp_path):
    """Alone, as in `run_qa.py`, or with a value. test_any_model infers it from the rows."""
    command = ["--model_name_or_path", data / "ours", "--data_dir", data / "v1", *SHORT, *RUN, "--max_steps", 1]
    run_squad(*command, "--output_dir", tmp_path / "on", "--version_2_with_negative")
    assert "eval_exact" in read(tmp_path / "on" / "all_results.json")
    run_squad("--model_name_or_path", tmp_path / "on", "--validation_file", data / "v2" / "validation.json", *SHORT,
              *RUN, "--do_eval", "--version_2_with_negative", "False", "--output_dir", tmp_path / "off")  # fmt: skip
    assert "eval_exact_match" in read(tmp_path / "off" / "all_results.json")


@pytest.mark.slow
def test_evaluation_and_prediction_without_training(data, tmp_path):
    """Padding does not change answers; rows without answers have no metrics."""
    rows = [{x: row[x] for x in ("id", "context", "question")} for row in house_rows(9, 5)]
    write_json_lines(tmp_path / "test.jsonl", rows)
    trained = tmp_path / "trained"
    command = ["--data_dir", data / "v2", *SHORT, *RUN]
    run_squad(*command, "--model_name_or_path", data / "ours", "--output_dir", trained, "--max_steps", 2)
    files = {"--validation_file": data / "v2/validation.json", "--test_file": tmp_path / "test.jsonl"}
    for name, more in {"plain": [], "padded": ["--pad_to_max_length"]}.items():
        run_squad("--model_name_or_path", trained, *SHORT, *RUN, "--output_dir", tmp_path / name, "--do_eval",
                  "--do_predict", *more, *[x for pair in files.items() for x in pair])  # fmt: skip
    answers = [read(tmp_path / name / "eval_predictions.json") for name in ("trained", "plain", "padded")]
    assert answers[0] == answers[1] == answers[2]
    assert len(read(tmp_path / "plain" / "predict_predictions.json")) == 9
    results = read(tmp_path / "plain" / "all_results.json")
    assert not any(name.startswith("predict_") for name in results)
    run_squad("--model_name_or_path", trained, "--test_file", files["--test_file"], "--do_predict", *RUN,
              "--output_dir", tmp_path / "alone")  # fmt: skip
    for name in ("predict_predictions", "predict_null_odds"):  # windows and "no answer" are those of the training
        assert read(tmp_path / "alone" / f"{name}.json") == read(tmp_path / "plain" / f"{name}.json")
    config = read(trained / "config.json")
    config["fine_tuning_flags"] |= {"doc_stride": 24}  # too long for the following inputs
    (trained / "config.json").write_text(json.dumps(config))
    run_squad("--model_name_or_path", trained, "--test_file", files["--test_file"], "--do_predict", *CPU,
              "--max_seq_length", 20, "--output_dir", tmp_path / "short")  # fmt: skip
    assert len(read(tmp_path / "short" / "predict_predictions.json")) == 9
    assert not (tmp_path / "plain" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task_name", "squad_v3"], "--task_name .*'squad_v3'"),
        (["--max_seq_length", 32, "--doc_stride", 128], "doc_stride .* not 128"),
        (["--n_best_size", 0], "--n_best_size .* not 0"),
        (["--cls_dropout", 0.2], "--cls_dropout 0.2"),
        (["--validation_file", "words.txt"], "words.txt"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_invalid_input(data, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("hello")
    with pytest.raises(SystemExit, match=rf"^run_squad\.py: .*{message}"):
        run_squad("--model_name_or_path", data / "ours", "--output_dir", "out", *RUN, "--data_dir", data / "v1", *words)
