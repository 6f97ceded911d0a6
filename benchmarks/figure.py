"""docs/speed.png from benchmarks/results: time of the peers over ours, and memory by length.

python benchmarks/figure.py
"""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from timing import RESULTS

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


def rows_of(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open() as file:
        rows = list(csv.DictReader(file))
    rows = [row for row in rows if row["device"] == "cpu" and row["dtype"] == "float32"]
    return [row for row in rows if row["machine"] == rows[-1]["machine"]]  # the machine measured last


def times(axis: plt.Axes) -> None:
    """Each peer's time over ours, case by case."""
    found = {(row["mode"], row["case"], row["peer"]): float(row["milliseconds"]) for row in rows_of("encoder.csv")}
    peers = ("in-tree", "disentangled-flash", "bert")
    for i, peer in enumerate(peers):
        ratios = [found.get((*bar, peer), 0) / found[(*bar, "ours sdpa")] for bar in BARS]
        places = [place + 0.27 * (i - 1) for place in range(len(BARS))]
        bars = axis.bar(places, ratios, 0.25, color=COLOURS[peer], label=LABELS[peer])
        axis.bar_label(bars, [f"{ratio:.1f}" if ratio else "" for ratio in ratios], fontsize=7, padding=1)
    axis.axhline(1, color=COLOURS["ours sdpa"], linewidth=1.5, label="hf_deberta = 1")
    names = [case if mode == "forward" else f"{case}\ntraining" for mode, case in BARS]
    axis.set_xticks(range(len(BARS)), [name.replace("mnli", "MNLI\npadded") for name in names], fontsize=8)
    axis.set_title("time of base-size encoders over ours", fontsize=10)
    axis.legend(fontsize=8, frameon=False, loc="center", bbox_to_anchor=(0.31, 0.8))


def memory(axis: plt.Axes) -> None:
    rows = rows_of("memory.csv")
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
    times(left)
    memory(right)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    row = rows_of("encoder.csv")[-1]
    about = f"{row['machine']}, float32, torch {row['torch']}, transformers {row['transformers']}, {row['date']}"
    figure.text(0.01, 0.01, about, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(TARGET, dpi=130)
    print(TARGET)


if __name__ == "__main__":
    main()
