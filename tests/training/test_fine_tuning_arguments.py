"""What of the command line makes a run another run, and whose an error is."""

import pytest

from hf_deberta.training.fine_tuning_arguments import decisive, is_of_training


def test_flags_without_effect_do_not_decide():
    flags = {"learning_rate": 1e-3, "max_seq_length": 128, "sift": True, "do_predict": True, "logging_steps": 5}
    assert decisive({**flags, "token": "hf_secret", "hub_token": "hf_secret", "push_to_hub": True}) == {
        "learning_rate": 1e-3,
        "max_seq_length": 128,
        "sift": True,
    }


@pytest.mark.parametrize(("file", "expected"), [("/lib/transformers/trainer.py", True), ("run_glue.py", False)])
def test_errors_of_training_are_known_by_where_they_come_from(file, expected):
    with pytest.raises(ValueError) as caught:
        exec(compile("raise ValueError('of this file')", file, "exec"))
    assert is_of_training(caught.value) == expected
