"""Adapters that PEFT trained on Transformers' `deberta` (v1) give the same outputs on ours after `convert_adapter`."""

import json

import pytest
import torch
from test_parity_with_transformers import in_tree

from hf_deberta import HfDebertaForSequenceClassification
from hf_deberta.in_tree.adapter import convert_adapter

peft = pytest.importorskip("peft")

IDS = torch.tensor([[1, 5, 7, 2], [1, 9, 8, 2]])
ADAPTERS = {
    "LoRA": lambda: peft.LoraConfig(task_type="SEQ_CLS"),
    "DoRA": lambda: peft.LoraConfig(use_dora=True, target_modules=["in_proj", "pos_proj", "pos_q_proj", "dense"]),
    "LoRA, names with outer modules": lambda: peft.LoraConfig(
        target_modules=["self.in_proj", "deberta.encoder.layer.0.attention.self.pos_proj", "pos_q_proj"],
        exclude_modules=["layer.1.attention.self.pos_q_proj"],
        rank_pattern={"in_proj": 3},
        alpha_pattern={"pos_proj": 32},
    ),
}


def trained(folder, config):
    """Return a v1 model with an adapter of random weights, saved as `base` and `adapter` in the folder."""
    base = in_tree("v1", "ForSequenceClassification")
    base.save_pretrained(folder / "base")
    model = peft.get_peft_model(base, config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.5)
    model.save_pretrained(folder / "adapter")
    return model


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_converted_adapter_gives_equal_outputs(name, tmp_path):
    model = trained(tmp_path, ADAPTERS[name]())
    convert_adapter(tmp_path / "adapter", tmp_path / "ours", num_attention_heads=4)
    base = HfDebertaForSequenceClassification.from_pretrained(tmp_path / "base")
    ours = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    with torch.no_grad():
        expected = model(IDS).logits
        torch.testing.assert_close(ours(IDS).logits, expected, rtol=1e-4, atol=1e-4)
        with ours.disable_adapter():
            assert (base(IDS).logits - expected).abs().max() > 1e-2


REFUSED = {
    "a pattern of names": ("LoRA", {"target_modules": ".*in_proj"}, "target_modules must be a list of names"),
    "a rank of a pattern": ("LoRA", {"rank_pattern": {".*in_proj": 4}}, "rank_pattern must have names of modules"),
    "another kind": ("LoHa", {}, "only LoRA and DoRA adapters of in_proj can be converted"),
    "a scale before the bias": ("IA3", {}, "only LoRA and DoRA adapters of in_proj can be converted"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_cannot_be_converted_is_refused(case, tmp_path):
    name, fields, message = REFUSED[case]
    kinds = {
        **ADAPTERS,
        "LoHa": lambda: peft.LoHaConfig(target_modules=["in_proj"]),
        "IA3": lambda: peft.IA3Config(task_type="SEQ_CLS"),
    }
    trained(tmp_path, kinds[name]())
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=message):
        convert_adapter(tmp_path / "adapter", tmp_path / "ours", num_attention_heads=4)
    assert not (tmp_path / "ours").exists()
