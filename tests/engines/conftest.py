"""Fixtures of the engines' tests: products of oneDNN on any processor, and warnings that name a backend."""

import pytest

from hf_deberta.engines import onednn


@pytest.fixture
def onednn_products(monkeypatch):
    """Prefer oneDNN on any processor; return a list that grows with each product of oneDNN."""
    products, product = [], onednn.onednn_linear
    monkeypatch.setattr(onednn, "prefers_onednn", onednn.has_onednn_linear)
    monkeypatch.setattr(onednn, "onednn_linear", lambda *matrices: products.append(matrices) or product(*matrices))
    return products


@pytest.fixture
def sdpa_warnings(warnings_so_far):
    """Return a function that returns the messages so far that name the backend sdpa."""
    return lambda: [message for message in warnings_so_far() if "sdpa" in message]
