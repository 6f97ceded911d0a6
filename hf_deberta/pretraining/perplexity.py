"""Perplexity of a long text under a causal language model, by overlapping windows."""

import math

import torch
from transformers import PreTrainedModel

from hf_deberta.model.batch_loss import cross_entropy_per_item


@torch.no_grad()
def strided_perplexity(model: PreTrainedModel, ids: torch.Tensor, length: int, stride: int) -> float:
    """Return exp of the mean loss over a sequence of tokens [T].

    Windows of `length` tokens advance by `stride`. Each window scores the tokens that no earlier window scored, so a
    token has at least `length - stride` tokens of context, except in the first window. The very first token has no
    context and is not scored; with `stride == length` that is true of each window's first token.

    >>> strided_perplexity(model, tokenizer(text, return_tensors="pt").input_ids[0], length=512, stride=256)
    """
    check_windows(ids, length, stride)
    ids, training = ids.to(model.device), model.training
    model.eval()
    total, scored, seen = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        first = max(seen, begin + 1)  # the first token to score, by the logits before it
        if first < end:
            logits = model(input_ids=ids[None, begin:end]).logits[0, first - begin - 1 : -1]
            total += float(cross_entropy_per_item(logits, ids[first:end]).sum(dtype=torch.float64))
            scored += end - first
        seen = end
        if end == len(ids):
            break
    model.train(training)
    return math.exp(total / scored)


def check_windows(ids: torch.Tensor, length: int, stride: int) -> None:
    if ids.dim() != 1 or len(ids) < 2:
        raise ValueError(f"ids must be one sequence [T] of at least 2 tokens, not {tuple(ids.shape)}")
    if length < 2 or not 1 <= stride <= length:
        raise ValueError(
            "a window needs a length of at least 2 and a stride from 1 to its length, not "
            f"length {length}, stride {stride}"
        )
