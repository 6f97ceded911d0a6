"""Print the tables in README.md, docs and results/README.md from the files in results/.

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
SIZES_MACHINE = "Intel(R) Xeon(R) Processor (family 6, model 207), 1 threads"  # timed several presets
SIZE_PEERS = {"in-tree": "Transformers", "ours sdpa": "this package", "ours optimized": "`optimize()`"}
PEERS = {  # name in the csv -> heading of the column
    "in-tree": "Transformers",
    "ours sdpa": "hf_deberta",
    "disentangled-flash": "disentangled-flash",
    "bert": "BERT",
}
DTYPES = ("float32", "bfloat16", "int8")
CASES = {  # (mode, case) in the csv -> label of the row
    ("forward", "1x32"): "1 row of 32 tokens",
    ("forward", "1x128"): "1 x 128",
    ("forward", "8x128"): "8 x 128",
    ("forward", "2x512"): "2 x 512",
    ("forward", "1x2048"): "1 x 2048",
    ("forward", "mnli"): "32 sentence pairs",
    ("training", "8x128"): "training, 8 x 128",
    ("training", "mnli"): "training, 32 pairs",
}
GPU_PEERS = {  # name in the csv -> heading of the column
    "in-tree": "Transformers",
    "ours sdpa": "ours, sdpa",
    "ours triton": "ours, triton",
    "flashdeberta": "flashdeberta",
    "disentangled-flash": "disentangled-flash",
    "bert": "BERT",
}
GPU_CASES = {"8x128": "8 x 128", "mnli": "32 sentence pairs", "32x512": "32 x 512", "4x2048": "4 x 2048"}
LABEL_PEERS = {
    "in-tree": "Transformers",
    "ours sdpa": "this package",
    "ours optimized": "`optimize()`",
    "onnxruntime in-tree": "ONNX Runtime",
}
README_CASES = {  # (type, mode, case) -> label of the row
    ("float32", "forward", "1x32"): "1 row of 32 tokens",
    ("float32", "forward", "8x128"): "8 rows of 128 tokens",
    ("float32", "forward", "mnli"): "32 sentence pairs, padded",
}
RATIOS = {"this package": "ours sdpa", "`optimize()`": "ours optimized", "OpenVINO": "openvino ours"}  # peers by column
README_RATIOS = list(RATIOS)[:2]
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
    """Return the times of base size in encoder.csv on two threads of each CPU, in one type."""
    times: dict[str, Times] = {}
    for row in read_rows(RESULTS / "encoder.csv"):
        two_threads = row["machine"].endswith(" 2 threads")
        if two_threads and (row["device"], row["dtype"], row["preset"]) == ("cpu", dtype, "v3-base"):
            of_machine = times.setdefault(row["machine"], {})
            of_machine[row["mode"], row["case"], row["peer"]] = float(row["milliseconds"])
    return times


def ratio_table(dtype: str) -> str:
    """How many times as fast as Transformers: the smallest to the largest ratio over all machines."""
    rows = [[label, *(ratios(dtype, case, column) for column in RATIOS)] for case, label in CASES.items()]
    return markdown([dtype, *RATIOS], [row for row in rows if set(row[1:]) != {"-"}])


def ratio_values(dtype: str, case: tuple[str, str], column: str) -> list[float]:
    """Return the ratio of each machine that timed both."""
    theirs, ours = (*case, "in-tree"), (*case, RATIOS[column])
    machines = times_by_machine(dtype).values()
    return [times[theirs] / times[ours] for times in machines if theirs in times and ours in times]


def ratios(dtype: str, case: tuple[str, str], column: str) -> str:
    """One cell: the smallest and the largest ratio over the machines that timed both."""
    values = ratio_values(dtype, case, column)
    if not values:
        return "-"
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def full_table() -> str:
    """Milliseconds of every peer and case on the AMD machine."""
    times = times_by_machine("float32")[AMD]
    rows = [[label, *(f"{times[*case, peer]:.0f}" for peer in PEERS)] for case, label in CASES.items()]
    return markdown(["milliseconds", *PEERS.values()], rows)


def size_table() -> str:
    """Milliseconds of a row of 128 tokens in models of each size, on the machine that timed several."""
    times: dict[str, dict[str, str]] = {}
    for row in read_rows(RESULTS / "encoder.csv"):
        if (row["machine"], row["mode"], row["case"]) == (SIZES_MACHINE, "forward", "1x128"):
            times.setdefault(row["preset"], {})[row["peer"]] = f"{float(row['milliseconds']):.0f}"
    rows = [[preset, *(by_peer[peer] for peer in SIZE_PEERS)] for preset, by_peer in times.items()]
    return markdown(["1 row of 128 tokens, ms", *SIZE_PEERS.values()], rows)


def label_table() -> str:
    """Share of equal labels, and the largest difference of logits from float32."""
    rows = [
        [f"{LABEL_PEERS[row['peer']]}, {row['dtype']}", f"{row['percent']} %", row["largest_logit_difference"]]
        for row in read_rows(RESULTS / "label_agreement.csv")
        if row["peer"] in LABEL_PEERS
    ]
    return markdown(["", "equal labels", "difference of logits"], rows)


def consumer_table() -> str:
    """Other libraries: how many times as fast as Transformers' class, and the largest difference from it."""
    ways: dict[str, dict[str, dict[str, str]]] = {}
    for row in read_rows(RESULTS / "consumers.csv"):
        ways.setdefault(f"{row['consumer']} ({row['library']} {row['version']})", {})[row["way"]] = row
    lines = []
    for label, rows in ways.items():
        differences = [row["max_abs_difference"] for row in rows.values()]
        times = [rows[way]["times_as_fast"] for way in ("enable()", "native")]
        lines.append([label, *times, max(differences, key=float)])
    return markdown(["times as fast", "`enable()`", "our class", "difference"], lines)


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
        [label, *(ratios(dtype, (mode, case), column) for column in README_RATIOS)]
        for (dtype, mode, case), label in README_CASES.items()
    ]
    extra = {
        row["peer"]: float(row["extra_mib"])
        for row in read_rows(RESULTS / "memory.csv")
        if (row["device"], row["dtype"], row["tokens"]) == ("cpu", "float32", str(README_TOKENS))
        and AMD in row["machine"]
    }
    less = f"1/{extra['in-tree'] / extra['ours sdpa']:.0f}"
    rows.append([f"memory of 1 row of {README_TOKENS} tokens", less, "-"])
    return markdown(["times as fast as Transformers", *README_RATIOS], rows)


if __name__ == "__main__":
    by_type = (ratio_table(dtype) for dtype in DTYPES)
    tables = (full_table(), size_table(), label_table(), gpu_table(), consumer_table())
    print(readme_table(), *by_type, *tables, sep="\n\n")
