"""Causal language model: attention only to earlier tokens, loss of the next token, generation, key-value cache."""

from unittest import mock

import pytest
import torch
import transformers
from numerics import (
    V1_ATTENTION,
    assert_equal_but_for_rounding,
    assert_same_by_name,
    tiny_config,
    tiny_inputs,
    tiny_model,
    train_step,
)
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.cache_utils import QuantizedLayer

from hf_deberta import HfDebertaForCausalLM, HfDebertaForMaskedLM, optimize
from hf_deberta.model import modeling_hf_deberta

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

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 10},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "do_sample": False},
    "prompt in chunks": {"prefill_chunk_size": 4, "do_sample": False},
}


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


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
@pytest.mark.parametrize("mode", MODES)
def test_generate_with_a_cache_equals_without(mode, backend):
    model, inputs = causal_model(backend).eval(), left_padded(INPUTS)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "eos_token_id": 1}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    if mode == "prompt lookup":
        inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7]])}
    torch.manual_seed(0)
    output = model.generate(**inputs, **settings, **MODES[mode])
    assert isinstance(output.past_key_values, transformers.DynamicCache)
    torch.manual_seed(0)
    needs_cache = mode in ("prompt lookup", "prompt in chunks")
    expected = model.generate(**inputs, **settings, use_cache=False, **({} if needs_cache else MODES[mode]))
    assert expected.past_key_values is None
    assert torch.equal(output.sequences, expected.sequences) and output.sequences.shape[1] - 5 in (7, 9)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_logits_to_keep():
    for variant in VARIANTS.values():
        model = causal_model(**variant).eval()
        logits = model(**INPUTS).logits
        for count in (1, 3, 9, 20):
            torch.testing.assert_close(model(**INPUTS, logits_to_keep=count).logits, logits[:, -count:])
        *_, output = in_chunks(model, left_padded(INPUTS), (4, 5), logits_to_keep=1)
        torch.testing.assert_close(output.logits, model(**left_padded(INPUTS)).logits[:, -1:])


def test_generating_past_the_absolute_positions_is_an_error():
    model, ids = causal_model().eval(), torch.randint(1, 128, (1, 60))
    with pytest.raises(ValueError, match=r"max_position_embeddings = 64,.* may reach 65"):
        model.generate(ids, max_new_tokens=5)
    assert model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape == (1, 64)
    relative = causal_model(emd_steps=0).eval()
    assert relative.generate(ids, max_new_tokens=8, min_new_tokens=8).shape == (1, 68)


def test_generation_from_inputs_embeds_is_an_error():
    model, ids = causal_model().eval(), INPUTS["input_ids"]
    with pytest.raises(ValueError, match="inputs_embeds"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=2)


# ---- key-value cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_both_names_of_the_cache_work(name):
    model, ids, cache = causal_model().eval(), INPUTS["input_ids"][:1], transformers.DynamicCache()
    output = model(ids[:, :4], **{name: cache})
    assert output.cache is output.past_key_values is cache
    torch.testing.assert_close(model(ids[:, 4:], **{name: cache}).logits, model(ids).logits[:, 4:])
    generated = model.generate(ids, max_new_tokens=3, **{name: transformers.DynamicCache()})
    assert torch.equal(generated, model.generate(ids, max_new_tokens=3, use_cache=False))
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="are two names of one argument; pass only one"):
            call(ids, cache=cache, past_key_values=cache)


CACHED_VARIANTS = {
    **VARIANTS,
    "all terms": {"pos_att_type": ["c2p", "p2c", "p2p"]},
    "all terms, v1 attention": {"pos_att_type": ["c2p", "p2c", "p2p"], **V1_ATTENTION},
    "short distances": {"max_relative_positions": 4, "position_buckets": 0},
}


def in_chunks(model, inputs, sizes, **flags):
    """Return the outputs of calls with the next `sizes` tokens and a cache."""
    cache, outputs, start = transformers.DynamicCache(), [], 0
    for size in sizes:
        ids, mask = inputs["input_ids"][:, start : start + size], inputs.get("attention_mask")
        start += size
        mask = None if mask is None else mask[:, :start]
        outputs.append(model(ids, attention_mask=mask, past_key_values=cache, **flags))
        assert outputs[-1].past_key_values is cache and cache.get_seq_length() == start
    return outputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
@pytest.mark.parametrize("variant", CACHED_VARIANTS)
@torch.no_grad()
def test_cached_chunks_equal_one_call(variant, backend, dtype):
    model = causal_model(backend, dtype, **CACHED_VARIANTS[variant]).eval()
    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    for inputs in (INPUTS, left_padded(INPUTS), {"input_ids": INPUTS["input_ids"][:1]}):
        real = inputs.get("attention_mask", torch.ones(1, 9)).bool()
        expected = model(**inputs).logits[real]
        for sizes in ((9,), (4, 1, 3, 1), (1,) * 9):
            logits = torch.cat([output.logits for output in in_chunks(model, inputs, sizes)], 1)[real]
            torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", ["decoder", "no decoder"])
@torch.no_grad()
def test_states_and_attentions_with_a_cache(variant):
    model, flags = causal_model("eager", **VARIANTS[variant]).eval(), {"output_hidden_states": True}
    expected = model(**left_padded(INPUTS), **flags, output_attentions=True)
    *_, output = in_chunks(model, left_padded(INPUTS), (4, 3, 2), **flags, output_attentions=True)
    assert len(output.hidden_states) == 4 and len(output.attentions) == 3
    torch.testing.assert_close(output.hidden_states, tuple(states[:, 7:] for states in expected.hidden_states))
    torch.testing.assert_close(output.attentions, tuple(attention[:, :, 7:] for attention in expected.attentions))


@torch.no_grad()
def test_long_rows_with_a_cache():
    """Beyond the largest distance of the table, and of the blocks in which "sdpa" computes."""
    model = causal_model(emd_steps=0, max_position_embeddings=64).eval()
    inputs = {"input_ids": torch.randint(1, 128, (1, 600))}
    logits = torch.cat([output.logits for output in in_chunks(model, inputs, (300, 1, 298, 1))], 1)
    torch.testing.assert_close(logits, model(**inputs).logits, rtol=1e-10, atol=1e-10)


def test_a_step_computes_one_query():
    model = causal_model().eval()
    attend, shapes = modeling_hf_deberta.disentangled_attention, []

    def record(query, key, *args, **kwargs):
        shapes.append((query.shape[2], key.shape[2]))
        return attend(query, key, *args, **kwargs)

    with mock.patch.object(modeling_hf_deberta, "disentangled_attention", record):
        model.generate(torch.randint(1, 128, (1, 9)), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    steps = model.config.emd_steps
    prompt = [(9, 9)] * 2 + [(1, 9)] * steps
    assert shapes == prompt + [(1, 10)] * (2 + steps) + [(1, 11)] * (2 + steps)


@torch.no_grad()
def test_optimized_model_with_a_cache_warns_and_computes_the_same():
    model, inputs = causal_model("auto", torch.float32).eval(), left_padded(INPUTS)
    expected = model(**inputs).logits[:, 7:]
    optimize(model)
    logger = transformers.utils.logging.get_logger("hf_deberta.serving.optimized_model")
    with mock.patch.object(logger, "warning_once") as warning:
        *_, output = in_chunks(model, inputs, (4, 3, 2))
    assert "no effect with a key-value cache" in warning.call_args.args[0]
    torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=1e-5)


STATIC_CACHE = transformers.StaticCache(tiny_config(), max_cache_len=20)
CACHE_REFUSALS = {
    "causal=False": ({"causal": False}, "needs causal=True"),
    "labels": ({"labels": INPUTS["input_ids"]}, "pass labels without"),
    "cu_seq_lens_q": ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, "cannot hold packed rows"),
    "position_ids that restart": ({"position_ids": RESTARTING[:1]}, "cannot hold packed"),
    "3-D mask": ({"attention_mask": torch.ones(4, 9, 9)}, r"must be \[B, K\] = \(4, 9\)"),
    "static cache": ({"past_key_values": STATIC_CACHE}, "such as DynamicCache, not StaticCache"),
    "tuple": ({"past_key_values": ()}, "such as DynamicCache, not tuple"),
}


@pytest.mark.parametrize("case", CACHE_REFUSALS)
def test_calls_that_cannot_have_a_cache_are_errors(case):
    arguments, message = CACHE_REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        causal_model().eval()(INPUTS["input_ids"], use_cache=True, **arguments)


def test_gradient_checkpointing_with_a_cache_is_an_error():
    model = causal_model()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(INPUTS["input_ids"], use_cache=True)
    assert model.eval()(INPUTS["input_ids"], use_cache=True).past_key_values.get_seq_length() == 9


def test_mask_of_the_new_tokens_alone_is_an_error():
    model = causal_model().eval()
    cache = model(**INPUTS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"= \(4, 10\), for 9 cached and 1 new tokens, not \(4, 1\)"):
        model(torch.ones(4, 1, dtype=torch.long), attention_mask=torch.ones(4, 1), past_key_values=cache)


@pytest.mark.parametrize("call", ["forward", "generate"])
def test_a_cache_of_another_batch_size_is_an_error(call):
    model = causal_model().eval()
    input_ids = INPUTS["input_ids"]
    cache = model(input_ids[:2], use_cache=True).past_key_values
    arguments = {"max_new_tokens": 1} if call == "generate" else {}
    ids = torch.cat([input_ids, input_ids[:, :1]], dim=1)[:1]
    with pytest.raises(ValueError, match="must hold the rows of this batch, 1, not 2; pass the cache of these rows"):
        getattr(model, call)(ids, past_key_values=cache, **arguments)
    cache.batch_select_indices(torch.tensor([0]))
    assert getattr(model, call)(ids, past_key_values=cache, **arguments) is not None


class UnchangedWhenQuantized(QuantizedLayer):
    """A quantized layer that loses nothing, without a library."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def test_a_quantized_cache():
    """After its first step it holds an empty vector in place of keys of 4 dimensions."""
    model, ids = causal_model().eval(), INPUTS["input_ids"]
    layers = [UnchangedWhenQuantized(residual_length=4) for _ in range(model.config.num_hidden_layers)]
    cache = transformers.Cache(layers=layers)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([3, 1, 1, 4], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits)
