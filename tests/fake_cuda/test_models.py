"""Every head on a simulated CUDA device, forward and backward: one device, no sync, no copy from the host."""

import pytest
import torch
from counter import counting, simulated_cuda, with_values
from layer_counts import V3
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

import hf_deberta
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
)
from hf_deberta.pretraining.rtd_pretraining import HfDebertaForRtdPretraining, HfDebertaRtdConfig

BATCH, LENGTH = 2, 48
BACKENDS = ("eager", "sdpa", "triton")
MODES = {
    "eval": {"training": False, "autocast": False},
    "training": {"training": True, "autocast": False},
    "autocast": {"training": True, "autocast": True},
}


def integers(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": integers(BATCH, LENGTH)}


def padded(rows: tuple[int, ...] = (BATCH,)) -> dict[str, torch.Tensor]:
    return {name: integers(*rows, LENGTH) for name in ("input_ids", "attention_mask")}


def with_mask_of_pairs() -> dict[str, torch.Tensor]:
    return {**tokens(), "attention_mask": integers(BATCH, LENGTH, LENGTH)}


def packed_by_position_ids() -> dict[str, torch.Tensor]:
    return {**tokens(), "position_ids": integers(BATCH, LENGTH)}


def masked_labels() -> dict[str, torch.Tensor | int]:
    return {"labels": integers(BATCH, LENGTH), "max_predictions_per_row": 9}


def frozen_below(config):
    """The position table of all layers stays trainable."""
    model = HfDebertaForSequenceClassification(config)
    for part in (model.deberta.embeddings, model.deberta.encoder.layer[0]):
        part.requires_grad_(False)
    return model


def generator_and_discriminator(config):
    return HfDebertaForRtdPretraining(HfDebertaRtdConfig.from_discriminator(config))


# head -> its class, and its inputs besides those of the encoder
HEADS = {
    "model": (HfDebertaModel, lambda: {}),
    "sequence": (HfDebertaForSequenceClassification, lambda: {"labels": integers(BATCH)}),
    "frozen layers": (frozen_below, lambda: {"labels": integers(BATCH)}),
    "generator": (generator_and_discriminator, masked_labels),
    "tokens": (HfDebertaForTokenClassification, lambda: {"labels": integers(BATCH, LENGTH)}),
    "masked LM": (HfDebertaForMaskedLM, masked_labels),
    "all logits": (HfDebertaForMaskedLM, lambda: {"labels": integers(BATCH, LENGTH), "sparse_prediction": False}),
    "causal": (HfDebertaForCausalLM, lambda: {"labels": integers(BATCH, LENGTH), "max_predictions_per_row": 30}),
    "replaced tokens": (HfDebertaForPreTraining, lambda: {"labels": integers(BATCH, LENGTH)}),
    "answers": (
        HfDebertaForQuestionAnswering,
        lambda: {"start_positions": integers(BATCH), "end_positions": integers(BATCH)},
    ),
    "choices": (HfDebertaForMultipleChoice, lambda: {**padded((BATCH, 3)), "labels": integers(BATCH)}),
    "entities": (
        HfDebertaForEntityChoice,
        lambda: {"entity_indices": integers(BATCH, 4, 5), "labels": integers(BATCH, 4)},
    ),
}


def run(model_class, config, inputs, training, autocast, backend=None):
    """Forward, and in training backward, of a new model; return the counter."""
    with simulated_cuda():
        with torch.device("cuda"):
            model, arguments = model_class(config).train(training), inputs()
        if backend is not None:
            model.set_attn_implementation(backend)
        with (
            counting() as counter,
            torch.set_grad_enabled(training),
            torch.autocast("cuda", torch.bfloat16, enabled=autocast),
        ):
            loss = model(**arguments)[0].sum()  # the loss, or the first output
            if training:
                loss.backward()
        assert loss.device.type == "cuda"
        if training:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            assert gradients and all(gradient.device.type == "cuda" for gradient in gradients)
    return counter


# all heads, and with every backend those that need the first states, labelled states, and a causal mask
HEADS_AND_BACKENDS = [(head, "sdpa") for head in HEADS if head not in ("choices", "entities")]
HEADS_AND_BACKENDS += [
    (head, other) for head in ("sequence", "frozen layers", "masked LM", "causal") for other in ("eager", "triton")
]


def assert_never_waits(counter):
    assert (counter.syncs, counter.copies, counter.on_host) == ([], [], [])


def tiny(**fields):
    return HfDebertaConfig.from_preset("tiny", **fields)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("head", "backend"), HEADS_AND_BACKENDS)
def test_head(head, backend, mode):
    model_class, labels = HEADS[head]
    counter = run(model_class, tiny(), lambda: {**padded(), **labels()}, **MODES[mode], backend=backend)
    assert_never_waits(counter)
    assert (counter.launches_by_operator["forward_kernel"] > 0) == (backend == "triton")


# case -> head, backend, configuration, inputs
CASES = {
    "no mask": ("model", "sdpa", {}, tokens),
    "no mask, triton": ("model", "triton", {}, tokens),
    "mask of pairs": ("masked LM", "sdpa", {}, with_mask_of_pairs),
    "mask of pairs, triton": ("masked LM", "triton", {}, with_mask_of_pairs),
    "position_ids": ("masked LM", "sdpa", {}, packed_by_position_ids),
    "position_ids, triton": ("masked LM", "triton", {}, packed_by_position_ids),
    "position_ids, causal": ("causal", "sdpa", {}, packed_by_position_ids),
    "position_ids, replaced tokens": ("replaced tokens", "sdpa", {}, packed_by_position_ids),
    "choices": ("choices", "sdpa", {}, lambda: {}),
    "choices, triton": ("choices", "triton", {}, lambda: {}),
    "entities": ("entities", "sdpa", {}, padded),
    "convolution": ("model", "sdpa", {"conv_kernel_size": 3}, padded),
    "v1": ("masked LM", "sdpa", {"share_att_key": False, "position_buckets": 0}, padded),
    "c2p alone": ("sequence", "sdpa", {"pos_att_type": ["c2p"]}, padded),
    "p2p": ("sequence", "sdpa", {"pos_att_type": ["c2p", "p2c", "p2p"]}, padded),
    "labels nearly everywhere": ("masked LM", "sdpa", {}, lambda: {**padded(), "max_predictions_per_row": 40}),
    "number of items": ("sequence", "sdpa", {}, lambda: {**padded(), "num_items_in_batch": 5}),
    "no relative attention": ("sequence", "sdpa", {"relative_attention": False}, padded),
    "regression": ("sequence", "sdpa", {"problem_type": "regression", "num_labels": 1}, padded),
    "attention probabilities": ("model", "sdpa", {"output_attentions": True}, padded),
    "hidden states": ("sequence", "sdpa", {"output_hidden_states": True}, padded),
}


@pytest.mark.parametrize("case", CASES)
def test_training(case):
    head, backend, fields, inputs = CASES[case]
    model_class, labels = HEADS[head]
    counter = run(model_class, tiny(**fields), lambda: {**labels(), **inputs()}, **MODES["training"], backend=backend)
    assert_never_waits(counter)


# ---- packed rows and labelled positions: the host must not read boundaries and labels ----------------------------


def packed() -> dict[str, torch.Tensor | int]:
    """Three documents in a row, as Transformers' flattening collator passes them."""
    bounds = with_values([0, 20, 29, LENGTH])
    longest = {"max_length_q": 20, "max_length_k": 20}
    return {"input_ids": integers(1, LENGTH), "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **longest}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head", ["model", "sequence", "tokens", "masked LM", "causal", "replaced tokens"])
def test_packed_row(head, backend):
    model_class, labels = HEADS[head]

    def inputs():
        of_rows = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in labels().items()}
        return {**packed(), **({"labels": integers(3)} if head == "sequence" else of_rows)}

    assert_never_waits(run(model_class, tiny(), inputs, **MODES["training"], backend=backend))


# ---- in-tree models under `enable()` -----------------------------------------------------------------------------

SIZES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IN_TREE_HEADS = {
    "sequence": v2.DebertaV2ForSequenceClassification,
    "tokens": v2.DebertaV2ForTokenClassification,
    "answers": v2.DebertaV2ForQuestionAnswering,
    "masked LM": v2.DebertaV2ForMaskedLM,
    "v1": v1.DebertaForSequenceClassification,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head", IN_TREE_HEADS)
def test_enabled_in_tree_model(head, mode):
    """Without labels: the in-tree losses are Transformers' own, and some of them wait for the device."""
    model_class = IN_TREE_HEADS[head]
    with hf_deberta.enable():
        counter = run(model_class, model_class.config_class(**V3, **SIZES, intermediate_size=64), padded, **MODES[mode])
    assert (counter.syncs, counter.on_host) == ([], [])
    # the rows of distances, once per device; those of fake tensors are not cached
    assert len(counter.copies) == 1 and "encoder.py" in counter.copies[0]
