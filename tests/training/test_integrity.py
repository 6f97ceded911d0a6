"""The manifest of a finished run shows every damage to its files; a checkpoint must have all its parts."""

import json
import os
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_deberta.training.integrity import find_damaged_files, find_missing_parts, write_manifest


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "out" / "inner").mkdir(parents=True)
    (tmp_path / "out" / "inner" / "a").write_bytes(b"abc")
    (tmp_path / "out" / "b.bin").write_bytes(bytes(5_000_000))  # read in blocks
    (tmp_path / "out" / "empty").touch()
    (tmp_path / "out" / "notes.txt").write_text("may change")
    write_manifest(tmp_path / "out", [tmp_path / "out" / name for name in ("b.bin", "empty", "inner/a")])
    return tmp_path / "out"


def test_each_kind_of_damage_is_named(folder):
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert files["inner/a"] == {"size": 3, "crc32": 891568578}  # of RFC 1952
    (folder / "notes.txt").unlink()
    assert find_damaged_files(folder) == []
    (folder / "b.bin").write_bytes(bytes(4_999_999) + b"1")
    os.truncate(folder / "inner" / "a", 2)
    (folder / "empty").unlink()
    (folder / "empty").mkdir()
    changed = "b.bin has another checksum than when it was written"
    assert find_damaged_files(folder) == [changed, "empty is missing", "inner/a has 2 bytes instead of 3"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b'{"files": 3}', b'{"files": {"a": 1}}', b'{"files": {"a": {"size": 1}}}', b"\xff",
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_damage(folder, content):
    (folder / "manifest.json").write_bytes(content)
    assert find_damaged_files(folder) == ["manifest.json is damaged"]


def test_a_disk_that_cannot_be_read_is_damage(folder, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("hf_deberta.training.integrity.checksum", fail)
    assert "inner/a cannot be read (Input/output error)" in find_damaged_files(folder)


def test_nothing_endless_is_read(folder):
    """A manifest may come from others."""
    (folder / "link").symlink_to("/dev/zero")
    entry = {"size": 0, "crc32": 0}
    (folder / "manifest.json").write_text(json.dumps({"files": {"link": entry, "../../dev/zero": entry}}))
    assert find_damaged_files(folder) == ["link is missing", "../../dev/zero is missing"]


def write_parts(folder: Path, names: str) -> None:
    for path in map(folder.joinpath, names.split()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"global_step": 5}')


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ("model.safetensors optimizer.pt scheduler.pt rng_state.pth", []),
        ("pytorch_model.bin optimizer.pt scheduler.pt rng_state.pth", []),
        ("model.safetensors.index.json optimizer.pt scheduler.pt rng_state.pth", []),
        ("model-00001-of-00002.safetensors optimizer.pt scheduler.pt rng_state.pth", ["no model weights"]),
        ("pytorch_model_fsdp_0/__0_0.distcp optimizer_0/__0_0.distcp scheduler.pt rng_state.pth", []),
        ("global_step5/mp_rank_00_model_states.pt rng_state.pth", ["no optimizer.pt", "no scheduler.pt"]),
        ("adapter_model.safetensors optimizer.pt scheduler.pt", ["no rng_state.pth"]),
        ("model.safetensors scheduler.pt rng_state.pth", ["no optimizer.pt"]),
        ("model.safetensors optimizer.pt rng_state.pth", ["no scheduler.pt"]),
    ],
)
def test_parts_of_a_checkpoint(tmp_path, names, missing):
    write_parts(tmp_path, f"{names} trainer_state.json")
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    assert find_missing_parts(tmp_path, arguments) == missing
    arguments.deepspeed_plugin = object()
    assert find_missing_parts(tmp_path, arguments) == ([] if "global_step5" in names else missing)


@pytest.mark.parametrize(
    ("state", "message"), [('{"global_step": 4}', "it is of step 4"), ('{"step": 5}', "unexpected keyword"), ("{", "")]
)
def test_the_state_must_be_of_the_step(tmp_path, state, message):
    folder = tmp_path / "checkpoint-5"
    write_parts(folder, "model.safetensors optimizer.pt scheduler.pt rng_state.pth trainer_state.json")
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    assert find_missing_parts(folder, arguments) == []
    (folder / "trainer_state.json").write_text(state)
    (damage,) = find_missing_parts(folder, arguments)
    assert damage.startswith("trainer_state.json ") and message in damage
