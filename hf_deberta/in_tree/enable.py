"""`hf_deberta.enable()`: Transformers' own DeBERTa classes compute with this package, without changes to user code.

    >>> import hf_deberta
    >>> hf_deberta.enable()                                    # until hf_deberta.disable()
    >>> classify = pipeline("zero-shot-classification", model="MoritzLaurer/deberta-v3-base-zeroshot-v2.0")
    >>> with hf_deberta.enable():                              # or for one block
    ...     scores = CrossEncoder("cross-encoder/nli-deberta-v3-base").predict(pairs)

Model classes keep their names, configurations, parameters and saved files; methods that compute are replaced in
place. This covers the Auto classes, pipelines, libraries that import `DebertaV2Model` themselves, before or after
(sentence-transformers 6.2.0 was tried, and GLiNER 0.2.29 with Transformers below 5.17, which it requires), subclasses,
adapters, and models that are in memory already. `disable()` changes them all back. While enabled:

- Encoders of model types "deberta" and "deberta-v2" use `disentangled_attention`, with the same numbers at real
  tokens, and with masks [B, N, N] too. Beyond the largest relative distance Transformers reads another row of the
  position table than the official code, whose rows are used with `enable(clamp_relative_distance=True)`.
- Heads are Transformers' own. Its masked-language models have neither the trained head of official releases nor the
  enhanced mask decoder: `HfDebertaForMaskedLM.from_pretrained` reads both from the same files.
- `DebertaTokenizer.from_pretrained`, `DebertaV2Tokenizer.from_pretrained`, and AutoTokenizer through them, return a
  `HfDebertaTokenizer`: the original tokenization, or the folder's tokenizer.json unchanged. It saves its own name as
  the tokenizer's class; AutoTokenizer reads that folder with and without this package.
- v1 tokenizers need `add_prefix_space=True` for lists of words, as before Transformers 5.
- `Trainer` divides the loss by the number of accumulation steps. With Transformers' DeBERTa alone it does not, so loss
  and gradients are multiplied by that number.
- Batches with much padding are computed without it (CPU), and final states at padding are then zeros, see below.

Not covered: graphs that were compiled before, exported graphs (torch.export, ONNX, TorchScript keep in-tree
operations), copies of the classes in other code (`trust_remote_code`, FlashDeBERTa), the v1 option `talking_head`,
tokenizers in memory, other processes. v1 has no multiple-choice head: use `HfDebertaForMultipleChoice`.

The change affects the whole process: when a block ends, the classes change back for all threads. A forward pass that
has begun ends with the attention that it began with. Two things need a state that lasts: load models while no other
thread calls `enable()` or `disable()`, and with gradient checkpointing end a block after the backward pass, which
computes the layers again.

Code that reads states at padding gets other numbers than before: the question-answering loss (the in-tree softmax
includes padding), token labels at padding that are not -100, means over states without the mask. Hooks on layers get
a `BatchLayout` as the mask, and real tokens in one row. Gradients with respect to hidden states need `disable()`,
because hidden states are then copies.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from threading import RLock
from typing import Any

from transformers import DebertaTokenizer, DebertaV2Tokenizer
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

from hf_deberta.model.attention import AUTO, check_attention_name
from hf_deberta.tokenization_hf_deberta import HfDebertaTokenizer

from .encoder import (
    attention_forward,
    encoder_forward,
    encoder_init,
    intermediate_forward,
    layer_norm,
    output_forward,
    set_options,
)

_lock = RLock()
_changes = ExitStack()  # undoes the changes that are in place
# calls of enable() that have not ended, in order, with their arguments; without any, no change is in place
_holders: dict[object, tuple[str, bool]] = {}
_attention_forwards: set[Callable] = set()  # forward functions of attention classes that accept a BatchLayout


class _Enabled(ExitStack):
    def __repr__(self) -> str:
        return "hf_deberta enabled"  # what a notebook prints after `hf_deberta.enable()`


def enable(attn_implementation: str = AUTO, clamp_relative_distance: bool = False) -> AbstractContextManager:
    """Let Transformers' DeBERTa classes compute with this package; this file's docstring lists what changes.

    >>> hf_deberta.enable()
    >>> model = AutoModelForSequenceClassification.from_pretrained("microsoft/deberta-v3-base")
    >>> hf_deberta.disable()

    As a context manager it ends with the block. If there are several blocks or calls, the changes end with the last.

    `attn_implementation` is "auto", "sdpa", "triton", "eager", or a function registered with Transformers'
    `AttentionInterface` (see hf_deberta.model.attention). `clamp_relative_distance`: beyond the largest relative
    distance, use the rows of the position table that the official code uses, not those of Transformers. Both are for
    all models in the process. Of several calls, the latest that has not ended decides.
    """
    global _changes
    check_attention_name(attn_implementation)
    holder, ending = object(), _Enabled()
    with _lock:
        if not _holders:
            _let_attention_accept_contexts()
            with ExitStack() as changes:
                changes.callback(set_options)
                _apply_changes(changes)
                _changes = changes.pop_all()
        _holders[holder] = attn_implementation, clamp_relative_distance
        set_options(*_holders[holder])
    ending.callback(_release, holder)
    return ending


def disable() -> None:
    """Change Transformers' classes back; models in memory compute with Transformers' own code again."""
    with _lock:
        _holders.clear()
        _changes.close()


def is_enabled() -> bool:
    """True between `enable()` and `disable()`."""
    return bool(_holders)


def _release(holder: object) -> None:
    with _lock:
        if holder in _holders:  # else disable() came first
            del _holders[holder]
            if _holders:
                set_options(*list(_holders.values())[-1])
            else:
                _changes.close()


def _let_attention_accept_contexts() -> None:
    """Let the in-tree attention compute with this package if its mask is a `BatchLayout`.

    `disable()` does not undo this change, which no other call notices: in other threads, encoders that began while
    enabled have still to call their layers.
    """
    for attention in (v1.DisentangledSelfAttention, v2.DisentangledSelfAttention):
        if attention.forward not in _attention_forwards:
            forward = attention_forward(attention.forward)
            _attention_forwards.add(forward)
            attention.forward = forward  # type: ignore[method-assign]


def _apply_changes(changes: ExitStack) -> None:
    def change(owner: type, name: str, new: Any) -> None:
        old = vars(owner).get(name)
        setattr(owner, name, new)
        changes.callback(*((delattr, owner, name) if old is None else (setattr, owner, name, old)))

    for module, prefix in ((v1, "Deberta"), (v2, "DebertaV2")):
        encoder = getattr(module, prefix + "Encoder")
        change(encoder, "__init__", encoder_init(encoder.__init__))
        change(encoder, "forward", encoder_forward(encoder.forward))
        change(getattr(module, prefix + "Intermediate"), "forward", intermediate_forward)
        for name in ("SelfOutput", "Output"):
            change(getattr(module, prefix + name), "forward", output_forward)
        # not of the base class: heads of others share it
        for head in (name for name in module.__all__ if name.startswith(prefix + "For")):
            change(getattr(module, head), "accepts_loss_kwargs", False)
    change(v1.DebertaLayerNorm, "forward", layer_norm)
    for tokenizer in (DebertaTokenizer, DebertaV2Tokenizer):
        change(tokenizer, "from_pretrained", _tokenizer_from_pretrained(tokenizer, tokenizer.from_pretrained))


def _tokenizer_from_pretrained(owner: type, in_tree: Callable) -> classmethod:
    def from_pretrained(cls, *args, **kwargs):
        if cls is not owner:  # a subclass keeps its own tokenization
            return in_tree.__func__(cls, *args, **kwargs)
        return HfDebertaTokenizer.from_pretrained(*args, **kwargs)

    return classmethod(from_pretrained)
