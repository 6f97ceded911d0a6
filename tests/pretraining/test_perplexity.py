"""Strided perplexity is that of a plain loop over tokens, each with the context its window gives it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numerics import tiny_model

from hf_deberta import HfDebertaForCausalLM
from hf_deberta.pretraining.packing import TokenRows
from hf_deberta.pretraining.perplexity import perplexity_of_documents, strided_loss
from hf_deberta.pretraining.token_file import TokenFile

IDS = torch.randint(1, 128, (23,), generator=torch.Generator().manual_seed(0))


def by_hand(model, ids, length, stride):
    """Token by token: the first window that holds it and something before it says how likely it is."""
    losses, scored = [], set()
    for begin in range(0, len(ids), stride):
        for token in range(begin + 1, min(begin + length, len(ids))):
            if token not in scored:
                scored.add(token)
                logits = model(input_ids=ids[None, begin:token]).logits[0, -1]
                losses.append(-float(logits.log_softmax(-1)[ids[token]]))
    return losses


@pytest.mark.parametrize("length, stride", [(8, 3), (8, 8), (8, 1), (11, 11), (23, 4), (30, 30), (2, 1)])
@torch.no_grad()
def test_it_is_that_of_single_tokens(length, stride):
    model = tiny_model(HfDebertaForCausalLM, conv_kernel_size=0).eval()
    losses = by_hand(model, IDS, length, stride)
    assert strided_loss(model, IDS, length, stride) == (pytest.approx(sum(losses), rel=1e-5), len(losses))


def test_it_leaves_the_model_as_it_was(monkeypatch):
    monkeypatch.setattr(torch, "float64", "unknown to Apple's GPUs")
    model = tiny_model(HfDebertaForCausalLM, conv_kernel_size=0, hidden_dropout_prob=0.1)
    found = strided_loss(model, IDS, 8, 4)
    assert model.training and found == strided_loss(model, IDS, 8, 4)
    model.eval()
    strided_loss(model, IDS, 8, 4)
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("stride", [0, 9])
def test_a_stride_that_leaves_tokens_out(stride):
    with pytest.raises(ValueError, match=f"from 1 to the length of a window, 8, not {stride}"):
        strided_loss(tiny_model(HfDebertaForCausalLM, conv_kernel_size=0), IDS, 8, stride)


@pytest.mark.parametrize("stride", [1, 5, 8])
def test_documents_are_predicted_whole_and_once(stride):
    """Token by token: [CLS] is given, the words and [SEP] are predicted, in windows of 9 that overlap."""
    model = tiny_model(HfDebertaForCausalLM, conv_kernel_size=0)
    documents = [np.arange(10, 33), np.arange(40, 44)]
    tokens = TokenFile(np.concatenate(documents), np.array([23, 27]), {})
    special = SimpleNamespace(cls_token_id=1, sep_token_id=2, pad_token_id=0)
    rows = TokenRows(tokens, special, 10, masking=None)
    rows.length = 9  # TokenRows needs 10
    losses = []
    for document in documents:
        losses += by_hand(model, torch.tensor([1, *document.tolist(), 2]), 9, stride)
    assert len(losses) == 23 + 4 + 2
    metrics = perplexity_of_documents(model, rows, stride, words=11, text_bytes=90)
    assert metrics["token_perplexity"] == pytest.approx(math.exp(sum(losses) / 29))
    assert metrics["word_perplexity"] == pytest.approx(math.exp(sum(losses) / 11))
    assert metrics["bits_per_byte"] == pytest.approx(sum(losses) / math.log(2) / 90)
