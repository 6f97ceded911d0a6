"""The README's table of times, from benchmarks/results/encoder.csv.

python benchmarks/table.py
"""

import csv
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "encoder.csv"
PEERS = {
    "in-tree": "in-tree",
    "disentangled-flash": "disentangled-flash",
    "bert": "BERT, SDPA",
    "ours sdpa, no oneDNN": "ours, no oneDNN",
    "enabled": "in-tree, enabled",
    "ours sdpa": "ours",
}
ROWS = {
    ("forward", "1x32"): "1 x 32 tokens",
    ("forward", "1x128"): "1 x 128",
    ("forward", "8x128"): "8 x 128",
    ("forward", "2x512"): "2 x 512",
    ("forward", "1x2048"): "1 x 2048",
    ("forward", "mnli"): "32 MNLI pairs, padded",
    ("training", "8x128"): "training step, 8 x 128",
    ("training", "mnli"): "training step, 32 MNLI pairs",
}


def table() -> str:
    with RESULTS.open() as file:
        rows = [row for row in csv.DictReader(file) if (row["device"], row["dtype"]) == ("cpu", "float32")]
    rows = [row for row in rows if row["machine"] == rows[-1]["machine"]]  # the machine measured last
    found = {(row["mode"], row["case"], row["peer"]): float(row["milliseconds"]) for row in rows}
    lines = ["| milliseconds (times ours) | " + " | ".join(PEERS.values()) + " |", "|---|" + "--:|" * len(PEERS)]
    for key, name in ROWS.items():
        ours = found[(*key, "ours sdpa")]
        cells = [
            f"**{ours:.0f}**"
            if peer == "ours sdpa"
            else f"{found[(*key, peer)]:.0f} ({found[(*key, peer)] / ours:.1f})"
            for peer in PEERS
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
