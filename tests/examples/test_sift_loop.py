"""The loop with SiFT learns, and its second loss is positive."""

import sift_loop

from hf_deberta import HfDebertaModel, HfDebertaTokenizer


def test_it_learns(tiny_model, sentiment, capsys):
    # without dropout the second loss comes from the perturbation alone
    model = HfDebertaModel.from_pretrained(tiny_model, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model.save_pretrained("model")
    HfDebertaTokenizer.from_pretrained(tiny_model).save_pretrained("model")
    epochs = sift_loop.main(["--model", "model", *sentiment, "--learning_rate", "3e-3", "--epochs", "2"])
    (first, *_), (last, adversarial, accuracy) = epochs[0], epochs[-1]
    assert last < 0.6 * first and adversarial > 0 and accuracy > 0.9
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"accuracy {accuracy:.3f}")
