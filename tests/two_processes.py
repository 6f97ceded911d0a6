"""Two connected processes for a test, forked by its file, which runs as a script and imports everything once.

>>> def one_of_two(rank, folder): ...
>>> def test_two_processes(tmp_path):
...     run_script(__file__, tmp_path)
>>> if __name__ == "__main__":
...     fork_two(one_of_two)
"""

import faulthandler
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

TESTS = Path(__file__).parent
TIMEOUT = 300  # seconds


def run_script(file: str, folder: Path) -> None:
    """Run a test file as a script with the folder as its argument; fail with its last lines if it fails."""
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, file, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]


def fork_two(work: Callable[[int, Path], None]) -> None:
    """Call `work` with the rank and the folder of the command line in two processes, which can find each other."""
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    arguments = (work, Path(sys.argv[1]), port)
    torch.multiprocessing.start_processes(_connect, arguments, nprocs=2, start_method="fork")


def _connect(rank: int, work: Callable[[int, Path], None], folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    faulthandler.dump_traceback_later(TIMEOUT - 60, exit=True)
    work(rank, folder)
    faulthandler.cancel_dump_traceback_later()
