"""What all attacks share: hypothesis settings, and a table of what was tried, refused by design, and failed."""

import csv
import os
from collections import Counter
from collections.abc import Iterator

import pytest
from fault_cases import FULL, SEED, Tally
from hypothesis import HealthCheck, settings

TALLY = "attack"  # name of the user property that carries a test's counts to the summary
RESULTS = ("held", "refused by design", "failed")

options = {"deadline": None, "database": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("faults", derandomize=not FULL, **options)
settings.load_profile("faults")


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    result = Tally()
    request.node.user_properties.append((TALLY, result.counts))
    yield result


def pytest_report_header() -> str:
    return f"attacks: {'all' if FULL else 'a sample'}, FAULTS_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of attacks, and write it to the file FAULTS_CSV."""
    table: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            counts = dict(report.user_properties).get(TALLY)
            if report.when != "call" or counts is None:
                continue
            for name, number in counts.items():
                attack, _, result = name.partition("|")
                table.setdefault(attack, Counter())[result] += number
            if outcome == "failed":
                for attack in {name.partition("|")[0] for name in counts} or {report.nodeid.partition("[")[0]}:
                    table.setdefault(attack, Counter())["failed"] += 1
    if not table or not FULL:
        return
    rows = [
        {"attack": attack, "tried": sum(counts.values()), **{result: counts[result] for result in RESULTS}}
        for attack, counts in sorted(table.items())
    ]
    terminalreporter.section(f"attacks, FAULTS_SEED={SEED}")
    for row in rows:
        terminalreporter.write_line(", ".join(f"{name} {value}" for name, value in row.items()))
    if path := os.environ.get("FAULTS_CSV"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
