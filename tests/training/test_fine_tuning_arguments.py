"""What of the command line makes a run another run."""

from hf_deberta.training.fine_tuning_arguments import decisive


def test_flags_without_effect_do_not_decide():
    flags = {"learning_rate": 1e-3, "max_seq_length": 128, "sift": True, "do_predict": True, "logging_steps": 5}
    assert decisive({**flags, "token": "hf_secret", "hub_token": "hf_secret", "push_to_hub": True}) == {
        "learning_rate": 1e-3,
        "max_seq_length": 128,
        "sift": True,
    }
