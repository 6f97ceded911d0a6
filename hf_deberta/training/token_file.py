"""A corpus as token ids on disk, tokenised once.

    folder/tokens.bin     ids of all documents, one after the other, without special tokens
    folder/ends.bin       where each document ends
    folder/about.json     what it was made of; written last, so a folder without it is not whole

Both arrays are memory-mapped: a corpus may be larger than the memory, and processes and workers share its pages.
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
    """Write documents as they come, beside the folder first; it appears under its name when it is whole."""
    folder = Path(folder)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    total = count = 0
    with open(unfinished / "tokens.bin", "wb") as tokens, open(unfinished / "ends.bin", "wb") as ends:
        for ids in documents:
            if len(ids) == 0:
                continue
            total, count = total + len(ids), count + 1
            tokens.write(np.asarray(ids, dtype).tobytes())
            ends.write(np.int64(total).tobytes())
    if count == 0:
        shutil.rmtree(unfinished)
        raise ValueError("there is no text in the corpus: every document is empty")
    about = {**about, "dtype": np.dtype(dtype).name, "tokens": total, "documents": count}
    (unfinished / "about.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    return TokenFile.read(folder)
