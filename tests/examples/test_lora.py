"""The example of LoRA: it learns, counts what is trained, and merging changes nothing."""

import re

import pytest

pytest.importorskip("peft", reason="needs pip install peft")
import lora
import torch
from peft import PeftModel
from safetensors.torch import load_file

from hf_deberta import HfDebertaForSequenceClassification


def test_it_learns_and_merges(tiny_model, sentiment, capsys):
    adapted, merged = lora.main(
        ["--model", str(tiny_model), *sentiment, "--max_steps", "40", "--learning_rate", "1e-2"]
    )
    counts = re.search(r"trainable params: ([\d,]+) \|\| all params: ([\d,]+)", capsys.readouterr().out).groups()
    trainable, total = (int(count.replace(",", "")) for count in counts)
    saved = load_file("lora/adapter/adapter_model.safetensors")
    assert adapted > 0.9 and merged == adapted
    assert sum(weight.numel() for weight in saved.values()) == trainable < total
    assert {name.split(".")[-2] for name in saved} == {"lora_A", "lora_B", "dense", "classifier"}


def test_the_adapter_holds_all_that_was_trained(tiny_model, sentiment):
    """Loaded into a checkpoint whose new pooler and classifier are other random numbers."""
    lora.main(["--model", str(tiny_model), *sentiment, "--max_steps", "2"])
    base = HfDebertaForSequenceClassification.from_pretrained(tiny_model, num_labels=2)
    loaded = PeftModel.from_pretrained(base, "lora/adapter").eval()
    merged = HfDebertaForSequenceClassification.from_pretrained("lora/merged").eval()
    ids = torch.tensor([[1, 5, 6, 7, 2]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, merged(ids).logits)
