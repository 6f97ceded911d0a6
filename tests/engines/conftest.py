"""Fixtures of the engines' tests: products of oneDNN on any processor, and warnings that name a backend."""

import logging

import pytest
import transformers

from hf_deberta.engines import onednn


@pytest.fixture
def onednn_products(monkeypatch):
    """Prefer oneDNN on any processor; return a list that grows with each product of oneDNN."""
    products, product = [], onednn.onednn_linear
    monkeypatch.setattr(onednn, "prefers_onednn", onednn.has_onednn_linear)
    monkeypatch.setattr(onednn, "onednn_linear", lambda *matrices: products.append(matrices) or product(*matrices))
    return products


@pytest.fixture
def sdpa_warnings(caplog):
    """Return a function that returns the messages so far that name the backend sdpa."""
    transformers.utils.logging.enable_propagation()
    logging.Logger.warning_once.cache_clear()
    caplog.set_level("WARNING")
    return lambda: [record.message for record in caplog.records if "sdpa" in record.message]
