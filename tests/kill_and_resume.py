"""Run scripts that are killed, interrupted or out of disk space. Imports everything once; each run is a fork.

    python tests/kill_and_resume.py SCRIPT ...

`Forks` starts this file. It reads one run per line from standard input, a JSON object: script, flags, and perhaps
`delay` (seconds until it gets the signal `signal`), `checkpoint` (a folder: the signal comes as soon as it exists) and
`limit` (size of the largest file that may be written). It answers with an object per line: status (negative: killed by
this signal), seconds, and output.

>>> with Forks("run_glue.py") as forks:
...     forks.run("run_glue.py", ["--output_dir", "out"], signal=signal.SIGKILL, delay=2.0)
"""

import contextlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from hf_deberta_command import import_command


class Forks:
    """This file in a process of its own, which imports the scripts."""

    def __init__(self, *scripts: str, **environment: str) -> None:
        root = Path(__file__).parents[1]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), **environment}
        command, pipe = [sys.executable, __file__, *scripts], subprocess.PIPE
        self.process: Any = subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout.readline() == "ready\n"

    def run(self, script: Path | str, flags: list[str], **order: Any) -> dict[str, Any]:
        order = {"script": str(script), "flags": flags, **order}
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(60)


def fork(run: dict[str, Any], output: int) -> int:
    """Start the script in another process, and return its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(output, stream)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs and nohup ignore these two
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if "limit" in run:
            resource.setrlimit(resource.RLIMIT_FSIZE, (run["limit"], run["limit"]))
        sys.argv = [run["script"], *run["flags"]]
        runpy.run_path(run["script"], run_name="__main__")
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
        print(stop.code, file=sys.stderr)
    except KeyboardInterrupt:  # before the script began
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def run(order: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    begin, output = time.monotonic(), b""
    process = fork(order, writer)
    os.close(writer)
    checkpoint = Path(order["checkpoint"]) if "checkpoint" in order else None
    number, deadline = order.get("signal"), begin + order.get("delay", 300)
    ended = 0
    while not ended:
        ended, status = os.waitpid(process, os.WNOHANG)
        with contextlib.suppress(BlockingIOError):
            output = (output + os.read(reader, 2**16))[-4000:]
        if not ended and (time.monotonic() > deadline or (checkpoint is not None and checkpoint.exists())):
            os.kill(process, number or signal.SIGKILL)
            # a run that ignores the signal fails the test by its other status
            number, deadline, checkpoint = signal.SIGKILL, time.monotonic() + 20, None
        time.sleep(0.001)
    os.close(reader)
    status = os.waitstatus_to_exitcode(status)
    return {"status": status, "seconds": time.monotonic() - begin, "output": output.decode(errors="replace")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for script in sys.argv[1:]:
        import_command(Path(script).stem.removeprefix("run_"))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
