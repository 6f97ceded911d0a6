"""Log how long a training run on a CPU will take, after its first steps."""

import time
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

MIN_SECONDS_MEASURED = 20
MIN_MINUTES_LEFT = 10  # the progress bar shows the time of shorter runs soon enough
UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60))

logger = logging.get_logger(__name__)


class TimeLeftCallback(TrainerCallback):
    """Logs once, in words, the time that the remaining steps will take; if that is days, also what to change.

    The first step is not measured: it takes longer than others.
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        self.is_logged, self.first_step = args.device.type != "cpu", state.global_step + 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        steps = state.global_step - self.first_step
        if steps == 0:
            self.start = time.perf_counter()
        if self.is_logged or steps == 0 or not state.is_world_process_zero:
            return
        seconds = time.perf_counter() - self.start
        if seconds < MIN_SECONDS_MEASURED:
            return
        self.is_logged = True
        left = seconds / steps * (state.max_steps - state.global_step)
        if left >= 60 * MIN_MINUTES_LEFT:
            advice = (
                " To shorten that: a GPU, a smaller model (v3-xsmall), a shorter --max_seq_length, or fewer steps "
                "(--max_steps)."
            )
            logger.info(
                f"A step takes {seconds / steps:,.1f} s on this CPU: the other {state.max_steps - state.global_step:,} "
                f"steps will take about {in_words(left)}, without evaluations.{advice if left >= 86_400 else ''}"
            )


def in_words(seconds: float) -> str:
    """Return a time in its largest unit.

    >>> in_words(100_000), in_words(3_700), in_words(50)
    ('1.2 days', '1 hour', '0.8 minutes')
    """
    name, size = next(((name, size) for name, size in UNITS if seconds >= size), UNITS[-1])
    number = f"{seconds / size:.1f}".removesuffix(".0")
    return f"{number} {name}{'s' * (number != '1')}"
