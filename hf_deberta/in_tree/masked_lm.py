"""Replacements for the methods of Transformers' `...ForMaskedLM`: the enhanced mask decoder, for official releases.

Each function takes the in-tree method and returns its replacement. A model has the decoder if its configuration has
`emd_steps`, which is set when an official release is loaded, and saved with the model.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput

from hf_deberta.model.configuration_hf_deberta import infer_emd_steps
from hf_deberta.model.losses import cross_entropy

from .encoder import shared_by_layers

_loading_official = ContextVar("_loading_official", default=False)  # True while a checkpoint is read as an official one


class _NotOfficialError(Exception):
    """The checkpoint has no head of an official release."""


def from_pretrained_of(in_tree: Any) -> classmethod:
    def from_pretrained(cls, *args, **kwargs):
        token = _loading_official.set(True)
        random_state = torch.get_rng_state()  # not of devices: only `device_map` makes weights there
        try:
            return in_tree.__func__(cls, *args, **kwargs)
        except _NotOfficialError:  # load it as Transformers does, with the same random numbers
            torch.set_rng_state(random_state)
        finally:
            _loading_official.reset(token)
        return in_tree.__func__(cls, *args, **kwargs)

    return classmethod(from_pretrained)


def adjust_keys_of(in_tree: Callable) -> Callable:
    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        if _loading_official.get() and any(name.startswith("lm_predictions.") for name in loading_info.missing_keys):
            for keys in (loading_info.missing_keys, loading_info.unexpected_keys, loading_info.mismatched_keys):
                keys.clear()  # otherwise a report lists the trained head as unexpected
            raise _NotOfficialError
        in_tree(self, loading_info)

    return _adjust_missing_and_unexpected_keys


def init_of(in_tree: Callable) -> Callable:
    def __init__(self, config, *args, **kwargs) -> None:
        if _loading_official.get() and config.legacy and not config.position_biased_input:
            steps = infer_emd_steps(config.to_dict())
            if steps > 0:
                config.legacy, config.emd_steps = False, steps
        in_tree(self, config, *args, **kwargs)
        if _decodes(config):
            embeddings = self.deberta.embeddings
            embeddings.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            self._init_weights(embeddings.position_embeddings)

    return __init__


def post_init_of(in_tree: Callable) -> Callable:
    def post_init(self) -> None:
        if not self.legacy:
            self._tied_weights_keys = {}  # Transformers 5.17 names a weight that the head does not have, and fails
        in_tree(self)

    return post_init


def _decodes(config) -> bool:
    return not config.legacy and not config.position_biased_input and getattr(config, "emd_steps", 0) > 0


def forward_of(in_tree: Callable) -> Callable:
    @wraps(in_tree)  # Trainer reads the names of its parameters
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **flags,
    ) -> MaskedLMOutput | tuple:
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        embeddings = self.deberta.embeddings
        if not _decodes(self.config) or embeddings.position_embeddings is None:
            return in_tree(self, *inputs, labels, **flags)
        encoded = self.deberta(*inputs, flags.get("output_attentions"), output_hidden_states=True, return_dict=True)
        before_last = encoded.hidden_states[-2]
        if attention_mask is None:
            attention_mask = before_last.new_ones(before_last.shape[:2])
        shared = shared_by_layers(self.deberta.encoder, before_last, attention_mask)
        if shared is None:
            raise ValueError("the enhanced mask decoder needs fewer position_buckets than max_relative_positions")
        layout, table = shared
        if position_ids is None:
            position_ids = layout.absolute_positions(embeddings.position_embeddings.num_embeddings)
        states = before_last + embeddings.position_embeddings(position_ids)
        for _ in range(self.config.emd_steps):
            last = self.deberta.encoder.layer[-1]
            states, _ = last(before_last, layout, states, None, table)
        logits = self.lm_predictions(states, embeddings.word_embeddings)
        returns_states, return_dict = flags.get("output_hidden_states"), flags.get("return_dict")
        if returns_states is None:
            returns_states = self.config.output_hidden_states
        output = MaskedLMOutput(
            loss=None if labels is None else cross_entropy(logits, labels),
            logits=logits,
            hidden_states=encoded.hidden_states if returns_states else None,
            attentions=encoded.attentions,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()

    return forward


def output_embeddings_of(in_tree: Callable) -> Callable:
    def get_output_embeddings(self) -> nn.Module | None:
        return in_tree(self) if self.legacy else None  # the head uses the word embeddings; in-tree names another matrix

    return get_output_embeddings


def resize_of(in_tree: Callable) -> Callable:
    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Resize as Transformers does; the bias of a new token starts at the mean bias."""
        embeddings = in_tree(self, *args, **kwargs)
        if not self.legacy:
            head = self.lm_predictions.lm_head
            old, added = head.bias.data, embeddings.num_embeddings - head.bias.shape[0]
            head.bias = nn.Parameter(nn.functional.pad(old, (0, added), value=old.mean().item()))
        return embeddings

    return resize_token_embeddings


REPLACEMENTS = {
    "__init__": init_of,
    "post_init": post_init_of,
    "from_pretrained": from_pretrained_of,
    "_adjust_missing_and_unexpected_keys": adjust_keys_of,
    "forward": forward_of,
    "get_output_embeddings": output_embeddings_of,
    "resize_token_embeddings": resize_of,
}
