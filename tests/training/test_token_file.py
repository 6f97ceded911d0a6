"""Token files: what is written is read back, and what is not whole is not taken for it."""

import pickle

import numpy as np
import pytest

from hf_deberta.training.token_file import TokenFile, write_token_file


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
