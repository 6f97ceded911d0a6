"""Replaced token detection (RTD), the DeBERTaV3 objective: the discriminator and its head.

    logit_t = classifier(act(dense(LayerNorm(h_first + h_t))))

A token is positive where a generator put another word than the original one. The loss is over every real
token, [CLS] and [SEP] included.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from .attention_context import real_tokens
from .batch_loss import IGNORED, binary_cross_entropy
from .configuration_hf_deberta import HfDebertaConfig
from .dense import dense
from .modeling_hf_deberta import HfDebertaModel
from .pretrained_model import HfDebertaPreTrainedModel


class HfDebertaMaskPredictions(nn.Module):
    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def forward(self, states: torch.Tensor, first_token_states: torch.Tensor) -> torch.Tensor:
        """Logits [B, N] from states [B, N, hidden] and those of each sequence's first token."""
        mixed = self.LayerNorm(first_token_states + states)
        return self.classifier(self.activation(dense(self.dense, mixed))).squeeze(-1)


class HfDebertaForPreTraining(HfDebertaPreTrainedModel):
    """The discriminator: one logit per token, positive where it was replaced.

    >>> labels = replaced_token_labels(input_ids, original_ids, attention_mask)
    >>> model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
    """

    _keys_to_ignore_on_load_unexpected = [
        r"lm_predictions\.",
        r"cls\.predictions\.",
        r"position_embeddings\.",
        r"embeddings\._weight$",
        r"^config$",
    ]

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.deberta = HfDebertaModel(config)
        self.mask_predictions = HfDebertaMaskPredictions(config)
        self.post_init()
        # the encoder alone ignores this head; this model must not
        self._keys_to_ignore_on_load_unexpected = set(type(self)._keys_to_ignore_on_load_unexpected)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,  # [B, N]: 1 replaced, 0 original, -100 ignored
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        wanted = self.deberta.wanted(output_attentions, output_hidden_states)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, cu_seq_lens_q)
        embeddings, context = self.deberta.embed(*inputs, unpad=self.deberta.unpads(*wanted))
        encoded = self.deberta.encoder(embeddings, context, *wanted)
        states = encoded.last_hidden_state
        logits = context.scatter(self.mask_predictions(states, first_token_states(states, context.documents)))
        loss = None
        if labels is not None:
            if attention_mask is not None:
                labels = labels.masked_fill(~real_tokens(attention_mask, *logits.shape), IGNORED)
            loss = binary_cross_entropy(logits, labels, num_items_in_batch)
        hidden_states = context.scatter_each(encoded.hidden_states)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=hidden_states, attentions=encoded.attentions
        )


def first_token_states(states: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """For each token, the state of its row's first token, or of its document's in a packed row."""
    if documents is None:
        return states[:, :1]
    first = torch.searchsorted(documents.contiguous(), documents.contiguous())  # documents do not decrease
    return states.gather(1, first[..., None].expand_as(states))


def replaced_token_labels(
    input_ids: torch.Tensor, original_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """1 where a token was replaced by another, 0 where it is the original, -100 at padding."""
    labels = (input_ids != original_ids).long()
    return labels if attention_mask is None else labels.masked_fill(attention_mask == 0, IGNORED)
