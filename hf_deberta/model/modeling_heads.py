"""Heads for fine-tuning: sequence and token classification, question answering, multiple choice, entity choice.

Parameter names and arithmetic are those of Transformers' DeBERTa classes, and of the official code for the heads that
it has. So fine-tuned checkpoints load and give the same logits. Every loss respects `num_items_in_batch`, see
`losses`.
"""

import math
from collections.abc import Mapping
from typing import Any, Unpack, cast

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from .batch_layout import check_one_document, first_real_tokens, real_tokens
from .configuration_hf_deberta import HfDebertaConfig
from .input_checks import EncoderKwargs, any_outside, check_integers, check_tensors, refuse
from .losses import (
    IGNORED,
    binary_cross_entropy,
    binary_labels,
    class_labels,
    cross_entropy,
    distributions,
    mean_squared_error,
    multi_labels,
    regression_targets,
    soft_cross_entropy,
)
from .modeling_hf_deberta import HfDebertaModel, gather_positions
from .pretrained_model import HfDebertaPreTrainedModel

PADDED_ENTITY_LOGIT = -10000.0


class ContextPooler(nn.Module):
    """Pools a sequence by its first token: act(dense(dropout(state of the first token)))."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.pooler_dropout)
        self.activation = ACT2FN[config.pooler_hidden_act]

    def forward(self, first_states: torch.Tensor) -> torch.Tensor:
        """Return [B, hidden] from [B, 1, hidden], or [documents, hidden] from [1, documents, hidden]."""
        return self.activation(self.dense(self.dropout(first_states.flatten(0, 1))))


def make_classifier_dropout(config: HfDebertaConfig) -> nn.Dropout:
    """Return the dropout before a classifier: `cls_dropout`, or `hidden_dropout_prob` if it is None."""
    return nn.Dropout(config.hidden_dropout_prob if config.cls_dropout is None else config.cls_dropout)


class HfDebertaForSequenceClassification(HfDebertaPreTrainedModel):
    """Classification or regression of single texts or text pairs: logits [B, num_labels].

    `config.problem_type` selects the loss: "regression", "single_label_classification" or "multi_label_classification".
    If it is None, the labels decide, as in the official code: regression if `num_labels` is 1; cross entropy for class
    indices [B] or [B, 1] (a negative one is ignored); cross entropy against distributions for floats [B, num_labels].
    For a packed row (`cu_seq_lens_q`) the logits are [documents, num_labels].

    >>> import torch
    >>> from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
    >>> model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny", num_labels=3))
    >>> model(torch.tensor([[1, 5, 7, 2]]), labels=torch.tensor([2])).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.num_labels = cast(int, config.num_labels)  # None only in a config without id2label
        self.deberta = HfDebertaModel(config)
        self.pooler = ContextPooler(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.dropout = make_classifier_dropout(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[EncoderKwargs],
    ) -> SequenceClassifierOutput:
        """Return logits [B, num_labels], and the loss if there are labels.

        The summed loss is divided by `num_items_in_batch`, by default the number of labelled items in this call. A
        packed row (`cu_seq_lens_q`) has logits and labels for each document.
        """
        encoded = self.deberta(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            first_token_only=True,
            return_dict=True,
            **kwargs,
        )
        pooled = self.pooler(encoded.last_hidden_state)
        logits = self.classifier(self.dropout(pooled))
        loss = None if labels is None else self._compute_loss(logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )

    def _compute_loss(
        self, logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        check_tensors(labels=labels)
        problem_type = self.config.problem_type
        if problem_type is None:
            if self.num_labels == 1:
                problem_type = "regression"
            elif labels.dim() < 2 or labels.shape[-1] == 1:
                problem_type = "single_label_classification"
        if problem_type == "regression":
            return mean_squared_error(logits, regression_targets(labels, logits.shape), num_items_in_batch)
        if problem_type == "single_label_classification":
            labels = class_labels(labels, logits.shape[:1], self.num_labels)
            return cross_entropy(logits, labels, num_items_in_batch)
        if problem_type == "multi_label_classification":
            return binary_cross_entropy(logits, multi_labels(labels, logits.shape), num_items_in_batch)
        return soft_cross_entropy(logits, distributions(labels, logits.shape), num_items_in_batch)


class HfDebertaForTokenClassification(HfDebertaPreTrainedModel):
    """Classification of each token: logits [B, N, num_labels].

    Labels are [B, N]; negative labels and labels at padding are ignored. `config.token_classifier="projection"` selects
    the official NER head, which has a dense layer and gelu before the classifier.

    >>> import torch
    >>> from hf_deberta import HfDebertaConfig, HfDebertaForTokenClassification
    >>> model = HfDebertaForTokenClassification(HfDebertaConfig.from_preset("tiny", num_labels=5))
    >>> model(torch.tensor([[1, 5, 7, 2]])).logits.shape
    torch.Size([1, 4, 5])
    """

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.num_labels = cast(int, config.num_labels)  # None only in a config without id2label
        self.deberta = HfDebertaModel(config)
        if config.token_classifier == "projection":
            self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = make_classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,  # [B, N], negative is ignored
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[EncoderKwargs],
    ) -> TokenClassifierOutput:
        """Return logits [B, N, num_labels], and the loss if there are labels.

        The summed loss is divided by `num_items_in_batch`, by default the number of labelled tokens in this call.
        """
        encoded = self.deberta(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        states = encoded.last_hidden_state
        if self.config.token_classifier == "projection":
            states = nn.functional.gelu(self.proj(states))
        logits = self.classifier(self.dropout(states))
        loss = None
        if labels is not None:
            real = None if attention_mask is None else real_tokens(attention_mask, *logits.shape[:2])
            labels = class_labels(labels, logits.shape[:2], self.num_labels, real)
            loss = cross_entropy(logits, labels, num_items_in_batch)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )


class HfDebertaForQuestionAnswering(HfDebertaPreTrainedModel):
    """Extractive question answering: `start_logits` and `end_logits` [B, N].

    The loss is the mean of two cross entropies over the tokens that are not padding. An answer outside the window or at
    padding is ignored.

    >>> import torch
    >>> from hf_deberta import HfDebertaConfig, HfDebertaForQuestionAnswering
    >>> model = HfDebertaForQuestionAnswering(HfDebertaConfig.from_preset("tiny"))
    >>> ids, start, end = torch.tensor([[1, 5, 7, 2]]), torch.tensor([1]), torch.tensor([2])
    >>> model(ids, start_positions=start, end_positions=end).start_logits.shape
    torch.Size([1, 4])
    """

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.deberta = HfDebertaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,  # [B]
        end_positions: torch.Tensor | None = None,  # [B]
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[EncoderKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Return start and end logits [B, N], and the loss if both positions are passed.

        Both summed losses are divided by `num_items_in_batch`, by default the number of answers in this call. They
        treat a packed row as one input.
        """
        encoded = self.deberta(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        start_logits, end_logits = self.qa_outputs(encoded.last_hidden_state).unbind(-1)
        loss = None
        if (start_positions is None) != (end_positions is None):
            raise ValueError("pass both start_positions and end_positions for a loss, or neither")
        if start_positions is not None and end_positions is not None:
            batch = start_logits.shape[:1]
            start_positions = class_labels(start_positions, batch, name="start_positions")
            end_positions = class_labels(end_positions, batch, name="end_positions")
            start_loss = _answer_loss(start_logits, start_positions, attention_mask, num_items_in_batch)
            loss = 0.5 * (start_loss + _answer_loss(end_logits, end_positions, attention_mask, num_items_in_batch))
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )


class HfDebertaForMultipleChoice(HfDebertaPreTrainedModel):
    """Choice of one of several options: inputs [B, choices, N], logits [B, choices], labels [B].

    >>> import torch
    >>> from hf_deberta import HfDebertaConfig, HfDebertaForMultipleChoice
    >>> model = HfDebertaForMultipleChoice(HfDebertaConfig.from_preset("tiny"))
    >>> model(torch.tensor([[[1, 5, 2], [1, 7, 2]]]), labels=torch.tensor([1])).logits.shape
    torch.Size([1, 2])
    """

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.deberta = HfDebertaModel(config)
        self.pooler = ContextPooler(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.dropout = make_classifier_dropout(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,  # [B, choices, N]
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,  # [B]
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[EncoderKwargs],
    ) -> MultipleChoiceModelOutput:
        """Return logits [B, choices], and the loss if there are labels.

        The summed loss is divided by `num_items_in_batch`, by default the number of labels in this call. Packed rows
        are not supported.
        """
        _refuse_packed_rows(kwargs)
        inputs = _flatten_choices(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )
        encoded = self.deberta(**inputs, first_token_only=True, return_dict=True, **kwargs)
        pooled = self.pooler(encoded.last_hidden_state)
        num_choices = cast(torch.Tensor, inputs_embeds if input_ids is None else input_ids).shape[1]
        logits = self.classifier(self.dropout(pooled)).view(-1, num_choices)
        loss = None
        if labels is not None:
            labels = class_labels(labels, logits.shape[:1], num_choices)
            loss = cross_entropy(logits, labels, num_items_in_batch)
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )


class HfDebertaForEntityChoice(HfDebertaPreTrainedModel):
    """The official ReCoRD head: one logit per entity of a passage, [B, E], high if it fits the query's placeholder.

    `entity_indices` [B, E, S] are the token positions of each entity's mention, 0 for padding. A mention's state is the
    mean of its token states, weighted by softmax(h_t . h_first / sqrt(hidden)). An entity of padding alone has logit
    -10000. Labels are [B, E]: 1 for an answer, 0 for another entity, -100 to ignore; padding is ignored.

    >>> import torch
    >>> from hf_deberta import HfDebertaConfig, HfDebertaForEntityChoice
    >>> model = HfDebertaForEntityChoice(HfDebertaConfig.from_preset("tiny"))
    >>> entity_indices = torch.tensor([[[1, 2], [4, 0]]])
    >>> model(torch.tensor([[1, 5, 7, 9, 8, 2]]), entity_indices=entity_indices).logits.shape
    torch.Size([1, 2])
    """

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.deberta = HfDebertaModel(config)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.dropout = make_classifier_dropout(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        entity_indices: torch.Tensor | None = None,  # [B, E, S]
        labels: torch.Tensor | None = None,  # [B, E]
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[EncoderKwargs],
    ) -> SequenceClassifierOutput:
        """Return logits [B, E], and the loss if there are labels.

        The summed loss is divided by `num_items_in_batch`, by default the number of labelled entities in this call.
        Packed rows are not supported.
        """
        _refuse_packed_rows(kwargs)
        if entity_indices is None:
            raise ValueError("entity choice needs entity_indices [B, entities, tokens], 0 for padding")
        encoded = self.deberta(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        states = encoded.last_hidden_state
        real = None if attention_mask is None else real_tokens(attention_mask, *states.shape[:2])
        mention_mask = mask_of_mentions(entity_indices, states, real)
        if attention_mask is None:
            check_one_document(position_ids)
        present = mention_mask.any(-1)  # [B, E]
        first = states[:, :1] if real is None else gather_positions(states, first_real_tokens(real).to(states.device))
        mentions = pool_mentions(states, entity_indices, mention_mask, first)
        mentions = self.dropout(nn.functional.gelu(self.proj(mentions)))
        logits = self.classifier(mentions).squeeze(-1).masked_fill(~present, PADDED_ENTITY_LOGIT)
        loss = None
        if labels is not None:
            labels = binary_labels(labels, logits.shape, present)
            loss = binary_cross_entropy(logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )


def mask_of_mentions(
    indices: torch.Tensor,  # [B, E, S]
    states: torch.Tensor,  # [B, N, hidden]
    real: torch.Tensor | None,  # [B, N] of bool
) -> torch.Tensor:
    """Return which of the indices belong to a mention, [B, E, S]: not 0, and not the position of padding."""
    check_tensors(entity_indices=indices)
    batch, length = states.shape[:2]
    if indices.dim() != 3 or indices.shape[0] != batch:
        raise ValueError(f"entity_indices must be [B, entities, tokens] with B = {batch}, not {tuple(indices.shape)}")
    check_integers("entity_indices", indices)
    if any_outside(indices, length):
        wrong = indices[(indices < 0) | (indices >= length)]
        refuse(wrong, f"entity_indices must be positions of tokens, in [0, {length})")
    mention_mask = indices > 0
    if real is not None:
        index = indices.flatten(1).long()
        mention_mask = mention_mask & real.to(index.device).gather(1, index).view_as(indices)
    return mention_mask


def pool_mentions(
    states: torch.Tensor,  # [B, N, hidden]
    indices: torch.Tensor,  # [B, E, S]
    mention_mask: torch.Tensor,  # [B, E, S] of bool
    first: torch.Tensor,  # [B, 1, hidden]
) -> torch.Tensor:
    """Return mention states [B, E, hidden]: the states at indices in the mask, averaged by similarity.

    The weights are the softmax over a mention of the scaled products with the state of the first real token.
    """
    batch, entities, span = indices.shape
    width = states.shape[-1]
    index = indices.reshape(batch, entities * span, 1).expand(-1, -1, width)
    tokens = states.gather(1, index.long()).view(batch, entities, span, width)
    scores = (tokens @ first.mT.unsqueeze(1)).squeeze(-1) / math.sqrt(width)  # [B, E, S]
    weights = scores.masked_fill(~mention_mask, torch.finfo(scores.dtype).min).softmax(-1) * mention_mask
    return (weights[..., None] * tokens).sum(2)


def _answer_loss(
    logits: torch.Tensor,  # [B, N]
    positions: torch.Tensor,  # [B] or [B, 1]
    attention_mask: torch.Tensor | None,
    num_items_in_batch: torch.Tensor | int | None,
) -> torch.Tensor:
    """Return the cross entropy of answer positions over real tokens, so that the amount of padding changes nothing."""
    labels = label_answers(positions, attention_mask, *logits.shape)
    if attention_mask is not None:
        logits = logits.masked_fill(~real_tokens(attention_mask, *logits.shape), torch.finfo(logits.dtype).min)
    return cross_entropy(logits, labels, num_items_in_batch)


def label_answers(
    positions: torch.Tensor, attention_mask: torch.Tensor | None, batch: int, length: int
) -> torch.Tensor:
    """Return answer positions [B] with -100 for those outside the window or at padding."""
    positions = positions.reshape(-1)
    ignored = (positions < 0) | (positions >= length)
    if attention_mask is not None:
        real = real_tokens(attention_mask, batch, length)
        ignored |= ~real.to(positions.device).gather(1, positions.clamp(0, length - 1)[:, None])[:, 0]
    return positions.masked_fill(ignored, IGNORED)


def _refuse_packed_rows(kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError("this head does not support packed rows; pass padded rows without cu_seq_lens_q")


def _flatten_choices(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return tensors [B * choices, ...] from [B, choices, ...]."""
    check_tensors(**tensors)
    inputs = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    first = next(iter(shapes.values()), ())
    if len(first) < 3 or any(shape[:2] != first[:2] or len(shape) < 3 for shape in shapes.values()):
        raise ValueError(f"multiple choice takes input_ids [B, choices, N] and masks like them, not {shapes}")
    return {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}
