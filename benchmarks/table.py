"""Print the tables in README.md and docs/benchmarks.md from the files in results/.

    python benchmarks/table.py

tests/test_readme.py compares the printed tables with both files.
"""

import csv
import os
from pathlib import Path

RESULTS = Path(os.environ.get("RESULTS") or Path(__file__).parent / "results") / "encoder.csv"
MEMORY = RESULTS.with_name("memory.csv")
GPU_COUNTS = RESULTS.with_name("gpu_counts.csv")
LABELS = RESULTS.with_name("label_agreement.csv")
AMD = "AMD EPYC, 2 threads"  # Zen 5
PEERS = {  # name in the csv -> heading of the column
    "in-tree": "Transformers' DeBERTa",
    "disentangled-flash": "disentangled-flash",
    "bert": "BERT, SDPA",
    "ours sdpa, no oneDNN": "hf_deberta, oneDNN off",
    "enabled": "Transformers' DeBERTa after `enable()`",
    "ours sdpa": "hf_deberta",
}
DTYPES = ("float32", "bfloat16", "int8")
CASES = {  # (mode, case) in the csv -> label of the row
    ("forward", "1x32"): "1 row of 32 tokens",
    ("forward", "1x128"): "1 x 128",
    ("forward", "8x128"): "8 x 128",
    ("forward", "2x512"): "2 x 512",
    ("forward", "1x2048"): "1 x 2048",
    ("forward", "mnli"): "32 sentence pairs of MNLI, padded",
    ("training", "8x128"): "training step, 8 x 128",
    ("training", "mnli"): "training step, 32 sentence pairs",
}
COUNTED_PEERS = {  # name in the csv -> heading of the column
    "in-tree": "Transformers' DeBERTa",
    "bert": "BERT, SDPA",
    "sdpa": "hf_deberta, sdpa",
    "triton": "hf_deberta, triton",
}
README_CASES = {  # (type, mode, case) -> label of the row
    ("float32", "forward", "1x32"): "1 row of 32 tokens",
    ("float32", "forward", "8x128"): "8 rows of 128 tokens, no padding",
    ("float32", "forward", "mnli"): "32 sentence pairs (MNLI), padded to the longest",
}
OPTIMIZED = ("ours optimized", "ours optimized, fixed shape")
RATIOS = {  # heading of the column -> (their peers, ours) by names in the csv; the fastest of each counts
    "Transformers / ours": (("in-tree",), ("ours sdpa",)),
    "Transformers / `optimize()`": (("in-tree",), OPTIMIZED[:1]),
    "runtimes / `optimize()`, any shape": (
        ("onnxruntime in-tree, any shape", "openvino in-tree, any shape"),
        OPTIMIZED[:1],
    ),
    "best runtime / best `optimize()`": (("onnxruntime in-tree", "openvino in-tree"), OPTIMIZED),
    "OpenVINO, our graph / best `optimize()`": (("openvino ours",), OPTIMIZED),
}
README_RATIOS = ["Transformers / ours", "Transformers / `optimize()`", "best runtime / best `optimize()`"]
README_TOKENS = 2048  # of the row with memory


def cpu_rows(dtype: str) -> list[dict[str, str]]:
    """Rows of encoder.csv that were measured on CPUs in one type."""
    with RESULTS.open() as file:
        return [row for row in csv.DictReader(file) if (row["device"], row["dtype"]) == ("cpu", dtype)]


def read_times(machine: str, dtype: str = "float32") -> dict[tuple[str, str, str], float]:
    """Milliseconds by (mode, case, peer), on the CPU of one machine."""
    return {
        (row["mode"], row["case"], row["peer"]): float(row["milliseconds"])
        for row in cpu_rows(dtype)
        if row["machine"].startswith(machine)
    }


def machines(dtype: str) -> list[str]:
    """Names of the machines with rows in encoder.csv, as they stand there."""
    return sorted({row["machine"] for row in cpu_rows(dtype)})


def ratio_table() -> str:
    """Times of others divided by ours in the same run: the smallest to the largest over all machines."""
    names = sorted({name for dtype in DTYPES for name in machines(dtype)})
    lines = ["| base size | " + " | ".join(RATIOS) + " |", "|---|" + "--:|" * len(RATIOS)]
    for dtype in DTYPES:
        times = [read_times(name, dtype) for name in machines(dtype)]
        for case, label in CASES.items():
            cells = [format_range(ratios_by_machine(times, case, *peers)) for peers in RATIOS.values()]
            if any(cells):
                lines.append(f"| {label}, {dtype} | " + " | ".join(cell or "-" for cell in cells) + " |")
    lines += ["", "Processors, in brackets how many of them a range is from:", ""]
    return "\n".join(lines + [f"- {name}" for name in names])


def ratios_by_machine(
    times: list[dict[tuple[str, str, str], float]],
    case: tuple[str, str],
    theirs: tuple[str, ...],
    ours: tuple[str, ...],
) -> list[float]:
    """The time of the fastest of theirs divided by that of ours, for each machine that timed both."""
    ratios = []
    for by_peer in times:
        of_case = {peer: time for (*key, peer), time in by_peer.items() if tuple(key) == case}
        others, own = ([of_case[peer] for peer in peers if peer in of_case] for peers in (theirs, ours))
        if others and own:
            ratios.append(min(others) / min(own))
    return ratios


def format_range(ratios: list[float]) -> str:
    """One cell: the smallest to the largest, and their number; empty if there are none."""
    if not ratios:
        return ""
    low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return f"{low if low == high else f'{low} to {high}'} ({len(ratios)})"


def full_table() -> str:
    """Every peer and case on the AMD machine, each with its time divided by ours."""
    times = read_times(AMD)
    lines = ["| milliseconds (divided by hf_deberta's) | " + " | ".join(PEERS.values()) + " |"]
    lines.append("|---|" + "--:|" * len(PEERS))
    for case, label in CASES.items():
        by_peer = {peer: time for (*key, peer), time in times.items() if tuple(key) == case}
        ours = by_peer["ours sdpa"]
        others = [by_peer[peer] for peer in PEERS if peer != "ours sdpa"]
        cells = [*(f"{time:.0f} ({time / ours:.1f})" for time in others), f"**{ours:.0f}**"]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def label_table() -> str:
    """Equal labels and the largest difference of logits from float32."""
    with LABELS.open() as file:
        rows = list(csv.DictReader(file))
    lines = ["| peer | type | equal labels | largest difference of logits |", "|---|---|--:|--:|"]
    for row in rows:
        peer = f"{row['peer']} ({row['settings']})" if row["settings"] else row["peer"]
        equal = f"{row['equal_labels']} of {row['rows']}, {row['percent']} %"
        lines.append(f"| {peer} | {row['dtype']} | {equal} | {row['largest_logit_difference']} |")
    return "\n".join(lines)


def gpu_counts_table() -> str:
    """Launches, gigabytes and GFLOP of one layer, counted on a simulated GPU; launches alone with Triton's kernels."""
    with GPU_COUNTS.open() as file:
        rows = {(row["mode"], row["case"], row["peer"]): row for row in csv.DictReader(file)}
    lines = ["| launches, GB, GFLOP | " + " | ".join(COUNTED_PEERS.values()) + " |"]
    lines.append("|---|" + "--:|" * len(COUNTED_PEERS))
    for mode, case in dict.fromkeys((mode, case) for mode, case, _ in rows):
        cells = [counts_of(rows[mode, case, peer]) for peer in COUNTED_PEERS]
        lines.append(f"| {mode}, {case.replace('x', ' x ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def counts_of(row: dict[str, str]) -> str:
    if row["triton_launches"] != "0":
        return f"{row['launches']} + {row['triton_launches']}"
    return ", ".join(row[name] for name in ("launches", "gigabytes", "gflop"))


def readme_table() -> str:
    """The ratios of a few cases, and one of memory."""
    lines = [
        "| base size, 2 threads | " + " | ".join(README_RATIOS) + " |",
        "|---|" + "--:|" * len(README_RATIOS),
    ]
    for (dtype, *case), label in README_CASES.items():
        times = [read_times(name, dtype) for name in machines(dtype)]
        cells = [format_range(ratios_by_machine(times, (case[0], case[1]), *RATIOS[name])) for name in README_RATIOS]
        lines.append(f"| {label} | " + " | ".join(cell or "-" for cell in cells) + " |")
    with MEMORY.open() as file:
        rows = [row for row in csv.DictReader(file) if (row["device"], row["dtype"]) == ("cpu", "float32")]
    extra = {(row["peer"], int(row["tokens"])): float(row["extra_mib"]) for row in rows if AMD in row["machine"]}
    ratio = extra["in-tree", README_TOKENS] / extra["ours sdpa", README_TOKENS]
    return "\n".join(
        [*lines, f"| memory of 1 row of {README_TOKENS} tokens | {ratio:.1f} (1) |" + " - |" * (len(README_RATIOS) - 1)]
    )


if __name__ == "__main__":
    print(readme_table(), ratio_table(), full_table(), label_table(), gpu_counts_table(), sep="\n\n")
