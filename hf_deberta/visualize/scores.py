"""The parts of the attention scores of one text, layer by layer. Legend: H heads, N tokens, R rows of the table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

import hf_deberta
from hf_deberta.model.attention_reference import position_terms
from hf_deberta.model.batch_layout import BatchLayout
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaLayer, HfDebertaSelfAttention
from hf_deberta.model.relative_position import rows_at, split_heads
from hf_deberta.model.slots import linear

TITLES = {
    "c2c": "content to content",
    "c2p": "content to position",
    "p2c": "position to content",
    "p2p": "position to position",
    "sum": "sum, the scores before softmax",
}


@dataclass(frozen=True)
class LayerScores:
    """The scores of one layer and one text."""

    parts: dict[str, torch.Tensor]  # by name, [H, N, N], query by key; the last one, "sum", is the sum of the others
    visible: torch.Tensor  # [N, N] of bool: the softmax is over these keys

    def shown(self, part: str) -> torch.Tensor:
        """One part [H, N, N], NaN where a query does not see a key."""
        return self.parts[part].masked_fill(~self.visible, torch.nan)


def attention_parts(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """Attention scores of one layer and one text before softmax, and the terms whose sum they are: each [H, N, N].

    The names are "c2c", the model's position terms ("c2p", "p2c", "p2p") and "sum"; entry [h, i, j] is head h, query i,
    key j. All include the factor 1 / sqrt(m d). Softmax over the keys that a query sees gives the attention. In a
    masked-language model the last layer is the ordinary one, as for `output_attentions`, not the mask decoder's.

    >>> inputs = tokenizer("A good film.", return_tensors="pt")
    >>> parts = attention_parts(model, inputs, layer=0)
    >>> torch.equal(parts["c2c"] + parts["c2p"] + parts["p2c"], parts["sum"])
    True
    """
    return scores_of_layers(model, inputs)[0][layer].parts


def encoder_of(model: torch.nn.Module) -> HfDebertaEncoder:
    encoders = [module for module in model.modules() if isinstance(module, HfDebertaEncoder)]
    if len(encoders) != 1:
        raise TypeError(
            f"this needs a model with one encoder of hf_deberta, and {type(model).__name__} has {len(encoders)}; load "
            "the checkpoint with a class of this package, such as hf_deberta.HfDebertaModel.from_pretrained"
        )
    return encoders[0]


@torch.no_grad()
def scores_of_layers(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[list[LayerScores], Any]:
    """The scores of all layers, and the output of the model with hidden states."""
    if model.training:
        raise ValueError("the model is in training mode, and dropout would change the picture; call model.eval()")
    layers = cast(list[HfDebertaLayer], list(encoder_of(model).layer))
    scores: dict[torch.nn.Module, LayerScores] = {}

    def keep_scores(layer: torch.nn.Module, arguments: tuple) -> None:
        if layer not in scores:  # the mask decoder calls the last layer again
            scores[layer] = _layer_scores(cast(HfDebertaLayer, layer).attention.self, *arguments[:3])

    hooks = [layer.register_forward_pre_hook(keep_scores) for layer in layers]
    try:
        with hf_deberta.reference_mode():
            output = model(**inputs, output_attentions=True, output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [scores[layer] for layer in layers], output


def _layer_scores(
    attention: HfDebertaSelfAttention,
    hidden_states: torch.Tensor,  # [1, N, hidden]
    table: torch.Tensor | None,  # [R, hidden]
    layout: BatchLayout,
) -> LayerScores:
    """Compute the scores as `reference_attention` does, which does not return them."""
    batch, length = hidden_states.shape[:2]
    if batch != 1:
        raise ValueError(f"pass the inputs of one text, [1, N], not a batch of {batch}")
    projected = attention.project_keys(hidden_states, table, layout)
    query = split_heads(linear(attention.query_proj, hidden_states), attention.head_size)
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(dtype) * attention.scale, projected.key.to(dtype)
    terms = {"c2c": query @ key.mT}
    if projected.relative is not None:
        positions = projected.relative.scaled(attention.scale, dtype)
        at = torch.arange(length, device=query.device)
        row = rows_at(at[:, None] - at, positions.window.rows_of_distance)[None]
        terms |= position_terms(query, key, positions, row)
    parts = {name: term[0] for name, term in terms.items()}
    visible = layout.attention_mask.visible(length, query.device)
    parts["sum"] = torch.stack(list(parts.values())).sum(0)
    return LayerScores(parts, query.new_ones(length, length).bool() if visible is None else visible[0, 0])


def tokenize(
    model: torch.nn.Module, tokenizer: Any, text: str, pair: str | None = None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The inputs of one text or pair of texts, and a readable name for each token."""
    device = next(model.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in tokenizer(text, pair, return_tensors="pt").items()}
    return inputs, [token_name(tokenizer, token) for token in inputs["input_ids"][0].tolist()]


def token_name(tokenizer: Any, token: int) -> str:
    """The token as text; as the tokenizer spells it if that is blank."""
    return tokenizer.decode([token]).strip() or tokenizer.convert_ids_to_tokens(token)
