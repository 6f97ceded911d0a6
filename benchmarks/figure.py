"""Draw docs/speed.png from benchmarks/results: time of the peers divided by ours, and memory by length.

    python benchmarks/figure.py

Times are ranges over the machines of encoder.csv, as in docs/benchmarks.md: a bar's solid part ends at the smallest
ratio, its light part at the largest. Memory is that of one machine.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from table import cpu_rows, machines, ratios_by_machine, read_times
from timing import RESULTS, read_rows

TARGET = Path(__file__).parents[1] / "docs" / "speed.png"
COLOURS = {"in-tree": "#b5453c", "disentangled-flash": "#d9a441", "bert": "#8a8f98", "ours sdpa": "#2f6f9f"}
LABELS = {
    "in-tree": "Transformers in-tree",
    "disentangled-flash": "disentangled-flash (torch)",
    "bert": "BERT with SDPA",
    "ours sdpa": "hf_deberta",
}
BARS = [("forward", case) for case in ("1x32", "1x128", "8x128", "2x512", "1x2048", "mnli")]
BARS += [("training", "8x128"), ("training", "mnli")]


def read_cpu_rows(name: str) -> list[dict[str, str]]:
    """Return the float32 rows of the CPU that comes last in a result file."""
    rows = [row for row in read_rows(RESULTS / name) if row["device"] == "cpu" and row["dtype"] == "float32"]
    return [row for row in rows if row["machine"] == rows[-1]["machine"]]


def plot_times(axis: plt.Axes) -> None:
    """Draw each peer's time divided by ours, by case."""
    times = [read_times(machine) for machine in machines("float32")]
    for i, peer in enumerate(("in-tree", "disentangled-flash", "bert")):
        ratios = [ratios_by_machine(times, case, (peer,), ("ours sdpa",)) or [0.0] for case in BARS]
        positions = [number + 0.27 * (i - 1) for number in range(len(BARS))]
        low, high = list(map(min, ratios)), list(map(max, ratios))
        bars = axis.bar(positions, high, 0.25, color=COLOURS[peer], alpha=0.45)
        axis.bar_label(bars, [f"{value:.1f}" if value else "" for value in high], fontsize=7, padding=1)
        bars = axis.bar(positions, low, 0.25, color=COLOURS[peer], label=LABELS[peer])
        inside = [f"{value:.1f}" if len(values) > 1 else "" for value, values in zip(low, ratios, strict=True)]
        axis.bar_label(bars, inside, fontsize=7, padding=-8, color="white")
    axis.axhline(1, color=COLOURS["ours sdpa"], linewidth=1.5, label="hf_deberta = 1")
    names = [case if mode == "forward" else f"{case}\ntraining" for mode, case in BARS]
    axis.set_xticks(range(len(BARS)), [name.replace("mnli", "MNLI\npadded") for name in names], fontsize=8)
    axis.set_title("time of base-size encoders divided by ours", fontsize=10)
    axis.legend(fontsize=8, frameon=False, loc="center", bbox_to_anchor=(0.31, 0.8))


def plot_memory(axis: plt.Axes) -> None:
    rows = read_cpu_rows("memory.csv")
    for peer in ("in-tree", "bert", "ours sdpa"):
        points = sorted((int(row["tokens"]), float(row["extra_mib"])) for row in rows if row["peer"] == peer)
        axis.plot(*zip(*points, strict=True), "o-", color=COLOURS[peer], label=LABELS[peer])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted({int(row["tokens"]) for row in rows}), sorted({row["tokens"] for row in rows}, key=int))
    axis.set_xlabel("tokens", fontsize=8)
    axis.set_title("extra memory of a forward pass, MiB", fontsize=10)
    axis.legend(fontsize=8, frameon=False)


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(2.4, 1))
    plot_times(left)
    plot_memory(right)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    row, dates = read_cpu_rows("memory.csv")[-1], sorted(row["date"] for row in cpu_rows("float32"))
    caption = f"float32; times: smallest and largest of up to {len(machines('float32'))} machines, {dates[0]} to "
    caption += f"{dates[-1]}; memory: {row['machine']}, {row['date']}"
    figure.text(0.01, 0.01, caption, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(TARGET, dpi=130)
    print(TARGET)


if __name__ == "__main__":
    main()
