"""The enhanced mask decoder (EMD, section 3.3 of the paper) and `HfDebertaForMaskedLM`.

    H      = output of the layer before the last
    z_0    = H + absolute position embeddings
    z_s+1  = last layer, applied to queries z_s with keys and values from H
    logits = lm_head(z_steps), with the word embedding as its output matrix

Absolute positions enter here and not at the input, so that the encoder learns relative structure. Queries do not
see one another: only the positions to be predicted need one, and the ordinary last layer never runs.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .attention_context import AttentionContext, real_tokens
from .batch_loss import IGNORED, cross_entropy, cross_entropy_per_item, mean_over_items
from .configuration_hf_deberta import HfDebertaConfig
from .dense import dense
from .fast_path_guards import (
    PLAIN_TENSORS,
    has_global_hooks_or_modes,
    in_functorch_transform,
    is_tracing_or_compiling,
    is_unmodified_module,
)
from .linear_cross_entropy import linear_cross_entropy
from .modeling_hf_deberta import HfDebertaModel, gather_positions, kept_states
from .pretrained_model import HfDebertaPreTrainedModel

DENSE_DECODING_THRESHOLD = 3 / 4  # share of labelled positions from which on all are decoded

logger = logging.get_logger(__name__)


class HfDebertaLMHead(nn.Module):
    """dense, activation, LayerNorm, then the word embedding as output matrix and a bias per word."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        width = config.embedding_size
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.decoder = nn.Linear(width, config.vocab_size, bias=False)  # tied to the word embedding

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return dense(self.decoder, self.transform(states)) + self.bias

    def transform(self, states: torch.Tensor) -> torch.Tensor:
        """What the output matrix is applied to."""
        return self.LayerNorm(self.activation(dense(self.dense, states)))

    def is_plain(self) -> bool:
        """Whether its logits could mean nothing but transformed states, the output matrix and the bias."""
        hooked = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        return (
            not (
                hooked
                or "forward" in vars(self)
                or is_tracing_or_compiling()
                or in_functorch_transform()
                or has_global_hooks_or_modes()
            )
            and type(self) is HfDebertaLMHead
            and type(self._parameters.get("bias")) in PLAIN_TENSORS
            and type(self.decoder) is nn.Linear
            and is_unmodified_module(self.decoder)
            and self.decoder.bias is None
        )


class HfDebertaLMPredictions(nn.Module):
    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.lm_head = HfDebertaLMHead(config)


@dataclass
class HfDebertaMaskedLMOutput(MaskedLMOutput):
    """`MaskedLMOutput`, and where only labelled positions were predicted, in the order of the batch, of each

        losses (`torch.Tensor` of shape [M]): its loss, without a gradient.
        predictions (`torch.LongTensor` of shape [M]): the best word.
        states (`torch.Tensor` of shape [M, hidden]): what `lm_head` makes its logits of, without a gradient.

    `logits` are then None, or [M, vocabulary] where a hook, an adapter or the like stands at the output matrix.
    """

    losses: torch.Tensor | None = None
    predictions: torch.Tensor | None = None
    states: torch.Tensor | None = None


class HfDebertaForMaskedLM(HfDebertaPreTrainedModel):
    """Masked-language model of DeBERTa, with the enhanced mask decoder unless the configuration says otherwise.

    >>> from transformers import pipeline
    >>> fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)

    Labels are original ids, -100 where nothing is to be predicted; padding never is. In training with labels, only
    labelled positions are predicted and `logits` are None: they would be far larger than all else. The output has
    `losses` and `predictions` instead. `sparse_prediction=False` asks for the `logits` [B, N, vocabulary] of all
    positions, `True` leaves them out of evaluation too; by default it is `config.sparse_prediction` in training.
    """

    _tied_weights_keys = {
        "lm_predictions.lm_head.decoder.weight": "deberta.embeddings.word_embeddings.weight",
    }
    _keys_to_ignore_on_load_unexpected = [
        r"mask_predictions\.",
        r"cls\.predictions\.decoder\.bias$",  # equal to cls.predictions.bias
        r"embeddings\._weight$",
        r"^config$",
    ]

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.deberta = HfDebertaModel(config, decoder_positions=config.uses_mask_decoder)
        self.lm_predictions = HfDebertaLMPredictions(config)
        self.post_init()
        # the encoder alone ignores what a decoder needs; this model must not
        self._keys_to_ignore_on_load_unexpected = set(type(self)._keys_to_ignore_on_load_unexpected)
        if not config.uses_mask_decoder and not config.position_biased_input:
            self._keys_to_ignore_on_load_unexpected.add(r"position_embeddings\.")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HfDebertaLMHead):
            init.zeros_(module.bias)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_predictions.lm_head.decoder

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Take another output matrix; a bias that it brings becomes the head's."""
        head = self.lm_predictions.lm_head
        head.decoder = value
        if value.bias is not None:
            head.bias, value.bias = value.bias, None

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """As in Transformers; the bias of a new word starts at the mean bias."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        head = self.lm_predictions.lm_head
        added = embeddings.num_embeddings - head.bias.shape[0]
        if added != 0:
            bias = nn.functional.pad(head.bias.data, (0, added), value=float(head.bias.mean()))
            head.bias = nn.Parameter(bias, requires_grad=head.bias.requires_grad)
        return embeddings

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        if any("mask_predictions." in key for key in loading_info.unexpected_keys):
            logger.warning_once(
                "This checkpoint is a replaced-token-detection discriminator (it holds mask_predictions): its encoder "
                "was not trained to fill masks, so expect poor words; load its generator for that."
            )
        untied_bias = any(key.endswith("cls.predictions.decoder.bias") for key in loading_info.unexpected_keys)
        if untied_bias and not self.config.tie_word_embeddings:
            raise ValueError(
                "this in-tree masked-LM checkpoint is untied and holds two output biases, of which Transformers uses "
                "cls.predictions.decoder.bias and this model knows cls.predictions.bias; copy the former over the "
                "latter in the file, then load it again"
            )
        super()._adjust_missing_and_unexpected_keys(loading_info)

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
        **kwargs,
    ) -> HfDebertaMaskedLMOutput:
        wanted = self.deberta.wanted(output_attentions, output_hidden_states)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, cu_seq_lens_q)
        embeddings, context = self.deberta.embed(*inputs, unpad=self.deberta.unpads(*wanted))
        labels = self._labels_of_real_tokens(labels, attention_mask, input_ids, inputs_embeds)
        sparse = self._predicts_sparsely(sparse_prediction)
        return self._predict(embeddings, context, wanted, labels, num_items_in_batch, sparse)

    def _predict(
        self,
        embeddings: torch.Tensor,
        context: AttentionContext,
        wanted: tuple[bool, bool | int | list[int]],
        labels: torch.Tensor | None,  # [B, N]
        num_items_in_batch: torch.Tensor | int | None,
        sparse: bool,
        asked: torch.Tensor | None = None,  # [B, Q]
    ) -> HfDebertaMaskedLMOutput:
        """All after the embedding; without labels, `asked` are the positions to predict, by default all."""
        decodes = self.config.uses_mask_decoder
        encoded = self.deberta.encoder(embeddings, context, *wanted, skip_last=decodes)
        states = encoded.last_hidden_state
        if decodes and (wanted[0] or wanted[1] is not False):
            encoded = self._with_last_layer(encoded, context, wanted[1])
        labelled = None
        if labels is not None:
            labels = context.gather(labels)
            labelled = labels != IGNORED if sparse else None
            asked = labelled_positions(labels) if sparse else None
        states = self._decode(states, context, asked) if decodes else gather_positions(states, asked)
        if labelled is None:
            logits = self.lm_predictions.lm_head(states)
            loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
            scores = {"loss": loss, "logits": context.scatter(logits)}
        else:
            states = states[labelled if asked is None else labelled.gather(1, asked)]  # [M, hidden]
            scores = {**self._score(states, labels[labelled], num_items_in_batch), "states": states.detach()}
            per_label = scores.keys() - {"loss"}
            scores |= {name: in_batch_order(scores[name], labelled, context) for name in per_label}
        return HfDebertaMaskedLMOutput(
            **scores,
            hidden_states=context.scatter_each(encoded.hidden_states),
            attentions=encoded.attentions,
        )

    def _labels_of_real_tokens(self, labels, attention_mask, input_ids, inputs_embeds) -> torch.Tensor | None:
        if labels is None:
            return None
        shape = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        if labels.shape != shape:
            raise ValueError(f"labels must be [B, N] = {tuple(shape)}, not {tuple(labels.shape)}")
        if attention_mask is None:
            return labels
        return labels.masked_fill(~real_tokens(attention_mask, *shape), IGNORED)

    def _predicts_sparsely(self, asked: bool | None) -> bool:
        wanted = self.training and self.config.sparse_prediction if asked is None else asked
        # how many positions are labelled depends on the data, which a compiled graph cannot follow
        return wanted and not is_tracing_or_compiling()

    def _score(
        self, states: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
    ) -> dict[str, torch.Tensor]:
        """What the output says of M labelled positions: without logits, where nothing could be looking at them."""
        head = self.lm_predictions.lm_head
        if head.is_plain():
            states = head.transform(states)
            scores = linear_cross_entropy(states, head.decoder.weight, head.bias, labels, num_items_in_batch)
            return dict(zip(("loss", "losses", "predictions"), scores, strict=True))
        logits = head(states)
        losses = cross_entropy_per_item(logits, labels)
        loss = mean_over_items(losses, labels >= 0, num_items_in_batch)
        return {"loss": loss, "logits": logits, "losses": losses.detach(), "predictions": logits.argmax(-1)}

    def _decode(
        self, before_last: torch.Tensor, context: AttentionContext, predicted: torch.Tensor | None
    ) -> torch.Tensor:
        """z_steps at the predicted positions [B, Q], or at all: [B, Q or N, hidden]."""
        encoder = self.deberta.encoder
        positions = self.deberta.embeddings.positions(context.position_ids, context.in_order)
        query_states = gather_positions(before_last + positions, predicted)
        table = encoder.relative_table(context)
        steps = self.config.emd_steps
        return encoder.layer[-1](before_last, table, context, query_states, predicted, steps=steps)[0]

    def _with_last_layer(
        self, encoded: BaseModelOutput, context: AttentionContext, output_hidden_states: bool | int | list[int]
    ) -> BaseModelOutput:
        """Run the ordinary last layer too, for who asked for hidden states or attentions of all layers."""
        encoder, before_last = self.deberta.encoder, encoded.last_hidden_state
        table = encoder.relative_table(context)
        wants_attentions = encoded.attentions is not None
        last, probabilities = encoder.layer[-1](before_last, table, context, output_attentions=wants_attentions)
        layers = self.config.num_hidden_layers
        kept = last if layers in kept_states(output_hidden_states, layers + 1) else None
        return BaseModelOutput(
            last_hidden_state=last,
            hidden_states=None if encoded.hidden_states is None else (*encoded.hidden_states, kept),
            attentions=(*encoded.attentions, probabilities) if wants_attentions else None,
        )


def labelled_positions(labels: torch.Tensor) -> torch.Tensor | None:
    """Positions [B, Q] that carry a label, row by row in order; Q is the fullest row's number, at least 1.

    Rows with fewer are filled up with positions that carry none. None for all positions, where that is less work:
    attention for some of the queries gathers what attention for all has side by side.
    """
    labelled = labels != IGNORED
    most = max(int(labelled.sum(1).max()), 1)
    if most > DENSE_DECODING_THRESHOLD * labels.shape[1]:
        return None
    return labelled.int().argsort(dim=1, descending=True, stable=True)[:, :most]


def in_batch_order(found: torch.Tensor, labelled: torch.Tensor, context: AttentionContext) -> torch.Tensor:
    """What was found at labelled positions [M, ...], row by row of the batch, wherever the layers had them."""
    if context.unpadding is None:
        return found
    return found[context.unpadding.index.to(labelled.device)[labelled[0]].argsort()]
