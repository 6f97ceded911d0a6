"""`HfDebertaForCausalLM`: DeBERTa as a left-to-right language model, as in the paper's WikiText-103 experiment.

    token t attends to tokens 0 .. t of its document and predicts token t + 1

The parameters are those of the masked-language model, so each loads checkpoints of the other. With the enhanced mask
decoder, the query H_t + p_t attends to H_0 .. H_t. The paper's variants:

    DeBERTa-AP: absolute positions at the input, `position_biased_input=True`
    DeBERTa-MT: both tasks on the same weights; add the loss with `causal=True` to that of masked inputs with
                `causal=False`

With a key-value cache, a step of `generate` computes the new tokens only: causal states and relative positions of
earlier tokens do not change. Position terms of a new query use the cached content keys and the model's tables.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Unpack

import torch
from torch.nn import functional
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from .batch_layout import BatchLayout
from .configuration_hf_deberta import HfDebertaConfig
from .enhanced_mask_decoder import HfDebertaForMaskedLM, HfDebertaMaskedLMOutput, MaskedLMKwargs
from .losses import IGNORED

# `generate` passes the cache, and finds it in outputs, by one name: "cache" from Transformers 5.24 on
CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class CausalLMKwargs(MaskedLMKwargs, total=False):
    """What a causal language model takes beside tokens and labels."""

    cache: Cache | None
    past_key_values: Cache | None
    use_cache: bool | None


@dataclass
class HfDebertaCausalLMOutput(HfDebertaMaskedLMOutput, CausalLMOutputWithPast):
    """`HfDebertaMaskedLMOutput` and the cache: keys and values of each layer, [B, H, N, d].

    The cache is the attribute `cache`, and also `past_key_values`, as Transformers called it before 5.24.
    """

    if CACHE_NAME == "past_key_values":
        cache = property(attrgetter("past_key_values"))


class HfDebertaForCausalLM(HfDebertaForMaskedLM, GenerationMixin):
    """Left-to-right language model; with `causal=False` in the call, a masked-language model.

    Labels are the input ids, with -100 at tokens to ignore; the model shifts them. It never predicts
    padding or the first token of a document. In packed rows, give the first token of each document the label -100, so
    that Trainer does not count it. The output is that of `HfDebertaForMaskedLM`: in training with labels it has
    `losses` and `predictions` instead of `logits`.

    `generate` supports greedy decoding, sampling and beams, with Transformers' `DynamicCache` of keys and values. If
    your tokenizer appends [SEP], drop it from the prompt: `input_ids[:, :-1]`. Outside of `generate`, a call has a
    cache if you pass `use_cache=True` or `cache`, which may also be called `past_key_values`. Packed rows, and gradient
    checkpointing in training, cannot have one.

    >>> import torch
    >>> from hf_deberta import HfDebertaConfig, HfDebertaForCausalLM
    >>> model = HfDebertaForCausalLM(HfDebertaConfig.from_preset("tiny")).eval()
    >>> input_ids = torch.tensor([[1, 5, 7]])
    >>> model(input_ids, labels=input_ids).logits.shape
    torch.Size([1, 3, 128])
    >>> model.generate(input_ids, max_new_tokens=4, do_sample=False).shape
    torch.Size([1, 7])
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,  # [B, N]
        num_items_in_batch: torch.Tensor | int | None = None,
        causal: bool = True,
        logits_to_keep: int = 0,
        **kwargs: Unpack[CausalLMKwargs],
    ) -> HfDebertaMaskedLMOutput:
        """Return logits, and the loss if there are labels.

        The summed loss is divided by `num_items_in_batch`, by default the number of labels in this call after the
        shift. Without labels, `logits_to_keep` limits logits to that many last positions; 0 is all. `num_real_tokens`
        is for `causal=False`.

        `cache`, or `past_key_values`, holds the tokens before `input_ids`, and receives these; `use_cache=True` begins
        with an empty one. The output, a `HfDebertaCausalLMOutput`, returns it. `attention_mask` [B, K] then covers all
        tokens.
        """
        others: dict[str, Any] = {**kwargs}
        use_cache = others.pop("use_cache", None)
        cache = only_cache(others.pop("cache", None), others.pop("past_key_values", None))
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            self._check_cache(cache, causal, labels, others.get("cu_seq_lens_q"))
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if not causal:
            return super().forward(*inputs, labels, num_items_in_batch, return_dict=True, **others)
        if self.config.conv_kernel_size > 0:
            raise ValueError(
                f"the convolution (conv_kernel_size={self.config.conv_kernel_size}) reads the next token, which a "
                "causal language model must not; use a configuration with conv_kernel_size=0, or causal=False"
            )
        embeddings, layout = self.deberta.start(*inputs, causal=True, cache=cache, **others)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        labels = self._check_labels(labels, attention_mask, tokens, others.get("max_predictions_per_row"))
        labels = None if labels is None else next_token_labels(labels, layout)
        batch, length = embeddings.shape[:2]
        last_positions = None
        if 0 < logits_to_keep < length:
            last_positions = torch.arange(length, device=embeddings.device)[-logits_to_keep:].expand(batch, -1)
        output = self._predict(embeddings, layout, labels, num_items_in_batch, last_positions, **others)
        if cache is not None:
            fields: dict[str, Any] = {**output, CACHE_NAME: cache}
            output = HfDebertaCausalLMOutput(**fields)
        return output

    def _check_cache(
        self, cache: Cache, causal: bool, labels: torch.Tensor | None, cu_seq_lens_q: torch.Tensor | None
    ) -> None:
        """Raise a ValueError for calls that cannot have a key-value cache."""
        reason = None
        if not isinstance(cache, Cache) or cache.is_compileable:
            reason = f"the key-value cache must be one that grows, such as DynamicCache, not {type(cache).__name__}"
        elif not causal:
            reason = "a key-value cache needs causal=True: otherwise earlier tokens attend to the new ones"
        elif labels is not None:
            reason = "a loss needs all tokens of a row in one call; pass labels without a key-value cache"
        elif cu_seq_lens_q is not None:
            reason = "a key-value cache cannot hold packed rows (cu_seq_lens_q); pass use_cache=False"
        elif self.training and any(layer.gradient_checkpointing for layer in self.deberta.encoder.layer):
            reason = "gradient checkpointing computes layers twice, which a key-value cache forbids; call model.eval()"
        if reason is not None:
            raise ValueError(reason)

    # ---- generation: mypy cannot match the protocol that Transformers declares for `self` ------------------------

    def generate(
        self, *args: Any, cache: Cache | None = None, past_key_values: Cache | None = None, **kwargs: Any
    ) -> Any:
        """Return what Transformers' `generate` returns; it takes only one of the two names of the cache."""
        cache = only_cache(cache, past_key_values)
        if cache is not None:
            kwargs[CACHE_NAME] = cache
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, cache=None, **kwargs):
        """Prepare inputs as Transformers does.

        `generate` accepts the arguments of this signature and of `forward`. `inputs_embeds` is in none of them, so it
        is an error.
        """
        kwargs[CACHE_NAME] = only_cache(cache, past_key_values)
        return super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[misc]

    def _validate_generated_length(self, generation_config, *args, **kwargs) -> None:
        super()._validate_generated_length(generation_config, *args, **kwargs)  # type: ignore[misc]
        limit, max_length = self.config.max_position_embeddings, generation_config.max_length
        has_absolute_positions = self.config.uses_mask_decoder or self.config.position_biased_input
        if has_absolute_positions and max_length > limit:
            raise ValueError(
                f"the model has absolute positions up to max_position_embeddings = {limit}, but prompt and new tokens "
                f"may reach {max_length}; shorten the prompt or lower max_new_tokens or max_length"
            )


# Trainer shifts the labels, for label smoothing, of the classes that are listed here
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[HfDebertaConfig.model_type] = HfDebertaForCausalLM.__name__


def only_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return the cache that was passed under one of its two names."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument; pass only one")
    return past_key_values if cache is None else cache


def next_token_labels(labels: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
    """Return at each position [B, N] the label of the next token, -100 at padding and at ends of rows and documents."""
    shifted = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if layout.documents is not None:
        ends = functional.pad(layout.documents.diff(dim=-1) != 0, (0, 1), value=True)
        shifted = shifted.masked_fill(ends, IGNORED)
    if layout.token_mask is not None:
        shifted = shifted.masked_fill(~layout.token_mask, IGNORED)
    return shifted
