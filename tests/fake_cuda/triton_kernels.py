"""Stubs for the kernels of the Triton backend: they check and count their launches, and compute nothing."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from triton.runtime.jit import KernelInterface

import hf_deberta.engines

FILES = sorted(Path(hf_deberta.engines.__file__).parent.glob("*triton*.py"))
Launch = Callable[[str, tuple[torch.Tensor, ...]], None]  # the kernel's name and its tensors


class KernelStub:
    """Stands for a kernel: `stub[grid](...)` reports the launch."""

    def __init__(self, name: str, arg_names: list[str], report: Launch):
        self.name, self.arg_names, self.report = name, arg_names, report

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            values = (*args, *kwargs.values())
            self.report(self.name, tuple(value for value in values if isinstance(value, torch.Tensor)))

        return launch


@contextmanager
def stubbed_kernels(report: Launch) -> Iterator[None]:
    """Replace every kernel in the files of the Triton backend."""
    patches = []
    for path in FILES:
        module = importlib.import_module(f"hf_deberta.engines.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, KernelInterface):
                patches.append(patch.object(module, name, KernelStub(name, value.arg_names, report)))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
