"""One self-contained HTML page (page.html) with the scores of all layers and heads, and candidates for each [MASK]."""

import base64
import json
from pathlib import Path
from typing import Any, cast

import torch

from hf_deberta import HfDebertaForMaskedLM
from hf_deberta.model.relative_position import TERMS
from hf_deberta.training.json_files import atomic_write

from .candidates import mask_candidates, missing_candidates
from .scores import TITLES, encoder_of, scores_of_layers, tokenize

TEMPLATE = Path(__file__).with_name("page.html")
MAX_PAGE_MB = 40
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
    integers = (values.double() / step).round().nan_to_num(HIDDEN).cpu().numpy().astype("<i2")
    return {"step": step, "base64": base64.b64encode(integers.tobytes()).decode()}
