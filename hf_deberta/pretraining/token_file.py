"""A corpus as token ids on disk, tokenised once.

    folder/tokens.bin     ids of all documents, one after the other, without special tokens
    folder/ends.bin       where each document ends
    folder/about.json     what it was made of; written last, so a folder without it is not whole

Both arrays are memory-mapped: a corpus may be larger than the memory, and processes and workers share its pages.
A writer that is killed leaves a folder `_unfinished-...` beside, which may be deleted.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np


@dataclass(frozen=True)
class TokenFile:
    """Token ids of a corpus, document by document.

    >>> tokens = TokenFile.read("my-tokens")
    >>> tokens.document(0)
    array([ 812,   17, 3301], dtype=uint16)
    """

    tokens: np.ndarray  # [T]
    ends: np.ndarray  # [D] int64
    about: dict
    folder: Path | None = None

    @classmethod
    def read(cls, folder: str | Path) -> "TokenFile":
        folder = Path(folder)
        try:
            about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(f"{folder} holds no whole token file: there is no about.json in it") from None
        tokens, ends = folder / "tokens.bin", folder / "ends.bin"
        sizes = about["tokens"] * np.dtype(about["dtype"]).itemsize, about["documents"] * 8
        if (tokens.stat().st_size, ends.stat().st_size) != sizes:
            raise ValueError(f"{folder} is damaged: tokens.bin and ends.bin must have {sizes} bytes; make it anew")
        return cls(np.memmap(tokens, about["dtype"], "r"), np.memmap(ends, np.int64, "r"), about, folder)

    @classmethod
    def kept(cls, folder: str | Path, made_of: str) -> "TokenFile | None":
        """That of a folder, if there is a whole one that says it was made of this."""
        about = Path(folder) / "about.json"
        if not about.exists() or json.loads(about.read_text(encoding="utf-8")).get("made_of") != made_of:
            return None
        return cls.read(folder)

    def __reduce__(self) -> tuple:
        """Workers map the files themselves; a copy of an array would be the whole corpus."""
        if self.folder is None:
            return TokenFile, (self.tokens, self.ends, self.about)
        return TokenFile.read, (self.folder,)

    def document(self, number: int) -> np.ndarray:
        return self.tokens[self.ends[number - 1] if number else 0 : self.ends[number]]

    def __len__(self) -> int:
        return len(self.ends)


def write_token_file(folder: str | Path, documents: Iterable[list[int]], vocab_size: int, about: dict) -> TokenFile:
    """Write documents as they come, beside the folder first; it appears under its name when it is whole.

    Another process may write the same (`about["made_of"]`) at the same time: what is whole first, stays.
    """
    folder = Path(folder)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    total = count = 0
    with unfinished_beside(folder) as unfinished:
        with open(unfinished / "tokens.bin", "wb") as tokens, open(unfinished / "ends.bin", "wb") as ends:
            for ids in documents:
                if len(ids) == 0:
                    continue
                total, count = total + len(ids), count + 1
                tokens.write(np.asarray(ids, dtype).tobytes())
                ends.write(np.int64(total).tobytes())
        if count == 0:
            raise ValueError("there is no text in the corpus: every document is empty")
        about = {**about, "dtype": np.dtype(dtype).name, "tokens": total, "documents": count}
        (unfinished / "about.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
        if "made_of" not in about or TokenFile.kept(folder, about["made_of"]) is None:
            with suppress(FileNotFoundError):
                os.replace(folder, unfinished.with_name(f"{folder.name}.old"))
            rename_atomically(unfinished, folder)
    return TokenFile.read(folder)


@contextmanager
def unfinished_beside(folder: Path) -> Iterator[Path]:
    """A new folder on the same disk, for this process alone; in the end what is left of it goes away."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = "_unfinished-"  # push_to_hub leaves out what begins so
    with TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as beside:
        unfinished = Path(beside) / folder.name  # the outer one is for its owner's eyes only
        unfinished.mkdir()
        yield unfinished


def rename_atomically(unfinished: Path, folder: Path) -> None:
    """Rename, unless another process has been first: what it made is as good."""
    try:
        os.replace(unfinished, folder)
    except OSError as error:
        taken = (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES)  # the last is what Windows says
        if error.errno not in taken or not folder.is_dir():
            raise
