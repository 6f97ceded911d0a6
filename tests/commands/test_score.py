"""`hf-deberta score`: equal to Transformers' pipeline, rows as they were, resumable; with Ray where it is installed."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from fine_tuning_models import read_json_lines
from transformers import pipeline, set_seed

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification, HfDebertaModel, HfDebertaTokenizer
from hf_deberta.__main__ import main
from hf_deberta.commands import score
from hf_deberta.commands.score import ScoreSettings, TextClassifier, parts_folder
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
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
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.3}
    config = HfDebertaConfig.from_preset("tiny", **fields, emd_steps=0, id2label={0: "bad", 1: "fair", 2: "good"})
    HfDebertaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def small_parts(monkeypatch) -> Iterator[None]:
    """Parts of 11 rows; and other tests get back the cores of their threads."""
    cores = torch.get_num_threads()
    monkeypatch.setattr("hf_deberta.commands.score.PART_ROWS", 11)
    yield
    torch.set_num_threads(cores)


def run(model: str | Path, source: Path | str, output: Path, *flags: str) -> int:
    return main(["score", "--model", str(model), "--input", str(source), "--output", str(output), *flags])


def labelled(model: str | Path, source: Path, output: Path, *flags: str) -> list[dict]:
    """Return the rows that a run writes for lines of text or JSON."""
    assert run(model, source, output, *flags) == 0
    return read_json_lines(output / f"{source.stem}.jsonl")


def refused(*arguments: Any) -> str:
    """Return the message of a run that fails."""
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    return str(caught.value)


def write_parquet(path: Path, texts: list, **columns: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts, **columns})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return path


def test_the_scores_are_those_of_the_pipeline(model, tmp_path, capsys):
    source = write_parquet(tmp_path / "a.parquet", TEXTS)
    assert run(model, source, tmp_path / "out", "--all_scores", "--cores", "2", "--tokens_per_batch", "50") == 0
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "a.parquet").to_pylist()
    expected = pipeline("text-classification", model=model, truncation=True)(TEXTS, top_k=None)
    assert [(row["id"], row["text"]) for row in rows] == list(enumerate(TEXTS))
    for row, scores in zip(rows, expected, strict=True):
        assert row["label"] == scores[0]["label"] and row["score"] == pytest.approx(scores[0]["score"], abs=1e-5)
        assert row["scores"] == pytest.approx({one["label"]: one["score"] for one in scores}, abs=1e-5)
    assert len({row["label"] for row in rows}) > 1  # else the order of rows would not matter
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a.parquet", "_score.json"}
    assert re.search(r"^30 rows in \d+ s: [\d,.]+ rows/s$", capsys.readouterr().out, re.MULTILINE)


def test_pairs_and_long_texts(model, tmp_path, capsys):
    source = write_parquet(tmp_path / "a.parquet", TEXTS, other=TEXTS[::-1])
    assert run(model, source, tmp_path / "out", "--text_pair_column", "other", "--max_length", "20") == 0
    inputs = [{"text": text, "text_pair": other} for text, other in zip(TEXTS, TEXTS[::-1], strict=True)]
    expected = pipeline("text-classification", model=model)(inputs, truncation=True, max_length=20)
    scores = pyarrow.parquet.read_table(tmp_path / "out" / "a.parquet")["score"].to_pylist()
    assert scores == pytest.approx([row["score"] for row in expected], abs=1e-5)
    assert "rows fill --max_length: longer texts were cut\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_without_bytes_has_no_rows(model, name, tmp_path):
    (tmp_path / name).touch()
    assert run(model, tmp_path / name, tmp_path / "out") == 0
    assert (tmp_path / "out" / "a.jsonl").read_bytes() == b""


@pytest.mark.parametrize(("labels", "problem"), [(1, None), (1, "regression"), (3, "multi_label_classification")])
def test_other_kinds_of_classifiers(model, labels, problem, tmp_path):
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    names = {number: f"label {number}" for number in range(labels)}
    config = HfDebertaConfig.from_pretrained(model, id2label=names, problem_type=problem)
    torch.manual_seed(0)
    HfDebertaForSequenceClassification(config).save_pretrained(tmp_path)
    classifier = TextClassifier(ScoreSettings(str(tmp_path)))
    _, scores, _ = classifier.collect(classifier.submit([TEXTS]))
    expected = [row["score"] for row in pipeline("text-classification", model=str(tmp_path), truncation=True)(TEXTS)]
    assert scores.max(1) == pytest.approx(expected, rel=1e-5, abs=1e-5)  # a regression's output may be far from 0


def test_a_model_of_another_class_is_refused(model, tmp_path, capsys):
    HfDebertaModel.from_pretrained(model).save_pretrained(tmp_path / "encoder")
    HfDebertaTokenizer.from_pretrained(model).save_pretrained(tmp_path / "encoder")
    message = refused(tmp_path / "encoder", write_parquet(tmp_path / "a.parquet", TEXTS), tmp_path / "out")
    assert "/encoder has no weights for classifier.bias, classifier.weight, " in message
    assert "0/30" not in capsys.readouterr().err  # no progress in a log file, before there is any


@pytest.mark.parametrize(
    ("dtype", "advice"), {"float32": "look for NaN in its weights", "int8": "try --dtype float32"}.items()
)
def test_scores_that_are_not_finite_are_refused(model, dtype, advice, tmp_path, monkeypatch):
    monkeypatch.setattr(
        TextClassifier, "_compute", lambda self, rows: torch.full((len(rows["input_ids"]), 3), torch.nan)
    )
    message = refused(model, write_parquet(tmp_path / "a.parquet", TEXTS), tmp_path / "out", "--dtype", dtype)
    assert f"returns scores that are not finite: {advice}" in message


def test_default_length(model, tmp_path):
    """That of the tokenizer, or of absolute positions; relative ones do not end."""
    for tokenizer_limit, position_biased, limit in ((100, False, 100), (100, True, 64), (10**30, False, 64)):
        HfDebertaTokenizer.from_pretrained(model, model_max_length=tokenizer_limit).save_pretrained(tmp_path)
        config = HfDebertaConfig.from_pretrained(model, position_biased_input=position_biased)
        HfDebertaForSequenceClassification(config).save_pretrained(tmp_path)
        assert TextClassifier(ScoreSettings(str(tmp_path))).max_length == limit


def test_rows_of_json_keep_their_fields(model, tmp_path):
    rows = [{"text": "the old man", "n": 1.5, "x": None}, {"text": "caf\u00e9", "deep": {"label": 1}}]
    (tmp_path / "a.jsonl").write_text("\n\n".join([*map(json.dumps, rows), " "]))  # blank lines are no rows
    written = labelled(model, tmp_path / "a.jsonl", tmp_path / "out", "--all_scores")
    assert [{name: row[name] for name in given} for row, given in zip(written, rows, strict=True)] == rows
    assert [[*row][-3:] for row in written] == [["label", "score", "scores"]] * 2
    assert written[1]["scores"].keys() == {"bad", "fair", "good"}


def test_a_text_file_has_one_text_a_line(model, tmp_path):
    (tmp_path / "a.TXT").write_bytes('\ufeffthe "old"\tman\r\n\nquiet'.encode())
    rows = labelled(model, tmp_path / "a.TXT", tmp_path / "out")
    assert [row["text"] for row in rows] == ['the "old"\tman', "", "quiet"]


def test_fields_of_csv_and_tsv_keep_their_text(model, tmp_path):
    """Numbers stay as they are written, quoted fields may have line breaks, and blank lines are no rows."""
    sources = {
        "a.csv": '\ufeffn,text,x\r\n007,"the old\nman, ""quiet""",N\rA\r\n\r\n1.50,,NA\r\n',
        "b.tsv": 'n\ttext\n007\tthe "old\rman\n1.50\tquiet\n',
        "c.csv": "n,text\n",
    }
    rows = {}
    for name, text in sources.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        run(model, tmp_path / f"{name}.gz", tmp_path / "out", "--all_scores", "--prefix", "new_")
        rows[name] = [*read_rows(tmp_path / "out" / f"{name}.gz")]
    values = [[*row.values()][:-3] for row in rows["a.csv"]]
    assert values == [["007", 'the old\nman, "quiet"', "N\rA"], ["1.50", None, "NA"]]
    assert [[*row.values()][:-3] for row in rows["b.tsv"]] == [["007", 'the "old\rman'], ["1.50", "quiet"]]
    for row in (*rows["a.csv"], *rows["b.tsv"]):
        scores = json.loads(row["new_scores"])
        assert row["new_label"] == max(scores, key=scores.get)
        assert float(row["new_score"]) == scores[row["new_label"]]
    assert gzip.decompress((tmp_path / "out" / "c.csv.gz").read_bytes()) == b"n,text,new_label,new_score,new_scores\n"


def test_columns_of_parquet_keep_their_types(model, tmp_path):
    """Spark writes INT96, and 9999-12-31 for rows that are valid until further notice. Pandas writes dictionaries."""
    until = pyarrow.array([datetime(9999, 12, 31), datetime(2026, 1, 1, 0, 0, 0, 123456)] * 15, "timestamp[us]")
    words = pyarrow.array(TEXTS).dictionary_encode()
    table = pyarrow.table({"text": words, "until": until, "n": [[1, None]] * 30}).replace_schema_metadata({"a": "b"})
    for rows in (30, 0):
        source = tmp_path / f"{rows}.parquet"
        pyarrow.parquet.write_table(table[:rows], source, 7, use_deprecated_int96_timestamps=True)
        run(model, source, tmp_path / "out")
        result = pyarrow.parquet.read_table(tmp_path / "out" / source.name)
        assert result.select([0, 1, 2]).equals(table[:rows]) and result.schema.metadata[b"a"] == b"b"
        assert [str(kind) for kind in result.schema.types[3:]] == ["string", "float"]
    pyarrow.parquet.write_table(table.append_column("text", words), source)
    assert "0.parquet needs one column 'text'; it has text, until, n" in refused(model, source, tmp_path / "twice")


ERRORS = {
    ("a.csv", "\n"): "a.csv needs one column 'text'",
    ("a.csv", "body\na\n"): "a.csv needs one column 'text'; it has body",
    ("a.csv", "text,label\na,1\n"): "a.csv has a column 'label' already: add --prefix",
    ("a.parquet", "PAR1"): "a.parquet: Parquet file size is 4 bytes",
    ("a.jsonl", '{"text": "a", "label": 1}'): "a column 'label' already: add --prefix",
    ("a.jsonl", '{"text": '): "line 1, column 9: not valid JSON",
}
BAD_ROWS = {'{"n": 1}': "null", '{"text": null}': "null", '{"text": 5}': "a number, 5"}
for line, value in BAD_ROWS.items():
    ERRORS["a.jsonl", '{"text": "a"}\n' * 11 + line] = f"row 12 has a bad text: {value}; --skip_bad_rows"


@pytest.mark.parametrize(("file", "message"), ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_are_found_before_the_model_is_loaded(model, file, message, tmp_path, monkeypatch):
    monkeypatch.setattr(score, "TextClassifier", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / file[0]).write_text(file[1])
    assert re.search(message, refused(model, tmp_path / file[0], tmp_path / "out"))


def test_bad_rows(model, tmp_path, capsys):
    """A file with one is left out and named, the others are scored; with --skip_bad_rows all rows are."""
    bad, other, out = write_parquet(tmp_path / "a.parquet", [*TEXTS, None]), tmp_path / "b.jsonl", tmp_path / "out"
    other.write_text('{"text": "the"}\n' + "\n".join(BAD_ROWS))
    write_parquet(tmp_path / "c.parquet", TEXTS)
    message = refused(model, tmp_path / "*.*", out)
    assert re.search("a.parquet, row 31 has a bad text: null; --skip_bad_rows.*\n.*b.jsonl, row 2 has", message)
    assert {path.name for path in out.iterdir()} == {"c.parquet", "_score.json"}
    assert "1 of 3 files to score\n30 rows in" in capsys.readouterr().out
    assert run(model, tmp_path / "*.*", out, "--skip_bad_rows") == 0
    assert pyarrow.parquet.read_table(out / bad.name)["label"].null_count == 1
    rows = read_json_lines(out / other.name)
    assert [row["label"] is None for row in rows] == [row["score"] is None for row in rows] == [False] + [True] * 3
    assert ", 4 of them bad, with a null label" in capsys.readouterr().out


def test_where_files_are_written(tmp_path, monkeypatch):
    for name in ("a/x.parquet", "b/x.parquet", "b/y.jsonl", "b/z.TXT.gz", "c/a.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b/y[1].csv").touch()  # not a pattern: the file exists
    names = ("a/x.parquet", "b/x.parquet", "y.jsonl", "z.jsonl.gz", "y[1].csv")
    patterns = ["**/*.parquet", "b/y.jsonl", "b/z.TXT.gz", "b/y[1].csv"]
    assert [*score.find_files(patterns, tmp_path / "out")] == [tmp_path / "out" / name for name in names]
    for patterns, message in {
        ("a/*.parquet", "b/*.parquet"): "would both be written",
        ("s3://a/*.parquet",): "there is no such file",
        ("b",): r"for a folder, name its files: FOLDER/\*.parquet",
        ("c/*",): "a.md is none of parquet",
    }.items():
        with pytest.raises(InputError, match=message):
            score.find_files(patterns, tmp_path / "out")
    (tmp_path / "link").symlink_to("b")
    for pattern, folder in {"b/y.jsonl": "b", "link/*.jsonl": "b", "**/*.parquet": "."}.items():
        with pytest.raises(InputError, match=r"(x.parquet|y.jsonl) would be its own result"):
            score.find_files([pattern], tmp_path / folder)


def test_a_folder_holds_results_of_one_model_and_its_settings(model, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "the old man"}')
    assert "needs one column 'wrong'" in refused(model, source, tmp_path / "out", "--text_column", "wrong")
    run(model, source, tmp_path / "out")
    run(model, source, tmp_path / "out", "--cores", "2", "--tokens_per_batch", "10", "--skip_bad_rows")
    message = refused(model, source, tmp_path / "out", "--max_length", "8")
    assert "other settings: max_length None, now 8; take another --output" in message


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_run_continues_behind_its_last_part(model, is_changed, tmp_path, monkeypatch, capsys):
    source, submit = tmp_path / "a.txt", TextClassifier.submit
    source.write_text("\n".join(TEXTS))
    submitted: list[str] = []

    def submit_two_parts(self: TextClassifier, texts: list[list[str]]) -> Any:
        if len(submitted) == 22:
            raise KeyboardInterrupt
        submitted.extend(texts[0])
        return submit(self, texts)

    with monkeypatch.context() as patch:
        patch.setattr(TextClassifier, "submit", submit_two_parts)
        assert refused(model, source, tmp_path / "out") == "130"  # the second part is not written
    if is_changed:
        os.utime(source, (0, 0))
    assert [row["text"] for row in labelled(model, source, tmp_path / "out")] == TEXTS
    assert f"1 of 1 files to score\n{30 if is_changed else 19} rows in" in capsys.readouterr().out


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_result_older_than_its_input_is_named(model, is_changed, tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "the old man"}')
    run(model, source, tmp_path / "out")
    if is_changed:
        os.utime(source, (time.time() + 60,) * 2)
    capsys.readouterr()
    assert run(model, source, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert printed.endswith("0 of 1 files to score\n")
    assert (
        f"1 of 1 results are older than their input, such as {tmp_path}/out/a.jsonl: delete" in printed
    ) == is_changed


@pytest.mark.slow
def test_no_row_is_lost_when_a_worker_is_killed(model, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr("hf_deberta.commands.score.PART_ROWS", 1000)
    source = write_parquet(tmp_path / "a.parquet", TEXTS * 200)
    run(model, source, tmp_path / "here")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else other tests of this machine go first
    command = [sys.executable, "-m", "hf_deberta", "score", "--model", model, "--input", str(source)]
    command += ["--output", f"{tmp_path}/out", "--address", "local"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        killed = kill_a_worker(parts_folder(tmp_path / "out" / "a.parquet"), tmp_path, process)
        output, _ = process.communicate(timeout=600)
    assert killed and "\n6,000 rows in" in output
    assert (tmp_path / "out" / "a.parquet").read_bytes() == (tmp_path / "here" / "a.parquet").read_bytes()


def kill_a_worker(parts: Path, folder: Path, process: subprocess.Popen) -> bool:
    """Kill a process in a folder that labels texts, when a part is written."""
    while process.poll() is None:
        for worker in Path("/proc").glob("[0-9]*") if parts.exists() else ():
            with suppress(OSError):
                is_of_run = (worker / "cwd").samefile(folder)
                if is_of_run and b"ray::label_texts" in (worker / "cmdline").read_bytes():
                    os.kill(int(worker.name), signal.SIGKILL)
                    return True
        time.sleep(0.01)
    return False
