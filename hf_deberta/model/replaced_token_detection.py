"""Replaced token detection (RTD), the objective of DeBERTaV3: the discriminator and its head.

    logit_t = classifier(act(dense(LayerNorm(h_first + h_t))))

A token is positive if a generator replaced the original token by another one. The loss covers all tokens but padding,
[CLS] and [SEP] included.
"""

from typing import Unpack

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from .batch_layout import real_tokens, scatter
from .configuration_hf_deberta import HfDebertaConfig
from .input_checks import EncoderKwargs
from .losses import IGNORED, binary_cross_entropy, binary_labels
from .modeling_hf_deberta import HfDebertaModel, gather_positions
from .pretrained_model import HfDebertaPreTrainedModel
from .slots import linear


class HfDebertaMaskPredictions(nn.Module):
    """The head of the discriminator, under the official parameter names."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def forward(self, states: torch.Tensor, first_states: torch.Tensor) -> torch.Tensor:
        """Return logits [B, N] from states [B, N, hidden] and first-token states [B, 1 or N, hidden]."""
        mixed = self.LayerNorm(first_states + states)
        return self.classifier(self.activation(linear(self.dense, mixed))).squeeze(-1)


class HfDebertaForPreTraining(HfDebertaPreTrainedModel):
    """The discriminator of replaced token detection: logits [B, N], positive where a token was replaced.

    Labels are 1 for a replaced token, 0 for an original one and -100 for an ignored one, see `replaced_token_labels`.

    >>> import torch
    >>> from hf_deberta import HfDebertaConfig, HfDebertaForPreTraining, replaced_token_labels
    >>> model = HfDebertaForPreTraining(HfDebertaConfig.from_preset("tiny"))
    >>> original_ids, input_ids = torch.tensor([[1, 5, 7, 2]]), torch.tensor([[1, 5, 9, 2]])
    >>> labels = replaced_token_labels(input_ids, original_ids)
    >>> labels
    tensor([[0, 0, 1, 0]])
    >>> model(input_ids, labels=labels).logits.shape
    torch.Size([1, 4])
    """

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.deberta = HfDebertaModel(config)
        self.mask_predictions = HfDebertaMaskPredictions(config)
        self.post_init()
        self.expect_on_load(r"mask_predictions\.")

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,  # [B, N]: 1 replaced, 0 original, -100 ignored
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[EncoderKwargs],
    ) -> TokenClassifierOutput:
        """Return logits [B, N], and the loss if there are labels.

        The summed loss is divided by `num_items_in_batch`, by default the number of labelled tokens in this call. In a
        packed row the head adds to each token the state of its document's first token.
        """
        layout = self.deberta.batch_layout(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        embeddings = self.deberta.embeddings(input_ids, token_type_ids, layout, inputs_embeds)
        encoded = self.deberta.encoder(embeddings, layout)
        states = encoded.last_hidden_state
        first_states = gather_positions(states, layout.first_token_positions().to(states.device))
        logits = scatter(self.mask_predictions(states, first_states), layout)
        loss = None
        if labels is not None:
            real = None if attention_mask is None else real_tokens(attention_mask, *logits.shape)
            labels = binary_labels(labels, logits.shape, real)
            loss = binary_cross_entropy(logits, labels, num_items_in_batch)
        return TokenClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )


def replaced_token_labels(
    input_ids: torch.Tensor, original_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return labels like `input_ids`: 1 for a replaced token, 0 for an original one, -100 for padding."""
    labels = (input_ids != original_ids).long()
    return labels if attention_mask is None else labels.masked_fill(attention_mask == 0, IGNORED)
