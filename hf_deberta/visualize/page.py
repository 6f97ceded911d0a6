"""One self-contained HTML page (page.html) with the scores of all layers and heads, and candidates for each [MASK]."""

import base64
import json
from pathlib import Path
from typing import Any, cast

import torch

from hf_deberta import HfDebertaForCausalLM, HfDebertaForMaskedLM
from hf_deberta.model.relative_position import TERMS
from hf_deberta.training.json_files import atomic_write

from .scores import TITLES, encoder_of, scores_of_layers, token_name, tokenize

TEMPLATE = Path(__file__).with_name("page.html")
MAX_PAGE_MB = 40
CANDIDATES = 8  # per [MASK]
HIDDEN = -(2**15)  # in the page's int16 values: a pair that the attention mask hides


def attention_page(
    model: torch.nn.Module, tokenizer: Any, text: str, file: str | Path, pair: str | None = None
) -> None:
    """Write one HTML file, without links to others: all layers, heads and parts, with their values.

    `pair` is the second text of a model that reads two, such as a premise and a hypothesis.

    For a masked-language model it also lists the best candidates for each [MASK] of the text, with the enhanced mask
    decoder and without it.
    """
    data = json.dumps(page_data(model, tokenizer, text, pair), ensure_ascii=False).replace("<", "\\u003c")
    html = TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data)  # which its script draws
    with atomic_write(Path(file)) as unfinished:
        unfinished.write_text(html, encoding="utf-8")


def page_data(model: torch.nn.Module, tokenizer: Any, text: str, pair: str | None = None) -> dict[str, Any]:
    """The contents of the page.

    `values[layer][part]` has the values of all heads, queries and keys as base64 of int16, to be multiplied by `step`.
    The page adds up the parts. `note` says why a [MASK] has no candidates. Heads other than those of language models
    need other inputs, and are left out.
    """
    note = missing_candidates(model)
    if not isinstance(model, HfDebertaForMaskedLM):
        model = getattr(model, "base_model", model)
    inputs, tokens = tokenize(model, tokenizer, text, pair)
    has_mask = bool((inputs["input_ids"] == tokenizer.mask_token_id).any())
    config = encoder_of(model).config
    parts = ["c2c", *(term for term in TERMS if config.relative_attention and term in (config.pos_att_type or ()))]
    megabytes = config.num_hidden_layers * config.num_attention_heads * len(parts) * len(tokens) ** 2 * 2.67e-6
    if megabytes > MAX_PAGE_MB:
        raise ValueError(
            f"a page of {len(tokens)} tokens would have {megabytes:.0f} MB, more than {MAX_PAGE_MB}; shorten the text "
            f"to {int(len(tokens) * (MAX_PAGE_MB / megabytes) ** 0.5)} tokens"
        )
    layers, output = scores_of_layers(model, inputs)
    masks = [] if note else mask_candidates(cast(HfDebertaForMaskedLM, model), tokenizer, inputs, output)
    return {
        "text": text if pair is None else f"{text} / {pair}",
        "tokens": tokens,
        "heads": config.num_attention_heads,
        "parts": {part: TITLES[part] for part in [*parts, "sum"]},
        "values": [{part: _encode(layer.shown(part)) for part in parts} for layer in layers],
        "masks": masks,
        "note": note if note and has_mask else "",
    }


def _encode(values: torch.Tensor) -> dict[str, Any]:
    """Values as 16-bit integers times a step; `HIDDEN` for NaN."""
    step = float(values.nan_to_num().abs().max()) / (2**15 - 1) or 1.0
    integers = (values / step).round().nan_to_num(HIDDEN).cpu().numpy().astype("<i2")
    return {"step": step, "base64": base64.b64encode(integers.tobytes()).decode()}


def missing_candidates(model: torch.nn.Module) -> str | None:
    """Say that this model has no candidates for [MASK], and which checkpoint has; None if it has them."""
    if isinstance(model, HfDebertaForMaskedLM) and not isinstance(model, HfDebertaForCausalLM):
        return None
    return (
        f"{type(model).__name__} has no masked-language head, and so no candidates for [MASK]. These have: "
        "microsoft/deberta-base and others of v1 and v2, models of hf-deberta mlm, and generators of v3 (pass "
        "--generator for a release that includes it, or the folder `generator` of hf-deberta rtd)."
    )


@torch.no_grad()
def mask_candidates(
    model: HfDebertaForMaskedLM, tokenizer: Any, inputs: dict[str, torch.Tensor], output: Any
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
