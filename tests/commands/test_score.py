"""`hf-deberta score`: equal to Transformers' pipeline, rows as they were, resumable; with Ray where it is installed."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from fine_tuning_models import read_json_lines
from transformers import pipeline, set_seed

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification, HfDebertaTokenizer
from hf_deberta.__main__ import main
from hf_deberta.commands import score
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.scoring import (
    WINDOW_ROWS,
    ScoreSettings,
    TextClassifier,
    count_rows,
    one_ahead,
    pack_by_tokens,
    score_file,
)
from hf_deberta.training.errors import InputError
from hf_deberta.training.text_files import read_rows

WORDS = ["the", "old", "man", "walked", "to", "a", "quiet", "harbour"]
TEXTS = [" ".join(WORDS[(number + i) % 8] for i in range(1 + number * 7 % 40)) for number in range(30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    tokenizer = train_tokenizer(TEXTS, 300, "bpe", model_max_length=64)
    tokenizer.save_pretrained(folder)
    set_seed(0)  # with one seed in five, all texts would get the same label
    labels = {0: "bad", 1: "fair", 2: "good"}
    config = HfDebertaConfig.from_preset("tiny", vocab_size=len(tokenizer), id2label=labels, emd_steps=0)
    config.pad_token_id, config.initializer_range = tokenizer.pad_token_id, 0.3
    HfDebertaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(model) -> TextClassifier:
    return TextClassifier(ScoreSettings(model, tokens_per_batch=100, cores=2, all_scores=True))


def rewired(classifier: TextClassifier, **changes: object) -> TextClassifier:
    """The same classifier with other settings."""
    other = object.__new__(TextClassifier)
    vars(other).update(vars(classifier), settings=replace(classifier.settings, **changes))
    return other


def write_parquet(path: Path, texts: list, **columns: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts, **columns})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return path


def test_batches_hold_each_text_once_and_at_most_so_many_tokens():
    lengths = np.random.default_rng(0).integers(1, 50, 200).tolist()
    batches = list(pack_by_tokens([*lengths, 500], 100))
    assert sorted(index for batch in batches for index in batch) == list(range(201))
    assert batches[0] == [200]  # longer than the limit
    assert all(sum(lengths[index] for index in batch) <= 100 for batch in batches[1:])
    assert list(pack_by_tokens([], 100)) == []


def test_the_scores_are_those_of_the_pipeline(model, classifier, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_deberta.scoring.WINDOW_ROWS", 11)
    source, done = write_parquet(tmp_path / "a.parquet", TEXTS), []
    counts = score_file(classifier, source, tmp_path / "out" / "a.parquet", done.append)
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "a.parquet").to_pylist()
    expected = pipeline("text-classification", model=model, truncation=True)(TEXTS, top_k=None)
    tokens = sum(len(classifier.tokenizer(text)["input_ids"]) for text in TEXTS)
    assert counts == {"rows": 30, "tokens": tokens, "bad_rows": 0, "full_rows": 0}
    assert sum(done) == len(rows) == 30 and len(done) > 6
    assert [(row["id"], row["text"]) for row in rows] == list(enumerate(TEXTS))
    for row, scores in zip(rows, expected, strict=True):
        assert row["label"] == scores[0]["label"] and row["score"] == pytest.approx(scores[0]["score"], abs=1e-5)
        assert row["scores"] == pytest.approx({one["label"]: one["score"] for one in scores}, abs=1e-5)
    assert len({row["label"] for row in rows}) > 1  # else the order of rows would not matter
    assert not list((tmp_path / "out").glob("_*"))


def test_pairs_and_long_texts(model, tmp_path):
    pairs = TextClassifier(ScoreSettings(model, text_pair="other", max_length=20))
    source = write_parquet(tmp_path / "a.parquet", TEXTS, other=TEXTS[::-1])
    score_file(pairs, source, tmp_path / "b.parquet")
    inputs = [{"text": text, "text_pair": other} for text, other in zip(TEXTS, TEXTS[::-1], strict=True)]
    expected = pipeline("text-classification", model=model)(inputs, truncation=True, max_length=20)
    scores = pyarrow.parquet.read_table(tmp_path / "b.parquet")["score"].to_pylist()
    assert scores == pytest.approx([row["score"] for row in expected], abs=1e-5)


@pytest.mark.parametrize(("labels", "problem"), [(1, None), (1, "regression"), (3, "multi_label_classification")])
def test_other_kinds_of_classifiers(model, classifier, labels, problem, tmp_path):
    classifier.tokenizer.save_pretrained(tmp_path)
    names = {number: f"label {number}" for number in range(labels)}
    config = HfDebertaConfig.from_pretrained(model, id2label=names, problem_type=problem)
    torch.manual_seed(0)
    HfDebertaForSequenceClassification(config).save_pretrained(tmp_path)
    other = TextClassifier(ScoreSettings(str(tmp_path)))
    found = other.probabilities(other.tokenize([TEXTS])).max(1).tolist()
    expected = [row["score"] for row in pipeline("text-classification", model=str(tmp_path), truncation=True)(TEXTS)]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)  # a regression's output may be far from 0


def test_official_files_whose_weights_are_those_of_a_classifier(model, classifier, tmp_path):
    official, source, out = tmp_path / "official", tmp_path / "a.txt", tmp_path / "out"
    assert main(["convert", model, str(official), "--to", "official"]) == 0
    classifier.tokenizer.save_pretrained(official)
    source.write_text("\n".join(TEXTS))
    command = ["score", "--model", str(official), "--input", str(source), "--output", str(out)]
    assert main(command) == 0
    expected = classifier.probabilities(classifier.tokenize([TEXTS])).max(1)
    assert [row["score"] for row in read_json_lines(out / "a.jsonl")] == pytest.approx(expected, abs=1e-5)
    weights = torch.load(official / "pytorch_model.bin", weights_only=True)
    torch.save(
        {name: value for name, value in weights.items() if "classifier" not in name}, official / "pytorch_model.bin"
    )
    (out / "a.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"no sequence classifier: it has no weights for classifier.bias"):
        main(command)


def test_other_threads_of_the_process_keep_their_cores(model):
    cores = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        classifier = TextClassifier(ScoreSettings(model, cores=2))
        classifier.probabilities(classifier.tokenize([TEXTS]))
        new = ThreadPoolExecutor(1)
        numbers = [threads.submit(torch.get_num_threads).result() for threads in (new, classifier.threads)]
        assert (torch.get_num_threads(), *numbers) == (2, 2, 1)
    finally:
        torch.set_num_threads(cores)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_lines_of_json_stay_as_they_are(classifier, ending, tmp_path):
    lines = ['{"text": "the old man", "n": 1.50, "x": null} ', '{ "text":"caf\u00e9 é", "deep": {"label": 1} }']
    data = "\n\n".join([*lines, " "]).encode()  # blank lines are no rows
    source, target = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
    source.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    assert score_file(classifier, source, target)["rows"] == 2
    text = (gzip.decompress(target.read_bytes()) if ending.endswith("gz") else target.read_bytes()).decode()
    first, second = text.splitlines()
    assert first.startswith(lines[0][:-2] + ', "label": ') and second.startswith(lines[1][:-2] + ', "label": ')
    assert json.loads(second)["scores"].keys() == {"bad", "fair", "good"}


def test_a_text_file_has_one_text_a_line(classifier, tmp_path):
    (tmp_path / "a.txt").write_bytes('\ufeffthe "old"\tman\r\n\nquiet'.encode())
    assert score_file(classifier, tmp_path / "a.txt", tmp_path / "a.jsonl")["rows"] == 3
    assert [row["text"] for row in read_json_lines(tmp_path / "a.jsonl")] == ['the "old"\tman', "", "quiet"]


def test_fields_of_csv_and_tsv_keep_their_text(classifier, tmp_path):
    """Numbers stay as they are written, quoted fields may have line breaks, and blank lines are no rows."""
    sources = {
        "a.csv": '\ufeffn,text,x\r\n007,"the old\nman, ""quiet""",N\rA\r\n\r\n1.50,,NA\r\n',
        "b.tsv": 'n\ttext\n007\tthe "old\rman\n1.50\tquiet\n',
    }
    rows = {}
    for name, text in sources.items():
        zipped = tmp_path / f"{name}.gz"
        zipped.write_bytes(gzip.compress(text.encode()))
        assert count_rows(zipped, classifier.settings) == 2
        score_file(classifier, zipped, tmp_path / f"out.{name}.gz")
        rows[name] = [*read_rows(tmp_path / f"out.{name}.gz")]
    values = [[*row.values()][:-3] for row in rows["a.csv"]]
    assert values == [["007", 'the old\nman, "quiet"', "N\rA"], ["1.50", None, "NA"]]
    assert [[*row.values()][:-3] for row in rows["b.tsv"]] == [["007", 'the "old\rman'], ["1.50", "quiet"]]
    for row in chain(*rows.values()):
        scores = json.loads(row["scores"])
        assert row["label"] == max(scores, key=scores.get) and float(row["score"]) == scores[row["label"]]


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "text,n\na,1\nb\n": "a.csv, row 2 has 1 fields, the header 2",
        "body\na\n": "a.csv has no column 'text'; it has body",
        "text,label\na,1\n": "a.csv has a column 'label' already: add --prefix",
        "": "a.csv has no column 'text'; it has ",
        'text\n"a': "a.csv, line 2: unexpected end of data",
        "text,n,text\na,1,b\n": "a.csv has the column 'text' more than once",
        "text\ncaf\u00e9": "a.csv: 'utf-8' codec can't decode byte 0xe9",
    }.items(),
)
def test_first_rows_are_checked_without_a_model(text, message, tmp_path):
    source = tmp_path / "a.csv"
    source.write_text(text, encoding="latin1")
    with pytest.raises(InputError, match=message):
        count_rows(source, ScoreSettings("no model"))


def test_rows_are_counted_or_estimated(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_deberta.scoring.WINDOW_ROWS", 8)
    monkeypatch.setattr("hf_deberta.scoring.MAX_COUNTED_ROWS", 20)
    monkeypatch.setattr(score, "MAX_COUNTED_ROWS", 20)
    paths = [tmp_path / name for name in ("a.txt", "bad.jsonl", "b.txt", "c.txt", "d.jsonl")]
    for path, lines in zip(paths, (["a"] * 19, ["{}"], ["ab"] * 2000, ["ab"] * 1000, ["not read"]), strict=True):
        path.write_text("\n".join(lines) + "\n")
    rows, errors = score.check_first_rows(paths, ScoreSettings("no model"))
    assert [*rows] == [paths[0], *paths[2:]] and "bad.jsonl, row 1 has a bad text" in errors[0]
    assert rows[paths[0]] == 19 and rows[paths[2]] == pytest.approx(2000, rel=0.4)


BAD = {
    '{"text": null}': "row 2 has a bad text: the text must be text, not null",
    '{"other": "a"}': "row 2 has a bad text: the text must be text, not null",
    '{"text": 5}': "row 2 has a bad text: the text must be text, not a number, 5",
    '{"text": "\\ud800"}': "row 2 has a bad text: the text has half of a surrogate pair",
    '{"text": "a", "label": 1}': "a column 'label' already: add --prefix",
    "[1]": "line 2 holds a list, .* must be an object",
    '{"text": ': "line 2, column 9: not valid JSON",
}


@pytest.mark.parametrize(
    ("tokenizer_limit", "position_biased", "limit"), [(100, False, 100), (100, True, 64), (10**30, False, 64)]
)
def test_default_length(model, tmp_path, tokenizer_limit, position_biased, limit):
    """That of the tokenizer, or of absolute positions; relative ones do not end."""
    HfDebertaTokenizer.from_pretrained(model, model_max_length=tokenizer_limit).save_pretrained(tmp_path)
    config = HfDebertaConfig.from_pretrained(model, position_biased_input=position_biased)
    HfDebertaForSequenceClassification(config).save_pretrained(tmp_path)
    assert TextClassifier(ScoreSettings(str(tmp_path))).max_length == limit


@pytest.mark.parametrize(("line", "message"), BAD.items(), ids=range(len(BAD)))
def test_a_bad_row_is_named_and_nothing_is_left(classifier, line, message, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "the old man"}\n' + line, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        score_file(classifier, source, tmp_path / "b.jsonl")
    assert str(source) in str(caught.value) and [*tmp_path.iterdir()] == [source]
    if "bad text" in message:
        counts = score_file(rewired(classifier, skip_bad_rows=True), source, tmp_path / "b.jsonl")
        rows = read_json_lines(tmp_path / "b.jsonl")
        assert (counts["rows"], counts["bad_rows"]) == (2, 1) and rows[0]["label"] is not None
        assert rows[1]["label"] is rows[1]["score"] is rows[1]["scores"] is None


def test_labels_and_lengths_that_cannot_work_are_refused(model, tmp_path):
    with pytest.raises(InputError, match="more than the 3 special tokens, not 3"):
        TextClassifier(ScoreSettings(model, text_pair="other", max_length=3))
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    config = HfDebertaConfig.from_pretrained(model, id2label={0: "bad", 1: "good", 2: "good"})
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="labels of different names, not bad, good, good"):
        TextClassifier(ScoreSettings(str(tmp_path), all_scores=True))


def test_files_of_parquet_that_cannot_be_scored(classifier, tmp_path):
    target = tmp_path / "out.parquet"
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    with pytest.raises(InputError, match="broken.parquet: Parquet file size is 4 bytes"):
        score_file(classifier, broken, target)
    with pytest.raises(InputError, match="no column 'body'; it has id, text"):
        score_file(rewired(classifier, text="body"), write_parquet(tmp_path / "a.parquet", TEXTS), target)
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(InputError, match="twice.parquet has the column 'text' more than once"):
        score_file(classifier, tmp_path / "twice.parquet", target)
    with pytest.raises(InputError, match="a.parquet, row 31 has a bad text"):
        score_file(classifier, write_parquet(tmp_path / "a.parquet", [*TEXTS, None]), target)
    assert not target.exists()
    score_file(classifier, write_parquet(tmp_path / "empty.parquet", pyarrow.array([], "string")), target)
    assert pyarrow.parquet.read_table(target).column_names == ["id", "text", "label", "score", "scores"]


def test_timestamps_of_spark_keep_their_year(classifier, tmp_path):
    """Spark writes INT96, and 9999-12-31 for rows that are valid until further notice."""
    until = pyarrow.array([datetime(9999, 12, 31), datetime(2026, 1, 1, 0, 0, 0, 123456)], "timestamp[us]")
    source, table = tmp_path / "a.parquet", pyarrow.table({"text": TEXTS[:2], "until": until})
    pyarrow.parquet.write_table(table, source, use_deprecated_int96_timestamps=True)
    score_file(classifier, source, tmp_path / "b.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "b.parquet")["until"].to_pylist() == until.to_pylist()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the full device of Linux")
def test_a_full_disk_names_the_file_that_is_written(classifier, tmp_path, monkeypatch):
    source = write_parquet(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setattr("hf_deberta.scoring.uuid4", lambda: SimpleNamespace(hex="0"))
    (tmp_path / "_b.parquet.0.unfinished").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"/b.parquet could not be written: .*No space left"):
        score_file(classifier, source, tmp_path / "b.parquet")


def test_an_output_that_was_cut_is_scored_again(tmp_path):
    files = {tmp_path / "in.jsonl": tmp_path / "a.jsonl"}
    (tmp_path / "_sizes.log").write_text('\n["a.jsonl", 1\n["a.jsonl", 6]')  # a kill has cut the first line
    for text, todo in {"{}\n{}\n": {}, "{}\n": files}.items():
        (tmp_path / "a.jsonl").write_text(text)
        assert score.unfinished_files(files) == todo


def test_an_error_of_the_thread_that_reads_ahead_is_raised():
    def numbers():
        yield 1
        raise InputError("end")

    ahead = one_ahead(numbers())
    assert next(ahead) == 1
    with pytest.raises(InputError, match="end"):
        next(ahead)


def test_where_files_are_written(tmp_path, monkeypatch):
    for name in ("a/x.parquet", "b/x.parquet", "b/y.jsonl", "b/z.TXT.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    found = score.find_files(["**/*.parquet", "b/y.jsonl", "b/z.TXT.gz"], out)
    targets = ["a/x.parquet", "b/x.parquet", "y.jsonl", "z.jsonl.gz"]
    assert [str(path.relative_to(out)) for path in found.values()] == targets
    for patterns, message in {
        ("a/*.parquet", "b/*.parquet"): "would both be written",
        ("*.csv",): "no such file",
        ("s3://a/*.parquet",): "must be mounted",
        ("b",): "names folders",
    }.items():
        with pytest.raises(InputError, match=message):
            score.find_files(patterns, out)
    with pytest.raises(InputError, match="would be overwritten"):
        score.find_files(["b/*"], tmp_path / "b")


def test_a_folder_holds_results_of_one_model_and_its_settings(model, tmp_path):
    settings = ScoreSettings(model)
    score.check_same_settings(tmp_path, replace(settings, text="wrong"))  # a run that fails before its first result
    score.check_same_settings(tmp_path, settings)
    (tmp_path / "a.parquet").touch()
    score.check_same_settings(tmp_path, replace(settings, cores=2, tokens_per_batch=10, skip_bad_rows=True))
    with pytest.raises(InputError, match="other settings: max_length None, now 8; take another --output"):
        score.check_same_settings(tmp_path, replace(settings, max_length=8))


def test_a_file_that_kills_its_workers_ends(model, tmp_path):
    source, target = write_parquet(tmp_path / "a[1].parquet", TEXTS), tmp_path / "out" / "a[1].parquet"
    target.parent.mkdir()
    scorer = score.FileScorer(ScoreSettings(model))
    for number in range(score.ATTEMPTS):
        (target.parent / f"_{target.name}.{number}.unfinished").touch()
    row = {"source": str(source), "target": str(target)}
    assert "10 workers died of it" in scorer(row)["error"] and not target.exists()
    score.remove_unfinished(tmp_path)
    result = scorer(row)
    assert (result["rows"], result["bad_rows"], result["error"]) == (30, 0, "")
    assert "all nodes must see it" in scorer({**row, "source": f"{source}.gone"})["error"]


def test_a_finished_folder_needs_no_ray(model, files, monkeypatch, capsys):
    monkeypatch.setattr(score, "running_ray", lambda address: pytest.fail("Ray was started"))
    (files / "out").mkdir()
    score.check_same_settings(files / "out", ScoreSettings(model, dtype="bfloat16"))
    for source in (files / "in").iterdir():
        (files / "out" / source.name).touch()
    assert run(model, files, "--address", "auto") == 0 and run(model, files, "--dtype", "bfloat16") == 0
    assert "Nothing to do: 4 files done before\n" in capsys.readouterr().out
    for flags, message in {
        ("--address", "auto", "--all_scores"): "all_scores False, now True",
        ("--dtype", "int8"): "dtype bfloat16, now int8",
        ("--device", "cpu"): "dtype bfloat16, now float32",
    }.items():
        with pytest.raises(SystemExit, match=message):
            run(model, files, *flags)


# With Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with one core each, started once. Limits are long enough for a busy machine."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # else other tests of this machine go first
        patch.setenv("RAY_gcs_server_port_wait_time_s", "300")
        patch.setenv("RAY_health_check_failure_threshold", "100")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def files(tmp_path) -> Path:
    for number in range(4):
        write_parquet(tmp_path / "in" / f"{number}.parquet", TEXTS)
    return tmp_path


def run(model: str, folder: Path, *flags: str) -> int:
    return main(["score", "--model", model, "--input", f"{folder}/in/*", "--output", f"{folder}/out", *flags])


@pytest.mark.parametrize("where", ["here", "cluster"])
def test_a_run_skips_files_that_are_done(model, files, where, request, capsys):
    flags = ("--address", request.getfixturevalue("cluster").address) if where == "cluster" else ()
    assert run(model, files, *flags) == 0
    assert "4 files, 120 rows" in capsys.readouterr().out
    assert '["2.parquet", ' in (files / "out" / "_sizes.log").read_text()
    done = {path: path.stat().st_mtime_ns for path in (files / "out").glob("*.parquet")}
    (files / "out" / "2.parquet").unlink()
    (files / "in" / "4.jsonl").write_text('{"text": null}')
    (files / "in" / "5.jsonl").write_text('{"text": "the"}\n' * WINDOW_ROWS + '{"text": null}')
    with pytest.raises(SystemExit, match="2 of 3 files failed; the first: .*4.jsonl, row 1 has a bad text"):
        run(model, files, *flags)
    output = capsys.readouterr()
    assert "2 files to score, 3 done before\n" in output.out and "5.jsonl, row 4097 has a bad text" in output.out
    assert "| 0/4127 [00:00<?, ? rows/s]" in output.err
    changed = {path.name for path, before in done.items() if path.stat().st_mtime_ns != before}
    assert changed == {"2.parquet"} and not (files / "out" / "5.jsonl").exists()
    with pytest.raises(SystemExit, match="all_scores False, now True"):
        run(model, files, *flags, "--all_scores")


def test_a_single_file_shows_its_rows_and_one_error(model, files, monkeypatch, capsys):
    monkeypatch.setattr(score, "SECONDS_BETWEEN_LINES", 0)
    flags = ["score", "--model", model, "--output", f"{files}/out", "--cores", "2", "--tokens_per_batch", "50"]
    assert main([*flags, "--input", f"{files}/in/1.parquet"]) == 0
    shown = capsys.readouterr().err
    assert shown.count("\r") > 5 and re.search(r"\| 30/30 \[00:\d\d<00:00, .*rows/s\]", shown)
    cut = ["score", "--model", model, "--output", f"{files}/cut", "--max_length", "40"]
    assert main([*cut, "--input", f"{files}/in/1.parquet"]) == 0
    assert re.search(r"; \d rows fill --max_length: longer texts were cut$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(score, "TextClassifier", lambda settings: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit, match="score: .*/2.parquet has no column 'body'; it has id, text"):
        main([*flags, "--input", f"{files}/in/2.parquet", "--text_column", "body"])
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_ray_starts_on_this_machine(model, files):
    """In a process of its own, as users run it: a process that switched clusters lost its workers in Ray 2.60."""
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "hf_deberta", "score", "--model", model]
    command += ["--input", f"{files}/in/*", "--output", f"{files}/out", "--address", "local"]
    environment = {**os.environ, "RAY_worker_niceness": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0 and "4 files, 120 rows" in done.stdout, done.stderr
    assert "/120 [" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_slow_start_is_one_sentence(monkeypatch):
    ray = pytest.importorskip("ray")

    def time_out(*arguments: object, **options: object) -> None:
        raise RuntimeError("Timed out waiting for file /tmp/ray/port")

    monkeypatch.setattr(ray, "init", time_out)
    message = r"Ray did not start \(--address local\): Timed out"
    with pytest.raises(InputError, match=message), score.running_ray("local"):
        pass


@pytest.mark.slow
def test_no_row_is_lost_when_a_worker_is_killed(model, files, cluster, capsys):
    """The worker of one node is killed while it computes."""
    for number in range(4, 12):
        write_parquet(files / "in" / f"{number}.parquet", TEXTS * 60)
    killed: list[int] = []
    finished = threading.Event()
    thread = threading.Thread(target=kill_a_worker, args=(files / "out", killed, finished))
    thread.start()
    try:
        assert run(model, files, "--address", cluster.address) == 0
    finally:
        finished.set()
        thread.join()
    assert killed and "12 files, 14,520 rows" in capsys.readouterr().out
    for source in (files / "in").iterdir():
        before, after = (pyarrow.parquet.read_table(path) for path in (source, files / "out" / source.name))
        assert after.select(["id", "text"]).equals(before) and after["label"].null_count == 0
    assert not list((files / "out").glob("*.unfinished"))


def kill_a_worker(output: Path, killed: list[int], finished: threading.Event) -> None:
    """Kill the first process that has an unfinished file open."""
    while not finished.wait(0.01):
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                is_writing = os.readlink(link).startswith(f"{output}/_") and link.parts[2] != str(os.getpid())
            except OSError:
                continue
            if is_writing and ".unfinished" in os.readlink(link):
                killed.append(int(link.parts[2]))
                os.kill(killed[0], signal.SIGKILL)
                return
