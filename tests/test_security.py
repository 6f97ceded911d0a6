"""SECURITY.md names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file, test", NAMED, ids=[test for _, test in NAMED])
def test_each_promise_has_its_test(file, test):
    assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


def test_promises_are_found():
    assert len(NAMED) >= 15
