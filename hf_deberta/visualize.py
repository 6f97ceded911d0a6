"""Pictures of disentangled attention: the parts of the scores, the position tables, training curves, and an HTML page.

    hf-deberta attention microsoft/deberta-base "The new [MASK] opened." --output page.html

Legend: H heads, N tokens, R rows of the relative table, k the largest distance.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

import hf_deberta
from hf_deberta.model.attention_context import AttentionContext
from hf_deberta.model.attention_reference import score_terms
from hf_deberta.model.dense import dense
from hf_deberta.model.modeling_hf_deberta import HfDebertaEncoder, HfDebertaLayer, HfDebertaSelfAttention
from hf_deberta.model.relative_position import TERMS, rows_at, rows_between
from hf_deberta.model.relative_table import relative_positions, relative_table, split_heads, table_modules
from hf_deberta.runs.checkpoints import checkpoints_by_step
from hf_deberta.runs.json_files import atomic_write, read_json_object

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "c2c": "content to content",
    "c2p": "content to position",
    "p2c": "position to content",
    "p2p": "position to position",
    "sum": "sum, the scores before softmax",
}
CANDIDATES = 8  # per [MASK]
MAX_PAGE_MB = 40
HIDDEN = -(2**15)  # in the page's int16 values: a pair that the attention mask hides


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
    _check_index("layer", layer, len(_encoder(model).layer))
    return _forward(model, inputs)[0][layer].parts


def _encoder(model: torch.nn.Module) -> HfDebertaEncoder:
    encoders = [module for module in model.modules() if isinstance(module, HfDebertaEncoder)]
    if len(encoders) != 1:
        raise TypeError(
            f"this needs a model with one encoder of hf_deberta, and {type(model).__name__} has {len(encoders)}; load "
            "the checkpoint with a class of this package, such as hf_deberta.HfDebertaModel.from_pretrained"
        )
    return encoders[0]


@torch.no_grad()
def _forward(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[list[LayerScores], Any]:
    """The scores of all layers, and the output of the model with hidden states."""
    if model.training:
        raise ValueError("the model is in training mode, and dropout would change the picture; call model.eval()")
    layers = cast(list[HfDebertaLayer], list(_encoder(model).layer))
    scores: dict[torch.nn.Module, LayerScores] = {}

    def keep_scores(attention: torch.nn.Module, arguments: tuple) -> None:
        if attention not in scores:  # the mask decoder calls the last layer again
            scores[attention] = _layer_scores(cast(HfDebertaSelfAttention, attention), *arguments[:3])

    hooks = [layer.attention.self.register_forward_pre_hook(keep_scores) for layer in layers]
    try:
        with hf_deberta.reference_mode():
            output = model(**inputs, output_attentions=True, output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [scores[layer.attention.self] for layer in layers], output


def _layer_scores(
    attention: HfDebertaSelfAttention,
    hidden_states: torch.Tensor,  # [1, N, hidden]
    table: torch.Tensor | None,  # [R, hidden]
    context: AttentionContext,
) -> LayerScores:
    """Compute the scores as `reference_attention` does, which does not return them."""
    batch, length = hidden_states.shape[:2]
    if batch != 1:
        raise ValueError(f"pass the inputs of one text, [1, N], not a batch of {batch}")
    memory = attention.project_memory(hidden_states, table, context)
    query = split_heads(dense(attention.query_proj, hidden_states), attention.config.num_attention_heads)
    dtype = torch.promote_types(query.dtype, torch.float32)
    positions, row = memory.positions, None
    if positions is not None:
        positions = positions.with_scaled_queries(attention.scale, dtype).to(dtype)
        at = torch.arange(length, device=query.device)
        row = rows_between(at, at, positions.rows_of_distance)[None]
    terms = score_terms(query.to(dtype) * attention.scale, memory.key.to(dtype), positions, row)
    parts = {name: term[0] for name, term in terms.items()}
    visible = context.mask_of(None).visible(length, query.device)
    everything = torch.ones(length, length, dtype=torch.bool, device=query.device)
    total = torch.stack(list(parts.values())).sum(0)
    return LayerScores({**parts, "sum": total}, everything if visible is None else visible[0, 0])


# Plots


def plot_attention(model: torch.nn.Module, tokenizer: Any, text: str, layer: int, head: int) -> "Figure":
    """A panel for each part of the scores of one head, queries down and keys across; all panels share their colours.

    >>> plot_attention(model, tokenizer, "A good film.", layer=0, head=1).savefig("attention.png")
    """
    inputs, tokens = _tokenize(model, tokenizer, text)
    _check_index("layer", layer, len(_encoder(model).layer))
    scores = _forward(model, inputs)[0][layer]
    _check_index("head", head, scores.parts["sum"].shape[0])
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
    encoder = _encoder(model)
    _check_index("layer", layer, len(encoder.layer))
    attention = cast(HfDebertaLayer, encoder.layer[layer]).attention.self
    rows = encoder.whole_table()
    with hf_deberta.reference_mode():
        table = None if rows is None else relative_table(table_modules(encoder), rows, None)
        positions = relative_positions(attention.table_projection(), table, rows, None)
    if rows is None or positions is None:
        raise ValueError("this model has no relative positions (relative_attention, pos_att_type in its configuration)")
    positions = positions.with_scaled_queries(1.0, torch.float32)
    span = positions.saturation
    distances = torch.arange(-span, span + 1, device=rows.of_distance.device)
    row = rows_at(distances, positions.rows_of_distance)
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


def plot_training(run_folder: str | Path) -> "Figure":
    """Loss curves of a run, finished or not, and its other evaluation metrics; with several seeds, those of each.

    Read from trainer_state.json in the folder, in its folders `seed-*`, or in their last checkpoints.
    """
    folder = Path(run_folder)
    runs = {path.name: _training_log(path) for path in sorted(folder.glob("seed-*")) if path.is_dir()}
    runs = runs or {"": _training_log(folder)}
    names = {name for log in runs.values() for entry in log for name in entry if _is_loss(name)}
    others = {name for log in runs.values() for entry in log for name in entry if _is_metric(name)}
    panels = {title: sorted(group) for title, group in (("loss", names), ("evaluation", others)) if group}
    if not panels:
        raise ValueError(f"{folder} has logged neither a loss nor a metric yet; log more often with --logging_steps")
    figure = _new_figure(6 * len(panels), 4)
    for axes, (title, keys) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for run, log in runs.items():
            for key in keys:
                points = [(entry["step"], entry[key]) for entry in log if isinstance(entry.get(key), int | float)]
                if points:
                    axes.plot(*zip(*points, strict=True), marker=".", label=f"{run} {key}".strip())
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(folder.resolve().name)
    return figure


def _training_log(folder: Path) -> list[dict[str, Any]]:
    """The entries of the newest trainer_state.json."""
    folders = [folder, *reversed(checkpoints_by_step(folder).values())]
    for path in (path / "trainer_state.json" for path in folders):
        if path.is_file():
            return read_json_object(path).get("log_history", [])
    raise FileNotFoundError(f"{folder} has no trainer_state.json, nor has a checkpoint in it; name the --output_dir")


def _is_loss(name: str) -> bool:
    return name.endswith("loss") and name != "train_loss"  # which is the mean of the whole run


def _is_metric(name: str) -> bool:
    timings = ("_runtime", "_per_second", "_samples", "_time", "loss")
    return name.startswith("eval_") and not name.endswith(timings)


def _new_figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib, which is not installed: pip install 'hf-deberta[demo]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _check_index(name: str, index: int, size: int) -> None:
    if not 0 <= index < size:
        raise ValueError(f"{name} must lie in [0, {size}), not {index}")


def _tokenize(model: torch.nn.Module, tokenizer: Any, text: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The inputs of one text, and a readable name for each token."""
    device = next(model.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in tokenizer(text, return_tensors="pt").items()}
    return inputs, [_token_name(tokenizer, token) for token in inputs["input_ids"][0].tolist()]


def _token_name(tokenizer: Any, token: int) -> str:
    """The token as text; as the tokenizer spells it if that is blank."""
    return tokenizer.decode([token]).strip() or tokenizer.convert_ids_to_tokens(token)


# The page


def attention_page(model: torch.nn.Module, tokenizer: Any, text: str, file: str | Path) -> None:
    """Write one HTML file, without links to others: all layers, heads and parts, with their values.

    For a masked-language model it also lists the best candidates for each [MASK] of the text, with the enhanced mask
    decoder and without it.
    """
    data = json.dumps(page_data(model, tokenizer, text), ensure_ascii=False).replace("<", "\\u003c")
    with atomic_write(Path(file)) as unfinished:
        unfinished.write_text(PAGE.replace("__DATA__", data), encoding="utf-8")


def page_data(model: torch.nn.Module, tokenizer: Any, text: str) -> dict[str, Any]:
    """The contents of the page.

    `values[layer][part]` has the values of all heads, queries and keys as base64 of int16, to be multiplied by `step`.
    The page adds up the parts.
    """
    inputs, tokens = _tokenize(model, tokenizer, text)
    config = _encoder(model).config
    parts = ["c2c", *(term for term in TERMS if config.relative_attention and term in (config.pos_att_type or ()))]
    megabytes = config.num_hidden_layers * config.num_attention_heads * len(parts) * len(tokens) ** 2 * 2.67e-6
    if megabytes > MAX_PAGE_MB:
        raise ValueError(
            f"a page of {len(tokens)} tokens would have {megabytes:.0f} MB, more than {MAX_PAGE_MB}; shorten the text "
            f"to {int(len(tokens) * (MAX_PAGE_MB / megabytes) ** 0.5)} tokens"
        )
    layers, output = _forward(model, inputs)
    return {
        "text": text,
        "tokens": tokens,
        "heads": config.num_attention_heads,
        "parts": {part: TITLES[part] for part in [*parts, "sum"]},
        "values": [{part: _encode(layer.shown(part)) for part in parts} for layer in layers],
        "masks": _mask_candidates(model, tokenizer, inputs, output),
    }


def _encode(values: torch.Tensor) -> dict[str, Any]:
    """Values as 16-bit integers times a step; `HIDDEN` for NaN."""
    step = float(values.nan_to_num().abs().max()) / (2**15 - 1) or 1.0
    integers = (values.double() / step).round().nan_to_num(HIDDEN).cpu().numpy().astype("<i2")
    return {"step": step, "base64": base64.b64encode(integers.tobytes()).decode()}


@torch.no_grad()
def _mask_candidates(
    model: torch.nn.Module, tokenizer: Any, inputs: dict[str, torch.Tensor], output: Any
) -> list[dict[str, Any]]:
    """The best tokens at each [MASK], with and without the decoder; empty if the model is no masked-language model.

    Without the decoder, the logits are those of the ordinary last layer, as if `emd_steps` were 0, from the same
    weights.
    """
    if not isinstance(model, hf_deberta.HfDebertaForMaskedLM) or isinstance(model, hf_deberta.HfDebertaForCausalLM):
        return []
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
    return [(_token_name(tokenizer, token), round(probability, 4)) for token, probability in pairs]


PAGE = r"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Disentangled attention</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 1.5rem; color: #222; }
h1 { font-size: 1.2rem; margin: 0 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 60rem; }
button { font: inherit; border: 1px solid #bbb; background: #fff; border-radius: 4px; cursor: pointer; }
button[aria-pressed=true] { border-color: #06c; background: #e3eeff; }
#parts button { padding: .3rem .7rem; margin: 0 .3rem .3rem 0; }
#columns { display: flex; flex-wrap: wrap; gap: 2rem; align-items: flex-start; margin-top: .6rem; }
#overview { display: grid; gap: 3px; align-items: center; justify-content: start; }
#overview { font-size: 11px; color: #666; text-align: center; }
#overview, #map { min-width: 16rem; }
#overview button { padding: 1px; line-height: 0; border-radius: 2px; border-width: 2px; border-color: #ddd; }
#overview button[aria-pressed=true] { border-color: #06c; }
canvas { image-rendering: pixelated; background: #ddd; }
#overview canvas { width: 34px; height: 34px; }
#map { display: grid; grid-template-columns: max-content max-content; font-size: 12px; }
#map canvas { cursor: crosshair; }
.keys, .queries { display: flex; white-space: nowrap; }
.queries { flex-direction: column; text-align: right; padding-right: 5px; }
.keys span { writing-mode: vertical-rl; transform: rotate(180deg); padding-top: 5px; }
.keys span, .queries span { display: flex; align-items: center; justify-content: flex-end; line-height: 1; }
.keys span { justify-content: flex-start; }
.lit { background: #ffe28a; }
#value, #hint { width: 0; min-width: 100%; }
#value { min-height: 4.2em; margin: .5rem 0; font-variant-numeric: tabular-nums; }
#scale { display: inline-block; width: 120px; height: 10px; margin: 0 .5em; }
table { border-collapse: collapse; margin: .3rem 2rem 1rem 0; display: inline-table; }
td, th { padding: .15rem .6rem .15rem 0; text-align: left; font-weight: normal; }
caption { text-align: left; font-weight: 600; }
.bar { display: inline-block; height: .7em; background: #4a7fc1; margin-right: .4em; }
</style></head><body>
<h1 id="title"></h1>
<p id="text"></p>
<div id="masks"></div>
<div id="parts"></div>
<div id="columns">
<div><div id="overview"></div><p id="hint">Rows are layers, columns heads. Click one, or use the arrow keys.</p></div>
<div><div id="map"></div><div id="value"></div>
<div><span id="low"></span><span id="scale"></span><span id="high"></span></div></div>
</div>
<script id="data" type="application/json">__DATA__</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const N = data.tokens.length, layers = data.values.length, heads = data.heads, HIDDEN = -32768;
const terms = Object.keys(data.parts).filter(part => part !== "sum");
const titles = {...data.parts, attention: "attention, the softmax of the sum"};
const state = {layer: 0, head: 0, part: "sum"};
const get = id => document.getElementById(id);

function decode(encoded) {
  const bytes = Uint8Array.from(atob(encoded.base64), c => c.charCodeAt(0));
  return Float64Array.from(new Int16Array(bytes.buffer), v => v === HIDDEN ? NaN : v * encoded.step);
}
const values = data.values.map(layer => {
  const decoded = Object.fromEntries(terms.map(term => [term, decode(layer[term])]));
  decoded.sum = decoded.c2c.map((_, i) => terms.reduce((total, term) => total + decoded[term][i], 0));
  decoded.attention = softmax(decoded.sum);
  return decoded;
});
function softmax(scores) {  // over the keys of each query that it sees
  const result = new Float64Array(scores.length);
  for (let start = 0; start < scores.length; start += N) {
    const row = scores.subarray(start, start + N);
    const most = row.reduce((a, b) => b > a ? b : a, -Infinity);
    let total = 0;
    for (const score of row) if (!isNaN(score)) total += Math.exp(score - most);
    row.forEach((score, j) => { result[start + j] = isNaN(score) ? NaN : Math.exp(score - most) / total; });
  }
  return result;
}
function of(layer, head, part) { return values[layer][part].subarray(head * N * N, (head + 1) * N * N); }
function largest(layer, head, part) {  // all parts of a head share their colours
  const parts = part === "attention" ? [part] : [...terms, "sum"];
  return Math.max(1e-9, ...parts.map(p => of(layer, head, p).reduce((m, v) => Math.abs(v) > m ? Math.abs(v) : m, 0)));
}
function colour(x) {  // -1 blue, 0 white, 1 red
  const strong = x < 0 ? [33, 102, 172] : [178, 24, 43], t = Math.min(1, Math.abs(x));
  return strong.map(c => 255 + (c - 255) * t);
}
function paint(canvas, layer, head, part) {
  const limit = largest(layer, head, part), image = new ImageData(N, N);
  of(layer, head, part).forEach((v, i) => {
    if (!isNaN(v)) image.data.set([...colour(v / limit), 255], 4 * i);
  });
  canvas.width = canvas.height = N;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return limit;
}
function add(parent, tag, text = "", properties = {}) {
  const element = Object.assign(document.createElement(tag), {textContent: text}, properties);
  parent.append(element);
  return element;
}
function show() {
  document.querySelectorAll("#parts button").forEach(b => b.setAttribute("aria-pressed", b.value === state.part));
  document.querySelectorAll("#overview button").forEach(b => {
    b.setAttribute("aria-pressed", b.value === state.layer + " " + state.head);
  });
  get("title").textContent = `Layer ${state.layer}, head ${state.head} | ${titles[state.part]}`;
  const limit = paint(map, state.layer, state.head, state.part), isPart = state.part !== "attention";
  get("low").textContent = isPart ? (-limit).toFixed(2) : "0";
  get("high").textContent = limit.toFixed(2);
  const stops = (isPart ? [-1, 0, 1] : [0, 1]).map(x => `rgb(${colour(x)})`);
  get("scale").style.background = `linear-gradient(to right, ${stops})`;
  get("value").textContent = "Hover over a cell for its values.";
}
function showOverview() {
  document.querySelectorAll("#overview button").forEach(b => {
    paint(b.firstChild, ...b.value.split(" ").map(Number), state.part);
  });
}
function hover(event) {
  const j = Math.min(N - 1, Math.floor(event.offsetX / cell)), i = Math.min(N - 1, Math.floor(event.offsetY / cell));
  if (i < 0 || j < 0) return;
  light(i, j);
  const number = part => of(state.layer, state.head, part)[i * N + j];
  const parts = [...terms, "sum"].map(part => `${part} ${number(part).toFixed(3)}`);
  const attention = number("attention");
  get("value").textContent = isNaN(attention) ? "hidden by the attention mask"
    : `query ${i} “${data.tokens[i]}”, key ${j} “${data.tokens[j]}”: ${parts.join(", ")}, ` +
      `attention ${(100 * attention).toFixed(1)}%`;
}
function light(i, j) {
  queries.childNodes.forEach((label, k) => label.classList.toggle("lit", k === i));
  keys.childNodes.forEach((label, k) => label.classList.toggle("lit", k === j));
}

get("text").textContent = data.text;
for (const mask of data.masks) {
  for (const [name, candidates] of Object.entries(mask.candidates)) {
    const table = add(get("masks"), "table");
    add(table, "caption", `${data.tokens[mask.position]} at ${mask.position}, ${name}`);
    for (const [token, probability] of candidates) {
      const row = add(table, "tr"), bar = (add(row, "td", token), add(row, "td"));
      add(bar, "span", "", {className: "bar"}).style.width = 100 * probability + "px";
      bar.append((100 * probability).toFixed(1) + "%");
    }
  }
}
for (const [part, title] of Object.entries(titles)) {
  add(get("parts"), "button", title, {value: part, onclick() { state.part = part; showOverview(); show(); }});
}
const cell = Math.max(6, Math.min(28, Math.floor(640 / N)));
get("overview").style.gridTemplateColumns = `auto repeat(${heads}, auto)`;
for (let head = -1; head < heads; head++) add(get("overview"), "span", head < 0 ? "" : head);
for (let layer = 0; layer < layers; layer++) {
  add(get("overview"), "span", layer);
  for (let head = 0; head < heads; head++) {
    const button = add(get("overview"), "button", "", {
      value: layer + " " + head, title: `layer ${layer}, head ${head}`,
      onclick() { Object.assign(state, {layer, head}); show(); },
    });
    add(button, "canvas");
  }
}
add(get("map"), "span");
const keys = add(get("map"), "div", "", {className: "keys"});
const queries = add(get("map"), "div", "", {className: "queries"});
for (const token of data.tokens) {
  add(keys, "span", token).style.width = cell + "px";
  add(queries, "span", token).style.height = cell + "px";
}
keys.style.fontSize = queries.style.fontSize = Math.min(13, cell) + "px";
const map = add(get("map"), "canvas", "", {onmousemove: hover, onmouseleave() { light(-1, -1); }});
map.style.width = map.style.height = N * cell + "px";
document.onkeydown = event => {
  const move = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  if (!move) return;
  event.preventDefault();
  state.layer = (state.layer + move[0] + layers) % layers;
  state.head = (state.head + move[1] + heads) % heads;
  show();
};
showOverview();
show();
</script></body></html>
"""
