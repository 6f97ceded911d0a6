"""`hf_deberta.enable()`: code written for Transformers' own DeBERTa computes with this package, unchanged.

    >>> import hf_deberta
    >>> hf_deberta.enable()                                    # until hf_deberta.disable()
    >>> classify = pipeline("zero-shot-classification", model="MoritzLaurer/deberta-v3-base-zeroshot-v2.0")
    >>> with hf_deberta.enable():                              # or only here
    ...     scores = CrossEncoder("cross-encoder/nli-deberta-v3-base").predict(pairs)

Transformers' classes stay: their names, configurations, parameters and files. What changes, in place, is what they
compute. So it holds for the Auto classes and pipelines, for libraries that import `DebertaV2Model` themselves, no
matter when (GLiNER), for subclasses, adapters, and models that are in memory already; and whatever is saved is as
it always was. While enabled:

- the encoders of model types "deberta" and "deberta-v2" use `disentangled_attention`: the same numbers faster, also
  with masks [B, N, N]. Past the largest relative distance they follow the official code, which Transformers does not;
- `...ForMaskedLM.from_pretrained` gives an official release the head and the enhanced mask decoder it was trained
  with, where Transformers starts a random head. A masked-LM checkpoint of Transformers' own stays without decoder.
  Saved, such a model keeps its official names; plain Transformers then reads the head, but has no decoder;
- `DebertaTokenizer.from_pretrained` and `DebertaV2Tokenizer.from_pretrained`, and AutoTokenizer through them, give
  a `HfDebertaTokenizer`: the original tokenization, or the folder's tokenizer.json as it is;
- `Trainer` divides a loss by the steps it accumulates; without, in-tree DeBERTa multiplies loss and gradients.

Not reached: graphs compiled before, exported graphs (torch.export, ONNX, TorchScript keep in-tree operations), copies
of the classes that other code brings along (`trust_remote_code`, FlashDeBERTa), the v1 option `talking_head`,
tokenizers in memory, other processes. Outputs at padding differ from in-tree ones; nothing reads them. v1 has no
multiple-choice head here either: use `HfDebertaForMultipleChoice`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import DebertaTokenizer, DebertaV2Tokenizer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

from .attention import disentangled_attention
from .attention_context import AttentionContext
from .batch_loss import cross_entropy
from .configuration_hf_deberta import emd_steps_of
from .relative_position import may_be_pruned, rows_in_use, rows_of_distances, saturation_of
from .tokenization_hf_deberta import HfDebertaTokenizer

_changes = ExitStack()  # how to take back what is in place
_enabled = False
_known_rows: dict[tuple[int, int], tuple[dict[torch.device, torch.Tensor], bool, int]] = {}
_loading_official = ContextVar("a masked-LM checkpoint is read as an official one", default=False)


def enable() -> AbstractContextManager:
    """Let Transformers' DeBERTa classes compute with this package; see the module for what that means.

    >>> hf_deberta.enable()
    >>> model = AutoModelForSequenceClassification.from_pretrained("microsoft/deberta-v3-base")
    >>> hf_deberta.disable()

    As a context manager it ends with the block, unless it was on before. A second call changes nothing.
    """
    global _changes, _enabled
    ending = ExitStack()
    if not _enabled:
        with ExitStack() as changes:
            _change_everything(changes)
            _changes, _enabled = changes.pop_all(), True
        ending.callback(disable)
    return ending


def disable() -> None:
    """Take everything back: Transformers' classes are as they were, and so are models made meanwhile."""
    global _enabled
    _changes.close()
    _enabled = False


def _change_everything(changes: ExitStack) -> None:
    def change(owner: type, name: str, new: Any) -> None:
        old = vars(owner).get(name)
        setattr(owner, name, new)
        changes.callback(*((delattr, owner, name) if old is None else (setattr, owner, name, old)))

    for encoder, attention in (
        (v1.DebertaEncoder, v1.DisentangledSelfAttention),
        (v2.DebertaV2Encoder, v2.DisentangledSelfAttention),
    ):
        change(encoder, "__init__", _encoder_init(encoder.__init__))
        change(encoder, "forward", _encoder_forward(encoder.forward))
        change(attention, "forward", _attention_forward(attention.forward))
    change(v1.DebertaLayerNorm, "forward", _layer_norm)
    for pretrained in (v1.DebertaPreTrainedModel, v2.DebertaV2PreTrainedModel):
        change(pretrained, "accepts_loss_kwargs", False)
    for masked_lm in (v1.DebertaForMaskedLM, v2.DebertaV2ForMaskedLM):
        change(masked_lm, "__init__", _masked_lm_init(masked_lm.__init__))
        change(masked_lm, "post_init", _masked_lm_post_init(masked_lm.post_init))
        change(masked_lm, "from_pretrained", _masked_lm_from_pretrained(masked_lm.from_pretrained.__func__))
        change(masked_lm, "forward", _masked_lm_forward(masked_lm.forward))
        change(masked_lm, "get_output_embeddings", _get_output_embeddings(masked_lm.get_output_embeddings))
        change(masked_lm, "resize_token_embeddings", _resize_token_embeddings(masked_lm.resize_token_embeddings))
    for tokenizer in (DebertaTokenizer, DebertaV2Tokenizer):
        change(tokenizer, "from_pretrained", _tokenizer_from_pretrained(tokenizer))


# ---- encoder -----------------------------------------------------------------------------------------


def _encoder_init(in_tree: Callable) -> Callable:
    def __init__(self, config) -> None:
        in_tree(self, config)
        if self.relative_attention:
            _relative_rows(self, torch.device("cpu"))  # should the first call be that of a compiler

    return __init__


def _relative_rows(encoder: nn.Module, device: torch.device) -> tuple[torch.Tensor, bool, int] | None:
    """rows_of_distance, whether rows out of reach may be left out, and saturation.

    They are made once, and never in a graph. None where that comes too late, and for more buckets than distances.
    """
    distance, buckets = key = encoder.max_relative_positions, getattr(encoder, "position_buckets", -1)
    in_graph = torch.compiler.is_compiling()
    if key not in _known_rows:
        if in_graph or buckets == 1 or (buckets > 1 and buckets // 2 >= distance - 1):
            return None
        rows = rows_of_distances(distance, buckets)
        pruned = may_be_pruned(rows, buckets if buckets > 0 else distance)
        _known_rows[key] = {torch.device("cpu"): rows}, pruned, saturation_of(rows)
    on_device, pruned, saturation = _known_rows[key]
    if device in on_device:
        return on_device[device], pruned, saturation
    rows = on_device[torch.device("cpu")].to(device)
    if not in_graph:
        on_device[device] = rows
    return rows, pruned, saturation


def _shared(encoder: nn.Module, states: torch.Tensor, attention_mask: torch.Tensor) -> tuple | None:
    """What all layers need: the context, and the rows in use of the relative table [R, hidden]."""
    relative: dict[str, Any] = {"rows_of_distance": None, "first_row": 0, "saturation": None}
    table = None
    if encoder.relative_attention:
        known = _relative_rows(encoder, states.device)
        if known is None:
            return None
        rows, pruned, saturation = known
        first, last = rows_in_use(states.shape[1], encoder.rel_embeddings.num_embeddings // 2, pruned)
        table = encoder.rel_embeddings(torch.arange(first, last, device=states.device))
        table = encoder.LayerNorm(table) if hasattr(encoder, "LayerNorm") else table
        relative = {"rows_of_distance": rows, "first_row": first, "saturation": saturation}
    shape = (states.shape[0], states.shape[1])
    return AttentionContext.of(attention_mask.bool(), None, None, shape, states.device, **relative), table


def _encoder_forward(in_tree: Callable) -> Callable:
    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        attention_mask: torch.Tensor,  # [B, N], [B, N, N] or [B, 1, N, N]
        output_hidden_states: bool = True,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> BaseModelOutput | tuple:
        unusual = query_states is not None or relative_pos is not None or _talks(self)
        exporting = torch.compiler.is_exporting() or torch.jit.is_tracing()
        shared = None if unusual or exporting else _shared(self, hidden_states, attention_mask)
        if shared is None:
            rest = (output_hidden_states, output_attentions, query_states, relative_pos, return_dict)
            return in_tree(self, hidden_states, attention_mask, *rest)
        context, table = shared
        states, probabilities = [hidden_states], []
        for i, layer in enumerate(self.layer):
            # by position, without which reentrant checkpointing would go through the table's graph twice
            new, probability = layer(states[-1], context, None, None, table, output_attentions)
            if i == 0 and getattr(self, "conv", None) is not None:
                new = self.conv(hidden_states, new, context.token_mask.long())
            states = [*states, new] if output_hidden_states else [new]
            probabilities.append(probability)
        output = BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(probabilities) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()

    return forward


def _attention_forward(in_tree: Callable) -> Callable:
    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, N, hidden]
        attention_mask: AttentionContext | torch.Tensor,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,  # [B, N, hidden]
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,  # [R, hidden]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = attention_mask
        if not isinstance(context, AttentionContext):  # called by another encoder
            return in_tree(
                self, hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings
            )
        terms = tuple(term for term in ("c2p", "p2c") if term in self.pos_att_type)
        fused = hasattr(self, "in_proj")  # v1
        counted = len(self.pos_att_type) if fused else len(terms)  # in-tree scales by the terms named, used or not
        query, key, value = _project(self, hidden_states, query_states)
        position_key = position_query = None
        if rel_embeddings is None:
            terms = ()
        else:
            table = self.pos_dropout(rel_embeddings)
            if "c2p" in terms:
                position_key = _heads(self, _position_projection(self, "key")(table))
            if "p2c" in terms:
                position_query = _heads(self, _position_projection(self, "query")(table))
        states, probabilities = disentangled_attention(
            query,
            key,
            value,
            position_key,
            position_query,
            terms=terms,
            rows_of_distance=context.rows_of_distance,
            first_row=context.first_row,
            saturation=context.saturation,
            mask=context.mask,
            scale=((1 + counted) * query.shape[-1]) ** -0.5,
            dropout_p=self.dropout.p if self.training else 0.0,
            backend="eager" if output_attentions else "sdpa",
            need_probabilities=output_attentions,
        )
        return states.transpose(1, 2).flatten(2), probabilities

    return forward


def _project(attention: nn.Module, hidden_states: torch.Tensor, query_states: torch.Tensor | None) -> tuple:
    """Query, key and value [B, H, N, d]."""
    asking = hidden_states if query_states is None else query_states
    if not hasattr(attention, "in_proj"):
        projected = attention.query_proj(asking), attention.key_proj(hidden_states), attention.value_proj(hidden_states)
        return tuple(_heads(attention, states) for states in projected)
    query, key, value = _heads(attention, attention.in_proj(hidden_states)).chunk(3, dim=-1)  # fused head by head
    if query_states is not None:
        query = _heads(attention, attention.in_proj(query_states)).chunk(3, dim=-1)[0]
    # biases are left in float32 by autocast, with which in-tree v1 fails
    shape = (attention.num_attention_heads, 1, query.shape[-1])
    query_bias, value_bias = (bias.view(shape).to(query.dtype) for bias in (attention.q_bias, attention.v_bias))
    return query + query_bias, key, value + value_bias


def _position_projection(attention: nn.Module, of: str) -> nn.Module:
    if hasattr(attention, "in_proj"):
        return attention.pos_proj if of == "key" else attention.pos_q_proj
    return getattr(attention, f"{of}_proj" if attention.share_att_key else f"pos_{of}_proj")


def _talks(encoder: nn.Module) -> bool:
    """Whether attention heads are mixed, a v1 option that no release uses."""
    of_v1 = isinstance(encoder, v1.DebertaEncoder)
    return of_v1 and any(getattr(module, "talking_head", False) for module in encoder.modules())


def _heads(attention: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """[..., N, hidden] to [..., H, N, d]."""
    return states.unflatten(-1, (attention.num_attention_heads, -1)).transpose(-3, -2)


def _layer_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, eps=self.variance_epsilon)


# ---- masked-language model ---------------------------------------------------------------------------


def _masked_lm_from_pretrained(in_tree: Callable) -> classmethod:
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        for official in (True, False):
            token = _loading_official.set(official)
            try:
                model, info = in_tree(cls, *args, output_loading_info=True, **kwargs)
            finally:
                _loading_official.reset(token)
            if not any(name.startswith("lm_predictions.") for name in info["missing_keys"]):
                break  # otherwise the checkpoint is not official, or has no such head: as Transformers reads it
        return (model, info) if output_loading_info else model

    return classmethod(from_pretrained)


def _masked_lm_init(in_tree: Callable) -> Callable:
    def __init__(self, config, *args, **kwargs) -> None:
        if _loading_official.get() and config.legacy and not config.position_biased_input:
            steps = emd_steps_of(config.to_dict())
            if steps > 0:
                config.legacy, config.emd_steps = False, steps
        in_tree(self, config, *args, **kwargs)
        if _decodes(config):
            embeddings = self.deberta.embeddings
            embeddings.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            self._init_weights(embeddings.position_embeddings)

    return __init__


def _masked_lm_post_init(in_tree: Callable) -> Callable:
    def post_init(self) -> None:
        if not self.legacy:
            self._tied_weights_keys = {}  # Transformers 5.17 names a weight there that the head has not, and fails
        in_tree(self)

    return post_init


def _decodes(config) -> bool:
    return not config.legacy and not config.position_biased_input and getattr(config, "emd_steps", 0) > 0


def _masked_lm_forward(in_tree: Callable) -> Callable:
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> MaskedLMOutput | tuple:
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        embeddings = self.deberta.embeddings
        if not _decodes(self.config) or embeddings.position_embeddings is None:
            return in_tree(self, *inputs, labels, output_attentions, output_hidden_states, return_dict, **kwargs)
        encoded = self.deberta(*inputs, output_attentions, output_hidden_states=True, return_dict=True)
        before_last = encoded.hidden_states[-2]
        if attention_mask is None:
            attention_mask = before_last.new_ones(before_last.shape[:2])
        if position_ids is None:
            position_ids = torch.arange(before_last.shape[1], device=before_last.device)[None]
        context, table = _shared(self.deberta.encoder, before_last, attention_mask)
        states = before_last + embeddings.position_embeddings(position_ids)
        for _ in range(self.config.emd_steps):
            last = self.deberta.encoder.layer[-1]
            states, _ = last(before_last, context, states, None, table)
        logits = self.lm_predictions(states, embeddings.word_embeddings)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = MaskedLMOutput(
            loss=None if labels is None else cross_entropy(logits, labels),
            logits=logits,
            hidden_states=encoded.hidden_states if wanted else None,
            attentions=encoded.attentions,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()

    return forward


def _get_output_embeddings(in_tree: Callable) -> Callable:
    def get_output_embeddings(self) -> nn.Module | None:
        return in_tree(self) if self.legacy else None  # the word embeddings; in-tree names another matrix

    return get_output_embeddings


def _resize_token_embeddings(in_tree: Callable) -> Callable:
    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """As in Transformers; the bias of a new word starts at the mean bias."""
        embeddings = in_tree(self, *args, **kwargs)
        if not self.legacy:
            head = self.lm_predictions.lm_head
            old, added = head.bias.data, embeddings.num_embeddings - head.bias.shape[0]
            head.bias = nn.Parameter(nn.functional.pad(old, (0, added), value=old.mean().item()))
        return embeddings

    return resize_token_embeddings


# ---- tokenizers --------------------------------------------------------------------------------------


def _tokenizer_from_pretrained(owner: type) -> classmethod:
    in_tree = owner.from_pretrained.__func__

    def from_pretrained(cls, *args, **kwargs):
        if cls is not owner:  # a subclass has its own ideas
            return in_tree(cls, *args, **kwargs)
        return HfDebertaTokenizer.from_pretrained(*args, **kwargs)

    return classmethod(from_pretrained)
