"""Comparable measurements: peers take turns, medians count, and each row records machine, versions and date."""

import csv
import ctypes
import datetime
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
import transformers
from table import RESULTS, read_rows

COUNTED_SECONDS = 2.0  # the counter of a GPU's energy moves some twenty times a second


def median_times(
    peers: Mapping[str, Callable[[], object]], repeats: int, device: str = "cpu", calls: int = 1
) -> dict[str, float]:
    """Return the median milliseconds of each peer's calls. Peers take turns; one warm-up round is not counted.

    Of several `calls` in a turn, the last counts: threads of one runtime wait for work for a while, and keep cores
    busy, while a peer with another one begins.
    """
    times: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(repeats + 1):
        for name, call in peers.items():
            for _ in range(calls - 1):
                call()
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            if turn > 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


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


def joules_per_call(call: Callable[[], object]) -> float | None:
    """Return the energy that the current GPU takes for a call, by two readings of its counter; None without one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    handle, millijoules, readings = ctypes.c_void_p(), ctypes.c_ulonglong(), []
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) != 0:
        return None
    calls, start = 0, time.perf_counter()
    for seconds in (0.0, COUNTED_SECONDS):
        while time.perf_counter() - start < seconds:
            call()
            torch.cuda.synchronize()
            calls += 1
        if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) != 0:
            return None
        readings.append(millijoules.value)
    return (readings[1] - readings[0]) / 1e3 / calls


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
    others = [row for row in read_rows(path) if tuple(row[column] for column in key) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
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
