"""Token files: what is written is read back, and what is not whole is not taken for it."""

import errno
import pickle

import numpy as np
import pytest

from hf_deberta.pretraining import token_file
from hf_deberta.pretraining.token_file import TokenFile, write_token_file


@pytest.mark.parametrize(("vocabulary", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_documents_come_back(tmp_path, vocabulary, dtype):
    documents = [[1, 2, 3], [], [vocabulary - 1], list(range(100))]
    written = write_token_file(tmp_path / "tokens", documents, vocabulary, {"made_of": "x"})
    read = TokenFile.read(tmp_path / "tokens")
    assert isinstance(read.tokens, np.memmap) and read.tokens.dtype == dtype
    assert [read.document(i).tolist() for i in range(len(read))] == [d for d in documents if d]
    assert read.about == written.about
    assert read.about == {"made_of": "x", "dtype": dtype, "tokens": 104, "documents": 3}


def test_a_worker_is_sent_the_folder_alone(tmp_path):
    written = write_token_file(tmp_path / "tokens", [list(range(5000))], 6000, {})
    sent = pickle.dumps(written)
    assert len(sent) < 1000
    assert pickle.loads(sent).document(0).tolist() == list(range(5000))


def test_written_anew(tmp_path):
    write_token_file(tmp_path / "tokens", [[1]], 10, {})
    assert write_token_file(tmp_path / "tokens", [[2, 3]], 10, {}).document(0).tolist() == [2, 3]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    write_token_file(tmp_path / "tokens", [[1]], 10, {})

    def documents():
        yield [5]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_token_file(tmp_path / "tokens", documents(), 10, {})
    assert TokenFile.read(tmp_path / "tokens").document(0).tolist() == [1]


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("same", [True, False])
def test_two_writers_at_once(tmp_path, stale, same):
    """Who is whole first stays, if both say that they write the same."""
    folder, here = tmp_path / "shared" / "train", {"made_of": "a"}
    if stale:
        write_token_file(folder, [[7]], 10, {"made_of": "of old"})

    def documents():
        yield [1]
        write_token_file(folder, [[1], [2, 3]], 10, here if same else {"made_of": "b"})
        first.append((folder / "about.json").stat().st_ino)
        yield [2, 3]

    first: list[int] = []
    found = write_token_file(folder, documents(), 10, here)
    assert [found.document(i).tolist() for i in range(len(found))] == [[1], [2, 3]] and found.about["made_of"] == "a"
    assert ((folder / "about.json").stat().st_ino == first[0]) == same
    assert [path.name for path in folder.parent.iterdir()] == ["train"]


def test_overtaken_in_the_last_moment(tmp_path, monkeypatch):
    write_token_file(tmp_path / "tokens", [[1]], 10, {"made_of": "a"})
    monkeypatch.setattr(TokenFile, "kept", lambda *_: None)
    replace = token_file.os.replace
    monkeypatch.setattr(
        token_file.os, "replace", lambda *paths: replace(*paths) if paths[1].name != "tokens.old" else None
    )
    assert write_token_file(tmp_path / "tokens", [[1]], 10, {"made_of": "a"}).document(0).tolist() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


@pytest.mark.parametrize("said", [errno.ENOTEMPTY, errno.EEXIST, errno.EACCES])  # the last by Windows
def test_a_place_that_is_taken(tmp_path, monkeypatch, said):
    (tmp_path / "taken").mkdir()

    def refuse(*_):
        raise OSError(said, "refused")

    monkeypatch.setattr(token_file.os, "replace", refuse)
    token_file.rename_atomically(tmp_path / "unfinished", tmp_path / "taken")
    with pytest.raises(OSError, match="refused"):
        token_file.rename_atomically(tmp_path / "unfinished", tmp_path / "free")


def test_what_is_kept(tmp_path):
    write_token_file(tmp_path / "tokens", [[1]], 10, {"made_of": "a"})
    assert TokenFile.kept(tmp_path / "tokens", "a").document(0).tolist() == [1]
    assert TokenFile.kept(tmp_path / "tokens", "b") is None and TokenFile.kept(tmp_path / "nothing", "a") is None
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    assert (tmp_path / "tokens").stat().st_mode == ordinary.stat().st_mode  # others may read it, if the umask lets them


def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="no whole token file"):
        TokenFile.read(tmp_path)
    with pytest.raises(ValueError, match="every document is empty"):
        write_token_file(tmp_path / "tokens", [[], []], 10, {})
    assert not list(tmp_path.iterdir())
    write_token_file(tmp_path / "tokens", [[1, 2, 3]], 10, {})
    (tmp_path / "tokens" / "tokens.bin").write_bytes(b"12")
    with pytest.raises(ValueError, match="damaged"):
        TokenFile.read(tmp_path / "tokens")
