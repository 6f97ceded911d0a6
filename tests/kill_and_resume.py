"""Run scripts to their end, and again with a kill at a checkpoint and a second start. Run as a program of its own.

    python tests/kill_and_resume.py checkpoint-6 RUNS.json

RUNS.json holds a list of objects: script, folder, flags. The output directories are folder/whole and folder/killed, and
folder/after_kill.txt lists the content of the latter after the kill. Each run is a fork of this process, so that
everything is imported once.
"""

import json
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
    checkpoint, runs = sys.argv[1:]
    for run in json.loads(Path(runs).read_text(encoding="utf-8")):
        script, flags, folder = run["script"], run["flags"], Path(run["folder"])
        run_to_the_end(script, flags, folder / "whole")
        run_until(folder / "killed" / checkpoint, script, flags, folder / "killed")
        names = sorted(path.name for path in (folder / "killed").iterdir())
        (folder / "after_kill.txt").write_text("\n".join(names), encoding="utf-8")
        run_to_the_end(script, flags, folder / "killed")
