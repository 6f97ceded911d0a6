"""The functions that the package replaces by faster ones, which compute the same numbers.

A function with `@replaceable` is the plain answer, all that a saved folder has. `import hf_deberta` replaces it by one
of `hf_deberta.engines`; in `reference_mode` the plain functions compute again.
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


class replaceable(Generic[Arguments, Result]):
    """Decorator of a function that a faster one may replace, with the same arguments and results."""

    def __init__(self, plain: Callable[Arguments, Result]):
        self.plain = self.faster = plain
        self.__doc__ = plain.__doc__

    def use(self, faster: Callable[Arguments, Result]) -> None:
        """Call this function from now on, except in reference mode."""
        self.faster = faster

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return (self.plain if _reference_requests else self.faster)(*args, **kwargs)


def linear(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer."""
    return linear_on_cpu(layer, states) if states.is_cpu else layer(states)


@replaceable
def linear_on_cpu(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer. An engine may compute it without calling the module, if nothing observes the call."""
    return layer(states)


@replaceable
def from_cache(
    owner: nn.Module, modules: Iterable[nn.Module], compute: Callable[[], Result], *inputs: object
) -> Result | None:
    """Return `compute()`, or what it returned before for this owner if weights and inputs are the same.

    None if nothing can be cached; the caller then computes only what this call needs.
    """
    return None
