"""Result files, whose rows record machine, versions and date; peaks of memory; peers that fail."""

import csv
import ctypes
import datetime
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from table import RESULTS, read_rows

COUNTED_SECONDS = 1.0  # the counter of a GPU's energy moves some twenty times a second


def synchronize(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def start_counting(device: str) -> int:
    """Reset the peak; return the bytes that are held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if not Path("/proc/self/clear_refs").exists():
        raise SystemExit("this system has no /proc/self/clear_refs to measure the peak: use Linux or --device cuda")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return status("VmRSS")


def peak(device: str) -> int:
    """Return the largest number of bytes held since counting started."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM")


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    _, _, rest = Path("/proc/self/status").read_text().partition(f"{field}:")
    return 1024 * int(rest.split()[0])


def joules_per_call(call: Callable[[], object]) -> float:
    """Return the energy that the current GPU takes for a call, by two readings of its counter."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    handle, millijoules, readings = ctypes.c_void_p(), ctypes.c_ulonglong(), []
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) != 0:
        raise OSError("the driver does not know this GPU")
    calls, start = 0, time.perf_counter()
    for seconds in (0.0, COUNTED_SECONDS):
        while time.perf_counter() - start < seconds:
            call()
            torch.cuda.synchronize()
            calls += 1
        if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) != 0:
            raise OSError("this GPU has no counter of energy")
        readings.append(millijoules.value)
    return (readings[1] - readings[0]) / 1e3 / calls


@contextmanager
def report_failure(what: str) -> Iterator[None]:
    """Report any error, such as a missing package or too little memory, and continue."""
    try:
        yield
    except Exception as reason:
        print(f"{what} is skipped: {type(reason).__name__}: {str(reason)[-300:]}", flush=True)


def require_ours(peers: Collection[str], measured: Collection[str]) -> None:
    """Exit with an error if a peer of ours was skipped."""
    if missing := [peer for peer in peers if "ours" in peer and peer not in measured]:
        raise SystemExit(f"skipped: {', '.join(missing)}")


def in_new_process(script: str, *flags: object) -> str:
    """Run a script with these flags in a process of its own; return the last line that it prints."""
    command = [sys.executable, script, *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def environment(device: str = "cpu") -> dict[str, str]:
    """Return date, machine and versions, the columns that every result file ends with."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {torch.get_num_threads()} threads"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor() -> str:
    """Return the processor's name with its family and model, or what the system reports in its place.

    In virtual machines several generations of processors may have the same name.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    first = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    if "model name" not in first:
        return platform.processor() or platform.machine()
    return f"{first['model name']} (family {first.get('cpu family')}, model {first.get('model')})"


def write_rows(path: Path, rows: list[dict], key: tuple[str, ...]) -> None:
    """Add rows to a result file. They replace earlier rows with the same values in the columns `key`."""
    new = {tuple(str(row[column]) for column in key) for row in rows}
    recorded = read_rows(path)
    others = [row for row in recorded if tuple(row.get(column, "") for column in key) not in new]
    columns = dict.fromkeys(name for row in (*recorded, *rows) for name in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(others + rows)
    os.replace(unfinished, path)


def record(file_name: str, rows: list[dict], key: tuple[str, ...], device: str = "cpu") -> None:
    """Write rows with date, machine and versions; they replace those of the same machine and values of `key`."""
    write_rows(RESULTS / file_name, [{**row, **environment(device)} for row in rows], (*key, "machine"))


def record_runs(
    file_name: str, runs: list[dict[str, str]], measure: Callable[[dict[str, str]], list[dict[str, str]]], again: bool
) -> None:
    """Measure the runs that a result file lacks and add their rows; print how many it has, of which date and machine.

    A run is the values of the columns that name it; `measure` returns its other columns, for each `step` if there are
    several. With `again` all runs are measured: new values are printed beside the recorded ones, which the file keeps.
    """
    rows = read_rows(RESULTS / file_name)
    recorded = [[row for row in rows if run.items() <= row.items()] for run in runs]
    origins = Counter(f"{earlier[0]['date']} on {earlier[0]['machine']}" for earlier in recorded if earlier)
    for origin, count in origins.items():
        print(f"{count} runs {'repeated' if again else 'skipped'}, recorded {origin}", flush=True)
    for run, earlier in zip(runs, recorded, strict=True):
        if earlier and not again:
            continue
        measured = measure(run)
        if not earlier:
            write_rows(RESULTS / file_name, [{**run, **values, **environment()} for values in measured], tuple(run))
        for values in measured:
            old = next((row for row in earlier if row.get("step") == values.get("step")), {})
            note = " (recorded {})" if old else ""
            cells = (f"{name} {value}{note.format(old.get(name))}" for name, value in values.items())
            print(f"{', '.join(run.values())}: {', '.join(cells)}", flush=True)
