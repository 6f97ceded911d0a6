"""The metrics of the tasks as modules of `evaluate`, which load without network:

    metric = evaluate.load(hf_deberta.metrics.path("glue"), "mrpc")
    metric.compute(predictions=[1, 0], references=[1, 1])

`compute_metric` is what the fine-tuning scripts call.
"""

from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

NAMES = ("glue", "super_glue", "squad", "squad_v2", "named_entities", "multiple_choice")


def path(name: str) -> str:
    """Return the file of a metric, for `evaluate.load`."""
    if name not in NAMES:
        raise ValueError(f"there is no metric {name!r}: choose one of {', '.join(NAMES)}")
    return str(Path(__file__).with_name(f"{name}.py"))


def compute_metric(name: str, config_name: str | None = None, **inputs: Any) -> dict[str, Any]:
    """Return the values of a metric, as its module does on one process; nothing is written to a cache.

    Args:
        config_name: such as "mrpc" of "glue"; not needed where a metric has one configuration.
        inputs: predictions and references, and what else the metric takes.
    """
    from evaluate.loading import import_main_class  # imports the pipelines of Transformers, which takes seconds

    path(name)
    metric = import_main_class(import_module(f"{__name__}.{name}").__name__)(config_name, keep_in_memory=True)
    return metric.compute(**inputs)


def require_configuration(metric: str, name: str, configurations: Collection[str]) -> None:
    """Require one of the configurations; "default" is what `evaluate` calls a missing one."""
    if name not in configurations:
        raise ValueError(
            f"the metric {metric} has no configuration {name!r}: choose one of {', '.join(configurations)}, as in "
            f'evaluate.load(hf_deberta.metrics.path("{metric}"), "{next(iter(configurations))}")'
        )
