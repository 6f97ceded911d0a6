"""Processes that contend for one folder and are killed at random: one at a time works there, and none locks it out."""

import fcntl
import os
import random
import signal
import time
from pathlib import Path
from typing import TextIO

from fault_cases import SEED, number_of_cases

from hf_deberta.training.errors import InputError
from hf_deberta.training.run_lock import lock_folder

PROCESSES = 3
HELD = 0.004  # seconds that a run works


def contend(folder: Path, seed: int) -> None:
    """Run again and again in the folder; exit with 1 if another run is at work there at the same time."""
    rng = random.Random(seed)
    with open(folder / "runs", "a", buffering=1) as runs:  # a killed process closes it, and unlocks it, before its lock
        while True:
            try:
                with lock_folder(folder / "out"):
                    work(runs, rng)
            except InputError as error:
                if "a run is at work in" not in str(error):
                    os._exit(2)
            time.sleep(rng.random() * HELD)


def work(runs: TextIO, rng: random.Random) -> None:
    try:
        fcntl.flock(runs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os._exit(1)
    time.sleep(rng.random() * HELD)
    runs.write("x\n")
    fcntl.flock(runs, fcntl.LOCK_UN)


def start(folder: Path, seed: int) -> int:
    process = os.fork()
    if process == 0:
        try:
            contend(folder, seed)
        finally:
            os._exit(3)
    return process


def test_contending_processes_that_are_killed(tmp_path):
    rng, kills = random.Random(SEED), number_of_cases(15, 400)
    running = [start(tmp_path, SEED + number) for number in range(PROCESSES)]
    try:
        for kill in range(kills):
            time.sleep(rng.random() * 0.02)
            process = running.pop(rng.randrange(PROCESSES))
            os.kill(process, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(process, 0)[1]), f"two runs at once, FAULTS_SEED={SEED}"
            running.append(start(tmp_path, SEED + PROCESSES + kill))
    finally:
        for process in running:
            os.kill(process, signal.SIGKILL)
        statuses = [os.waitpid(process, 0)[1] for process in running]
    assert all(os.WIFSIGNALED(status) for status in statuses)
    with lock_folder(tmp_path / "out"):
        runs = len((tmp_path / "runs").read_text().split())
    assert runs > kills / 10
