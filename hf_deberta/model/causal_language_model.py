"""`HfDebertaForCausalLM`: DeBERTa as an autoregressive model by a triangular mask, the paper's WikiText-103 experiment.

    token t sees tokens 0 .. t of its document, and predicts token t + 1

Parameters are those of the masked-language model, so checkpoints go from one to the other. With the enhanced mask
decoder the query H_t + p_t sees H_0 .. H_t; DeBERTa-AP, absolute positions at the input instead, is
`position_biased_input=True`. DeBERTa-MT learns both tasks on one set of weights: the loss with `causal=True`, plus that
of masked inputs with `causal=False`.
"""

import torch
from torch.nn import functional
from transformers import GenerationConfig, GenerationMixin
from transformers.utils.generic import can_return_tuple

from .attention_context import AttentionContext
from .batch_loss import IGNORED
from .enhanced_mask_decoder import HfDebertaForMaskedLM, HfDebertaMaskedLMOutput


class HfDebertaForCausalLM(HfDebertaForMaskedLM, GenerationMixin):
    """Left-to-right language model of DeBERTa; a masked one with `causal=False`.

    >>> prompt = tokenizer("text", return_tensors="pt").input_ids[:, :-1]  # [CLS] text: without the last, [SEP]
    >>> model.generate(prompt, max_new_tokens=5)

    Labels are the input ids, -100 where nothing is to be predicted: they are shifted inside. Padding, and what no token
    of its own document comes before, is never predicted. A packed row best marks each document's first token with -100,
    which Trainer then does not count either. The output is that of `HfDebertaForMaskedLM`, sparse in training.

    Generation computes the whole prefix at every step, there is no cache.
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
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        sparse_prediction: bool | None = None,
        causal: bool = True,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> HfDebertaMaskedLMOutput:
        """`logits_to_keep`: of the last so many positions alone, where no labels are given; 0 is all."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        if not causal:
            states = (output_attentions, output_hidden_states)
            counts = (cu_seq_lens_q, num_items_in_batch)
            return super().forward(*inputs, labels, *states, *counts, sparse_prediction, return_dict=True)
        if self.config.conv_kernel_size > 0:
            raise ValueError(
                f"the convolution (conv_kernel_size={self.config.conv_kernel_size}) looks at the next token, which a "
                "causal language model must not; use a configuration with conv_kernel_size=0, or causal=False"
            )
        wanted = self.deberta.wanted(output_attentions, output_hidden_states)
        embeddings, context = self.deberta.embed(*inputs, cu_seq_lens_q, causal=True)
        labels = self._labels_of_real_tokens(labels, attention_mask, input_ids, inputs_embeds)
        if labels is not None:
            labels = next_labels(labels, context)
        last = None
        if logits_to_keep > 0:
            batch, length = embeddings.shape[:2]
            last = torch.arange(length, device=embeddings.device)[-logits_to_keep:].expand(batch, -1)
        sparse = self._predicts_sparsely(sparse_prediction)
        return self._predict(embeddings, context, wanted, labels, num_items_in_batch, sparse, last)

    # ---- generation ------------------------------------------------------------------------------

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs) -> dict:
        """As in Transformers, which looks here whether a prompt may be embeddings: without a cache it may not."""
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, *args, **kwargs) -> None:
        generation_config.use_cache = False  # of a copy that generate() made; it passes the whole prefix then

    def _validate_generated_length(self, generation_config: GenerationConfig, *args, **kwargs) -> None:
        super()._validate_generated_length(generation_config, *args, **kwargs)
        known, longest = self.config.max_position_embeddings, generation_config.max_length
        absolute = self.config.uses_mask_decoder or self.config.position_biased_input
        if absolute and longest > known:
            raise ValueError(
                f"absolute positions are known up to max_position_embeddings = {known}, and prompt and new tokens may "
                f"reach {longest}; shorten the prompt, or ask for fewer tokens with max_new_tokens or max_length"
            )


def next_labels(labels: torch.Tensor, context: AttentionContext) -> torch.Tensor:
    """At each position [B, N] the label of the next; none at a row's or document's end, and none at padding."""
    following = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if context.documents is not None:
        ends = functional.pad(context.documents.diff(dim=-1) != 0, (0, 1), value=True)
        following = following.masked_fill(ends, IGNORED)
    if context.token_mask is not None:
        following = following.masked_fill(~context.token_mask, IGNORED)
    return following
