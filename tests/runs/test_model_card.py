"""Model cards: no secret of the command line is in one."""

from hf_deberta.runs.model_card import hide_secrets


def test_secrets_are_left_out():
    words = ["--seed", "1", "--token", "hf_a", "--hub_token=hf_b", "--hub-token", "hf_c", "--train_tokenizer", "300"]
    shown = hide_secrets(words)
    assert "hf_" not in " ".join(shown) and len(shown) == len(words)
    assert shown[:2] == words[:2] and shown[-2:] == words[-2:]
