"""A corpus as token ids on disk, tokenized once.

    folder/tokens.bin     ids of all documents, one after the other, without special tokens
    folder/ends.bin       where each document ends
    folder/about.json     number of tokens and documents, and the corpus' fingerprint; written last

Both arrays are memory-mapped: a corpus may be larger than the memory, and processes and workers share its pages.
A writer that is killed leaves a folder `_unfinished-...` beside, which may be deleted.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hf_deberta.training.errors import InputError
from hf_deberta.training.json_files import read_json_object

WAY_OUT = "tokenize again with --overwrite_cache"


@dataclass(frozen=True)
class TokenFile:
    """Token ids of a corpus, document by document.

    >>> tokens = TokenFile.read("my-tokens")
    >>> tokens.document(0)
    array([ 812,   17, 3301], dtype=uint16)
    """

    tokens: np.ndarray  # [T]
    ends: np.ndarray  # [D] int64
    about: dict[str, Any]
    folder: Path | None = None

    @classmethod
    def read(cls, folder: str | Path) -> "TokenFile":
        folder = Path(folder)
        try:
            about = read_json_object(folder / "about.json")
            tokens = np.memmap(folder / "tokens.bin", about["dtype"], "r")
            ends = np.memmap(folder / "ends.bin", np.int64, "r")
            sizes, expected = (len(tokens), len(ends)), (about["tokens"], about["documents"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder} holds no whole token file ({error}); {WAY_OUT}") from error
        if sizes != expected:
            raise InputError(f"{folder} is damaged: {sizes} tokens and documents instead of {expected}; {WAY_OUT}")
        return cls(tokens, ends, about, folder)

    @classmethod
    def read_if_same(cls, folder: str | Path, fingerprint: str) -> "TokenFile | None":
        """Read the token file in a folder if there is one with this fingerprint."""
        if not (Path(folder) / "about.json").exists():
            return None
        token_file = cls.read(folder)
        if token_file.about.get("fingerprint") != fingerprint:
            return None
        if token_file.ends[-1] != len(token_file.tokens) or (np.diff(token_file.ends, prepend=0) <= 0).any():
            raise InputError(f"{folder} is damaged: documents end at wrong places; {WAY_OUT}")
        return token_file

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder's name: workers map the files themselves, instead of copying the whole corpus."""
        if self.folder is None:
            return TokenFile, (self.tokens, self.ends, self.about)
        return TokenFile.read, (self.folder,)

    def document(self, number: int) -> np.ndarray:
        return self.tokens[self.ends[number - 1] if number else 0 : self.ends[number]]

    def __len__(self) -> int:
        return len(self.ends)


def write_token_file(
    folder: str | Path,
    documents: Iterable[Sequence[int] | np.ndarray],
    vocab_size: int,
    fingerprint: str,
    counts: Mapping[str, int] | None = None,
) -> TokenFile:
    """Write documents as they come, and rename the folder once it is complete.

    Another process may write the same folder at the same time. If the fingerprints are equal, the first one stays.

    Args:
        counts: numbers for about.json; they may change while documents are read.
    """
    folder = Path(folder)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    total = count = 0
    with temporary_folder_beside(folder) as unfinished:
        with open(unfinished / "tokens.bin", "wb") as tokens, open(unfinished / "ends.bin", "wb") as ends:
            for ids in documents:
                if len(ids) == 0:
                    continue
                total, count = total + len(ids), count + 1
                tokens.write(np.asarray(ids, dtype).tobytes())
                ends.write(np.int64(total).tobytes())
        if count == 0:
            raise InputError(f"there is no text for {folder}: every document is empty")
        about = {"fingerprint": fingerprint, "dtype": np.dtype(dtype).name, "tokens": total, "documents": count}
        about |= counts or {}
        (unfinished / "about.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
        if TokenFile.read_if_same(folder, fingerprint) is None:
            with suppress(FileNotFoundError):
                os.replace(folder, unfinished.with_name(f"{folder.name}.old"))
            rename_unless_taken(unfinished, folder)
    return TokenFile.read(folder)


@contextmanager
def temporary_folder_beside(folder: Path) -> Iterator[Path]:
    """Give a new folder on the same disk, for this process alone; it is deleted at the end unless it was renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = "_unfinished-"  # push_to_hub ignores names that start with an underscore
    with TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as parent:
        unfinished = Path(parent) / folder.name  # the parent can be read by its owner only, this folder by others
        unfinished.mkdir()
        yield unfinished


def rename_unless_taken(unfinished: Path, folder: Path) -> None:
    """Rename a folder. Do nothing if another process has created it meanwhile: its content is the same."""
    try:
        os.replace(unfinished, folder)
    except OSError as error:
        name_exists = (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES)  # EACCES on Windows
        if error.errno not in name_exists or not folder.is_dir():
            raise
