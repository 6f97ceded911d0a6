"""Plots of the scores of one head and of the position tables.

Legend: D distances, H heads.
"""

from typing import TYPE_CHECKING, Any, cast

import torch

import hf_deberta
from hf_deberta.model.modeling_hf_deberta import HfDebertaLayer
from hf_deberta.model.relative_position import LONGEST_TEXT, position_table, rows_at

from .scores import TITLES, encoder_of, scores_of_layers, tokenize

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_attention(model: torch.nn.Module, tokenizer: Any, text: str, layer: int, head: int) -> "Figure":
    """A panel for each part of the scores of one head, queries down and keys across; all panels share their colours.

    >>> plot_attention(model, tokenizer, "A good film.", layer=0, head=1).savefig("attention.png")
    """
    inputs, tokens = tokenize(model, tokenizer, text)
    scores = scores_of_layers(model, inputs)[0][layer]
    panels = {part: scores.shown(part)[head].float().cpu().numpy() for part in scores.parts}
    size = max(3.2, 0.22 * len(tokens))
    figure = _new_figure(size * len(panels) + 0.8, size + 1.2)
    limit = float(max(scores.parts[part][head].abs().max() for part in scores.parts))
    grid = figure.subplots(1, len(panels), sharey=True)
    for axes, (part, values) in zip(grid, panels.items(), strict=True):
        image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes.set_title(TITLES[part], fontsize=10)
        axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=8)
        axes.set_yticks(range(len(tokens)), tokens, fontsize=8)
        axes.set_xlabel("key")
    grid[0].set_ylabel("query")
    figure.colorbar(image, ax=grid, label="score", fraction=0.02, pad=0.01)
    figure.suptitle(f"Layer {layer}, head {head}")
    return figure


@torch.no_grad()
def position_norms(model: torch.nn.Module, layer: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Distances [D] (query - key), and for "c2p" and "p2c" how far each distance's row of the table stands out [H, D].

    That is the norm of the row, as the layer projects it, minus the mean row of the head. What all rows share does not
    depend on the position. The score of a query (c2p) or key (p2c) deviates from its mean over the table by at most
    this norm times the norm of the query or key, and the factor of the scores.
    """
    encoder = encoder_of(model)
    attention = cast(HfDebertaLayer, encoder.layer[layer]).attention.self
    rows = encoder.whole_table(next(encoder.parameters()).device)
    with hf_deberta.reference_mode():
        table, _ = position_table(encoder, rows, LONGEST_TEXT)
        positions = attention.table_projection().relative_positions(table, rows, LONGEST_TEXT, attention)
    if rows is None or positions is None:
        raise ValueError("this model has no relative positions (relative_attention, pos_att_type in its configuration)")
    positions = positions.scaled(1.0, torch.float32)
    span = positions.window.saturation
    distances = torch.arange(-span, span + 1, device=rows.rows_of_distance.device)
    row = rows_at(distances, positions.window.rows_of_distance)
    tables = {"c2p": positions.position_key, "p2c": positions.position_query}
    norms = {
        part: (projected.float() - projected.float().mean(1, keepdim=True)).norm(dim=-1)[:, row]
        for part, projected in tables.items()
        if projected is not None
    }
    return distances, norms


def plot_position_table(model: torch.nn.Module, layer: int) -> "Figure":
    """The tables of c2p and p2c in one layer over distance, a row of colours for each head; see `position_norms`."""
    distances, norms = position_norms(model, layer)
    figure = _new_figure(6 * len(norms), 1.6 + 0.25 * next(iter(norms.values())).shape[0])
    span = int(distances[-1])
    for axes, (part, values) in zip(figure.subplots(1, len(norms), squeeze=False)[0], norms.items(), strict=True):
        edges = torch.arange(-span, span + 2) - 0.5
        image = axes.pcolormesh(edges.numpy(), range(values.shape[0] + 1), values.cpu().numpy(), cmap="viridis")
        if span > 16:
            axes.set_xscale("symlog", linthresh=8, base=2)
            ticks = [2**power for power in range(3, span.bit_length(), 2)]
            ticks = [-tick for tick in reversed(ticks)] + [0, *ticks]
            axes.set_xticks(ticks, ticks)
            axes.minorticks_off()
        axes.set_yticks([head + 0.5 for head in range(values.shape[0])], range(values.shape[0]))
        axes.invert_yaxis()
        axes.set(title=f"{part}: {TITLES[part]}", xlabel="distance, query - key", ylabel="head")
        figure.colorbar(image, ax=axes, label="norm of row - mean row")
    figure.suptitle(f"Position tables of layer {layer}")
    return figure


def _new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
