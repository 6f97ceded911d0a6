"""Perplexity of texts under a causal language model, by overlapping windows."""

import math

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_deberta.model.losses import cross_entropy_per_item
from hf_deberta.pretraining.packing import TokenRows


def perplexity_of_documents(
    model: PreTrainedModel, rows: TokenRows, stride: int, words: int, text_bytes: int
) -> dict[str, float]:
    """Return the perplexity per token and per word, and bits per byte, of whole documents.

    Each document is one sequence, `[CLS] document [SEP]`. Everything after [CLS] is predicted, once, with at least
    `rows.length - stride` tokens of context from the same document where it has so many. All three numbers come from
    the same sum of losses: per token (with the end of each document), per word between white space, per byte of UTF-8.

    >>> perplexity_of_documents(model, rows, stride=256, *corpus.text_size("test"))
    {'token_perplexity': 31.2, 'word_perplexity': 58.9, 'bits_per_byte': 1.07}
    """
    total, tokens = 0.0, 0
    for number in range(len(rows.tokens)):
        ids = np.concatenate([rows.cls, rows.tokens.document(number), rows.sep]).astype(np.int64)
        loss, scored = strided_loss(model, torch.from_numpy(ids), rows.length, stride)
        total, tokens = total + loss, tokens + scored
    return {
        "token_perplexity": math.exp(min(total / tokens, 700)),
        "word_perplexity": math.exp(min(total / max(words, 1), 700)),  # a text of one word in many tokens overflows
        "bits_per_byte": total / math.log(2) / text_bytes,
    }


@torch.no_grad()
def strided_loss(model: PreTrainedModel, ids: torch.Tensor, length: int, stride: int) -> tuple[float, int]:
    """Return the sum of the losses over a sequence of tokens [T], and how many of them are scored.

    Windows of `length` tokens advance by `stride`. Each window scores the tokens that no earlier window scored, so a
    token has at least `length - stride` tokens of context, except in the first window. The very first token has no
    context and is not scored; with `stride == length` that is true of each window's first token.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"the stride must be from 1 to the length of a window, {length}, not {stride}")
    ids, training = ids.to(model.device), model.training
    model.eval()
    total, scored, last_end = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        first = max(last_end, begin + 1)  # the first token to score, by the logits before it
        if first < end:
            logits = model(input_ids=ids[None, begin:end]).logits[0, first - begin - 1 : -1]
            total += float(cross_entropy_per_item(logits, ids[first:end]).sum())
            scored += end - first
        last_end = end
        if end == len(ids):
            break
    model.train(training)
    return total, scored
