"""Print the tables in README.md and docs/benchmarks.md from the files in results/.

    python benchmarks/table.py

tests/test_readme.py compares the printed tables with both files. Needs no package, so that any Python prints them.
"""

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

RESULTS = Path(os.environ.get("RESULTS") or Path(__file__).parent / "results")  # folder of the result files
AMD = "AMD EPYC, 2 threads"  # Zen 5
GPU = "NVIDIA H100 80GB HBM3"
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
GPU_PEERS = {  # name in the csv -> heading of the column
    "in-tree": "Transformers' DeBERTa",
    "flashdeberta": "flashdeberta",
    "disentangled-flash": "disentangled-flash",
    "bert": "BERT, SDPA",
    "ours sdpa": "hf_deberta, sdpa",
    "ours triton": "hf_deberta, triton",
}
GPU_CASES = {"8x128": "8 x 128", "mnli": "32 sentence pairs", "32x512": "32 x 512", "4x2048": "4 x 2048"}
README_CASES = {  # (type, mode, case) -> label of the row
    ("float32", "forward", "1x32"): "1 row of 32 tokens",
    ("float32", "forward", "8x128"): "8 rows of 128 tokens, no padding",
    ("float32", "forward", "mnli"): "32 sentence pairs (MNLI), padded to the longest",
}
RATIOS = {  # heading of the column -> (their peers, of which the fastest counts; ours) by names in the csv
    "Transformers / ours": (("in-tree",), "ours sdpa"),
    "Transformers / `optimize()`": (("in-tree",), "ours optimized"),
    "best runtime / `optimize()`": (("onnxruntime in-tree", "openvino in-tree"), "ours optimized"),
    "OpenVINO, our graph / `optimize()`": (("openvino ours",), "ours optimized"),
}
README_RATIOS = list(RATIOS)[:3]
README_TOKENS = 2048  # of the row with memory
Times = dict[tuple[str, str, str], float]  # milliseconds by (mode, case, peer)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a result file; none if there is no such file yet."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Return a table in Markdown whose first `texts` columns are aligned left, and the others right."""
    lines = ["".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * texts + "--:|" * (len(head) - texts))
    return "\n".join(lines)


def mean_and_range(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean; of several values with the smallest and the largest."""
    low, high = min(values), max(values)
    return f"{mean(values):.{digits}f}" + (f" ({low:.{digits}f} to {high:.{digits}f})" if len(values) > 1 else "")


def grouped(rows: list[dict[str, str]], by: tuple[str, ...]) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """Return the rows by their values in the columns `by`."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return groups


def pairs_by_seed(
    rows: list[dict[str, str]], by: tuple[str, ...], column: str, baseline: str, value: str = "value"
) -> dict[tuple[str, ...], list[tuple[float, float]]]:
    """Return the values of each variant beside those of the baseline with the same seed.

    The keys are the columns `by` and `column`, which names the variant.
    """
    values = {(*(row[name] for name in by), row[column], row["seed"]): float(row[value]) for row in rows}
    pairs: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for (*key, variant, seed), own in values.items():
        other = values.get((*key, baseline, seed))
        if variant != baseline and other is not None:
            pairs.setdefault((*key, variant), []).append((own, other))
    return pairs


def summary(rows: list[dict[str, str]], by: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return a table of runs: mean and range of the columns `values` over the runs that agree in the columns `by`."""
    lines = [
        [*key, str(len(group)), *(mean_and_range([float(row[name]) for row in group]) for name in values)]
        for key, group in grouped(rows, by).items()
    ]
    return markdown([*by, "runs", *values], lines, len(by))


def times_by_machine(dtype: str) -> dict[str, Times]:
    """Return the times in encoder.csv on each CPU, in one type."""
    times: dict[str, Times] = {}
    for row in read_rows(RESULTS / "encoder.csv"):
        if (row["device"], row["dtype"]) == ("cpu", dtype):
            of_machine = times.setdefault(row["machine"], {})
            of_machine[row["mode"], row["case"], row["peer"]] = float(row["milliseconds"])
    return times


def ratio_table() -> str:
    """Times of others divided by ours in the same run: the smallest to the largest over all machines."""
    rows = []
    for dtype in DTYPES:
        for case, label in CASES.items():
            cells = [ratios(dtype, case, column) for column in RATIOS]
            if any(cells):
                rows.append([f"{label}, {dtype}", *(cell or "-" for cell in cells)])
    names = sorted({name for dtype in DTYPES for name in times_by_machine(dtype)})
    legend = ["", "Processors, in brackets how many of them a range is from:", "", *(f"- {name}" for name in names)]
    return "\n".join([markdown(["base size", *RATIOS], rows), *legend])


def ratio_values(dtype: str, case: tuple[str, str], column: str) -> list[float]:
    """Return the ratio of each machine that timed both."""
    values, (peers, ours) = [], RATIOS[column]
    for times in times_by_machine(dtype).values():
        theirs = [times[*case, peer] for peer in peers if (*case, peer) in times]
        if theirs and (*case, ours) in times:
            values.append(min(theirs) / times[*case, ours])
    return values


def ratios(dtype: str, case: tuple[str, str], column: str) -> str:
    """One cell: the smallest and the largest ratio over the machines that timed both, and their number."""
    values = ratio_values(dtype, case, column)
    if not values:
        return ""
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return f"{low if low == high else f'{low} to {high}'} ({len(values)})"


def full_table() -> str:
    """Every peer and case on the AMD machine, each with its time divided by ours."""
    times = times_by_machine("float32")[AMD]
    rows = []
    for case, label in CASES.items():
        ours = times[*case, "ours sdpa"]
        others = [times[*case, peer] for peer in PEERS if peer != "ours sdpa"]
        rows.append([label, *(f"{time:.0f} ({time / ours:.1f})" for time in others), f"**{ours:.0f}**"])
    return markdown(["milliseconds (divided by hf_deberta's)", *PEERS.values()], rows)


def label_table() -> str:
    """Equal labels and the largest difference of logits from float32."""
    rows = [
        (
            f"{row['peer']} ({row['settings']})" if row["settings"] else row["peer"],
            row["dtype"],
            f"{row['equal_labels']} of {row['rows']}, {row['percent']} %",
            row["largest_logit_difference"],
        )
        for row in read_rows(RESULTS / "label_agreement.csv")
    ]
    return markdown(["peer", "type", "equal labels", "largest difference of logits"], rows, 2)


def gpu_table() -> str:
    """Milliseconds of each peer and case on the GPU."""
    times = {
        (row["mode"], row["case"], row["peer"]): row["milliseconds"]
        for row in read_rows(RESULTS / "encoder.csv")
        if (row["machine"], row["dtype"], row["preset"]) == (GPU, "bfloat16", "v3-base")
    }
    rows = [
        [prefix + label, *(times.get((mode, case, peer), "-") for peer in GPU_PEERS)]
        for mode, prefix in (("forward", ""), ("training", "training step, "))
        for case, label in GPU_CASES.items()
        if (mode, case, "in-tree") in times
    ]
    return markdown(["milliseconds", *GPU_PEERS.values()], rows)


def readme_table() -> str:
    """The ratios of a few cases, and one of memory."""
    rows = [
        [label, *(ratios(dtype, (mode, case), column) or "-" for column in README_RATIOS)]
        for (dtype, mode, case), label in README_CASES.items()
    ]
    extra = {
        row["peer"]: float(row["extra_mib"])
        for row in read_rows(RESULTS / "memory.csv")
        if (row["device"], row["dtype"], row["tokens"]) == ("cpu", "float32", str(README_TOKENS))
        and AMD in row["machine"]
    }
    rows.append(
        [f"memory of 1 row of {README_TOKENS} tokens", f"{extra['in-tree'] / extra['ours sdpa']:.1f} (1)", "-", "-"]
    )
    return markdown(["base size, 2 threads", *README_RATIOS], rows)


if __name__ == "__main__":
    print(readme_table(), ratio_table(), full_table(), label_table(), gpu_table(), sep="\n\n")
