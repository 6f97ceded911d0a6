"""The loop with SiFT learns, and its second loss is positive."""

import sift_loop


def test_it_learns(tiny_model, sentiment, capsys):
    epochs = sift_loop.main(["--model", str(tiny_model), *sentiment, "--learning_rate", "3e-3", "--epochs", "2"])
    (first, *_), (last, adversarial, accuracy) = epochs[0], epochs[-1]
    assert last < 0.6 * first and adversarial > 0 and accuracy > 0.9
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"accuracy {accuracy:.3f}")
