"""These tests run in a process of their own, in which load_guard.py was imported before torch.

`make test-fake-cuda` starts it, and tests/test_fake_cuda.py in `make test`. Other processes collect nothing.
"""

import sys

if "load_guard" not in sys.modules:
    collect_ignore_glob = ["test_*.py"]
