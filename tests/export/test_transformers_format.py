"""Export to Transformers' own classes: what the folder contains, and models that cannot be exported."""

import pytest
import torch
import transformers
from test_parity_with_transformers import batch, in_tree, ours

import hf_deberta
from hf_deberta import export_to_transformers


def test_exported_folder_loads_with_auto_classes(tmp_path):
    model = hf_deberta.HfDebertaForSequenceClassification(
        hf_deberta.HfDebertaConfig.from_preset("tiny", num_labels=3, problem_type="single_label_classification")
    ).eval()
    export_to_transformers(model.__class__(model.config), tmp_path / "exported")  # replaced, in another number of files
    export_to_transformers(model, tmp_path / "exported", max_shard_size="20KB")
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    assert type(plain) is transformers.DebertaV2ForSequenceClassification
    assert (tmp_path / "exported" / "model.safetensors.index.json").exists()  # sharded
    assert plain.config.num_labels == 3 and plain.config.problem_type == "single_label_classification"
    inputs = batch(lengths=(12, 5))
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, atol=1e-6, rtol=0)


def test_export_of_a_mask_decoder_warns_and_keeps_its_weights(tmp_path):
    model = hf_deberta.HfDebertaForMaskedLM(hf_deberta.HfDebertaConfig.from_preset("tiny")).eval()
    with pytest.warns(UserWarning, match="no enhanced mask decoder"):
        export_to_transformers(model, tmp_path)
    again = ours("ForMaskedLM", tmp_path)
    assert again.config.emd_steps == 2
    inputs = batch(lengths=(12, 5))
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    plain = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        states, expected = plain(**inputs).last_hidden_state, model.deberta(**inputs).last_hidden_state
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(states[real], expected[real], atol=1e-5, rtol=0)


V1 = {"position_buckets": -1, "share_att_key": False, "norm_rel_ebd": "none"}
EXPORTABLE = {
    "spans of a checkpoint of three labels": ("ForQuestionAnswering", {"num_labels": 3}, "DebertaV2"),
    "untied": ("ForMaskedLM", {"emd_steps": 0, "tie_word_embeddings": False}, "DebertaV2"),
    "v1": ("Model", {**V1, "attention_key_bias": False}, "Deberta"),
    "v1 with key biases": ("Model", {**V1, "attention_key_bias": True}, "DebertaV2"),
}


@pytest.mark.parametrize("case", EXPORTABLE)
def test_transformers_classes_compute_the_same(case, tmp_path):
    name, fields, prefix = EXPORTABLE[case]
    model = getattr(hf_deberta, f"HfDeberta{name}")(hf_deberta.HfDebertaConfig.from_preset("tiny", **fields)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # biases start at zero
    export_to_transformers(model, tmp_path)
    plain, report = getattr(transformers, f"{prefix}{name}").from_pretrained(tmp_path, output_loading_info=True)
    inputs = batch(lengths=(12, 12))
    with torch.no_grad():
        expected, found = model(**inputs), plain.eval()(**inputs)
    assert not report["missing_keys"] and transformers.AutoConfig.from_pretrained(tmp_path).architectures == [
        type(plain).__name__
    ]
    for key in found.keys() & {"logits", "start_logits", "end_logits", "last_hidden_state"}:
        torch.testing.assert_close(expected[key], found[key], atol=1e-5, rtol=0)


NOT_EXPORTABLE = {
    "p2p term": ("HfDebertaModel", {"pos_att_type": "c2p|p2p"}, "p2p"),
    "projection head": ("HfDebertaForTokenClassification", {"token_classifier": "projection"}, "projection head"),
    "causal attention": ("HfDebertaForCausalLM", {}, "HfDebertaForMaskedLM"),
}


@pytest.mark.parametrize("case", NOT_EXPORTABLE)
def test_model_that_transformers_cannot_express_is_an_error(case, tmp_path):
    name, fields, message = NOT_EXPORTABLE[case]
    model = getattr(hf_deberta, name)(hf_deberta.HfDebertaConfig.from_preset("tiny", **fields))
    with pytest.raises(ValueError, match=message):
        export_to_transformers(model, tmp_path / "folder")
    with pytest.raises(ValueError, match="DebertaV2Model"):
        export_to_transformers(in_tree("v3", "Model"), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_classes_of_somebody_else_are_refused(tmp_path):
    class OwnHead(hf_deberta.HfDebertaForSequenceClassification):
        """Its pooling would be lost."""

    model = OwnHead(hf_deberta.HfDebertaConfig.from_preset("tiny"))
    with pytest.raises(ValueError, match=r"no class like OwnHead.*model\.deberta"):
        export_to_transformers(model, tmp_path / "out")
    export_to_transformers(model.deberta, tmp_path / "encoder")
