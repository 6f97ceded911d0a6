"""How many cases the attacks in tests/faults try, from which seed, and the count of what happened.

`make test` tries a sample that takes about a minute, always the same one. `make faults` sets FAULTS=full and a new
FAULTS_SEED, which it prints; the same FAULTS_SEED repeats a run.

>>> @pytest.mark.parametrize("seed", seeds(sample=2, full=100))
>>> def test_killed_at_a_random_moment(seed, tally):
...     random.Random(seed)
...     tally.held("kill and resume")
"""

import os

FULL = os.environ.get("FAULTS") == "full"
SEED = int(os.environ.get("FAULTS_SEED", 0))


def number_of_cases(sample: int, full: int) -> int:
    return full if FULL else sample


def seeds(sample: int, full: int) -> list[int]:
    """Return one seed per case."""
    return [SEED + case for case in range(number_of_cases(sample, full))]


class Tally:
    """Counts the cases of a test by attack: held (the promise was kept) or refused (an error by design)."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # pytest-xdist sends plain dicts only

    def held(self, attack: str, cases: int = 1, result: str = "held") -> None:
        name = f"{attack}|{result}"
        self.counts[name] = self.counts.get(name, 0) + cases

    def refused(self, attack: str) -> None:
        self.held(attack, result="refused by design")
