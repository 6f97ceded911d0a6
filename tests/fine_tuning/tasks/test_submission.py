"""Prediction files, and the zip of a submission."""

import sys
import zipfile

import pytest

from hf_deberta.fine_tuning.tasks.submission import submission_command, write_lines, zip_submission
from hf_deberta.training.errors import InputError

NAMES = ["CoLA.tsv", "MNLI-m.tsv", "RTE.tsv"]


@pytest.fixture
def folders(tmp_path):
    for name in NAMES[:2]:
        write_lines(tmp_path / name[:2] / name, ["index\tprediction", "0\t1"])
    return [tmp_path / "Co", tmp_path / "MN"]


def test_zip_of_the_files_that_exist(folders, tmp_path):
    assert zip_submission(tmp_path / "all.zip", folders, NAMES) == ["RTE.tsv"]
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        assert archive.namelist() == NAMES[:2]
        assert archive.read("CoLA.tsv") == b"index\tprediction\n0\t1\n"


def test_duplicate_and_missing_files(folders, tmp_path):
    with pytest.raises(InputError, match="CoLA.tsv and .*CoLA.tsv both exist"):
        zip_submission(tmp_path / "all.zip", [folders[0], folders[0]], NAMES)
    with pytest.raises(InputError, match="none of CoLA.tsv, MNLI-m.tsv, RTE.tsv is in"):
        zip_submission(tmp_path / "all.zip", [tmp_path], NAMES)
    assert not (tmp_path / "all.zip").exists()


def test_command(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["glue", str(tmp_path / "all.zip"), *map(str, folders)])
    submission_command("glue", NAMES)
    assert "RTE.tsv" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["glue", str(tmp_path / "all.zip"), str(tmp_path)])
    with pytest.raises(SystemExit, match="glue: none of"):
        submission_command("glue", NAMES)
    monkeypatch.setattr(sys, "argv", ["glue"])
    with pytest.raises(SystemExit, match="usage: python -m hf_deberta.fine_tuning.tasks.glue SUB"):
        submission_command("glue", NAMES)
