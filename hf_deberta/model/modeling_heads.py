"""Task heads: sequence and token classification, question answering, multiple choice, entity choice.

Parameter names and arithmetic are in-tree's (and the official code's, where that has the head), so fine-tuned
checkpoints load and give the same logits. Every loss honours `num_items_in_batch`, see `batch_loss`.
"""

import math

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from .attention_context import real_tokens
from .batch_loss import IGNORED, binary_cross_entropy, cross_entropy, mean_squared_error, soft_cross_entropy
from .configuration_hf_deberta import HfDebertaConfig
from .modeling_hf_deberta import HfDebertaModel
from .pretrained_model import HfDebertaPreTrainedModel

PADDED_ENTITY_LOGIT = -10000.0


class ContextPooler(nn.Module):
    """act(dense(dropout(first token)))."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.pooler_dropout)
        self.activation = ACT2FN[config.pooler_hidden_act]

    def forward(self, first_states: torch.Tensor) -> torch.Tensor:
        """[B, 1, hidden], or [1, documents, hidden], to [B or documents, hidden]."""
        return self.activation(self.dense(self.dropout(first_states.flatten(0, 1))))


def classifier_dropout(config: HfDebertaConfig) -> nn.Dropout:
    return nn.Dropout(config.hidden_dropout_prob if config.cls_dropout is None else config.cls_dropout)


class HfDebertaForSequenceClassification(HfDebertaPreTrainedModel):
    """Sentence and sentence-pair classification and regression.

    `config.problem_type` decides the loss: "regression", "single_label_classification" or
    "multi_label_classification". Unset, one label means regression, integer labels cross entropy (a negative
    label is ignored), and [B, labels] floats cross entropy against those distributions, as in the official code.
    """

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.deberta = HfDebertaModel(config)
        self.pooler = ContextPooler(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.dropout = classifier_dropout(config)
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
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        wanted = (output_attentions, output_hidden_states)
        encoded = self.deberta(*inputs, *wanted, cu_seq_lens_q, first_token_only=True, return_dict=True)
        pooled = self.pooler(encoded.last_hidden_state)
        logits = self.classifier(self.dropout(pooled))
        loss = None if labels is None else self._loss(logits, labels, num_items_in_batch)
        return _classified(SequenceClassifierOutput, loss, logits, encoded)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch) -> torch.Tensor:
        problem = self.config.problem_type
        if problem is None:
            if self.num_labels == 1:
                problem = "regression"
            elif labels.dim() == 1 or labels.shape[-1] == 1:
                problem = "single_label_classification"
        if problem == "regression":
            return mean_squared_error(logits, labels, num_items_in_batch)
        if problem == "single_label_classification":
            return cross_entropy(logits, labels.long(), num_items_in_batch)
        if problem == "multi_label_classification":
            return binary_cross_entropy(logits, labels, num_items_in_batch)
        return soft_cross_entropy(logits, labels, num_items_in_batch)


class HfDebertaForTokenClassification(HfDebertaPreTrainedModel):
    """One label per token. `config.token_classifier="projection"` is the official NER head, dense and gelu first."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.deberta = HfDebertaModel(config)
        if config.token_classifier == "projection":
            self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
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
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self.deberta(*inputs, output_attentions, output_hidden_states, cu_seq_lens_q, return_dict=True)
        states = encoded.last_hidden_state
        if self.config.token_classifier == "projection":
            states = nn.functional.gelu(self.proj(states))
        logits = self.classifier(self.dropout(states))
        loss = None
        if labels is not None:
            if attention_mask is not None:
                labels = labels.masked_fill(~real_tokens(attention_mask, *labels.shape), IGNORED)
            loss = cross_entropy(logits, labels, num_items_in_batch)
        return _classified(TokenClassifierOutput, loss, logits, encoded)


class HfDebertaForQuestionAnswering(HfDebertaPreTrainedModel):
    """Extractive answers: start and end logits per token; the loss is over real tokens."""

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
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> QuestionAnsweringModelOutput:
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self.deberta(*inputs, output_attentions, output_hidden_states, cu_seq_lens_q, return_dict=True)
        start_logits, end_logits = self.qa_outputs(encoded.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            answers = (start_logits, start_positions), (end_logits, end_positions)
            loss = 0.5 * sum(
                cross_entropy(
                    _without_padding(logits, attention_mask),
                    _answerable(positions, attention_mask, *logits.shape),
                    num_items_in_batch,
                )
                for logits, positions in answers
            )
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )


class HfDebertaForMultipleChoice(HfDebertaPreTrainedModel):
    """Which of several endings or options: inputs [B, choices, N], logits [B, choices]."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.deberta = HfDebertaModel(config)
        self.pooler = ContextPooler(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.dropout = classifier_dropout(config)
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
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> MultipleChoiceModelOutput:
        given = input_ids if input_ids is not None else inputs_embeds
        if given is not None and given.dim() != (3 if input_ids is not None else 4):
            raise ValueError(f"multiple choice takes input_ids [B, choices, N], not {tuple(given.shape)}")
        inputs = map(_flat, (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds))
        wanted = (output_attentions, output_hidden_states)
        encoded = self.deberta(*inputs, *wanted, first_token_only=True, return_dict=True)
        pooled = self.pooler(encoded.last_hidden_state)
        logits = self.classifier(self.dropout(pooled)).view(given.shape[:2])
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return _classified(MultipleChoiceModelOutput, loss, logits, encoded)


class HfDebertaForEntityChoice(HfDebertaPreTrainedModel):
    """The official ReCoRD head: how well each entity of a passage fills the query's placeholder.

    `entity_indices` [B, E, S] holds the token positions of each mention, 0 for padding. A mention is the mean of
    its tokens weighted by softmax(h_t . h_first / sqrt(hidden)); an all-padding entity gets logit -10000.
    """

    def __init__(self, config: HfDebertaConfig):
        super().__init__(config)
        self.deberta = HfDebertaModel(config)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.dropout = classifier_dropout(config)
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
        labels: torch.Tensor | None = None,  # [B, E]: 1 for an answer; -100, or padding, is ignored
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        if entity_indices is None:
            raise ValueError("entity choice needs entity_indices [B, entities, tokens], 0 for padding")
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        encoded = self.deberta(*inputs, output_attentions, output_hidden_states, return_dict=True)
        present = (entity_indices > 0).any(-1)  # [B, E]
        mentions = pool_mentions(encoded.last_hidden_state, entity_indices)
        mentions = self.dropout(nn.functional.gelu(self.proj(mentions)))
        logits = self.classifier(mentions).squeeze(-1).masked_fill(~present, PADDED_ENTITY_LOGIT)
        loss = None
        if labels is not None:
            labels = labels.masked_fill(~present, -100)
            loss = binary_cross_entropy(logits, labels, num_items_in_batch)
        return _classified(SequenceClassifierOutput, loss, logits, encoded)


def pool_mentions(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[B, E, hidden]: states [B, N, hidden] at indices [B, E, S], weighted by likeness to the first token."""
    batch, entities, span = indices.shape
    width = states.shape[-1]
    index = indices.reshape(batch, entities * span, 1).expand(-1, -1, width)
    tokens = states.gather(1, index).view(batch, entities, span, width)
    scores = (tokens @ states[:, 0, :, None].unsqueeze(1)).squeeze(-1) / math.sqrt(width)  # [B, E, S]
    real = indices > 0
    weights = scores.masked_fill(~real, torch.finfo(scores.dtype).min).softmax(-1) * real
    return (weights[..., None] * tokens).sum(2)


def _without_padding(logits: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Logits [B, N] for a softmax over real tokens: how far a batch is padded must not change the loss."""
    if attention_mask is None:
        return logits
    return logits.masked_fill(~real_tokens(attention_mask, *logits.shape), torch.finfo(logits.dtype).min)


def _answerable(positions: torch.Tensor, attention_mask: torch.Tensor | None, batch: int, length: int) -> torch.Tensor:
    """Answer positions [B], -100 where the answer is not in this window, or at padding."""
    positions = positions.reshape(-1)
    outside = (positions < 0) | (positions >= length)
    if attention_mask is not None:
        real = real_tokens(attention_mask, batch, length).to(positions.device)
        outside |= ~real.gather(1, positions.clamp(0, length - 1)[:, None])[:, 0]
    return positions.masked_fill(outside, IGNORED)


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """[B, choices, ...] to [B * choices, ...]."""
    return None if tensor is None else tensor.flatten(0, 1)


def _classified(output_class, loss, logits: torch.Tensor, encoded: BaseModelOutput):
    return output_class(loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions)
