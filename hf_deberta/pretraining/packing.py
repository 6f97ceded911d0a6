"""Rows of full length, cut from a token file.

A row is a sequence of pieces, each `[CLS] piece [SEP]`, from documents in order. A document that does not fit is cut
and continues in the next row. Position ids restart with each piece: the models recognise document boundaries by them,
and there is no attention between pieces.
"""

from array import array
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_deberta.model.losses import IGNORED
from hf_deberta.pretraining.masking import Masking
from hf_deberta.pretraining.token_file import TokenFile
from hf_deberta.training.errors import InputError

MIN_PIECE = 8  # a document starts at the end of a row only if so many of its tokens fit


def packed_rows(ends: np.ndarray, length: int) -> np.ndarray:
    """Return where each row of `length` tokens begins: document and token within it, [R, 2]."""
    sizes = np.diff(ends, prepend=0)
    after = np.cumsum(sizes + 2)  # with [CLS] and [SEP]
    rows, document, offset = array("q"), 0, 0
    while document < len(ends):
        rows.extend((document, offset))
        remaining = int(sizes[document]) - offset
        if remaining > length - 2:
            offset += length - 2
            continue
        room = length - 2 - remaining
        first = document + 1
        document = int(np.searchsorted(after, after[first - 1] + room, side="right"))
        room -= int(after[document - 1] - after[first - 1])
        offset = room - 2 if room - 2 >= MIN_PIECE and document < len(ends) else 0
    return np.frombuffer(rows, dtype=np.int64).reshape(-1, 2)


def single_rows(ends: np.ndarray, length: int) -> np.ndarray:
    """Return the same for rows of one document, or one piece of a document, each: [R, 2]."""
    sizes = np.diff(ends, prepend=0)
    pieces = -(-sizes // (length - 2))
    documents = np.repeat(np.arange(len(ends)), pieces)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.stack([documents, number * (length - 2)], axis=1)


def check_rows(tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """Check that rows of this length can be made with the tokenizer's special tokens."""
    if length < MIN_PIECE + 2:
        raise InputError(f"--max_seq_length must be at least {MIN_PIECE + 2}, not {length}")
    missing = [n for n in ("cls_token", "sep_token", "pad_token") if getattr(tokenizer, f"{n}_id") is None]
    if missing:
        raise InputError(f"rows need a tokenizer with {', '.join(missing)}, which this one does not have")


class TokenRows(torch.utils.data.Dataset):
    """Rows of a corpus, masked differently in each epoch.

    An index counts through the epochs, `index = epoch * len(rows) + row`. So the sampler determines the epoch, and each
    worker returns the same row for an index. Without `masking`, labels are the ids, for causal language models.

    >>> masking = Masking(Vocabulary.from_tokenizer(tokenizer))
    >>> rows = TokenRows(TokenFile.read("my-tokens"), tokenizer, length=512, masking=masking)
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
        self.cls, self.sep = np.array([[tokenizer.cls_token_id], [tokenizer.sep_token_id]])
        self.pad_token_id = tokenizer.pad_token_id
        self.rows = (packed_rows if pack else single_rows)(tokens.ends, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, row = divmod(index, len(self.rows))
        pieces = self.pieces(row)
        ids = np.concatenate([part for piece in pieces for part in (self.cls, piece, self.sep)])
        positions = np.concatenate([np.arange(len(piece) + 2) for piece in pieces])
        if self.masking is not None:
            masked, labels = self.masking(ids, (self.seed, epoch, row))
        else:  # the first token of a document is not predicted
            masked, labels = ids, np.where(positions == 0, IGNORED, ids)
        if not self.pack:
            return {"input_ids": masked, "labels": labels}
        return {
            "input_ids": pad(masked, self.length, self.pad_token_id),
            "labels": pad(labels, self.length, IGNORED),
            "position_ids": pad(positions, self.length, 0),  # each padding token is a document of its own
        }

    def pieces(self, row: int) -> list[np.ndarray]:
        """Return the documents of a row, or their parts that are in the row."""
        document, offset = self.rows[row].tolist()
        if not self.pack:
            return [self.tokens.document(document)[offset : offset + self.length - 2]]
        end, end_offset = self.rows[row + 1].tolist() if row + 1 < len(self.rows) else (len(self.tokens), 0)
        pieces = [self.tokens.document(number) for number in range(document, min(end + 1, len(self.tokens)))]
        if end < len(self.tokens):
            pieces[-1] = pieces[-1][:end_offset]
        pieces[0] = pieces[0][offset:]
        return [piece for piece in pieces if len(piece)]

    def mean_context_length(self) -> float:
        """Return how many tokens of its own document a token has in its row, itself, [CLS] and [SEP] among them.

        This is the mean over all tokens: the longer a piece is, the more tokens have its length.
        """
        ends = self.tokens.ends
        documents, offsets = self.rows.T
        row_starts = np.append(0, ends)[documents] + offsets
        lengths = np.diff(np.union1d(row_starts, ends)) + 2
        return float((lengths**2).sum() / lengths.sum())


class RowCollator:
    """Stacks rows into tensors [B, N]; rows of different length are padded to the longest and get an attention mask.

    `max_predictions_per_row` spares `HfDebertaForMaskedLM` to read the labels of each batch. It is a multiple of
    N / 16, so that most batches have the same number and a compiled graph serves them all.
    """

    def __init__(self, pad_token_id: int):
        self.fill = {"input_ids": pad_token_id, "labels": IGNORED, "attention_mask": 0}

    def __call__(self, rows: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        if "position_ids" not in rows[0]:
            rows = [{**row, "attention_mask": np.ones_like(row["input_ids"])} for row in rows]
            length = max(len(row["input_ids"]) for row in rows)
            rows = [{name: pad(value, length, self.fill[name]) for name, value in row.items()} for row in rows]
        batch: dict[str, Any] = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
        return {**batch, "max_predictions_per_row": bound_of_predictions(batch["labels"])}


def bound_of_predictions(labels: torch.Tensor) -> int:
    """Return the largest number of labels in a row of labels [B, N], rounded up to a multiple of N / 16."""
    length = labels.shape[1]
    step = max(length // 16, 1)
    most = int((labels != IGNORED).sum(1).max())
    return min(-(-most // step) * step, length)


def pad(value: np.ndarray, length: int, fill: int) -> np.ndarray:
    return np.concatenate([value, np.full(length - len(value), fill, dtype=np.int64)])
