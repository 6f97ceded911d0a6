"""How many cases the attacks in tests/faults try, and from which seed.

`make test` tries a sample that takes about a minute, always the same one. `make faults` sets FAULTS=full and a new
FAULTS_SEED, which it prints; the same FAULTS_SEED repeats a run.

>>> @pytest.mark.parametrize("seed", seeds(sample=2, full=100))
>>> def test_killed_at_a_random_moment(seed):
...     random.Random(seed)
"""

import os

FULL = os.environ.get("FAULTS") == "full"
SEED = int(os.environ.get("FAULTS_SEED", 0))


def number_of_cases(sample: int, full: int) -> int:
    return full if FULL else sample


def seeds(sample: int, full: int) -> list[int]:
    """Return one seed per case."""
    return [SEED + case for case in range(number_of_cases(sample, full))]
