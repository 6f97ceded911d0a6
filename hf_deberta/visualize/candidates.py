"""The best candidates for each [MASK] of a text, with and without the enhanced mask decoder."""

from typing import Any

import torch

import hf_deberta

from .scores import token_name

CANDIDATES = 8  # per [MASK]


def missing_candidates(model: torch.nn.Module) -> str | None:
    """Say that this model has no candidates for [MASK], and which checkpoint has; None if it has them."""
    is_causal = isinstance(model, hf_deberta.HfDebertaForCausalLM)
    if isinstance(model, hf_deberta.HfDebertaForMaskedLM) and not is_causal:
        return None
    return (
        f"{type(model).__name__} has no masked-language head, and so no candidates for [MASK]. These have: "
        "microsoft/deberta-base and others of v1 and v2, models of hf-deberta mlm, and generators of v3 (pass "
        "--generator for a release that includes it, or the folder `generator` of hf-deberta rtd)."
    )


@torch.no_grad()
def mask_candidates(
    model: hf_deberta.HfDebertaForMaskedLM, tokenizer: Any, inputs: dict[str, torch.Tensor], output: Any
) -> list[dict[str, Any]]:
    """The best tokens at each [MASK], with and without the decoder, of a masked-language model.

    Without the decoder, the logits are those of the ordinary last layer, as if `emd_steps` were 0, from the same
    weights.
    """
    variants = {"masked-language model": output.logits[0]}
    if model.config.uses_mask_decoder:
        without = model.lm_predictions.lm_head(output.hidden_states[-1])
        variants = {"with the mask decoder": output.logits[0], "without (last layer only)": without[0]}
    masks = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten().tolist()
    return [
        {
            "position": position,
            "candidates": {name: _best(logits[position], tokenizer) for name, logits in variants.items()},
        }
        for position in masks
    ]


def _best(logits: torch.Tensor, tokenizer: Any) -> list[tuple[str, float]]:
    """The tokens with the highest probability."""
    best = logits.float().softmax(-1).topk(min(CANDIDATES, len(logits)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(token_name(tokenizer, token), round(probability, 4)) for token, probability in pairs]
