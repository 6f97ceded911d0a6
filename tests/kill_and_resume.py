"""Run a script to its end, and again with a kill at a checkpoint and a second start. Run as a program of its own.

    python tests/kill_and_resume.py run_mlm.py FOLDER checkpoint-6 FLAGS

FOLDER/whole and FOLDER/killed are the output directories. Each run is a fork of this process, so that everything is
imported once.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch

from hf_deberta.pretraining import arguments, language_model_trainer, rtd_trainer  # noqa: F401


def fork(script: str, flags: list[str], output_dir: Path) -> int:
    """Start the script in another process, and return its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        sys.argv = [script, *flags, "--output_dir", str(output_dir)]
        runpy.run_path(script, run_name="__main__")
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def run_to_the_end(script: str, flags: list[str], output_dir: Path) -> None:
    _, status = os.waitpid(fork(script, flags, output_dir), 0)
    if status:
        raise SystemExit(f"{script} failed in {output_dir}")


def run_until(checkpoint: Path, script: str, flags: list[str], output_dir: Path) -> None:
    """Kill the script as soon as the checkpoint exists."""
    process, deadline = fork(script, flags, output_dir), time.monotonic() + 120
    while not checkpoint.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{checkpoint} was not written in time")
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit(f"{script} ended before it was killed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    script, folder, checkpoint, *flags = sys.argv[1:]
    whole, killed = Path(folder) / "whole", Path(folder) / "killed"
    run_to_the_end(script, flags, whole)
    run_until(killed / checkpoint, script, flags, killed)
    print(*sorted(path.name for path in killed.iterdir()))
    run_to_the_end(script, flags, killed)
