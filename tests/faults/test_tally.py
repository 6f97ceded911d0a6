"""The table of attacks counts what tests report."""


def test_a_tally_counts_cases_by_attack_and_result(tally):
    tally.held("an attack", 2)
    tally.refused("an attack")
    assert tally.counts == {"an attack|held": 2, "an attack|refused by design": 1}
    tally.counts.clear()
