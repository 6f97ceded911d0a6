"""Small JSON files are complete or unchanged, and a damaged one is named."""

import errno

import pytest

from hf_deberta.training.errors import InputError
from hf_deberta.training.json_files import atomic_write, read_json_object, write_json


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"a": 1', b"\xff\xfe", b"[" * 100_000, b"\0" * 9])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(InputError, match="run.json( is |, line 1)"):
        read_json_object(tmp_path / "run.json")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "run.json"):
        with pytest.raises(InputError, match=f"cannot read {path}: "):
            read_json_object(path)


def test_a_file_is_complete_or_unchanged(tmp_path):
    path = tmp_path / "seeds.json"
    path.write_text("old")
    with pytest.raises(OSError), atomic_write(path) as unfinished:
        unfinished.write_text("half")
        assert path.read_text() == "old"
        raise OSError(errno.ENOSPC, "no space left")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with atomic_write(path) as unfinished:
        unfinished.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    write_json(path, {"seed": 42, "name": "ä"})
    assert read_json_object(path) == {"seed": 42, "name": "ä"}
