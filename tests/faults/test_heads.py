"""Padding changes nothing: every head gives a padded or packed row the output, loss and gradients that it has alone.

A row alone is cut to the span from its first to its last real token. Padding between real tokens stays, with its mask:
relative positions count it, and v2's convolution reads its zeros. A row of padding only is alone as one token of
padding. Ids and labels at padding are random. Labels that a head does not take are refused.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from fault_cases import number_of_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import V1_ATTENTION, assert_same_by_name, gradients, largest, tiny_config, tiny_model

import hf_deberta
from hf_deberta.model.losses import IGNORED
from hf_deberta.pretraining.rtd_pretraining import HfDebertaForRtdPretraining, HfDebertaRtdConfig

pytestmark = pytest.mark.usefixtures("unpad_tiny_models")

VOCABULARY, CLASSES = 128, 5
VERSIONS = {
    "v1": {**V1_ATTENTION, "conv_kernel_size": 0},
    "v1 with absolute positions": {**V1_ATTENTION, "conv_kernel_size": 0, "position_biased_input": True},
    "v2": {"conv_kernel_size": 3},
    "v3": {"conv_kernel_size": 0},
}
SEQUENCE = hf_deberta.HfDebertaForSequenceClassification
MULTI_LABEL = {"num_labels": CLASSES, "problem_type": "multi_label_classification"}
# name: (class, config fields, kind of labels, whether outputs are one per row, whether rows may be packed)
HEADS = {
    "base model": (hf_deberta.HfDebertaModel, {}, None, False, True),
    "single label": (SEQUENCE, {"num_labels": CLASSES}, "class", True, True),
    "multi-label": (SEQUENCE, MULTI_LABEL, "classes", True, True),
    "regression": (SEQUENCE, {"num_labels": 1}, "number", True, True),
    "tokens": (hf_deberta.HfDebertaForTokenClassification, {"num_labels": CLASSES}, "tokens", False, True),
    "question answering": (hf_deberta.HfDebertaForQuestionAnswering, {}, "answer", False, False),
    "multiple choice": (hf_deberta.HfDebertaForMultipleChoice, {}, "choice", True, False),
    "entity choice": (hf_deberta.HfDebertaForEntityChoice, {}, "entities", True, False),
    "replaced tokens": (hf_deberta.HfDebertaForPreTraining, {}, "replaced", False, True),
    "masked LM": (hf_deberta.HfDebertaForMaskedLM, {"sparse_prediction": False}, "words", False, True),
    "masked LM, sparse": (hf_deberta.HfDebertaForMaskedLM, {}, "words", None, True),
    "causal LM": (hf_deberta.HfDebertaForCausalLM, {"sparse_prediction": False}, "next words", False, True),
    "RTD pair": (HfDebertaForRtdPretraining, {}, "pair", False, True),
}


# kind of labels -> field of a row
TOKEN_LABELS = {"tokens": "classes", "replaced": "replaced", "words": "words", "next words": "words", "pair": "words"}


@dataclass
class Row:
    """A row alone: the span from its first to its last real token. Of padding only: one token, which is padding."""

    ids: torch.Tensor  # [n]
    mask: torch.Tensor  # [n]
    words: torch.Tensor  # [n], labels of a language model
    classes: torch.Tensor  # [n], labels of tokens
    replaced: torch.Tensor  # [n], 0 or 1, or -100
    label: int  # of the row, -100 in some
    several: torch.Tensor  # [classes], 0, 1 or -100
    number: float
    answer: tuple[int, int]
    entities: torch.Tensor  # [2, 2], 0 for padding
    entity_labels: torch.Tensor  # [2]


def draw_row(length: int, inner_padding: bool, random: torch.Generator) -> Row:
    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    mask = torch.ones(max(length, 1), dtype=torch.long)
    if length == 0:
        mask[:] = 0
    elif inner_padding and length > 2:
        mask[1:-1] = numbers(0, 2, length - 2)
    n = len(mask)
    unlabelled = numbers(0, 3, n) == 0
    answer = numbers(-1, n, 2)
    return Row(
        ids=numbers(1, VOCABULARY, n),
        mask=mask,
        words=numbers(0, VOCABULARY, n).masked_fill(unlabelled, IGNORED),
        classes=numbers(0, CLASSES, n).masked_fill(unlabelled, IGNORED),
        replaced=numbers(0, 2, n).masked_fill(unlabelled, IGNORED),
        label=int(numbers(-1, CLASSES, 1)) if length else IGNORED,
        several=numbers(0, 2, CLASSES).masked_fill(numbers(0, 4, CLASSES) == 0, IGNORED),
        number=float(numbers(-9, 9, 1)) / 4,
        answer=(int(answer.min()), int(answer.max())),
        entities=numbers(0, n, 2, 2),
        entity_labels=numbers(0, 2, 2),
    )


def placed(row: Row, before: int, length: int, random: torch.Generator) -> Row:
    """Return the row with padding before it and up to `length`, of random ids and labels."""
    n = len(row.ids)

    def pad(values: torch.Tensor, high: int) -> torch.Tensor:
        whole = torch.randint(1, high, (length,), generator=random)
        whole[before : before + n] = values
        return whole

    mask = torch.zeros(length, dtype=torch.long)
    mask[before : before + n] = row.mask
    return replace(
        row,
        ids=pad(row.ids, VOCABULARY),
        mask=mask,
        words=pad(row.words, VOCABULARY),
        classes=pad(row.classes, CLASSES),
        replaced=pad(row.replaced, 2),
        answer=tuple(at if at < 0 else at + before for at in row.answer),
        entities=torch.where(row.entities > 0, row.entities + before, 0),
    )


def model_inputs(rows: list[Row], kind: str | None, packed: bool) -> dict[str, torch.Tensor]:
    """Return the inputs of a model for rows of equal length, or for one packed row of them."""

    def of_tokens(name: str) -> torch.Tensor:
        values = [getattr(row, name) for row in rows]
        return torch.cat(values)[None] if packed else torch.stack(values)

    inputs = {"input_ids": of_tokens("ids"), "attention_mask": of_tokens("mask")}
    if packed:
        bounds = torch.tensor([0, *(len(row.ids) for row in rows)]).cumsum(0)
        inputs["cu_seq_lens_q"] = bounds.int()
        if bool(inputs["attention_mask"].all()):
            del inputs["attention_mask"]
    if kind in TOKEN_LABELS:
        inputs["labels"] = of_tokens(TOKEN_LABELS[kind])
    if kind == "class":
        inputs["labels"] = torch.tensor([row.label for row in rows])
    if kind == "classes":
        inputs["labels"] = torch.stack([row.several for row in rows]).float()
    if kind == "number":
        inputs["labels"] = torch.tensor([row.number for row in rows])
    if kind == "entities":
        inputs["labels"] = torch.stack([row.entity_labels for row in rows])
        inputs["entity_indices"] = torch.stack([row.entities for row in rows])
    if kind == "answer":
        inputs["start_positions"], inputs["end_positions"] = torch.tensor([row.answer for row in rows]).unbind(1)
    if kind == "pair":
        inputs["replaced_ids"] = inputs["input_ids"] * 7 % VOCABULARY + (inputs["input_ids"] * 7 % VOCABULARY == 0)
    if kind == "choice":
        choices = inputs["input_ids"].shape[0] if len(rows) == 1 else 2
        inputs = {name: values.unflatten(0, (-1, choices)) for name, values in inputs.items()}
        inputs["labels"] = torch.zeros(len(inputs["input_ids"]), dtype=torch.long)
    return inputs


def summed_loss(output, rows: list[Row], kind: str | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss times the number of labelled items, so that the losses of rows add up."""
    real = torch.cat([row.mask for row in rows]).bool()
    if kind is None:
        weights = torch.cat([row.ids for row in rows])[real].double().sin()
        states = output.last_hidden_state.flatten(0, 1)[real]
        return (states * weights[:, None]).sum()
    if kind == "pair":
        masked = torch.cat([row.words for row in rows])[real] >= 0
        return output.lm_loss * masked.sum() + output.rtd_loss * real.sum()
    if kind == "answer":
        return answer_losses(output, rows, inputs)
    if kind in ("class", "classes"):
        items = (inputs["labels"] >= 0).sum()
    elif kind == "number":
        items = len(rows)
    elif kind == "entities":
        items = sum(int((row.mask[row.entities].bool() & (row.entities > 0)).any(-1).sum()) for row in rows)
    elif kind == "next words":
        items = sum(int(((row.words[1:] >= 0) & row.mask[1:].bool() & row.mask[:-1].bool()).sum()) for row in rows)
    else:
        items = int((torch.cat([getattr(row, TOKEN_LABELS[kind]) for row in rows])[real] >= 0).sum())
    return output.loss * items


def answer_losses(output, rows: list[Row], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the losses of all answers at real tokens."""
    losses = []
    for name, logits in (("start_positions", output.start_logits), ("end_positions", output.end_logits)):
        for row, at, scores in zip(rows, inputs[name].tolist(), logits, strict=True):
            if at >= 0 and row.mask[at]:
                losses.append(scores[row.mask.bool()].logsumexp(0) - scores[at])
    return torch.stack(losses).sum() if losses else 0 * output.start_logits[:, 0].sum()


def outputs_by_row(output, rows: list[Row], per_row: bool | None, packed: bool) -> list[torch.Tensor]:
    """Return the output of each row: one vector, or one for each real token."""
    if per_row is None:
        return []
    if hasattr(output, "start_logits"):
        values = torch.stack([output.start_logits, output.end_logits], -1)
    else:
        values = output.last_hidden_state if "last_hidden_state" in output else output.logits
    if per_row:
        return list(values.reshape(len(rows), -1))
    by_row = values[0].split([len(row.ids) for row in rows]) if packed else values
    return [states[row.mask.bool()] for states, row in zip(by_row, rows, strict=True)]


@lru_cache(maxsize=256)
def model_of(head: str, version: str, layers: int, dtype: torch.dtype):
    fields = {**VERSIONS[version], **HEADS[head][1], "num_hidden_layers": layers}
    if layers == 1:
        fields["emd_steps"] = 0
    if head != "RTD pair":
        return tiny_model(HEADS[head][0], dtype=dtype, **fields)
    torch.manual_seed(0)
    return HfDebertaForRtdPretraining(HfDebertaRtdConfig(discriminator=tiny_config(**fields))).to(dtype).train()


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.25}


@settings(max_examples=number_of_cases(60, 5000))
@given(
    head=st.sampled_from(list(HEADS)),
    version=st.sampled_from(list(VERSIONS)),
    layers=st.integers(1, 7),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]),
    backend=st.sampled_from(["eager", "sdpa"]),
    unpad=st.booleans(),
    side=st.sampled_from(["left", "right", "mixed", "none"]),
    inner=st.booleans(),
    packed=st.booleans(),
    lengths=st.lists(st.integers(0, 9), min_size=2, max_size=4),
    seed=st.integers(0, 2**20),
)
def test_a_row_among_others_equals_the_row_alone(
    head, version, layers, dtype, backend, unpad, side, inner, packed, lengths, seed, tally
):
    _, _, kind, per_row, may_pack = HEADS[head]
    packed = packed and may_pack
    if version == "v2" and kind == "next words":
        version = "v3"  # a causal language model has no convolution
    if kind == "choice":
        lengths = lengths[: len(lengths) // 2 * 2]
    random = torch.Generator().manual_seed(seed)
    rows = [draw_row(length, inner, random) for length in lengths]
    widest = max(len(row.ids) for row in rows) + (side != "none")
    batch = []
    for index, row in enumerate(rows):
        length = len(row.ids) if packed and side == "none" else widest
        left = side == "left" or (side == "mixed" and index % 2 == 0)
        batch.append(placed(row, length - len(row.ids) if left else 0, length, random))
    model = model_of(head, version, layers, dtype)
    model.set_attn_implementation(backend)
    for part in (model.generator, model.discriminator) if kind == "pair" else (model,):
        part.config.unpad_inputs = unpad
    exact = dtype == torch.float64
    model.train(exact or per_row is None)
    with torch.set_grad_enabled(exact):
        inputs = model_inputs(batch, kind, packed)
        together = model(**inputs)
        singles = [model_inputs([row], kind, False) for row in rows]
        alone = [model(**single) for single in singles]
        found = outputs_by_row(together, batch, per_row, packed)
        expected = [outputs_by_row(one, [row], per_row, False)[:1] for one, row in zip(alone, rows, strict=True)]
        for values, reference in zip(found, expected, strict=False):
            assert values.isfinite().all()
            error = largest(values.double() - reference[0].double())
            assert error <= TOLERANCES[dtype] * max(1, largest(reference[0])), error
        if kind == "choice":
            logits = torch.cat([one.logits.flatten() for one in alone]).view(-1, 2).float()
            losses = -logits.log_softmax(-1)[:, 0].sum()
            loss = together.loss * (len(rows) // 2)
        else:
            loss = summed_loss(together, batch, kind, inputs)
            losses = sum(
                summed_loss(one, [row], kind, single) for one, row, single in zip(alone, rows, singles, strict=True)
            )
    assert torch.isfinite(loss)
    if dtype != torch.bfloat16:
        torch.testing.assert_close(loss.float(), losses.float(), rtol=1e-3, atol=1e-3)
    if exact:
        parameters = dict(model.named_parameters())
        found = gradients(loss, parameters)
        assert all(gradient.isfinite().all() for gradient in found.values())
        assert_same_by_name(found, gradients(losses, parameters))
    tally.held("a padded or packed row equals the row alone")


# ---- what no head takes ------------------------------------------------------------------------------------------

BAD_VALUES = {
    "class": (CLASSES, 10**6, 0.5, float("nan")),
    "choice": (2, 10**6, 0.5),
    "classes": (2, -1, 1.5, float("nan"), float("inf")),
    "soft": (1, 0, -1, float("nan"), float("inf")),
    "number": (float("nan"), float("inf"), -float("inf")),
    "tokens": (CLASSES, 10**6, 0.5, float("nan")),
    "entities": (2, -1, 10**6, 0.5, float("nan")),
    "replaced": (2, -1, 10**6, 0.5, float("nan")),
    "words": (VOCABULARY, 10**9, 0.5, float("nan")),
    "next words": (VOCABULARY, 10**9, 0.5, float("nan")),
    "pair": (VOCABULARY, 10**9),
    "answer": (0.5, float("nan")),
}
BAD_SHAPES = {
    "a row too many": lambda values: torch.cat([values, values[:1]]),
    "a column too many": lambda values: torch.stack([values, values], -1),
    "one more dimension": lambda values: values[None],
    "a list": lambda values: values.tolist(),
    "an array": lambda values: values.numpy(),
    "one number": lambda values: values.flatten()[0],
}
BAD_INPUTS = {
    "input_ids": (-1, VOCABULARY, 10**12),
    "inputs_embeds": (),
    "attention_mask": (),
    "entity_indices": (-1, 10, 10**6),
    "replaced_ids": (-1, VOCABULARY),
}


@settings(max_examples=number_of_cases(100, 5000))
@given(
    head=st.sampled_from([*HEADS, "soft labels"]),
    backend=st.sampled_from(["eager", "sdpa"]),
    data=st.data(),
    seed=st.integers(0, 2**20),
)
def test_what_a_head_does_not_take_is_refused(head, backend, data, seed, tally):
    soft = head == "soft labels"
    head, kind = ("single label", "soft") if soft else (head, HEADS[head][2])
    random = torch.Generator().manual_seed(seed)
    rows = [draw_row(length, False, random) for length in (6, 6, 6, 6)]
    model = model_of(head, "v3", 2, torch.float32)
    model.set_attn_implementation(backend)
    inputs = model_inputs(rows, "class" if soft else kind, packed=False)
    if soft:
        inputs["labels"] = torch.rand(4, CLASSES, generator=random).softmax(-1)
    assert torch.isfinite(model(**inputs).loss).all() if kind else True
    name = data.draw(st.sampled_from(sorted(inputs)))
    values = inputs[name]
    is_label = name in ("labels", "start_positions", "end_positions")
    bad_values = BAD_VALUES[kind] if is_label else BAD_INPUTS[name]
    fault = data.draw(st.sampled_from([*bad_values, *BAD_SHAPES, "no rows", "missing"]))
    if fault == "missing":
        if name not in ("input_ids", "start_positions", "end_positions", "entity_indices") or kind == "pair":
            return
        del inputs[name]
    elif fault == "no rows":
        inputs[name] = values[:0]
    elif isinstance(fault, str):
        inputs[name] = BAD_SHAPES[fault](values)
    else:
        kept = isinstance(fault, int) and not values.is_floating_point()
        inputs[name] = torch.full_like(values, fault, dtype=None if kept else torch.float32)
    with pytest.raises(ValueError) as caught:
        model(**inputs)
    assert "\n" not in str(caught.value)
    tally.refused("inputs and labels that a head does not take")
