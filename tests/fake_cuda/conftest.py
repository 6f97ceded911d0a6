"""These tests run in a process of their own, in which load_guard.py was imported before torch.

tests/test_fake_cuda.py starts it. Other processes collect nothing. To run some of the tests:

    PYTHONPATH=tests/fake_cuda python -m pytest -p load_guard tests/fake_cuda -k "triton and training"
"""

import sys

import pytest

IS_SIMULATED = "load_guard" in sys.modules
collect_ignore_glob = [] if IS_SIMULATED else ["test_*.py"]  # files that are named are collected all the same


def pytest_runtest_setup():
    if not IS_SIMULATED:
        pytest.skip("no simulated GPU: run tests/test_fake_cuda.py, or see tests/fake_cuda/conftest.py")
