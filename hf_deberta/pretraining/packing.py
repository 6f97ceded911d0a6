"""Rows of full length, cut from a token file.

A row is a number of pieces, each `[CLS] piece [SEP]`, from documents in order. Documents that do not fit are cut and go
on in the next row. Position ids restart with each piece, which is how the models know that pieces do not see one
another.
"""

from array import array

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_deberta.model.batch_loss import IGNORED
from hf_deberta.pretraining.masking import Masking
from hf_deberta.pretraining.token_file import TokenFile

LEAST_PIECE = 8  # tokens of a document for which it is begun at the end of a row


def packed_rows(ends: np.ndarray, length: int) -> np.ndarray:
    """Where each row of `length` tokens begins: document and token within it, [R, 2]."""
    sizes = np.diff(ends, prepend=0)
    after = np.cumsum(sizes + 2)  # with [CLS] and [SEP]
    rows, document, offset = array("q"), 0, 0
    while document < len(ends):
        rows.extend((document, offset))
        rest = int(sizes[document]) - offset
        if rest > length - 2:
            offset += length - 2
            continue
        room = length - 2 - rest
        first = document + 1
        document = int(np.searchsorted(after, after[first - 1] + room, side="right"))
        room -= int(after[document - 1] - after[first - 1])
        offset = room - 2 if room - 2 >= LEAST_PIECE and document < len(ends) else 0
    return np.frombuffer(rows, dtype=np.int64).reshape(-1, 2)


def single_rows(ends: np.ndarray, length: int) -> np.ndarray:
    """The same for rows that hold one document, or a piece of one, each: [R, 2]."""
    sizes = np.diff(ends, prepend=0)
    pieces = -(-sizes // (length - 2))
    documents = np.repeat(np.arange(len(ends)), pieces)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.stack([documents, number * (length - 2)], axis=1)


def check_rows(tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    if length < LEAST_PIECE + 2:
        raise ValueError(f"a row needs {LEAST_PIECE + 2} tokens at least, not {length}")
    missing = [n for n in ("cls_token", "sep_token", "pad_token") if getattr(tokenizer, f"{n}_id") is None]
    if missing:
        raise ValueError(f"rows need a tokenizer with {', '.join(missing)}, which this one has not; give it one")


class Rows(torch.utils.data.Dataset):
    """Rows of a corpus, masked anew in each epoch.

    An index counts through the epochs: `index = epoch * len(rows) + row`, so a sampler says which epoch it is, and
    what comes out is the same in any worker. Without `masking`, labels are the ids, for causal language models.

    >>> rows = Rows(TokenFile.read("my-tokens"), tokenizer, length=512, masking=Masking(Vocabulary.of(tokenizer)))
    >>> rows[0].keys()
    dict_keys(['input_ids', 'labels', 'position_ids'])
    """

    def __init__(
        self,
        tokens: TokenFile,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        masking: Masking | None,
        pack: bool = True,
        seed: int = 0,
    ):
        check_rows(tokenizer, length)
        self.tokens, self.length, self.masking, self.pack, self.seed = tokens, length, masking, pack, seed
        self.first, self.last = np.array([[tokenizer.cls_token_id], [tokenizer.sep_token_id]])
        self.padding = tokenizer.pad_token_id
        self.rows = (packed_rows if pack else single_rows)(tokens.ends, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, row = divmod(index, len(self.rows))
        pieces = self.pieces(row)
        ids = np.concatenate([part for piece in pieces for part in (self.first, piece, self.last)])
        places = np.concatenate([np.arange(len(piece) + 2) for piece in pieces])
        if self.masking is not None:
            masked, labels = self.masking(ids, (self.seed, epoch, row))
        else:  # nothing predicts the first token of a document
            masked, labels = ids, np.where(places == 0, IGNORED, ids)
        item = {"input_ids": masked, "labels": labels}
        if self.pack:
            item["position_ids"] = places
            item = {name: self.filled(name, value) for name, value in item.items()}
        return item

    def pieces(self, row: int) -> list[np.ndarray]:
        """The documents of a row, or what of them stands in it."""
        document, offset = self.rows[row].tolist()
        if not self.pack:
            return [self.tokens.document(document)[offset : offset + self.length - 2]]
        end, end_offset = self.rows[row + 1].tolist() if row + 1 < len(self.rows) else (len(self.tokens), 0)
        pieces = [self.tokens.document(number) for number in range(document, min(end + 1, len(self.tokens)))]
        if end < len(self.tokens):
            pieces[-1] = pieces[-1][:end_offset]
        pieces[0] = pieces[0][offset:]
        return [piece for piece in pieces if len(piece)]

    def context(self) -> float:
        """Tokens of the piece that a token stands in, on average."""
        sizes = np.diff(self.tokens.ends, prepend=0)
        whole, rest = np.divmod(sizes, self.length - 2)
        squares = (whole * self.length**2 + np.where(rest > 0, rest + 2, 0) ** 2).sum()
        return float(squares / (whole * self.length + np.where(rest > 0, rest + 2, 0)).sum())

    def filled(self, name: str, value: np.ndarray) -> np.ndarray:
        """To full length. What is left at the end of a row are documents of one padding token, seen by nobody."""
        fill = {"input_ids": self.padding, "labels": IGNORED, "position_ids": 0}[name]
        return np.concatenate([value, np.full(self.length - len(value), fill, dtype=np.int64)])


class RowCollator:
    """Rows [B, N] of tensors; rows of different length are padded to the longest and get an attention mask."""

    def __init__(self, padding: int, multiple_of: int | None = None):
        self.fill = {"input_ids": padding, "labels": IGNORED, "attention_mask": 0}
        self.multiple_of = multiple_of

    def __call__(self, rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        if "position_ids" in rows[0]:
            return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
        rows = [{**row, "attention_mask": np.ones_like(row["input_ids"])} for row in rows]
        length = max(len(row["input_ids"]) for row in rows)
        if self.multiple_of:
            length = -(-length // self.multiple_of) * self.multiple_of
        return {
            name: torch.from_numpy(np.stack([self.padded(name, row[name], length) for row in rows])) for name in rows[0]
        }

    def padded(self, name: str, value: np.ndarray, length: int) -> np.ndarray:
        return np.concatenate([value, np.full(length - len(value), self.fill[name], dtype=np.int64)])
