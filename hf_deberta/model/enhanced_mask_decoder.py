"""The enhanced mask decoder (EMD, paper section 3.2) and `HfDebertaForMaskedLM`.

    H      = output of the layer before the last
    z_0    = H + absolute position embeddings
    z_s+1  = last layer, applied to queries z_s with keys and values from H
    logits = lm_head(z_steps), with the word embedding as output matrix

Absolute positions are added here and not at the input, so that the encoder learns from relative positions. Queries do
not attend to one another. So only the positions to predict need a query, and the ordinary last layer never runs.

Legend: B batch, N tokens, Q query positions per row, M predicted positions in the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .batch_layout import BatchLayout, gather, real_tokens, scatter
from .configuration_hf_deberta import HfDebertaConfig
from .input_checks import EncoderKwargs, can_read_values, in_captured_graph
from .losses import IGNORED, class_labels, cross_entropy, cross_entropy_per_item, mean_over_items
from .modeling_hf_deberta import HfDebertaModel, gather_positions
from .pretrained_model import HfDebertaPreTrainedModel
from .slots import linear, replaceable

DENSE_DECODING_THRESHOLD = 3 / 4  # if a row has a larger share of labelled positions, decode all positions

logger = logging.get_logger(__name__)


class MaskedLMKwargs(EncoderKwargs, total=False):
    """What a masked-language model takes beside tokens and labels."""

    sparse_prediction: bool | None
    max_predictions_per_row: int | None
    sampling_temperature: float | None


class HfDebertaLMHead(nn.Module):
    """Compute logits: dense, activation, LayerNorm, then the word embedding as output matrix and a bias per token."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.decoder = nn.Linear(width, config.vocab_size, bias=False)  # tied to the word embedding

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [..., vocabulary] from states [..., hidden]."""
        return linear(self.decoder, self.transform(states)) + self.bias

    def transform(self, states: torch.Tensor) -> torch.Tensor:
        """Return the input of the output matrix, [..., embedding]."""
        return self.LayerNorm(self.activation(linear(self.dense, states)))


@replaceable
def vocabulary_loss(
    head: HfDebertaLMHead,
    states: torch.Tensor,  # [M, hidden]
    labels: torch.Tensor,  # [M], a negative label is ignored
    num_items_in_batch: torch.Tensor | int | None,
    sampling_temperature: float | None,
) -> dict[str, torch.Tensor | None]:
    """Return the loss, and losses, predictions and samples [M]; an engine may do without the logits [M, vocabulary]."""
    logits = head(states)
    losses = cross_entropy_per_item(logits, labels)
    loss = mean_over_items(losses, labels >= 0, num_items_in_batch)
    samples = sample_tokens(logits, sampling_temperature)
    return {"loss": loss, "losses": losses.detach(), "predictions": logits.argmax(-1), "samples": samples}


@torch.no_grad()
def sample_tokens(logits: torch.Tensor, temperature: float | None) -> torch.Tensor | None:
    """Sample a token [M] from each row of softmax(logits / temperature) [M, vocabulary]; None without a temperature."""
    if not temperature:
        return None if temperature is None else logits.argmax(-1)
    # the Gumbel-max trick: unlike torch.multinomial it does not wait for the device
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_()
    return noise.sub_(logits, alpha=1 / temperature).argmin(-1)


class HfDebertaLMPredictions(nn.Module):
    """Holds the head under the official parameter names, `lm_predictions.lm_head`."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.lm_head = HfDebertaLMHead(config)


@dataclass
class HfDebertaMaskedLMOutput(MaskedLMOutput):
    """`MaskedLMOutput` with four more fields for sparse prediction, in the order of the predicted positions.

    losses (`torch.Tensor` of shape [M]): the loss of each predicted position, without a gradient.
    predictions (`torch.LongTensor` of shape [M]): the most likely token id of each predicted position.
    samples (`torch.LongTensor` of shape [M]): tokens sampled there, if there is a `sampling_temperature`.
    labels (`torch.LongTensor` of shape [M]): the label of each predicted position.

    These are the labelled positions. On a GPU and in compiled graphs, `max_predictions_per_row` adds positions without
    a label, so that all rows have as many: their label is -100 and their loss 0.

    With sparse prediction `logits` is None.
    """

    losses: torch.Tensor | None = None
    predictions: torch.Tensor | None = None
    samples: torch.Tensor | None = None
    labels: torch.Tensor | None = None


class HfDebertaForMaskedLM(HfDebertaPreTrainedModel):
    """Masked-language model with the enhanced mask decoder, or without it if `config.emd_steps` is 0.

    Labels are the original token ids at the positions to predict and -100 elsewhere; labels at padding are ignored.

    In training with labels, only the labelled positions are predicted, because the logits of all positions would take
    far more memory than the rest of the model. `logits` is then None; the output has `losses` and `predictions` of the
    labelled positions, see `HfDebertaMaskedLMOutput`. `sparse_prediction=False` returns all logits [B, N, vocabulary];
    `sparse_prediction=True` omits them in evaluation too. The default is `config.sparse_prediction` in training and
    False in evaluation. To find the labelled positions, the host waits for the GPU, and a compiled graph has to predict
    all positions instead. For neither, pass `max_predictions_per_row`, the largest number of labels in a row or any
    larger number: shapes then depend on this number alone.

    >>> import torch
    >>> from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM
    >>> model = HfDebertaForMaskedLM(HfDebertaConfig.from_preset("tiny"))
    >>> input_ids, labels = torch.tensor([[1, 4, 4, 2]]), torch.tensor([[-100, 8, 9, -100]])
    >>> output = model.train()(input_ids, labels=labels)
    >>> output.logits is None, output.losses.shape, output.predictions.shape
    (True, torch.Size([2]), torch.Size([2]))
    >>> model.eval()(input_ids, labels=labels).logits.shape
    torch.Size([1, 4, 128])
    """

    _tied_weights_keys = {
        "lm_predictions.lm_head.decoder.weight": "deberta.embeddings.word_embeddings.weight",
    }

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.deberta = HfDebertaModel(config, decoder_positions=config.uses_mask_decoder)
        self.lm_predictions = HfDebertaLMPredictions(config)
        self.post_init()
        positions = [r"position_embeddings\."] if config.uses_mask_decoder or config.position_biased_input else []
        self.expect_on_load(r"lm_predictions\.", r"cls\.predictions\.", *positions)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HfDebertaLMHead):
            init.zeros_(module.bias)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_predictions.lm_head.decoder

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the output matrix; its bias, if it has one, becomes the bias of the head."""
        head = self.lm_predictions.lm_head
        head.decoder = value
        if value.bias is not None:
            head.bias = value.bias
            value.register_parameter("bias", None)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Resize as Transformers does; the bias of a new token is the mean bias."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        head = self.lm_predictions.lm_head
        added = embeddings.num_embeddings - head.bias.shape[0]
        if added != 0:
            old = head.bias.data
            bias = nn.functional.pad(old, (0, added), value=old.mean().item())
            head.bias = nn.Parameter(bias, requires_grad=head.bias.requires_grad)
        return embeddings

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        if any("mask_predictions." in key for key in loading_info.unexpected_keys):
            logger.warning_once(
                "This checkpoint is a replaced-token-detection discriminator (it has mask_predictions). Its encoder "
                "was not trained to fill masks, so predictions will be poor; load its generator instead."
            )
        untied_bias = any(key.endswith("cls.predictions.decoder.bias") for key in loading_info.unexpected_keys)
        if untied_bias and not self.config.tie_word_embeddings:
            raise ValueError(
                "this in-tree masked-LM checkpoint is untied and holds two output biases: Transformers uses "
                "cls.predictions.decoder.bias, this model loads cls.predictions.bias; drop the latter from the "
                "file and give the former its name, then load it again"
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
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[MaskedLMKwargs],
    ) -> HfDebertaMaskedLMOutput:
        """Return logits, and the loss if there are labels; with sparse prediction see the class.

        The summed loss is divided by `num_items_in_batch`, by default the number of labelled positions in this call.
        Absolute positions restart in each document of a packed row. `sparse_prediction` overrides the configuration's.
        With `max_predictions_per_row`, a row with more labels raises a ValueError on the CPU, and elsewhere makes the
        loss NaN. With `sampling_temperature`, sparse prediction samples a token for each position from the softmax of
        logits / temperature; 0 takes the most likely.
        """
        layout = self.deberta.batch_layout(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
        )
        embeddings = self.deberta.embeddings(input_ids, token_type_ids, layout, inputs_embeds)
        labels = self._prepare_labels(labels, attention_mask, embeddings.shape[:2])
        return self._predict(embeddings, layout, labels, num_items_in_batch, **kwargs)

    def _predict(
        self,
        embeddings: torch.Tensor,
        layout: BatchLayout,
        labels: torch.Tensor | None,  # [B, N]
        num_items_in_batch: torch.Tensor | int | None,
        query_positions: torch.Tensor | None = None,  # [B, Q]
        **kwargs: Unpack[MaskedLMKwargs],
    ) -> HfDebertaMaskedLMOutput:
        """Return the output from the embeddings. Without labels, logits are of `query_positions`, or of all if None."""
        encoded = self.deberta.encoder(embeddings, layout, skip_last=self.config.uses_mask_decoder)
        states = encoded.last_hidden_state
        fields: Mapping[str, torch.Tensor | None]
        if labels is not None and self._uses_sparse_prediction(**kwargs):
            fields = self._predict_labelled(states, layout, labels, num_items_in_batch, **kwargs)
        else:
            logits = self.lm_predictions.lm_head(self._decode(states, layout, query_positions))
            loss = None if labels is None else cross_entropy(logits, gather(labels, layout), num_items_in_batch)
            fields = {"loss": loss, "logits": scatter(logits, layout)}
        return HfDebertaMaskedLMOutput(
            **fields,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def _prepare_labels(
        self, labels: torch.Tensor | None, attention_mask: torch.Tensor | None, shape: torch.Size
    ) -> torch.Tensor | None:
        """Return the labels [B, N] with -100 at padding."""
        if labels is None:
            return None
        real = None if attention_mask is None else real_tokens(attention_mask, *shape)
        return class_labels(labels, shape, self.lm_predictions.lm_head.bias.shape[0], real)

    def _uses_sparse_prediction(
        self, sparse_prediction: bool | None = None, max_predictions_per_row: int | None = None, **others: Any
    ) -> bool:
        if sparse_prediction is None:
            sparse_prediction = self.training and self.config.sparse_prediction
        # the number of labelled positions depends on the data, so a compiled graph predicts all positions
        return sparse_prediction and (max_predictions_per_row is not None or not in_captured_graph())

    def _decode(self, states: torch.Tensor, layout: BatchLayout, query_positions: torch.Tensor | None) -> torch.Tensor:
        """Return z_steps [B, Q, hidden] at the query positions, or [B, N, hidden] if None.

        `states` [B, N, hidden] are those of the layer before the last; without a decoder, of the last.
        """
        if not self.config.uses_mask_decoder:
            return gather_positions(states, query_positions)
        encoder = self.deberta.encoder
        absolute = self.deberta.embeddings.absolute_embeddings(layout)
        query_states, layout = gather_positions(states + absolute, query_positions), layout.for_queries(query_positions)
        table, layout = encoder.position_table(layout, states.device)
        return encoder.layer[-1](states, table, layout, query_states, self.config.emd_steps)[0]

    def _predict_labelled(
        self,
        states: torch.Tensor,  # [B, N, hidden]
        layout: BatchLayout,
        labels: torch.Tensor,  # [B, N]
        num_items_in_batch: torch.Tensor | int | None,
        max_predictions_per_row: int | None = None,
        sampling_temperature: float | None = None,
        **others: Any,
    ) -> dict[str, torch.Tensor | None]:
        """Return the output fields of sparse prediction, without logits if nothing can observe them."""
        if layout.padded is not None and layout.unpadding.lengths is None:
            # a row of documents of unknown lengths would multiply each query with the keys of all documents
            states, layout = scatter(states, layout), layout.padded
        if can_read_values(labels):
            most = int((labels != IGNORED).sum(1).max())
            if max_predictions_per_row is not None and most > max_predictions_per_row:
                raise ValueError(
                    f"a row has {most} labels, more than max_predictions_per_row = {max_predictions_per_row}; pass a "
                    "larger number, or none"
                )
        if can_read_values(labels) or layout.unpadding is not None:
            max_predictions_per_row = None  # on the CPU count the labels: the given maximum may be larger
        labels = gather(labels, layout)
        labelled = labels != IGNORED  # [B, N]
        query_positions = labelled_positions(labelled, max_predictions_per_row)
        states = self._decode(states, layout, query_positions)  # [B, Q or N, hidden]
        if query_positions is not None:
            labels = labels.gather(1, query_positions)
        if max_predictions_per_row is not None:
            states, labels = states.flatten(0, 1), labels.flatten()  # M = B Q, some without a label
        else:
            has_label = labelled if query_positions is None else labelled.gather(1, query_positions)
            states, labels = states[has_label], labels[has_label]
        head = self.lm_predictions.lm_head
        fields = vocabulary_loss(head, states, labels, num_items_in_batch, sampling_temperature) | {"labels": labels}
        loss = cast(torch.Tensor, fields.pop("loss"))
        if max_predictions_per_row is not None:
            loss = loss.masked_fill((labelled.sum(1) > max_predictions_per_row).any(), torch.nan)
        if layout.unpadding is not None:
            order = layout.unpadding.order_in_batch(labelled)
            fields = {name: None if field is None else field[order] for name, field in fields.items()}
        return {"loss": loss, **fields}


def labelled_positions(labelled: torch.Tensor, max_predictions_per_row: int | None = None) -> torch.Tensor | None:
    """Return the positions [B, Q] of labels, in ascending order, from a mask [B, N] that is True at each of them.

    Q is `max_predictions_per_row`, by default the largest number in a row, and at least 1. Rows with fewer labels are
    filled with positions that have none. Return None, for all positions, if Q is nearly N: attention of all queries
    needs no gathered copies and is then faster.
    """
    most = int(labelled.sum(1).max()) if max_predictions_per_row is None else max_predictions_per_row
    most = max(most, 1)
    if most > DENSE_DECODING_THRESHOLD * labelled.shape[1]:
        return None
    return labelled.int().argsort(dim=1, descending=True, stable=True)[:, :most].sort(dim=1).values
