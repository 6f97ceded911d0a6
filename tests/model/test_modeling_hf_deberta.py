"""The public interface of the models: outputs, masks, packing, padding, bad input, resizing, pipelines, compiling."""

import pytest
import torch
from numerics import (
    V1_ATTENTION,
    assert_equal_but_for_rounding,
    assert_same_by_name,
    at_real_tokens,
    gradients_of,
    tiny_config,
    tiny_inputs,
    tiny_model,
)
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from hf_deberta import (
    HfDebertaForCausalLM,
    HfDebertaForMaskedLM,
    HfDebertaForPreTraining,
    HfDebertaForQuestionAnswering,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
    HfDebertaModel,
)
from hf_deberta.model.modeling_hf_deberta import HfDebertaLayer

HEADS = [
    HfDebertaModel,
    HfDebertaForMaskedLM,
    HfDebertaForPreTraining,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
    HfDebertaForQuestionAnswering,
]
CAUSAL = {"conv_kernel_size": 0}  # the convolution reads the next token


def name_of(model_class):
    return model_class.__name__.removeprefix("HfDeberta")


@pytest.mark.parametrize("head", [HfDebertaForTokenClassification, HfDebertaForSequenceClassification])
@pytest.mark.parametrize(("cls_dropout", "expected"), [(None, 0.1), (0.0, 0.0), (0.3, 0.3)])
def test_dropout_before_the_classifier(head, cls_dropout, expected):
    model = tiny_model(head, hidden_dropout_prob=0.1, cls_dropout=cls_dropout)
    assert model.dropout.p == expected


@pytest.mark.parametrize(
    ("ids", "mask", "expected"),
    [([[7, 8, 0]], None, 1), ([[0, 7, 8]], None, 1), ([[7, 0, 8]], None, 0), ([[7]], None, 0), ([[7, 0]], [[1, 0]], 0)],
    ids=str,
)
def test_padding_without_a_mask_is_warned_of(ids, mask, expected, warnings_so_far):
    model = tiny_model(HfDebertaModel, pad_token_id=0)
    model(torch.tensor(ids), attention_mask=None if mask is None else torch.tensor(mask))
    assert len({message for message in warnings_so_far() if "passing in an `attention_mask`" in message}) == expected


def with_labels(model_class, inputs):
    if model_class is HfDebertaModel:
        return inputs
    if model_class is HfDebertaForSequenceClassification:
        return {**inputs, "labels": torch.arange(len(inputs["input_ids"])) % 2}
    if model_class is HfDebertaForQuestionAnswering:
        position = torch.arange(len(inputs["input_ids"])) % 2
        return {**inputs, "start_positions": position, "end_positions": position + 1}
    ids = inputs["input_ids"]
    labels = ids.masked_fill((ids % 3 != 0) | (ids == 0), -100)
    return {**inputs, "labels": labels if issubclass(model_class, HfDebertaForMaskedLM) else labels.clamp(max=1)}


def first_tensor(output):
    """The main output of a head: logits, the last hidden state, or losses if there are no logits."""
    for name in ("logits", "start_logits", "last_hidden_state", "losses"):
        if name in output:
            return output[name]
    raise AssertionError(f"nothing to compare in {list(output)}")


def loss_of(output, inputs):
    """The loss, or a sum over the main output without padding if the model has no loss."""
    if "loss" in output:
        return output.loss
    states = first_tensor(output)
    return at_real_tokens(states, inputs.get("attention_mask", torch.ones(states.shape[:2])))[..., 0].sum()


def trained(model, **inputs):
    model.zero_grad()
    output = model(**inputs)
    loss = loss_of(output, inputs)
    loss.backward()
    return loss.detach(), gradients_of(model)


# ---- gradient checkpointing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("model_class", [*HEADS, HfDebertaForCausalLM], ids=name_of)
@pytest.mark.usefixtures("unpad_tiny_models")
def test_gradient_checkpointing_changes_nothing(model_class, reentrant):
    fields = CAUSAL if model_class is HfDebertaForCausalLM else {}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = tiny_model(model_class, num_hidden_layers=3, **dropout, **fields)
    inputs, calls = with_labels(model_class, tiny_inputs()), []
    for layer in model.modules():
        if isinstance(layer, HfDebertaLayer):
            layer.intermediate.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    expected = trained(model, **inputs)
    once = len(calls)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(0)
    found = trained(model, **inputs)
    assert once >= 3 and len(calls) == 3 * once  # forward, forward again and its repetition in backward
    assert_equal_but_for_rounding(found[0], expected[0])
    assert_same_by_name(found[1], expected[1])


# ---- outputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_class", HEADS, ids=name_of)
@pytest.mark.parametrize("where", ["arguments", "configuration"])
@pytest.mark.usefixtures("unpad_tiny_models")
def test_all_states_and_attentions_on_request(model_class, where):
    model = tiny_model(model_class, num_hidden_layers=3).eval()
    inputs = tiny_inputs()
    plain = model(**inputs)
    assert plain.hidden_states is None and plain.attentions is None
    flags = {"output_hidden_states": True, "output_attentions": True}
    if where == "configuration":
        model.config.output_hidden_states = model.config.output_attentions = True
        flags = {}
    output = model(**inputs, **flags)
    assert [tuple(state.shape) for state in output.hidden_states] == [(3, 9, 32)] * 4
    assert [tuple(attention.shape) for attention in output.attentions] == [(3, 4, 9, 9)] * 3
    real = inputs["attention_mask"].double()
    found, expected = (at_real_tokens(first_tensor(each), real) for each in (output, plain))
    torch.testing.assert_close(found, expected)  # another backend computes attentions
    for attention in output.attentions:
        torch.testing.assert_close(attention.sum(-1), real[:, None].expand(-1, 4, -1))
    encoder = model if model_class is HfDebertaModel else model.deberta
    last = at_real_tokens(encoder(**inputs).last_hidden_state, real)
    torch.testing.assert_close(at_real_tokens(output.hidden_states[-1], real), last)
    only_states = model(**inputs, output_hidden_states=True, output_attentions=False)
    assert len(only_states.hidden_states) == 4 and only_states.attentions is None
    for state, expected in zip(only_states.hidden_states, output.hidden_states, strict=True):
        torch.testing.assert_close(at_real_tokens(state, real), at_real_tokens(expected, real))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.usefixtures("unpad_tiny_models")
def test_requested_states_do_not_change_the_decoder_in_training(sparse):
    model = tiny_model(HfDebertaForMaskedLM, sparse_prediction=sparse)
    inputs = with_labels(HfDebertaForMaskedLM, tiny_inputs())
    plain, with_states = model(**inputs), model(**inputs, output_hidden_states=True, output_attentions=True)
    real = inputs["attention_mask"]
    found, expected = (at_real_tokens(first_tensor(output), real) for output in (with_states, plain))
    torch.testing.assert_close((found, with_states.loss), (expected, plain.loss))
    assert ("losses" in plain) == sparse
    assert len(with_states.hidden_states) == 3 and len(with_states.attentions) == 2


@pytest.mark.parametrize("model_class", HEADS, ids=name_of)
@pytest.mark.usefixtures("unpad_tiny_models")
def test_embeddings_in_place_of_ids(model_class):
    model = tiny_model(model_class)
    inputs = with_labels(model_class, tiny_inputs())
    expected = model(**inputs)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert torch.equal(first_tensor(model(**inputs)), first_tensor(expected))


# ---- masks and padding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [2, 32, 64, 120])
def test_rows_in_use_of_many_buckets(buckets):
    """For few positions some buckets exceed their distance, and the rows in use must include them."""
    model, inputs = tiny_model(HfDebertaModel, position_buckets=buckets).eval(), tiny_inputs((64, 34, 5))
    states = model(**inputs).last_hidden_state
    for row, length in ((1, 34), (2, 5)):
        alone = model(inputs["input_ids"][row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(states[row, :length], alone[0])


MASKS = {
    "bool": lambda mask: mask.bool(),
    "float": lambda mask: mask.float(),
    "[B, N, N]": lambda mask: mask[:, :, None] * mask[:, None],
    "[B, 1, N, N]": lambda mask: (mask[:, :, None] * mask[:, None])[:, None],
    "[B, 1, 1, N]": lambda mask: mask[:, None, None],
}


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("model_class", [HfDebertaModel, HfDebertaForMaskedLM], ids=name_of)
@pytest.mark.usefixtures("unpadded_or_padded")
def test_masks_of_every_form_agree(model_class, form):
    model = tiny_model(model_class).eval()
    inputs = tiny_inputs()
    expected = first_tensor(model(**inputs))
    mask = MASKS[form](inputs["attention_mask"])
    found = first_tensor(model(inputs["input_ids"], attention_mask=mask))
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_class", HEADS, ids=name_of)
@pytest.mark.usefixtures("unpadded_or_padded")
def test_a_fully_padded_row_is_finite_and_leaves_the_others_alone(model_class, dtype):
    model = tiny_model(model_class, dtype=dtype)
    inputs = with_labels(model_class, tiny_inputs((9, 9, 9)))
    inputs["attention_mask"][1] = 0
    model.eval()
    output = first_tensor(model(**inputs))
    assert output.dtype == dtype and output.isfinite().all()
    alone = first_tensor(model(**{name: tensor[2:] for name, tensor in inputs.items()}))
    assert_equal_but_for_rounding(output[2:], alone)
    model.train()
    loss, gradients = trained(model, **inputs)
    assert loss.isfinite()
    assert not [name for name, gradient in gradients.items() if not gradient.isfinite().all()]


# ---- packed documents --------------------------------------------------------------------------------------------


def packed(lengths, how):
    """One row of documents, and the documents on their own."""
    documents = [tiny_inputs((length,), seed=i)["input_ids"] for i, length in enumerate(lengths)]
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    options = {"cu_seq_lens_q": boundaries.int()}
    if how == "position_ids":
        options = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    if how == "mask":
        document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        options = {"attention_mask": (document[:, None] == document)[None]}
        options["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": torch.cat(documents, 1), **options}, documents


@pytest.mark.parametrize("how", ["cu_seq_lens_q", "position_ids", "mask"])
@pytest.mark.parametrize(
    "model_class", [HfDebertaModel, HfDebertaForMaskedLM, HfDebertaForQuestionAnswering], ids=name_of
)
def test_packed_documents_equal_separate_ones(model_class, how):
    model = tiny_model(model_class).eval()
    row, documents = packed((7, 1, 12, 5), how)
    separate = torch.cat([first_tensor(model(document)) for document in documents], 1)
    torch.testing.assert_close(first_tensor(model(**row)), separate)


# ---- number of positions -------------------------------------------------------------------------------------------

IDS = tiny_inputs()["input_ids"]


@pytest.mark.parametrize("how", ["length", "position_ids"])
@pytest.mark.parametrize(
    "model_class, fields",
    [
        (HfDebertaForMaskedLM, {}),
        (HfDebertaForMaskedLM, {"position_biased_input": True}),
        (HfDebertaModel, {"position_biased_input": True}),
    ],
    ids=["decoder", "masked LM with absolute input", "encoder with absolute input"],
)
def test_more_positions_than_embeddings_are_refused(model_class, fields, how):
    model = tiny_model(model_class, **fields)
    inputs = {"input_ids": tiny_inputs((65,))["input_ids"]}
    if how == "position_ids":
        inputs = {"input_ids": IDS[:1], "position_ids": torch.arange(56, 65)[None]}
    with pytest.raises(ValueError, match="65 positions, and max_position_embeddings is 64; shorten"):
        model(**inputs)
    fitting = {name: tensor[:, :-1] for name, tensor in inputs.items()}
    assert first_tensor(model(**fitting)).isfinite().all()


def test_a_packed_row_may_be_longer_than_the_positions_of_its_documents():
    ids, boundaries = tiny_inputs((150,))["input_ids"], torch.tensor([0, 50, 110, 150])
    assert tiny_model(HfDebertaForMaskedLM)(ids, cu_seq_lens_q=boundaries).logits.shape == (1, 150, 128)


# ---- embeddings: resizing, tying, saving -------------------------------------------------------------------------


def assert_tied(model):
    head = model.lm_predictions.lm_head
    assert model.get_output_embeddings() is head.decoder
    assert head.decoder.weight is model.get_input_embeddings().weight
    assert head.decoder.bias is None


def saved_and_loaded(model, folder):
    model.save_pretrained(folder)
    again, report = type(model).from_pretrained(folder, output_loading_info=True, dtype=model.dtype)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert model.state_dict().keys() == again.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    return again.eval()


@pytest.mark.parametrize("size", [100, 160], ids=["smaller", "larger"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_resizing_keeps_the_remaining_words(size, tied, tmp_path):
    model = tiny_model(HfDebertaForMaskedLM, tie_word_embeddings=tied).eval()
    ids = tiny_inputs(vocab=100)["input_ids"]
    with torch.no_grad():  # Transformers resizes parameters in place, which a live graph would not survive
        before = model(ids).logits
        model.resize_token_embeddings(size)
        after, kept = model(ids).logits, min(size, 128)
    assert model.config.vocab_size == size and model.get_input_embeddings().num_embeddings == size
    assert after.shape[-1] == size and after.isfinite().all()
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    head = model.lm_predictions.lm_head
    assert head.bias.shape == (size,)
    assert (head.decoder.weight is model.get_input_embeddings().weight) == tied and head.decoder.bias is None
    torch.testing.assert_close(saved_and_loaded(model, tmp_path)(ids).logits, after)
    stored = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_predictions.lm_head.bias" in stored and ("lm_predictions.lm_head.decoder.weight" in stored) != tied
    new = torch.full_like(ids, size - 1)
    _, gradients = trained(model.train(), input_ids=new, labels=new)
    assert gradients["deberta.embeddings.word_embeddings.weight"][size - 1].any()
    with pytest.raises(ValueError, match=rf"must lie in \[0, {size}\)"):
        model(new + 1)


def test_resizing_with_gradients_on_gives_no_warning(recwarn):
    torch.set_warn_always(True)  # otherwise once in a process
    tiny_model(HfDebertaForMaskedLM).resize_token_embeddings(160)
    torch.set_warn_always(False)
    assert not [warning for warning in recwarn if "requires_grad" in str(warning.message)]


def test_input_and_output_embeddings_can_be_replaced():
    model = tiny_model(HfDebertaForMaskedLM).eval()
    assert_tied(model)
    assert model.get_input_embeddings() is model.deberta.embeddings.word_embeddings
    model.set_input_embeddings(torch.nn.Embedding(128, 32, dtype=torch.float64))
    model.tie_weights()
    assert_tied(model)
    replaced = torch.nn.Linear(32, 128, dtype=torch.float64)
    bias = replaced.bias
    model.set_output_embeddings(replaced)
    assert model.get_output_embeddings() is replaced and replaced.bias is None
    assert model.lm_predictions.lm_head.bias is bias
    torch.nn.init.zeros_(replaced.weight)
    assert torch.equal(model(IDS).logits, bias.expand(3, 9, -1))
    ao = torch.ao.quantization
    quantized = ao.quantize_dynamic(model.float(), {torch.nn.Embedding: ao.float_qparams_weight_only_qconfig})
    assert quantized(IDS).logits.isfinite().all()  # its embeddings have no parameters, and `weight` is a method


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_class", HEADS, ids=name_of)
@pytest.mark.usefixtures("unpad_tiny_models")
def test_every_parameter_learns(model_class, tied):
    """There is one output bias, also with untied embeddings: an unused one would stop distributed training."""
    model = tiny_model(model_class, tie_word_embeddings=tied)
    _, gradients = trained(model, **with_labels(model_class, tiny_inputs()))
    assert gradients.keys() == dict(model.named_parameters()).keys()
    zero = {name for name, gradient in gradients.items() if not gradient.any()}
    assert not zero


# ---- pipelines, compiling, devices -------------------------------------------------------------------------------


COMPILED = {
    "encoder": (HfDebertaModel, {}),
    "masked LM": (HfDebertaForMaskedLM, {}),
    "masked LM, no mask": (HfDebertaForMaskedLM, {}),
    "classes": (HfDebertaForSequenceClassification, {}),
    "tokens": (HfDebertaForTokenClassification, {}),
    "causal LM": (HfDebertaForCausalLM, CAUSAL),
}


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["training", "serving"])
@pytest.mark.parametrize("case", COMPILED)
def test_one_graph_for_all_lengths(case, training):
    """With labels and without `problem_type`; lengths lie on both sides of the table's span."""
    model_class, fields = COMPILED[case]
    model, graphs = tiny_model(model_class, **fields).train(training), []
    torch.compiler.reset()
    backend = lambda graph, inputs: graphs.append(graph) or graph  # noqa: E731
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in (7, 12, 16, 17, 23, 33, 40, 60):
        inputs = with_labels(model_class, tiny_inputs((length, length // 2, length)))
        if "no mask" in case:
            del inputs["attention_mask"]
        with torch.set_grad_enabled(training):
            loss, expected = (loss_of(each(**inputs), inputs) for each in (compiled, model))
        assert_equal_but_for_rounding(loss, expected, torch.float32)
        if training:
            names, weights = zip(*model.named_parameters(), strict=True)
            found, wanted = (torch.autograd.grad(each, weights, materialize_grads=True) for each in (loss, expected))
            assert_same_by_name(dict(zip(names, found, strict=True)), dict(zip(names, wanted, strict=True)))
    assert len(graphs) <= 2


@pytest.mark.slow
def test_frozen_layers_are_trained_in_one_graph():
    """The position table alone needs a gradient there."""
    model = tiny_model(HfDebertaModel).eval()
    model.embeddings.requires_grad_(False)
    model.encoder.layer.requires_grad_(False)
    table = model.encoder.rel_embeddings.weight
    losses = [model, torch.compile(model, backend="eager", fullgraph=True)]
    expected, actual = (torch.autograd.grad(each(IDS).last_hidden_state.square().mean(), table) for each in losses)
    torch.testing.assert_close(actual, expected)


def test_context_follows_a_model_to_another_device():
    """Accelerate moves a layer's arguments to the layer's device if they have a method `to`."""
    from accelerate.utils import send_to_device

    mask = torch.ones_like(IDS)
    mask[:, -1] = 0
    model = tiny_model(HfDebertaModel)
    _, context = model.encoder.position_table(model.batch_layout(IDS, mask), IDS.device)
    moved = send_to_device(context, "meta")
    parts = (moved, moved.attention_mask, moved.window)
    tensors = [value for part in parts for value in vars(part).values() if torch.is_tensor(value)]
    assert len(tensors) == 3 and {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.window.first == context.window.first and context.attention_mask.mask.device.type == "cpu"


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
def test_shapes_are_known_on_the_meta_device(backend):
    """Which has no autocast."""
    with torch.device("meta"):
        model, inputs = HfDebertaForMaskedLM(tiny_config(attn_implementation=backend)), torch.ones_like(IDS)
        output = model.train()(inputs, labels=inputs, max_predictions_per_row=inputs.shape[1])
        output.loss.backward()
        assert model.eval()(inputs, labels=inputs).logits.shape == (*IDS.shape, model.config.vocab_size)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("fields", [{}, V1_ATTENTION], ids=["v3 attention", "v1 attention"])
def test_models_can_be_made_without_values(fields, device):
    with FakeTensorMode() if device == "cpu" else torch.device("meta"):
        encoder = HfDebertaForMaskedLM(tiny_config(**fields)).deberta.encoder
    real = HfDebertaForMaskedLM(tiny_config(**fields)).deberta.encoder
    assert encoder.saturation == real.saturation and encoder.can_shrink == real.can_shrink
    assert encoder.rows_of_distance.device.type == "cpu"  # weights may be assigned to such a model later


def test_weights_are_loaded_after_to_empty():
    """As models that FSDP divides are made; no file holds the rows of the distances."""
    model = tiny_model(HfDebertaModel).eval()
    with torch.device("meta"):
        copy = HfDebertaModel(model.config).double().eval()
    copy.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(copy(IDS).last_hidden_state, model(IDS).last_hidden_state)


def test_an_average_with_buffers_keeps_the_rows_of_distances():
    model = tiny_model(HfDebertaModel).eval()
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True).eval()  # 0.9 * 5 + 0.1 * 5 is 4
    for _ in range(2):
        average.update_parameters(model)
    torch.testing.assert_close(average(IDS).last_hidden_state, model(IDS).last_hidden_state)
