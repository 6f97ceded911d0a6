"""Adapters of the real PEFT library on models of this package."""

import pytest
import torch
from safetensors.torch import load_file
from test_parity_with_transformers import in_tree

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaForSequenceClassification, HfDebertaModel

peft = pytest.importorskip("peft")

IDS = torch.tensor([[1, 5, 7, 2], [1, 9, 2, 0]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
LABELS = {HfDebertaForSequenceClassification: torch.tensor([0, 1]), HfDebertaForMaskedLM: IDS}
ADAPTERS = {
    "default LoRA": peft.LoraConfig,
    "default IA3": peft.IA3Config,
    "default AdaLoRA": lambda: peft.AdaLoraConfig(total_step=10),
    "all linear": lambda: peft.LoraConfig(target_modules="all-linear"),
    "words": lambda: peft.LoraConfig(target_modules=["word_embeddings"]),
    "tokens": lambda: peft.LoraConfig(target_modules=["query_proj"], trainable_token_indices=[5, 9]),
    "tokens only": lambda: peft.TrainableTokensConfig(token_indices=[5], target_modules=["word_embeddings"]),
    "positions": lambda: peft.LoraConfig(target_modules=["rel_embeddings"]),
}


@pytest.mark.parametrize("model_class", LABELS)
@pytest.mark.parametrize("name", ADAPTERS)
@torch.random.fork_rng()
def test_an_adapter_has_gradients_and_is_saved_loaded_and_merged(name, model_class, tmp_path):
    torch.manual_seed(0)
    base = model_class(HfDebertaConfig.from_preset("tiny", num_labels=2, initializer_range=0.3))
    base.save_pretrained(tmp_path / "base")
    before = base.eval()(**INPUTS).logits.detach()
    model = peft.get_peft_model(base, ADAPTERS[name]())
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        torch.nn.init.normal_(parameter.data, std=0.5)
    model.train()(**INPUTS, labels=LABELS[model_class]).loss.backward()
    assert trainable and all(parameter.grad.abs().sum() > 0 for parameter in trainable)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(model_class.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    with torch.no_grad():
        adapted = model.eval()(**INPUTS).logits
        assert (adapted - before).abs().max() > 1e-3
        torch.testing.assert_close(again.eval()(**INPUTS).logits, adapted)
        if name == "words" and model_class is HfDebertaForMaskedLM:
            return  # PEFT adapts the input only, and would merge into the output matrix too, which is the same tensor
        torch.testing.assert_close(model.merge_and_unload()(**INPUTS).logits, adapted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("heads", [(), ("pooler", "classifier")])
@torch.random.fork_rng()
def test_a_pooler_that_the_checkpoint_lacks_is_saved_only_if_it_is_named(heads, tmp_path):
    """With task_type="SEQ_CLS" PEFT saves the classifier; a checkpoint of pretraining has no pooler."""
    HfDebertaModel(HfDebertaConfig.from_preset("tiny", initializer_range=0.3)).save_pretrained(tmp_path / "base")
    outputs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = HfDebertaForSequenceClassification.from_pretrained(tmp_path / "base")
        if seed == 0:
            config = peft.LoraConfig(task_type="SEQ_CLS", modules_to_save=list(heads) or None)
            model = peft.get_peft_model(model, config)
            model.save_pretrained(tmp_path / "adapter")
        else:
            model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
        outputs.append(model.eval()(**INPUTS).logits)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.split(".")[2] for name in saved if "lora" not in name} == {"classifier", *heads}
    assert torch.allclose(*outputs, atol=1e-5) == bool(heads)


def test_default_targets_are_those_of_deberta_v2():
    HfDebertaForMaskedLM(HfDebertaConfig.from_preset("tiny"))
    tables = {name: table for name, table in vars(peft.utils.constants).items() if name.startswith("TRANSFORMERS_")}
    tables = {name: table for name, table in tables.items() if "deberta-v2" in table}
    assert len(tables) > 5
    for name, table in tables.items():
        assert table["hf_deberta"] == table["deberta-v2"], name


def test_ids_outside_of_an_adapted_vocabulary_are_named():
    model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny"))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["word_embeddings"]))
    with pytest.raises(ValueError, match=r"input_ids must lie in \[0, 128\)"):
        model(torch.tensor([[1, 128, 2]]))


@pytest.mark.parametrize("config", [peft.LoraConfig, peft.IA3Config])
@torch.random.fork_rng()
def test_an_adapter_of_v1_is_merged_before(config, tmp_path):
    """Its modules have other names in Transformers' `deberta`."""
    model = peft.get_peft_model(in_tree("v1", "ForSequenceClassification"), config()).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.5)
    with torch.no_grad():
        expected = model(**INPUTS).logits
        model.merge_and_unload().save_pretrained(tmp_path)
        found = HfDebertaForSequenceClassification.from_pretrained(tmp_path).eval()(**INPUTS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
