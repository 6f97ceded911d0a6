"""The table of attacks counts what tests report."""

import os
import subprocess
import sys
from pathlib import Path

ATTACKS = """
def test_one(tally):
    tally.held("one that holds", 2)
    tally.refused("one that holds")

def test_other(tally):
    tally.held("one that fails")
    assert False
"""


def test_all_attacks_are_counted_in_a_table(tmp_path):
    folder = tmp_path / "faults"
    folder.mkdir()
    (folder / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (folder / "test_attacks.py").write_text(ATTACKS)
    environment = {**os.environ, "FAULTS": "full", "FAULTS_CSV": str(tmp_path / "table.csv")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-m", "pytest", "-q", str(folder)], env=environment, capture_output=True)
    assert (tmp_path / "table.csv").read_text().splitlines() == [
        "attack,tried,held,refused by design,failed",
        "one that fails,2,1,0,1",
        "one that holds,3,2,1,0",
    ]
