"""These tests run in a process of their own, in which load_guard.py was imported before torch.

tests/test_fake_cuda.py starts it. Other processes collect nothing. To run some of the tests:

    PYTHONPATH=tests/fake_cuda python -m pytest -p load_guard tests/fake_cuda -k "triton and training"
"""

import sys

if "load_guard" not in sys.modules:
    collect_ignore_glob = ["test_*.py"]
