"""Run the tests of tests/fake_cuda, and count a layer's calls, in processes with a simulated CUDA device."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from guard import GuardError, build_library

FOLDER = Path(__file__).with_name("fake_cuda")
# backend, case -> calls of Python in a layer, in each of the MODES. BERT has 372
MOST_CALLS = {
    ("sdpa", "plain"): (440, 445, 445),
    ("sdpa", "padded"): (445, 450, 450),
    ("triton", "plain"): (440, 560, 560),
    ("triton", "padded"): (440, 560, 560),
}
MOST_LAUNCHES = (15, 59, 91)  # of PyTorch in a layer with the Triton kernels. BERT has 12, 42, 76
MODES = ("eval", "training", "autocast")


def run_python(*arguments: str) -> str:
    """Return what a Python process with tests/fake_cuda in its path prints."""
    pytest.importorskip("triton")
    try:
        build_library()
    except GuardError as error:
        pytest.skip(str(error))
    paths = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    ran = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_in_a_process_with_a_simulated_gpu():
    plugins = ["-p", "load_guard", "-p", "no:cacheprovider", "-p", "no:xdist"]
    output = run_python("-m", "pytest", str(FOLDER), *plugins)
    assert int(re.search(r"(\d+) passed", output)[1]) > 100


@pytest.mark.slow
def test_python_calls_and_launches_of_a_layer(tmp_path):
    """Small batches on a GPU wait for Python. Lower a limit when a change needs fewer calls."""
    run_python(str(FOLDER / "host_time.py"), "--seconds", "0", "--csv", str(tmp_path / "counts.csv"))
    with (tmp_path / "counts.csv").open() as file:
        rows = {(row["peer"], row["case"], row["mode"]): row for row in csv.DictReader(file)}
    for kind, limits in MOST_CALLS.items():
        counts = tuple(int(rows[*kind, mode]["python_calls"]) for mode in MODES)
        assert all(count <= limit for count, limit in zip(counts, limits, strict=True)), (kind, counts)
    for case in ("plain", "padded"):
        counts = tuple(int(rows["triton", case, mode]["launches"]) for mode in MODES)
        assert all(count <= limit for count, limit in zip(counts, MOST_LAUNCHES, strict=True)), (case, counts)
