"""Decide or report something once for all processes of a run.

>>> checkpoint = in_main_process(lambda: choose_checkpoint(arguments))
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from hf_deberta.training.errors import InputError

Result = TypeVar("Result")


def is_main_process() -> bool:
    """Return whether this is the process that reports, also before the processes are connected."""
    return int(os.environ.get("RANK", 0)) == 0


def number_of_devices(use_cpu: bool) -> int:
    """Return the number of devices that the run will use, also before the processes are connected."""
    return int(os.environ.get("WORLD_SIZE", 0)) or max(1, 0 if use_cpu else torch.cuda.device_count())


def in_main_process(compute: Callable[[], Result]) -> Result:
    """Call `compute` in the main process, and return its result, or raise its InputError, in every process."""
    state = PartialState()
    if state.num_processes == 1:
        return compute()
    result_and_error: list[Any] = [None, None]
    if state.is_main_process:
        try:
            result_and_error[0] = compute()
        except InputError as error:
            result_and_error[1] = str(error)
    result, message = broadcast_object_list(result_and_error)
    if message is not None:
        raise InputError(message)
    return result
