"""Timing that can be compared: peers take turns, medians count, and every row says where it was measured."""

import csv
import datetime
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def interleaved(peers: dict[str, Callable[[], object]], repeats: int, device: str = "cpu") -> dict[str, list[float]]:
    """Milliseconds of each call of each peer; peers take turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(repeats + 1):
        for name, call in peers.items():
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            if turn > 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in times.items()}


def circumstances(device: str = "cpu") -> dict[str, str]:
    """Where and with what a row was measured."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {torch.get_num_threads()} threads"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_rows(path: Path, rows: list[dict], same: tuple[str, ...]) -> None:
    """Write rows to a CSV; earlier rows with equal values in the columns `same` are replaced, others kept."""
    kept = []
    if path.exists():
        new = {tuple(str(row[column]) for column in same) for row in rows}
        with path.open() as file:
            kept = [row for row in csv.DictReader(file) if tuple(row[column] for column in same) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + rows)
    os.replace(unfinished, path)
