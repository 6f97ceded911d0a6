"""Answer questions about texts with a fine-tuned model, in place of the pipeline that Transformers 5 removed.

    >>> model = AutoModelForQuestionAnswering.from_pretrained("deepset/deberta-v3-base-squad2")
    >>> answer = QuestionAnswerer(model, AutoTokenizer.from_pretrained("deepset/deberta-v3-base-squad2"))
    >>> answer(question="Where is it?", context="It is in Paris.")
    {'score': 0.98, 'start': 9, 'end': 14, 'answer': 'Paris'}

Windows, candidates and probabilities are those of `run_squad.py`, whose functions compute them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_deberta.fine_tuning.answer_spans import AnswerSpan, SquadEncoder, rank_spans, span_probabilities
from hf_deberta.fine_tuning.task_model import max_input_length

Answer = dict[str, Any]  # score, start, end, answer

logger = logging.get_logger(__name__)


class QuestionAnswerer:
    """Call it with a question and a context.

    Args:
        model: any question-answering model of Transformers or of this package; it is put in eval mode.
        tokenizer: its fast tokenizer.
        max_batch_tokens: tokens of a batch of windows, padding included; at least one window is computed at a time.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_batch_tokens: int = 4096):
        self.model, self.tokenizer, self.max_batch_tokens = model.eval(), tokenizer, max_batch_tokens

    def __call__(
        self,
        question: str | Sequence[str],
        context: str | Sequence[str],
        *,
        top_k: int = 1,
        handle_impossible_answer: bool = False,
        null_score_diff_threshold: float = 0.0,
        max_seq_len: int | None = None,
        doc_stride: int | None = None,
        max_question_len: int | None = None,
        max_answer_len: int = 30,
        n_best_size: int = 20,
    ) -> Answer | list[Answer] | list[list[Answer]]:
        """Return the answer as a dict, a list of the best `top_k`, or a list of either for a list of questions.

        An answer has its probability among the candidates (`score`), the characters [start, end) in the context, and
        their text (`answer`). It is "" if there is none, and does not depend on the other questions. A question that
        leaves no room for its context is an error; in a list its answer is "" with score 0, and a warning counts them.

        Args:
            context: the text, or a list of as many texts as questions.
            handle_impossible_answer: "no answer" is a candidate too. It is the best one if its score exceeds that of
                the best span by more than `null_score_diff_threshold`.
            max_seq_len: tokens of a window, question included; by default that of `run_squad.py` when it trained the
                model, or 384.
            doc_stride: tokens that neighbouring windows share; by default as many as in the training, unless
                `max_seq_len` is given, or 128, or half of what the question leaves for the context if that is less.
            max_question_len: truncate questions to this number of tokens; by default as in the training.
            max_answer_len: tokens of an answer.
            n_best_size: candidates of each question.
        """
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {top_k}")
        questions, contexts = question_rows(question, context)
        trained = getattr(self.model.config, "fine_tuning_flags", None) or {}
        if max_seq_len is None:
            max_seq_len = trained.get("max_seq_length")
            doc_stride = trained.get("doc_stride") if doc_stride is None else doc_stride
        if max_question_len is None:
            max_question_len = trained.get("max_query_length")
        length = max_input_length(max_seq_len, self.tokenizer, self.model.config, default=384)
        encoder = SquadEncoder(self.tokenizer, length, doc_stride, max_question_len)
        lengths, limit = encoder.question_lengths(questions), encoder.max_question_length
        rows = [row for row, tokens in enumerate(lengths) if tokens <= limit]
        if len(rows) < len(questions):
            fault = f"{len(questions) - len(rows)} of {len(questions)} questions leave no room for their context in "
            fault += f"max_seq_len {length} (at most {max(limit, 0)} tokens): raise it, or pass max_question_len"
            if isinstance(question, str):
                raise ValueError(fault)
            logger.warning(f"{fault}; until then their answer is '' with score 0")
        windows = encoder.windows([questions[row] for row in rows], [contexts[row] for row in rows])
        logits = self._logits(windows)
        candidates = rank_spans(windows, len(rows), *logits, max(n_best_size, top_k), max_answer_len)
        answers = [answer_entries([], text) for text in contexts]
        for row, (spans, null) in zip(rows, candidates, strict=True):
            if handle_impossible_answer:
                spans = with_no_answer(spans, null, null_score_diff_threshold)
            answers[row] = answer_entries(spans, contexts[row])[:top_k]
        results = [entries[0] for entries in answers] if top_k == 1 else answers
        return results[0] if isinstance(question, str) else results

    @torch.inference_mode()
    def _logits(self, windows: dict[str, list]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return start and end logits [N] of each window."""
        lengths = list(map(len, windows["input_ids"]))
        starts, ends = ([np.empty(0)] * len(lengths) for _ in range(2))
        names = [name for name in self.tokenizer.model_input_names if name in windows]
        for batch in token_batches(lengths, self.max_batch_tokens):
            rows = {name: [windows[name][window] for window in batch] for name in names}
            inputs = self.tokenizer.pad(rows, padding_side="right", return_tensors="pt").to(self.model.device)
            output = self.model(**inputs)
            if not hasattr(output, "start_logits"):
                raise ValueError(f"{type(self.model).__name__} has no answers: pass a model for question answering")
            logits = torch.stack([output.start_logits, output.end_logits]).float().cpu().numpy()
            for i, window in enumerate(batch):
                starts[window], ends[window] = logits[:, i, : lengths[window]]
        return starts, ends


def question_rows(question: str | Sequence[str], context: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Return as many questions as contexts; one context serves all questions."""
    questions = [question] if isinstance(question, str) else list(question)
    contexts = [context] * len(questions) if isinstance(context, str) else list(context)
    if len(questions) != len(contexts):
        raise ValueError(
            f"{len(questions)} questions have {len(contexts)} contexts: pass one context for all, or one for each"
        )
    for name, texts in {"question": questions, "context": contexts}.items():
        wrong = [text for text in texts if not isinstance(text, str) or not text.strip()]
        if wrong:
            raise ValueError(f"a {name} must be a text that is not empty, not {wrong[0]!r}; leave such rows out")
    if not questions:
        raise ValueError("there is no question in the list; pass at least one")
    return questions, contexts


def token_batches(lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of rows in batches of at most `max_tokens` tokens with padding, long rows first.

    >>> list(token_batches([3, 9, 4, 2], 9))
    [[1], [2, 0], [3]]
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    while order:
        count = max(1, max_tokens // lengths[order[0]])
        yield order[:count]
        order = order[count:]


def with_no_answer(spans: list[AnswerSpan], null: AnswerSpan, threshold: float) -> list[AnswerSpan]:
    """Return the spans with "no answer" among them, where its score less the threshold puts it."""
    return sorted([*spans, null], key=lambda span: span.score - threshold * (span is null), reverse=True)


def answer_entries(spans: list[AnswerSpan], context: str) -> list[Answer]:
    """Return spans as dicts; one without an answer if there is no span."""
    entries = [
        {"score": probability, "start": span.start, "end": span.end, "answer": context[span.start : span.end]}
        for span, probability in zip(spans, span_probabilities(spans), strict=True)
    ]
    return entries or [{"score": 0.0, "start": 0, "end": 0, "answer": ""}]
