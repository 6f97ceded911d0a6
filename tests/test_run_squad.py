"""`run_squad.py` as a user starts it: both versions, other models, SiFT, going on, files, and bad input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from fine_tuning_models import RUN, runner, save_models
from safetensors.torch import load_file
from transformers import AutoModelForQuestionAnswering

from hf_deberta.demos.squad import house_rows
from hf_deberta.fine_tuning.tasks import squad
from hf_deberta.fine_tuning.tasks.squad_scores import squad_scores, squad_v2_scores

SHORT = ["--max_seq_length", "32", "--doc_stride", "8"]


def official(rows: list[dict]) -> dict:
    """As SQuAD is released."""
    paragraphs = []
    for row in rows:
        answers = [dict(zip(row["answers"], pair, strict=True)) for pair in zip(*row["answers"].values(), strict=True)]
        question = {"id": row["id"], "question": row["question"], "answers": answers, "is_impossible": not answers}
        paragraphs.append({"context": row["context"], "qas": [question]})
    return {"version": "v2.0", "data": [{"title": "houses", "paragraphs": paragraphs}]}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
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


@pytest.fixture
def run_squad(monkeypatch):
    return runner(monkeypatch, "run_squad.py")


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_demonstration_learns(run_squad, tmp_path):
    out = tmp_path / "out"
    run_squad("--demo", *RUN[:3], "--output_dir", out)
    results = read(out / "all_results.json")
    assert results["eval_exact"] > 80 and results["predict_HasAns_total"] + results["predict_NoAns_total"] == 50
    assert len(read(out / "predict_predictions.json")) == 50


@pytest.mark.parametrize(("model", "version"), [("ours", "v2"), ("in_tree", "v1"), ("bert", "v2")])
def test_any_model(run_squad, made, tmp_path, model, version):
    """The scores are those of the files, the texts pieces of the context."""
    out, data = tmp_path / "out", made / version
    run_squad("--model_name_or_path", made / model, "--data_dir", data, *SHORT, "--output_dir", out, *RUN,
              "--max_steps", 3)  # fmt: skip
    kept = AutoModelForQuestionAnswering.from_pretrained(out)
    assert type(kept).__name__ == ("BertForQuestionAnswering" if model == "bert" else "HfDebertaForQuestionAnswering")
    results = read(out / "all_results.json")
    for split, prefix in {"validation": "eval", "test": "predict"}.items():
        rows = squad.squad_rows(squad.read_squad(data / f"{split}.json"), split)
        golds = squad.gold_answers(rows)
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


def test_sift_several_seeds_and_a_threshold(run_squad, made, tmp_path):
    out = tmp_path / "out"
    run_squad("--model_name_or_path", made / "ours", "--data_dir", made / "v2", *SHORT, "--output_dir", out, *RUN,
              "--sift", "--max_steps", 2, "--num_seeds", 2, "--null_score_diff_threshold", -1e9)  # fmt: skip
    assert set(read(out / "seeds.json")["seeds"]) == {"42", "43"}
    assert set(read(out / "eval_predictions.json").values()) == {""}  # above that threshold, nothing is answered
    assert read(out / "all_results.json")["eval_NoAns_exact"] == 100


def test_version_2_is_a_switch(run_squad, made, tmp_path):
    """Alone, as in `run_qa.py`, or with a value; texts that all have their answer make it 1.1 otherwise."""
    command = ["--model_name_or_path", made / "ours", "--data_dir", made / "v1", *SHORT, *RUN, "--max_steps", 1]
    for name, switch in {"none": [], "alone": ["--version_2_with_negative"]}.items():
        run_squad(*command, "--output_dir", tmp_path / name, *switch)
    assert "eval_exact_match" in read(tmp_path / "none" / "all_results.json")
    assert "eval_exact" in read(tmp_path / "alone" / "all_results.json")
    run_squad("--model_name_or_path", tmp_path / "alone", "--validation_file", made / "v2" / "validation.json", *SHORT,
              *RUN, "--do_eval", "--version_2_with_negative", "False", "--output_dir", tmp_path / "off")  # fmt: skip
    assert "eval_exact_match" in read(tmp_path / "off" / "all_results.json")


def test_it_goes_on_exactly(run_squad, made, tmp_path):
    """In the middle of an epoch, with windows grouped by length and dropout on."""
    command = ["--model_name_or_path", made / "ours", "--data_dir", made / "v2", *SHORT, *RUN, "--num_train_epochs", 3]
    command += ["--save_steps", 2, "--save_strategy", "steps", "--eval_strategy", "no", "--save_total_limit", 9]
    command += ["--train_sampling_strategy", "group_by_length"]
    run_squad(*command, "--output_dir", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for path in (tmp_path / "stopped").iterdir():
        if path.name != "checkpoint-4":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run_squad(*command, "--output_dir", tmp_path / "stopped")
    whole, stopped = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    predictions = [read(tmp_path / name / "eval_predictions.json") for name in ("whole", "stopped")]
    assert predictions[0] == predictions[1]


def test_evaluation_and_prediction_alone(run_squad, made, tmp_path):
    """A padded batch gives the same answers; without answers there are no scores."""
    rows = [{x: row[x] for x in ("id", "context", "question")} for row in house_rows(9, 5)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = tmp_path / "trained"
    command = ["--data_dir", made / "v2", *SHORT, *RUN]
    run_squad(*command, "--model_name_or_path", made / "ours", "--output_dir", trained, "--max_steps", 2)
    files = {"--validation_file": made / "v2/validation.json", "--test_file": tmp_path / "test.jsonl"}
    for name, more in {"plain": [], "padded": ["--pad_to_max_length"]}.items():
        run_squad("--model_name_or_path", trained, *SHORT, *RUN, "--output_dir", tmp_path / name, "--do_eval",
                  "--do_predict", *more, *[x for pair in files.items() for x in pair])  # fmt: skip
    found = [read(tmp_path / name / "eval_predictions.json") for name in ("trained", "plain", "padded")]
    assert found[0] == found[1] == found[2]
    assert len(read(tmp_path / "plain" / "predict_predictions.json")) == 9
    results = read(tmp_path / "plain" / "all_results.json")
    assert not any(name.startswith("predict_") for name in results)
    assert not (tmp_path / "plain" / "model.safetensors").exists()


def test_the_recipe_is_ours_and_flags_win(run_squad, made, tmp_path, caplog):
    out = tmp_path / "out"
    run_squad("--model_name_or_path", made / "ours", "--data_dir", made / "v1", "--output_dir", out, "--use_cpu",
              "--max_steps", 1, "--max_seq_length", 40, "--doc_stride", 8, "--learning_rate", "2e-4")  # fmt: skip
    assert "none was published for squad" in caplog.text
    arguments = torch.load(out / "training_args.bin", weights_only=False)
    assert (arguments.learning_rate, arguments.per_device_train_batch_size) == (2e-4, 48)


def test_bad_input(run_squad, made, tmp_path):
    v1 = made / "v1"
    model = ["--model_name_or_path", made / "ours", "--output_dir", tmp_path / "out", *RUN]
    row = house_rows(1, 0)[0]
    files = {
        "columns": [{"context": "a", "question": "b", "id": "c"}],
        "long": [{**row, "question": "where is it ? " * 30}],
        "elsewhere": [{**row, "answers": {"text": ["rome"], "answer_start": [400]}}],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "none.json").write_text('{"version": "1.1", "data": []}')
    (tmp_path / "words.txt").write_text("hello")
    cases = [
        (["--output_dir", tmp_path / "out"], "say which checkpoint"),
        ([*model, "--task_name", "squad_v3"], "--task_name is squad or squad_v2, not 'squad_v3'"),
        ([*model], "say which data"),
        ([*model, "--train_file", tmp_path / "columns.jsonl"], "the train rows have no column answers"),
        ([*model, "--train_file", tmp_path / "none.json"], "there is no question in"),
        ([*model, "--train_file", tmp_path / "words.txt"], "words.txt is none of json, jsonl, parquet"),
        ([*model, "--train_file", tmp_path / "nowhere.json"], "there is no file"),
        ([*model, "--validation_file", v1 / "validation.json"], "--do_train needs train rows"),
        ([*model, *SHORT, "--train_file", tmp_path / "long.jsonl"], "leaves room for 20: raise"),
        ([*model, *SHORT, "--train_file", tmp_path / "elsewhere.jsonl"], "no answer is where its answer_start"),
        ([*model, "--data_dir", v1, "--max_seq_length", 32], r"doc_stride must be in .0, max_seq_length.*, not 128"),
        ([*model, "--data_dir", v1, "--cls_dropout", 0.2], "--cls_dropout 0.2: the head that finds answers has no"),
        ([*model, *SHORT, "--data_dir", v1, "--label_smoothing_factor", 0.1], "0.1 is for labels that are classes"),
        ([*model, *SHORT, "--data_dir", v1, "--do_eval"], "qa_outputs.weight of this one would be new, with random"),
        ([*model, *SHORT, "--data_dir", v1, "--n_best_size", 0], "--n_best_size must be 1 or more"),
    ]
    for arguments, said in cases:
        with pytest.raises(SystemExit, match=said):
            run_squad(*arguments)
