"""Compare with tensors of the official implementation, with its weights loaded through `from_pretrained`."""

import json
from dataclasses import replace

import golden_cases
import pytest
import torch
from golden_cases import part

from hf_deberta import (
    HfDebertaForEntityChoice,
    HfDebertaForMaskedLM,
    HfDebertaForMultipleChoice,
    HfDebertaForPreTraining,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
    replaced_token_labels,
)
from hf_deberta.model.batch_layout import AttentionMask
from hf_deberta.model.relative_position import log_bucket

STATES = {"atol": 2e-5, "rtol": 1e-4}
PROBABILITIES = {"atol": 2e-6, "rtol": 0}
MLM_CASES = [
    "case01_v1_mlm",
    "case01b_v1_maxrel",
    "case02_v2_mlm",
    "case02b_v2_conv_variant",
    "case02c_v2_unshared",
    "case03a_v3_mlm",
    "case04_abs_pos_types_embproj",
    "case04b_v3_abs_pos_types",
    "case05a_c2p_only",
    "case05b_p2c_only",
    "case05c_no_rel_none",
    "case05d_no_rel_default_type",
    "case05e_no_rel_both",
    "case05f_v1_no_bucket_new_layout_c2p",
]


def model_inputs(batch):
    """Return the inputs of a case that the encoder takes."""
    names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    return {name: batch[name] for name in names if name in batch}


def compare_encoder(output, expected, real):
    """Compare hidden states at real tokens, and whole attention matrices: padded queries attend to nothing."""
    for key, value in expected.items():
        name, _, layer = key.partition(".")
        if name == "embeddings":
            torch.testing.assert_close(output.hidden_states[0], value, **STATES)
        elif name == "hidden_states":
            torch.testing.assert_close(output.hidden_states[int(layer) + 1][real], value[real], **STATES)
        elif name == "attentions":
            torch.testing.assert_close(output.attentions[int(layer)], value, **PROBABILITIES)


@pytest.mark.parametrize("case", MLM_CASES)
@pytest.mark.usefixtures("unpadded_or_padded")
def test_encoder_and_masked_language_model(case, tmp_path):
    tensors = golden_cases.tensors(case)
    model = golden_cases.load(HfDebertaForMaskedLM, case, tmp_path)
    for name in sorted({key.split("/")[1] for key in tensors if key.startswith("in/") and key.count("/") == 2}):
        batch, expected = part(tensors, f"in/{name}/"), part(tensors, f"out/{name}/")
        inputs, real = model_inputs(batch), batch["attention_mask"].bool()
        with torch.no_grad():
            output = model(**inputs, output_hidden_states=True, output_attentions=True)
            compare_encoder(output, expected, real)  # computed by "eager"
            expected_states = {key: value for key, value in expected.items() if "attentions" not in key}
            compare_encoder(model(**inputs, output_hidden_states=True), expected_states, real)  # computed by "sdpa"
        if "lm_logits" not in expected:
            continue
        labels = batch["labels"].masked_fill(batch["labels"] == 0, -100)
        labelled = labels != -100
        torch.testing.assert_close(output.logits[labelled], expected["lm_logits"], **STATES)
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs, labels=labels).loss, expected["lm_loss"].mean(), **STATES)
            sparse = predict_sparsely(model, inputs, labels)
        torch.testing.assert_close(sparse.losses, expected["lm_loss"], **STATES)
        assert torch.equal(sparse.predictions, expected["lm_logits"].argmax(-1))
        torch.testing.assert_close(sparse.loss, expected["lm_loss"].mean(), **STATES)


def predict_sparsely(model, inputs, labels):
    """Return the output of a training step without dropout."""
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    rate, model.config.attention_probs_dropout_prob = model.config.attention_probs_dropout_prob, 0.0
    output = model(**inputs, labels=labels)
    model.config.attention_probs_dropout_prob = rate
    model.eval()
    return output


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("case", ["case01_v1_mlm", "case02_v2_mlm", "case03a_v3_mlm"])
def test_decoder_states_after_each_step(case, steps, tmp_path):
    tensors = golden_cases.tensors(case)
    model = golden_cases.load(HfDebertaForMaskedLM, case, tmp_path, emd_steps=steps)
    batch, expected = part(tensors, "in/A/"), part(tensors, "out/A/")
    with torch.no_grad():
        inputs = model_inputs(batch)
        context = model.deberta.batch_layout(**inputs)
        embeddings = model.deberta.embeddings(inputs["input_ids"], inputs.get("token_type_ids"), context, None)
        before_last = model.deberta.encoder(embeddings, context, skip_last=True).last_hidden_state
        states = model._decode(before_last, context, None)
    torch.testing.assert_close(states[batch["labels"] > 0], expected[f"emd_states.{steps - 1}"], **STATES)
    torch.testing.assert_close(
        model.deberta.embeddings.absolute_embeddings(context).expand_as(expected["position_embeddings"]),
        expected["position_embeddings"],
    )


def test_replaced_token_detection(tmp_path):
    case = "case03b_v3_rtd_head"
    tensors = golden_cases.tensors(case)
    model = golden_cases.load(HfDebertaForPreTraining, case, tmp_path)
    batch, expected = part(tensors, "in/A/"), part(tensors, "out/A/")
    real = batch["attention_mask"].bool()
    originals = torch.where(batch["labels"] > 0, batch["labels"], batch["input_ids"])
    labels = replaced_token_labels(batch["input_ids"], originals, batch["attention_mask"])
    with torch.no_grad():
        output = model(**model_inputs(batch), labels=labels, output_hidden_states=True, output_attentions=True)
    compare_encoder(output, expected, real)
    torch.testing.assert_close(output.logits[real], expected["rtd_logits"][real], **STATES)
    torch.testing.assert_close(labels[real].float(), expected["rtd_labels"])
    assert not real.all() and (labels[~real] == -100).all()
    torch.testing.assert_close(output.loss, expected["rtd_loss"].mean(), **STATES)


def encode_with_official_masks(model, batch, mask3d):
    """Return the output with the 2-D mask for embeddings, the 3-D mask for layers and no document boundaries."""
    deberta = model.deberta
    context = deberta.batch_layout(batch["input_ids"], batch["attention_mask_2d"])
    embeddings = deberta.embeddings(batch["input_ids"], None, context, None)
    context = replace(
        context, attention_mask=AttentionMask(mask3d.bool()), token_mask=mask3d.bool().any(1), documents=None
    )
    states = frozenset(range(len(deberta.encoder.layer) + 1))
    context = replace(context, backend="eager", output_attentions=True, output_hidden_states=states)
    return deberta.encoder(embeddings, context), context


@pytest.mark.parametrize("case", ["case07a_v3_mask3d", "case07b_v2_conv_mask3d"])
@pytest.mark.parametrize("name", ["packed", "random"])
def test_three_dimensional_masks(case, name, tmp_path):
    tensors = golden_cases.tensors(case)
    batch, expected = part(tensors, "in/"), part(tensors, f"out/{name}/")
    model = golden_cases.load(HfDebertaForMaskedLM, case, tmp_path)
    mask = batch[f"{name}/mask3d"]
    with torch.no_grad():
        output, context = encode_with_official_masks(model, batch, mask)
        compare_encoder(output, expected, mask.sum(2) > 0)
        if name == "packed":
            context = replace(context, position_ids=batch["position_ids"])
            labelled = batch["labels"] > 0
            states = model._decode(output.hidden_states[-2], context, None)[labelled]
            torch.testing.assert_close(states, expected["emd_states.1"], **STATES)
            logits = model.lm_predictions.lm_head(states)
            torch.testing.assert_close(logits, expected["lm_logits"], **STATES)


@pytest.mark.parametrize("case", ["case08a_seqcls_gelu", "case08b_seqcls_tanh", "case08c_regression"])
@pytest.mark.usefixtures("unpadded_or_padded")
def test_sequence_classification(case, tmp_path):
    tensors = golden_cases.tensors(case)
    batch, expected = part(tensors, "in/"), part(tensors, "out/")
    labels = golden_cases.info(case)["num_labels"]
    model = golden_cases.load(HfDebertaForSequenceClassification, case, tmp_path, num_labels=labels)
    with torch.no_grad():
        output = model(**model_inputs(batch))
        torch.testing.assert_close(output.logits, expected["logits"], **STATES)
        for kind in ("class", "soft", "float"):
            if f"labels_{kind}" in batch:
                loss = model(**model_inputs(batch), labels=batch[f"labels_{kind}"]).loss
                torch.testing.assert_close(loss, expected[f"loss_labels_{kind}"], **STATES)


HEADS = {
    "case08d_ner": (HfDebertaForTokenClassification, {"num_labels": 5, "token_classifier": "projection"}),
    "case08e_multichoice": (HfDebertaForMultipleChoice, {}),
    "case08f_record": (HfDebertaForEntityChoice, {}),
}


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.usefixtures("unpadded_or_padded")
def test_other_heads(case, tmp_path):
    tensors = golden_cases.tensors(case)
    batch, expected = part(tensors, "in/"), part(tensors, "out/")
    model_class, fields = HEADS[case]
    model = golden_cases.load(model_class, case, tmp_path, **fields)
    entities = {"entity_indices": batch["entity_indice"]} if "entity_indice" in batch else {}
    with torch.no_grad():
        output = model(**model_inputs(batch), **entities, labels=batch["labels"])
    compared = batch["attention_mask"].bool() if case == "case08d_ner" else ...
    torch.testing.assert_close(output.logits[compared], expected["logits"][compared], **STATES)
    torch.testing.assert_close(output.loss, expected["loss"], **STATES)


LOG_BUCKETS = json.loads((golden_cases.FOLDER / "case11_log_buckets.json").read_text())["tables"]


@pytest.mark.parametrize("table", LOG_BUCKETS, ids=lambda t: f"{t['bucket_size']}-{t['max_position']}")
def test_log_buckets_are_exact(table):
    first = table["first_relative_position"] if "first_relative_position" in table else -table["max_position"]
    distance = torch.arange(len(table["values"])) + first
    buckets = log_bucket(distance.numpy(), table["bucket_size"], table["max_position"])
    assert buckets.tolist() == table["values"]
