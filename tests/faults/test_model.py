"""Random configurations, inputs, heads, precisions and backends: every model equals its own plain computation.

The plain computation is `reference_mode()`: eager attention, nn.Linear, no cache, no unpadding. In float64 both must
be equal but for rounding; in float32 and bfloat16 the error against float64 may be a few times that of the plain
computation. All dropout is 0, so training mode must give the same numbers.

Padding and packing change nothing either: a row has the outputs, losses and gradients that it has alone.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from fault_cases import number_of_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_equal_but_for_rounding, gradients_of, largest, move_off_identity

from hf_deberta import (
    HfDebertaConfig,
    HfDebertaForCausalLM,
    HfDebertaForEntityChoice,
    HfDebertaForMaskedLM,
    HfDebertaForMultipleChoice,
    HfDebertaForPreTraining,
    HfDebertaForQuestionAnswering,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
    HfDebertaModel,
    reference_mode,
)

pytestmark = pytest.mark.usefixtures("unpad_tiny_models")

VOCABULARY, CHOICES, ENTITIES, LABELS = 37, 3, 4, 3
HEADS = (
    HfDebertaModel,
    HfDebertaForMaskedLM,
    HfDebertaForCausalLM,
    HfDebertaForPreTraining,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
    HfDebertaForQuestionAnswering,
    HfDebertaForMultipleChoice,
    HfDebertaForEntityChoice,
)
PER_ROW = (HfDebertaForSequenceClassification, HfDebertaForMultipleChoice, HfDebertaForEntityChoice)  # no tokens
ONE_TEXT_PER_ROW = (HfDebertaForQuestionAnswering, HfDebertaForMultipleChoice, HfDebertaForEntityChoice)
PADDED, PACKED = ("right", "left", "mixed", "holes", "empty row"), ("packed", "packed and padded")
MASKS = ("none", *PADDED, *PACKED, "pairs", "[B, 1, 1, N]", "restarts")
HEADS_AND_LAYOUTS = [(head, PADDED) for head in HEADS]
HEADS_AND_LAYOUTS += [(head, PACKED) for head in HEADS if head not in ONE_TEXT_PER_ROW]
TOLERANCE, LOSS_TOLERANCE = 1e-10, 1e-6  # losses are computed in float32


@dataclass(frozen=True)
class Case:
    """One model and one call of it; its repr, which hypothesis prints, is all that is needed to repeat it."""

    head: type
    fields: dict
    batch: int
    length: int
    mask: str
    backend: str
    training: bool
    embeds: bool
    labels: bool
    hidden_states: bool
    is_saved: bool
    seed: int


@st.composite
def cases(draw, heads=HEADS, masks=MASKS):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    head, mask = pick(*heads), pick(*masks)
    heads_of_attention = pick(1, 2, 3, 4)
    width = heads_of_attention * pick(2, 4, 5, 8, 16)
    steps = pick(0, 1, 2, 3)
    buckets = pick(-1, 0, 4, 5, 6, 16, 17)  # with 5 up to 12, Transformers reaches row 0 at 61
    distance = pick(-1, 12, 40) if buckets <= 16 else -1
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_attention_heads": heads_of_attention,
        "intermediate_size": pick(1, 7, 2 * width),
        "num_hidden_layers": pick(2, 3) if steps else pick(1, 2),
        "relative_attention": pick(True, True, True, False),
        "pos_att_type": pick("c2p|p2c", "c2p|p2c", "p2c|c2p", "c2p", "p2c", "p2p", "c2p|p2c|p2p", "none"),
        "position_buckets": buckets,
        "max_relative_positions": distance,
        "share_att_key": pick(True, False),
        "norm_rel_ebd": pick("layer_norm", "none"),
        "attention_key_bias": pick(True, False),
        "clamp_relative_distance": pick(True, True, False),
        "max_position_embeddings": 84,
        "position_biased_input": pick(False, False, True),
        "type_vocab_size": pick(0, 2),
        "emd_steps": steps,
        "embedding_size": pick(5, width) if steps == 0 else width,
        "conv_kernel_size": pick(0, 0, 1, 3, 5),
        "conv_act": pick("tanh", "gelu"),
        "hidden_act": pick("gelu", "gelu", "relu", "tanh"),
        "sparse_prediction": pick(True, False),
        "token_classifier": pick("linear", "projection"),
        "unpad_inputs": pick(True, True, False),
        "pad_token_id": pick(0, None, 3),
        "num_labels": pick(1, 2, LABELS) if head is HfDebertaForSequenceClassification else LABELS,
        "initializer_range": pick(0.05, 0.2),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return Case(
        head=head,
        fields=fields,
        batch=1 if "packed" in mask else draw(st.integers(1, 5)),
        length=draw(st.integers(1, 80)),
        mask=mask,
        backend=pick("eager", "sdpa"),
        training=pick(False, False, True),
        embeds=pick(False, False, True),
        labels=pick(False, True),
        hidden_states=pick(False, False, True),
        is_saved=pick(*[False] * 24, True),
        seed=draw(st.integers(0, 2**31)),
    )


def make_model(case):
    """A model whose biases and norms are not the identity, in float64."""
    torch.manual_seed(case.seed)
    model = case.head(HfDebertaConfig(**case.fields, attn_implementation=case.backend)).double()
    return move_off_identity(model).train(case.training)


def token_mask_and_layout(case, batch, random):
    """The tokens whose outputs count [batch, N], and the keyword arguments that describe the layout."""
    n = case.length
    integers = lambda *shape, high: torch.randint(0, high, shape, generator=random)  # noqa: E731
    real = torch.ones(batch, n, dtype=torch.bool)
    place = torch.arange(n)
    if case.mask in ("right", "[B, 1, 1, N]", "left", "mixed", "empty row"):
        starts, ends = integers(batch, 1, high=n), integers(batch, 1, high=n)
        starts, ends = torch.minimum(starts, ends), torch.maximum(starts, ends) + 1
        after, before = place >= starts, place < ends
        real = {"left": after, "mixed": after & before}.get(case.mask, before)
        if case.mask == "empty row" and batch > 1:
            real[integers(1, high=batch)] = False
    elif case.mask in ("holes", "packed and padded"):
        real = torch.rand(batch, n, generator=random) < 0.6
        real[place[:batch] % batch, integers(min(batch, n), high=n)] = True
    if case.mask == "none":
        return real, {}
    if case.mask == "pairs":
        pairs = torch.rand(batch, n, n, generator=random) < 0.5
        return real, {"attention_mask": pairs | torch.eye(n, dtype=torch.bool)}
    if "packed" in case.mask:
        inner = torch.randperm(n - 1, generator=random)[: int(integers(1, high=5))] + 1 if n > 1 else place[:0]
        layout = {"cu_seq_lens_q": torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([n])]).int()}
        if case.mask == "packed":
            return torch.ones_like(real), layout
        if len(inner):
            real[0, : layout["cu_seq_lens_q"][1]] = False  # a document without a real token
        return real, {**layout, "attention_mask": real.long()}
    if case.mask == "restarts":
        begins = torch.rand(batch, n, generator=random) < 0.1
        begins[:, 0] = True
        return real, {"position_ids": place - torch.where(begins, place, 0).cummax(1).values}
    mask = real.long()
    return real, {"attention_mask": mask[:, None, None] if case.mask == "[B, 1, 1, N]" else mask}


def make_inputs(case):
    """Keyword arguments of the model, and the tokens [B, N] (or [B, choices, N]) whose outputs count."""
    random = torch.Generator().manual_seed(case.seed)
    choices = CHOICES if case.head is HfDebertaForMultipleChoice else 1
    batch, n = case.batch * choices, case.length
    real, inputs = token_mask_and_layout(case, batch, random)
    ids = torch.randint(1, VOCABULARY, (batch, n), generator=random)
    if case.embeds:
        inputs["inputs_embeds"] = torch.randn(batch, n, case.fields["embedding_size"], generator=random).double()
    else:
        inputs["input_ids"] = ids
    if case.fields["type_vocab_size"]:
        inputs["token_type_ids"] = ids % 2
    if choices > 1:
        inputs = {
            name: tensor if name == "cu_seq_lens_q" else tensor.unflatten(0, (case.batch, choices))
            for name, tensor in inputs.items()
        }
    if case.head is HfDebertaForEntityChoice:
        inputs["entity_indices"] = torch.randint(0, n, (case.batch, ENTITIES, 3), generator=random)
    if case.labels:
        rows = len(inputs["cu_seq_lens_q"]) - 1 if "packed" in case.mask else case.batch
        inputs |= make_labels(case, ids, real, rows)
    return inputs, real


def make_labels(case, ids, real, rows):
    if case.head in (HfDebertaForMaskedLM, HfDebertaForCausalLM):
        return {"labels": torch.where(real & (ids % 3 == 0), ids, -100)}
    if case.head is HfDebertaForPreTraining:
        return {"labels": ids % 2}
    if case.head is HfDebertaForTokenClassification:
        return {"labels": ids % LABELS}
    if case.head is HfDebertaForSequenceClassification:
        labels = torch.arange(rows)
        return {"labels": labels / 2 if case.fields["num_labels"] == 1 else labels % 2}
    if case.head is HfDebertaForQuestionAnswering:
        first = real.int().argmax(1) if rows == len(real) else torch.zeros(rows, dtype=torch.long)
        return {"start_positions": first, "end_positions": first}
    if case.head is HfDebertaForMultipleChoice:
        return {"labels": torch.arange(case.batch) % CHOICES}
    if case.head is HfDebertaForEntityChoice:
        return {"labels": (ids[:, :1] + torch.arange(ENTITIES)) % 2}
    return {}


def compute(model, case, inputs, real):
    """Outputs at real tokens and, in training, gradients of all parameters; or the ValueError that refuses the call."""
    inputs = dict(inputs)
    if case.embeds:
        inputs["inputs_embeds"] = inputs["inputs_embeds"].to(model.dtype)
    with torch.set_grad_enabled(case.training):
        try:
            output = model(**inputs, output_hidden_states=case.hidden_states)
        except ValueError as error:
            return error
    results = {}
    for name, value in output.items():
        values = value if isinstance(value, tuple) else (value,)
        for i, tensor in enumerate(values):
            if torch.is_tensor(tensor) and tensor.is_floating_point():
                per_row = case.head in PER_ROW and name == "logits"
                per_token = tensor.shape[:2] == real.shape and not per_row
                results[f"{name} {i}"] = tensor[real] if per_token else tensor
    if case.training:
        loss = sum(
            (value * torch.linspace(0.5, 1, value.numel()).view(value.shape)).sum() for value in results.values()
        )
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        results |= {
            f"gradient of {name}": gradient
            for name, gradient in zip(parameters, gradients, strict=True)
            if gradient is not None
        }
    return {name: value.detach() for name, value in results.items()}


def compute_plainly(model, case, inputs, real):
    with reference_mode():
        return compute(model, case, inputs, real)


def assert_same(found, expected):
    if isinstance(expected, ValueError):
        assert isinstance(found, ValueError) and str(found) == str(expected)
        return
    assert not isinstance(found, ValueError), found
    assert found.keys() == expected.keys()
    scale = max([1.0, *map(largest, expected.values())])
    for name, tensor in expected.items():
        assert tensor.isfinite().all(), f"{name} is not finite"
        error = largest(found[name] - tensor)
        rounded = name.startswith("loss") or ("gradient" in name and "loss 0" in expected)
        allowed = (LOSS_TOLERANCE if rounded else TOLERANCE) * scale
        assert error <= allowed, f"{name} is off by {error:.2e}"


@settings(max_examples=number_of_cases(70, 12_000))
@given(case=cases())
def test_float64_equals_the_plain_computation(case, tmp_path_factory):
    model = make_model(case)
    inputs, real = make_inputs(case)
    expected = compute_plainly(model, case, inputs, real)
    found = compute(model, case, inputs, real)
    assert_same(found, expected)
    assert_same(compute(model, case, inputs, real), expected)  # with tables from the cache
    if case.is_saved and not isinstance(expected, ValueError):
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        twin = case.head.from_pretrained(folder, dtype=torch.float64, attn_implementation=case.backend)
        assert_same(compute(twin.train(case.training), case, inputs, real), expected)


def spans_of(case, inputs, real):
    """(row, first token, last token + 1) of the real tokens of each row or document; its first token if it has none."""
    bounds = inputs.get("cu_seq_lens_q", torch.tensor([0, case.length])).tolist()
    for row, mask in enumerate(real):
        for start, end in itertools.pairwise(bounds):
            places = mask[start:end].nonzero().flatten().tolist() or [0]
            yield row, start + places[0], start + places[-1] + 1


def cut(case, inputs, index, span):
    """The inputs of one span alone, the `index`th, with its labels."""
    row, start, end = span
    alone = {}
    for name, tensor in inputs.items():
        if name == "entity_indices":
            alone[name] = torch.where((tensor[row] > start) & (tensor[row] < end), tensor[row] - start, 0)[None]
        elif name in ("start_positions", "end_positions"):
            alone[name] = tensor[row, None] - start
        elif name == "labels" and case.head in PER_ROW:
            alone[name] = tensor[index, None]
        elif case.head is HfDebertaForMultipleChoice:
            alone[name] = tensor.flatten(0, 1)[row, start:end][None, None]
        elif name != "cu_seq_lens_q":
            alone[name] = tensor[row, start:end][None]
    return alone


def summed_gradients(model, calls):
    """The gradients by name of the sum of the losses of all items."""
    model.zero_grad()
    for inputs in calls:
        model(**inputs, num_items_in_batch=1).loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize(
    "head, masks", HEADS_AND_LAYOUTS, ids=lambda it: it[0] if it in (PADDED, PACKED) else it.__name__
)
@settings(max_examples=number_of_cases(8, 300))
@given(data=st.data())
def test_a_row_among_others_equals_the_row_alone(head, masks, data):
    """Also the gradients of its loss. A row of padding only is alone as one token of padding."""
    case = data.draw(cases([head], masks))
    training, length = case.training, max(case.length, 8)
    case = replace(case, length=length, labels=True, training=False, hidden_states=False)
    if head is HfDebertaForCausalLM:
        case.fields["conv_kernel_size"] = 0
    model = make_model(case).train(training)
    inputs, real = make_inputs(case)
    spans = list(spans_of(case, inputs, real))
    if head is HfDebertaForMultipleChoice:
        inputs.pop("labels")  # its loss compares the rows
    if head is HfDebertaForEntityChoice:  # 0 is padding, alone too
        inputs["entity_indices"] *= inputs["entity_indices"] != torch.tensor(spans)[:, 1, None, None]
    alone = [cut(case, inputs, index, span) for index, span in enumerate(spans)]
    found = compute(model, case, inputs, real)
    parts = [compute(model, case, one, real[row, None, start:end])
             for one, (row, start, end) in zip(alone, spans, strict=True)]  # fmt: skip
    assert found.keys() == parts[0].keys()
    for name in found.keys() - {"loss 0"}:
        expected = torch.cat([part[name].flatten() for part in parts])
        assert_equal_but_for_rounding(found[name].flatten(), expected, message=name)
    if "labels" in inputs or "start_positions" in inputs:
        found, expected = summed_gradients(model, [inputs]), summed_gradients(model, alone)
        assert found.keys() == expected.keys()
        allowed = LOSS_TOLERANCE * max(1.0, *map(largest, expected.values()))
        assert not {name for name in expected if largest(found[name] - expected[name]) > allowed}


# How much larger than the error of plain arithmetic in the same precision the error may be: other orders of additions,
# and in half precision roundings between the fused operations of PyTorch's attention.
ERROR_FACTOR, ROUNDINGS = 8, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(max_examples=number_of_cases(15, 2_500))
@given(case=cases())
def test_low_precision_is_as_exact_as_the_plain_computation(dtype, case):
    if case.fields["hidden_act"] == "relu":  # its gradient jumps where rounding changes the sign of a state
        case = replace(case, fields={**case.fields, "hidden_act": "gelu"})
    model = make_model(case)
    inputs, real = make_inputs(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    exact = compute_plainly(model, case, inputs, real)
    model.to(dtype)
    plain, found = compute_plainly(model, case, inputs, real), compute(model, case, inputs, real)
    if isinstance(exact, ValueError):
        assert isinstance(found, ValueError) and isinstance(plain, ValueError)
        return
    assert not isinstance(found, ValueError), found
    eps, scale = torch.finfo(dtype).eps, max(map(largest, exact.values()))
    budget = max(largest(plain[key].double() - exact[key]) for key in exact)
    for key, tensor in exact.items():
        assert found[key].isfinite().all(), f"{key} is not finite"
        error = largest(found[key].double() - tensor)
        allowed = ERROR_FACTOR * budget + ROUNDINGS * eps * scale
        assert error <= allowed, f"{key}: error {error:.2e}, plain arithmetic has {budget:.2e}, allowed {allowed:.2e}"
