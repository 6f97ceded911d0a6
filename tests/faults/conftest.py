"""What all attacks share: hypothesis settings, and a table of the cases that held or were refused by design."""

import csv
import os
from collections import Counter

import pytest
from fault_cases import FULL, SEED, Tally
from hypothesis import HealthCheck, settings

TALLY = "attack"  # name of the user property that carries a test's counts to the summary

options = {"deadline": None, "database": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("faults", derandomize=not FULL, **options)
settings.load_profile("faults")


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    result = Tally()
    request.node.user_properties.append((TALLY, result.counts))
    return result


def pytest_report_header() -> str:
    return f"attacks: {'all' if FULL else 'a sample'}, FAULTS_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Of all attacks, print the table, and write it to the file FAULTS_CSV; pytest counts failures."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed") if FULL else ():
        if report.when == "call":
            counts.update(dict(report.user_properties).get(TALLY, {}))
    if not counts:
        return
    rows = [(*name.split("|"), cases) for name, cases in sorted(counts.items())]
    terminalreporter.section(f"attacks, FAULTS_SEED={SEED}")
    for attack, result, cases in rows:
        terminalreporter.write_line(f"{attack}: {cases} {result}")
    if path := os.environ.get("FAULTS_CSV"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("attack", "result", "cases"), *rows])
