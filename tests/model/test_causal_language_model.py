"""Causal language model: attention only to earlier tokens, loss of the next token, generation."""

import pytest
import torch
import transformers
from numerics import (
    V1_ATTENTION,
    assert_equal_but_for_rounding,
    assert_same_by_name,
    tiny_inputs,
    tiny_model,
    train_step,
)
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_deberta import HfDebertaForCausalLM, HfDebertaForMaskedLM

CAUSAL = {"conv_kernel_size": 0, "num_hidden_layers": 3}
VARIANTS = {
    "decoder": {},
    "decoder, v1 attention": V1_ATTENTION,
    "no decoder": {"emd_steps": 0},
    "absolute input (AP)": {"position_biased_input": True},
    "no relative attention": {"relative_attention": False, "pos_att_type": None, "position_biased_input": True},
}
INPUTS = tiny_inputs((9, 5, 7, 9))


def causal_model(backend="sdpa", dtype=torch.float64, **fields):
    model = tiny_model(HfDebertaForCausalLM, dtype=dtype, **{**CAUSAL, **fields})
    model.set_attn_implementation(backend)
    return model


def left_padded(inputs):
    return {name: tensor.flip(1) for name, tensor in inputs.items()}


# ---- attention ---------------------------------------------------------------------------------------------------

ROWS = tiny_inputs((9, 9))["input_ids"]
LEFT = left_padded(INPUTS)
LEFT_POSITIONS = (LEFT["attention_mask"].cumsum(1) - 1).clamp(min=0)
RESTARTING = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 0, 1, 2]])
BOUNDS = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
BLOCKS = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool().expand(2, -1, -1)
LAYOUTS = {  # inputs, and the document of each token [B, N], -1 at padding
    "no padding": ({"input_ids": ROWS}, torch.zeros(2, 9)),
    "right padding": (INPUTS, INPUTS["attention_mask"] - 1),
    "left padding": ({**LEFT, "position_ids": LEFT_POSITIONS}, LEFT["attention_mask"] - 1),
    "position_ids that restart": ({"input_ids": ROWS, "position_ids": RESTARTING}, (RESTARTING == 0).cumsum(1)),
    "cu_seq_lens_q": ({"input_ids": ROWS[:1], "cu_seq_lens_q": BOUNDS}, torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2]])),
    "3-D mask": ({"input_ids": ROWS, "attention_mask": BLOCKS}, (torch.arange(9) >= 4).long().expand(2, -1)),
}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_token_changes_only_itself_and_later_tokens_of_its_document(layout, variant, backend):
    model, (inputs, documents) = causal_model(backend, **VARIANTS[variant]).eval(), LAYOUTS[layout]
    logits = model(**inputs).logits
    assert logits.isfinite().all()
    for token in range(9):
        changed = inputs["input_ids"].clone()
        changed[:, token] = changed[:, token] % 127 + 1
        changed_logits = model(**{**inputs, "input_ids": changed}).logits
        assert changed_logits.isfinite().all()
        attends = (torch.arange(9) >= token) & (documents == documents[:, token, None]) & (documents >= 0)
        differs = (changed_logits != logits).any(-1)
        real = documents >= 0
        assert not differs[real & ~attends].any()  # bit-identical
        assert differs[attends].all()


@torch.no_grad()
@pytest.mark.usefixtures("unpad_tiny_models")
def test_causal_false_equals_the_masked_language_model(tmp_path):
    masked = tiny_model(HfDebertaForMaskedLM).eval()
    masked.save_pretrained(tmp_path)
    model = HfDebertaForCausalLM.from_pretrained(tmp_path).double().eval()
    labels = INPUTS["input_ids"].masked_fill(INPUTS["input_ids"] % 3 > 0, -100)
    output, expected = model(**INPUTS, labels=labels, causal=False), masked(**INPUTS, labels=labels)
    assert torch.equal(output.logits, expected.logits) and output.loss == expected.loss
    assert isinstance(model(**INPUTS, causal=False, return_dict=False), tuple)


def test_convolution_is_an_error():
    model = tiny_model(HfDebertaForCausalLM)
    with pytest.raises(ValueError, match=r"conv_kernel_size=3\).*causal=False"):
        model(**INPUTS)
    assert model(**INPUTS, causal=False).logits.shape == (4, 9, 128)


# ---- loss --------------------------------------------------------------------------------------------------------


def next_tokens(layout):
    """Return the token that each position predicts, -100 if none."""
    inputs, documents = LAYOUTS[layout]
    labels = torch.full_like(inputs["input_ids"], -100)
    same_document = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    labels[:, :-1] = inputs["input_ids"][:, 1:].masked_fill(~same_document, -100)
    return labels


@pytest.mark.parametrize("first", [0, 6], ids=["all labels", "few labels"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_is_the_cross_entropy_of_next_tokens(layout, variant, first):
    """Labels from a position on, as for an answer after a prompt."""
    inputs, expected_labels = LAYOUTS[layout][0], next_tokens(layout)
    labels = inputs["input_ids"].masked_fill(torch.arange(9) < first, -100)
    expected_labels = expected_labels.masked_fill(torch.arange(1, 10) < first, -100)
    results = []
    for sparse in (True, False):
        model = causal_model(**VARIANTS[variant], sparse_prediction=sparse)
        results.append(train_step(model, **inputs, labels=labels))
    (sparse, sparse_gradients), (dense, dense_gradients) = results
    assert sparse.logits is None and dense.logits.shape == (*labels.shape, 128)
    losses = nn.functional.cross_entropy(dense.logits.flatten(0, 1), expected_labels.flatten(), reduction="none")
    labelled = expected_labels.flatten() >= 0
    assert_equal_but_for_rounding(dense.loss, losses.sum() / labelled.sum())
    assert_equal_but_for_rounding(sparse.loss, dense.loss)
    assert_equal_but_for_rounding(sparse.losses, losses[labelled])
    assert torch.equal(sparse.predictions, dense.logits.flatten(0, 1)[labelled].argmax(-1))
    assert_same_by_name(sparse_gradients, dense_gradients)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("values_are_not_read")
def test_bounded_equals_counted_number_of_labels(variant):
    labels = INPUTS["input_ids"].masked_fill(torch.arange(9) % 3 == 0, -100)
    model = causal_model(**VARIANTS[variant])
    counted, gradients = train_step(model, **INPUTS, labels=labels)
    bounded, bounded_gradients = train_step(model, **INPUTS, labels=labels, max_predictions_per_row=8)
    assert_equal_but_for_rounding(bounded.loss, counted.loss)
    assert_same_by_name(bounded_gradients, gradients)


def test_trainer_shifts_the_labels_of_label_smoothing(tmp_path):
    model = causal_model().eval()
    trainer = Trainer(model, TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to=[], use_cpu=True))
    labels = INPUTS["input_ids"].masked_fill(INPUTS["attention_mask"] == 0, -100)
    logits = model(**INPUTS).logits[:, :-1]
    expected = nn.functional.cross_entropy(logits.mT, labels[:, 1:], label_smoothing=0.1)
    torch.testing.assert_close(trainer.compute_loss(model, {**INPUTS, "labels": labels}), expected)


def test_rows_of_one_token_have_no_loss():
    assert causal_model()(INPUTS["input_ids"][:, :1], labels=INPUTS["input_ids"][:, :1]).loss == 0


# ---- generation --------------------------------------------------------------------------------------------------


def continue_greedily(model, ids, count):
    """Append the most likely next token `count` times, without `generate`."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_generate_with_left_padding_equals_each_row_alone(variant):
    model, inputs = causal_model(**VARIANTS[variant]).eval(), left_padded(INPUTS)
    generated = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    for row, real in enumerate(inputs["attention_mask"].bool()):
        alone = inputs["input_ids"][row, real][None]
        assert generated[row, 9:].tolist() == continue_greedily(model, alone, 6)[0, real.sum() :].tolist()


def test_generate_samples_from_the_logits_of_the_whole_row():
    model, inputs = causal_model("auto").eval(), left_padded(INPUTS)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(**inputs, **settings, do_sample=True, top_k=10)
    mask = nn.functional.pad(inputs["attention_mask"], (0, 5), value=1)
    logits = model(output.sequences, attention_mask=mask).logits[:, 8:-1]
    torch.testing.assert_close(torch.stack(output.logits, 1).double(), logits, rtol=1e-5, atol=1e-5)


def test_a_saved_setting_of_the_cache_is_ignored(tmp_path):
    """As in folders of older versions, and of others."""
    model, ids = causal_model(dtype=torch.float32).eval(), INPUTS["input_ids"][:1]
    expected = continue_greedily(model, ids, 3)
    for use_cache in (None, True):
        model.save_pretrained(tmp_path)
        transformers.GenerationConfig(use_cache=use_cache).save_pretrained(tmp_path)
        loaded = HfDebertaForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(loaded.generate(ids, max_new_tokens=3, min_new_tokens=3), expected)
        settings = transformers.GenerationConfig(max_new_tokens=3, min_new_tokens=3)
        assert torch.equal(loaded.generate(ids, settings), expected)


@pytest.mark.parametrize("name", ["use_cache", "cache", "past_key_values"])
@pytest.mark.parametrize("call", ["forward", "generate"])
def test_a_cache_is_an_error(call, name):
    model, ids = causal_model().eval(), INPUTS["input_ids"]
    arguments = {name: True if name == "use_cache" else transformers.DynamicCache()}
    with pytest.raises(ValueError, match=f"has no key-value cache: leave out {name}, and pass all tokens of a row"):
        getattr(model, call)(ids, **arguments)
    with pytest.raises(ValueError, match="has no key-value cache"):
        model.generate(ids, transformers.GenerationConfig(use_cache=True))
    assert torch.equal(model(ids, **{name: None}).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("mode", [{"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 4}])
def test_generation_that_needs_a_cache_is_an_error(mode):
    with pytest.raises((RuntimeError, ValueError), match="cache"):
        causal_model().eval().generate(INPUTS["input_ids"][:1], max_new_tokens=3, **mode)


@torch.no_grad()
def test_logits_to_keep():
    for variant in VARIANTS.values():
        model = causal_model(**variant).eval()
        logits = model(**INPUTS).logits
        for count in (1, 3, 9, 20):
            torch.testing.assert_close(model(**INPUTS, logits_to_keep=count).logits, logits[:, -count:])


def test_generating_past_the_absolute_positions_is_an_error():
    model, ids = causal_model().eval(), torch.randint(1, 128, (1, 60))
    with pytest.raises(ValueError, match="65 positions, and max_position_embeddings is 64"):
        model.generate(ids, max_new_tokens=6, min_new_tokens=6)
    assert model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape == (1, 64)
    relative = causal_model(emd_steps=0).eval()
    assert relative.generate(ids, max_new_tokens=8, min_new_tokens=8).shape == (1, 68)


def test_generation_from_inputs_embeds_is_an_error():
    model, ids = causal_model().eval(), INPUTS["input_ids"]
    with pytest.raises(ValueError, match="inputs_embeds"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=2)
