"""Run the core tests on several releases of Transformers and print a table of passes.

    python tests/versions.py
    python tests/versions.py --releases 5.12.0 newest --csv benchmarks/results/versions.csv

Each release gets a virtual environment in `.venv-versions/`, with this package, what its tests need, and the versions
of constraints.txt; of tokenizers and huggingface_hub, the newest that the release accepts. Environments are kept and
used again. "newest" is the newest release of every package, but of PyTorch that of constraints.txt; it runs all tests
that are not slow. The program exits with 1 if a test failed.
"""

import argparse
import csv
import datetime
import os
import re
import subprocess
import sys
import venv
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
from table import markdown  # noqa: E402

FOLDER = ROOT / ".venv-versions"
NEWEST = "newest"
CORE = (  # but for those marked slow
    "tests/engines",
    "tests/model",
    "tests/in_tree",
    "tests/test_tokenization_hf_deberta.py",
    "tests/training/test_private_trainer_apis.py",
)
SCRIPTS = (
    "tests/test_demos.py::test_demonstrations[run_glue.py-learns]",
    "tests/test_run_mlm.py::test_from_text_to_a_model",
    "tests/test_run_mlm.py::test_continue_from_a_transformers_checkpoint",
)
SAVED_FOLDERS = ("tests/model/test_saved_folders.py", "-m", "slow")
TOOLS = ("hypothesis", "parameterized", "peft", "pytest", "pytest-xdist", "seqeval")
OUTCOMES = ("passed", "failed", "error", "skipped")
CHOSEN_BY_RELEASE = ("transformers", "tokenizers", "huggingface_hub")
VERSIONS = ("torch", "transformers", "tokenizers", "huggingface_hub")
PRINT_VERSIONS = f"""
import importlib.metadata, platform
print(platform.python_version(), *map(importlib.metadata.version, {VERSIONS}))
"""


def default_releases() -> list[str]:
    """Return the oldest release that pyproject.toml allows, and the newest."""
    oldest = re.search(r'"transformers>=([\d.]+)', (ROOT / "pyproject.toml").read_text())[1]
    return [oldest if oldest.count(".") == 2 else f"{oldest}.0", NEWEST]


def environment(release: str) -> Path:
    """Return the interpreter of the environment for a release of Transformers; create or upgrade it if needed."""
    folder = FOLDER / release
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists() and release != NEWEST:
        return python
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
    packages = [f"transformers=={release}", *TOOLS, "--editable", ROOT]
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(CHOSEN_BY_RELEASE)]
    if release == NEWEST:
        packages = ["--upgrade", "--upgrade-strategy", "eager", "--editable", f"{ROOT}[dev]"]
        kept = [line for line in lines if line.startswith("torch==")]
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(kept))
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    subprocess.run([*install, "torch"], check=True)  # first, so that no other package pulls in a different build
    subprocess.run([*install, *packages], check=True)
    ready.touch()
    return python


def run_tests(release: str, workers: int) -> dict[str, str]:
    """Return the row of the table for a release: versions, counts of tests, seconds and date."""
    python = environment(release)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables["HF_MODULES_CACHE"] = str(FOLDER / release / "modules")  # releases name the same code differently
    printed = subprocess.run([python, "-c", PRINT_VERSIONS], check=True, capture_output=True, text=True).stdout
    row = dict(zip(("python", *VERSIONS), printed.split(), strict=True))
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "--numprocesses", str(workers)]
    counts = Counter()
    not_slow = ["tests"] if release == NEWEST else CORE
    for tests in ([*not_slow, "-m", "not slow"], SCRIPTS, SAVED_FOLDERS):
        done = subprocess.run([*command, *tests], cwd=ROOT, env=variables, capture_output=True, text=True)
        lines = done.stdout.splitlines() or [""]
        print(*(line for line in lines if line.startswith(("FAILED", "ERROR"))), sep="\n", end="")
        found = {outcome: int(count) for count, outcome in re.findall(r"(\d+) ([a-z]+)", lines[-1])}
        if "passed" not in found:
            raise SystemExit(f"pytest stopped on Transformers {release}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        counts.update(found)
    return {**row, **{outcome: str(counts[outcome]) for outcome in OUTCOMES}, "date": str(datetime.date.today())}


def write_csv(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", nargs="+", default=default_releases(), help="releases of Transformers, or newest")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    arguments = parser.parse_args()
    rows = []
    for release in arguments.releases:
        rows.append(run_tests(release, arguments.workers))
        print(markdown(list(rows[0]), [list(row.values()) for row in rows]), flush=True)
        if arguments.csv:
            write_csv(arguments.csv, rows)
    return int(any(row["failed"] != "0" or row["error"] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
