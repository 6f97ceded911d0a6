"""Token files: documents are read back, and incomplete files are not used."""

import errno
import pickle

import numpy as np
import pytest

from hf_deberta.pretraining import token_file
from hf_deberta.pretraining.token_file import TokenFile, write_token_file
from hf_deberta.training.errors import InputError


@pytest.mark.parametrize(("vocabulary", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_documents_come_back(tmp_path, vocabulary, dtype):
    documents = [[1, 2, 3], [], [vocabulary - 1], list(range(100))]
    written = write_token_file(tmp_path / "tokens", documents, vocabulary, "x")
    read = TokenFile.read(tmp_path / "tokens")
    assert isinstance(read.tokens, np.memmap) and read.tokens.dtype == dtype
    assert [read.document(i).tolist() for i in range(len(read))] == [d for d in documents if d]
    assert read.about == written.about
    assert read.about == {"fingerprint": "x", "dtype": dtype, "tokens": 104, "documents": 3}
    same, other = (TokenFile.read_if_same(tmp_path / "tokens", fingerprint) for fingerprint in "xy")
    assert same is not None and other is None
    (tmp_path / "ordinary").mkdir()  # others may read the folder if the umask permits
    assert (tmp_path / "tokens").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_pickle_contains_the_folder_alone(tmp_path):
    written = write_token_file(tmp_path / "tokens", [list(range(5000))], 6000, "x")
    sent = pickle.dumps(written)
    assert len(sent) < 1000
    assert pickle.loads(sent).document(0).tolist() == list(range(5000))


def test_a_failing_writer_leaves_the_old_file(tmp_path):
    write_token_file(tmp_path / "tokens", [[1]], 10, "x")

    def documents():
        yield [5]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_token_file(tmp_path / "tokens", documents(), 10, "x")
    assert TokenFile.read(tmp_path / "tokens").document(0).tolist() == [1]


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("same", [True, False])
def test_two_writers_at_once(tmp_path, stale, same):
    """The first one stays if both have the same fingerprint."""
    folder = tmp_path / "shared" / "train"
    if stale:
        write_token_file(folder, [[7]], 10, "old")

    def documents():
        yield [1]
        write_token_file(folder, [[1], [2, 3]], 10, "a" if same else "b")
        first.append((folder / "about.json").stat().st_ino)
        yield [2, 3]

    first: list[int] = []
    written = write_token_file(folder, documents(), 10, "a")
    assert [written.document(i).tolist() for i in range(2)] == [[1], [2, 3]] and written.about["fingerprint"] == "a"
    assert ((folder / "about.json").stat().st_ino == first[0]) == same
    assert [path.name for path in folder.parent.iterdir()] == ["train"]


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EEXIST, errno.EACCES])  # the last on Windows
def test_rename_to_an_existing_folder(tmp_path, monkeypatch, code):
    (tmp_path / "taken").mkdir()

    def refuse(*_):
        raise OSError(code, "refused")

    monkeypatch.setattr(token_file.os, "replace", refuse)
    token_file.rename_unless_taken(tmp_path / "unfinished", tmp_path / "taken")
    with pytest.raises(OSError, match="refused"):
        token_file.rename_unless_taken(tmp_path / "unfinished", tmp_path / "free")


def test_documents_without_text(tmp_path):
    with pytest.raises(InputError, match="every document is empty"):
        write_token_file(tmp_path / "tokens", [[], []], 10, "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["about.json", "tokens.bin", "ends.bin"])
@pytest.mark.parametrize("content", [None, b"", b"12", b"[]", b"\xff" * 8, b"{}", b'{"fingerprint": "x", "dtype": 3}'])
def test_a_damaged_file_is_named(tmp_path, name, content):
    write_token_file(tmp_path / "tokens", [[1, 2, 3]], 10, "x")
    path = tmp_path / "tokens" / name
    path.unlink() if content is None else path.write_bytes(content)
    if name == "about.json" and content is None:
        assert TokenFile.read_if_same(tmp_path / "tokens", "x") is None
        return
    if name == "tokens.bin":
        with pytest.raises(InputError):
            TokenFile.read(tmp_path / "tokens")
    with pytest.raises(InputError) as raised:
        TokenFile.read_if_same(tmp_path / "tokens", "x")
    assert str(path.parent) in str(raised.value) and "tokenize again with --overwrite_cache" in str(raised.value)


def test_changed_ends_are_noticed(tmp_path):
    write_token_file(tmp_path / "tokens", [[1, 2, 3], [4], [5]], 10, "x")
    for ends in ([3, 4, 6], [4, 3, 5], [-3, 4, 5], [0, 4, 5]):
        np.array(ends, np.int64).tofile(tmp_path / "tokens" / "ends.bin")
        with pytest.raises(InputError, match="is damaged: documents end"):
            TokenFile.read_if_same(tmp_path / "tokens", "x")
