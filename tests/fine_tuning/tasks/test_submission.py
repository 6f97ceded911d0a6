"""Files of predictions, and the zip of several runs."""

import sys
import zipfile

import pytest

from hf_deberta.fine_tuning.tasks.submission import command, write_lines, write_submission

NAMES = ["CoLA.tsv", "MNLI-m.tsv", "RTE.tsv"]


@pytest.fixture
def folders(tmp_path):
    for name in NAMES[:2]:
        (tmp_path / name[:2]).mkdir()
        write_lines(tmp_path / name[:2] / name, ["index\tprediction", "0\t1"])
    return [tmp_path / "Co", tmp_path / "MN"]


def test_the_zip_holds_what_is_there(folders, tmp_path):
    assert write_submission(tmp_path / "all.zip", folders, NAMES) == ["RTE.tsv"]
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        assert archive.namelist() == NAMES[:2]
        assert archive.read("CoLA.tsv") == b"index\tprediction\n0\t1\n"


def test_bad_folders(folders, tmp_path):
    with pytest.raises(ValueError, match="are both there"):
        write_submission(tmp_path / "all.zip", [folders[0], folders[0]], NAMES)
    with pytest.raises(ValueError, match="none of CoLA.tsv, MNLI-m.tsv, RTE.tsv is in"):
        write_submission(tmp_path / "all.zip", [tmp_path], NAMES)
    assert not (tmp_path / "all.zip").exists()


def test_the_command(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["glue", str(tmp_path / "all.zip"), *map(str, folders)])
    command("glue", NAMES)
    assert "the server also wants RTE.tsv" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["glue", str(tmp_path / "all.zip"), str(tmp_path)])
    with pytest.raises(SystemExit, match="glue: none of"):
        command("glue", NAMES)
    monkeypatch.setattr(sys, "argv", ["glue"])
    with pytest.raises(SystemExit, match="usage: python -m hf_deberta.fine_tuning.tasks.glue SUB"):
        command("glue", NAMES)
