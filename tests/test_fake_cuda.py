"""Run the tests of tests/fake_cuda in a process with a simulated CUDA device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from guard import GuardError, build_guard

FOLDER = Path(__file__).with_name("fake_cuda")


@pytest.mark.slow
def test_in_a_process_with_a_simulated_gpu():
    pytest.importorskip("triton")
    try:
        build_guard()
    except GuardError as error:
        pytest.skip(str(error))
    paths = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    plugins = ["-p", "load_guard", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", str(FOLDER), *plugins],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(re.search(r"(\d+) passed", ran.stdout)[1]) > 100
