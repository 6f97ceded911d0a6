"""`HfDebertaForCausalLM`: DeBERTa as a left-to-right language model, as in the paper's WikiText-103 experiment.

    token t attends to tokens 0 .. t of its document and predicts token t + 1

The parameters are those of the masked-language model, so each loads checkpoints of the other. With the enhanced mask
decoder, the query H_t + p_t attends to H_0 .. H_t. The paper's variants:

    DeBERTa-AP: absolute positions at the input, `position_biased_input=True`
    DeBERTa-MT: both tasks on the same weights; add the loss with `causal=True` to that of masked inputs with
                `causal=False`

There is no key-value cache: `generate` computes the whole row again at each step.
"""

from typing import Any, Unpack

import torch
from torch.nn import functional
from transformers import GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from .batch_layout import BatchLayout
from .configuration_hf_deberta import HfDebertaConfig
from .enhanced_mask_decoder import HfDebertaForMaskedLM, HfDebertaMaskedLMOutput, MaskedLMKwargs
from .losses import IGNORED


class HfDebertaForCausalLM(HfDebertaForMaskedLM, GenerationMixin):
    """Left-to-right language model; with `causal=False` in the call, a masked-language model.

    Labels are the input ids, with -100 at tokens to ignore; the model shifts them. It never predicts
    padding or the first token of a document. In packed rows, give the first token of each document the label -100, so
    that Trainer does not count it. The output is that of `HfDebertaForMaskedLM`: in training with labels it has
    `losses` and `predictions` instead of `logits`.

    `generate` supports greedy decoding, sampling and beams. If your tokenizer appends [SEP], drop it from the prompt:
    `input_ids[:, :-1]`. Each step computes the whole row: a key-value cache is an error.

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
        **kwargs: Unpack[MaskedLMKwargs],
    ) -> HfDebertaMaskedLMOutput:
        """Return logits, and the loss if there are labels.

        The summed loss is divided by `num_items_in_batch`, by default the number of labels in this call after the
        shift. Without labels, `logits_to_keep` limits logits to that many last positions; 0 is all. `num_real_tokens`
        is for `causal=False`.
        """
        others: dict[str, Any] = {**kwargs}
        _refuse_cache(**others)
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if not causal:
            return super().forward(*inputs, labels, num_items_in_batch, return_dict=True, **others)
        if self.config.conv_kernel_size > 0:
            raise ValueError(
                f"the convolution (conv_kernel_size={self.config.conv_kernel_size}) reads the next token, which a "
                "causal language model must not; use a configuration with conv_kernel_size=0, or causal=False"
            )
        layout = self.deberta.batch_layout(*inputs, causal=True, **others)
        embeddings = self.deberta.embeddings(input_ids, token_type_ids, layout, inputs_embeds)
        batch, length = embeddings.shape[:2]
        labels = self._prepare_labels(labels, attention_mask, embeddings.shape[:2])
        labels = None if labels is None else next_token_labels(labels, layout)
        last_positions = None
        if labels is None and 0 < logits_to_keep < length:
            last_positions = torch.arange(length, device=embeddings.device)[-logits_to_keep:].expand(batch, -1)
        return self._predict(embeddings, layout, labels, num_items_in_batch, last_positions, **others)

    # ---- generation: mypy cannot match the protocol that Transformers declares for `self` ------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return what Transformers' `generate` returns."""
        _refuse_cache(**kwargs)
        self.generation_config.use_cache = False  # the default of Transformers, and files, may say otherwise
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        """Prepare inputs as Transformers does.

        `generate` accepts the arguments of this signature and of `forward`. `inputs_embeds` is in none of them, so it
        is an error.
        """
        return super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[misc]


# Trainer shifts the labels, for label smoothing, of the classes that are listed here
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[HfDebertaConfig.model_type] = HfDebertaForCausalLM.__name__


def _refuse_cache(**kwargs: Any) -> None:
    """Raise a ValueError for a key-value cache, and for a call that expects one: the next would pass new tokens only.

    Transformers called `cache` `past_key_values` before 5.24.
    """
    for name in ("use_cache", "cache", "past_key_values"):
        if kwargs.get(name) not in (None, False):
            raise ValueError(
                f"the model has no key-value cache: leave out {name}, and pass all tokens of a row in each call"
            )


def next_token_labels(labels: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
    """Return at each position [B, N] the label of the next token, -100 at padding and at ends of rows and documents."""
    shifted = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if layout.documents is not None:
        ends = functional.pad(layout.documents.diff(dim=-1) != 0, (0, 1), value=True)
        shifted = shifted.masked_fill(ends, IGNORED)
    if layout.token_mask is not None:
        shifted = shifted.masked_fill(~layout.token_mask, IGNORED)
    return shifted
