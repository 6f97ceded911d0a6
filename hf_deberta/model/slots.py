"""Slots: the places where the package computes the same numbers faster than the files of a saved folder.

A function with `@slot` is the plain answer, all that a saved folder has. `import hf_deberta` fills the slots with the
functions of `hf_deberta.engines`; in `reference_mode` the plain answers compute again.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_reference_requests = int(os.environ.get("HF_DEBERTA_REFERENCE", "0") not in ("", "0"))


@contextmanager
def reference_mode() -> Iterator[None]:
    """Switch all engines off in the whole process: eager attention, plain layers, no cache, no unpadding.

    >>> with hf_deberta.reference_mode():
    ...     output = model(**inputs)

    Setting the environment variable HF_DEBERTA_REFERENCE=1 before the start does the same until the process ends.
    """
    global _reference_requests
    _reference_requests += 1
    try:
        yield
    finally:
        _reference_requests -= 1


def in_reference_mode() -> bool:
    """True if `reference_mode` or HF_DEBERTA_REFERENCE asks for the plain computation."""
    return _reference_requests > 0


class slot(Generic[Arguments, Result]):  # a decorator
    """A function whose place a faster one may take: `fast` has the same arguments and the same results."""

    def __init__(self, plain: Callable[Arguments, Result]):
        self.plain = self.fast = plain
        self.__doc__ = plain.__doc__

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return (self.plain if _reference_requests else self.fast)(*args, **kwargs)


@slot
def linear(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer. An engine may compute it without calling the module, if nothing observes the call."""
    return layer(states)


@slot
def cached(owner: nn.Module, modules: Iterable[nn.Module], compute: Callable[[], Result], *inputs: object) -> Result:
    """Return `compute()`, or what it returned before for this owner if weights and inputs are the same."""
    return compute()
