"""`hf_deberta.enable()`: code written for Transformers' own DeBERTa computes with this package, unchanged.

    >>> import hf_deberta
    >>> hf_deberta.enable()                                    # until hf_deberta.disable()
    >>> classify = pipeline("zero-shot-classification", model="MoritzLaurer/deberta-v3-base-zeroshot-v2.0")
    >>> with hf_deberta.enable():                              # or only here
    ...     scores = CrossEncoder("cross-encoder/nli-deberta-v3-base").predict(pairs)

Transformers' classes stay: their names, configurations, parameters and files. What changes, in place, is what they
compute. So it holds for the Auto classes and pipelines, for libraries that import `DebertaV2Model` themselves, no
matter when (GLiNER), for subclasses, adapters, and models that are in memory already; and whatever is saved is as
it always was. While enabled:

- the encoders of model types "deberta" and "deberta-v2" use `disentangled_attention`: the same numbers at real
  tokens, also with masks [B, N, N]. Past the largest relative distance they follow the official code, which
  Transformers does not;
- `...ForMaskedLM.from_pretrained` gives an official release the head and the enhanced mask decoder it was trained
  with, where Transformers starts a random head. A masked-LM checkpoint of Transformers' own stays without decoder.
  Saved, such a model keeps its official names; plain Transformers then reads the head, but has no decoder;
- `DebertaTokenizer.from_pretrained` and `DebertaV2Tokenizer.from_pretrained`, and AutoTokenizer through them, give
  a `HfDebertaTokenizer`: the original tokenization, or the folder's tokenizer.json as it is;
- v1 tokenizers want `add_prefix_space=True` for lists of words, as they did before Transformers 5;
- `Trainer` divides a loss by the steps it accumulates; without, in-tree DeBERTa multiplies loss and gradients.

Not reached: graphs compiled before, exported graphs (torch.export, ONNX, TorchScript keep in-tree operations), copies
of the classes that other code brings along (`trust_remote_code`, FlashDeBERTa), the v1 option `talking_head`,
tokenizers in memory, other processes. v1 has no multiple-choice head here either: use `HfDebertaForMultipleChoice`.

It holds for the whole process: where several threads compute, enable once, before they start; a block that ends takes
the classes back from a forward pass that another thread is in.

Padding is left out where that pays, so states of padding are zeros. What reads them gives other numbers than before:
the question-answering loss, whose in-tree softmax runs over padding, token labels at padding that are not -100, means
over states without the mask. Hooks on layers see an `AttentionContext` for the mask, and real tokens in one row; for
the gradients of hidden states, which are then copies, disable.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from threading import RLock
from typing import Any

from transformers import DebertaTokenizer, DebertaV2Tokenizer
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

from hf_deberta.tokenization_hf_deberta import HfDebertaTokenizer

from .encoder import (
    attention_forward,
    encoder_forward,
    encoder_init,
    intermediate_forward,
    layer_norm,
    output_forward,
)
from .masked_lm import REPLACEMENTS

_lock = RLock()
_changes = ExitStack()  # how to take back what is in place
_holders: set[object] = set()  # calls of enable() that have not ended; nothing is in place without one


def enable() -> AbstractContextManager:
    """Let Transformers' DeBERTa classes compute with this package; see the module for what that means.

    >>> hf_deberta.enable()
    >>> model = AutoModelForSequenceClassification.from_pretrained("microsoft/deberta-v3-base")
    >>> hf_deberta.disable()

    As a context manager it ends with the block; what several blocks or calls have asked for, with the last of them.
    """
    global _changes
    holder, ending = object(), ExitStack()
    with _lock:
        if not _holders:
            with ExitStack() as changes:
                _change_everything(changes)
                _changes = changes.pop_all()
        _holders.add(holder)
    ending.callback(_release, holder)
    return ending


def disable() -> None:
    """Take everything back: Transformers' classes are as they were, and so are models made meanwhile."""
    with _lock:
        _holders.clear()
        _changes.close()


def _release(holder: object) -> None:
    with _lock:
        if holder in _holders:  # else disable() came first
            _holders.remove(holder)
            if not _holders:
                _changes.close()


def _change_everything(changes: ExitStack) -> None:
    def change(owner: type, name: str, new: Any) -> None:
        old = vars(owner).get(name)
        setattr(owner, name, new)
        changes.callback(*((delattr, owner, name) if old is None else (setattr, owner, name, old)))

    for module, prefix in ((v1, "Deberta"), (v2, "DebertaV2")):
        encoder, attention = getattr(module, prefix + "Encoder"), module.DisentangledSelfAttention
        change(encoder, "__init__", encoder_init(encoder.__init__))
        change(encoder, "forward", encoder_forward(encoder.forward))
        change(attention, "forward", attention_forward(attention.forward))
        change(getattr(module, prefix + "Intermediate"), "forward", intermediate_forward)
        for name in ("SelfOutput", "Output"):
            change(getattr(module, prefix + name), "forward", output_forward)
    change(v1.DebertaLayerNorm, "forward", layer_norm)
    for pretrained in (v1.DebertaPreTrainedModel, v2.DebertaV2PreTrainedModel):
        change(pretrained, "accepts_loss_kwargs", False)
    for masked_lm in (v1.DebertaForMaskedLM, v2.DebertaV2ForMaskedLM):
        for name, replacement_of in REPLACEMENTS.items():
            change(masked_lm, name, replacement_of(getattr(masked_lm, name)))
    for tokenizer in (DebertaTokenizer, DebertaV2Tokenizer):
        change(tokenizer, "from_pretrained", _tokenizer_from_pretrained(tokenizer, tokenizer.from_pretrained))


def _tokenizer_from_pretrained(owner: type, in_tree: Callable) -> classmethod:
    def from_pretrained(cls, *args, **kwargs):
        if cls is not owner:  # a subclass has its own ideas
            return in_tree.__func__(cls, *args, **kwargs)
        return HfDebertaTokenizer.from_pretrained(*args, **kwargs)

    return classmethod(from_pretrained)
