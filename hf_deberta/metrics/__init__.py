"""The metrics of the tasks: a function in each file, which is a module of `evaluate` too and loads without network.

>>> import evaluate, hf_deberta
>>> metric = evaluate.load(hf_deberta.metrics.path("glue"), "mrpc")
>>> metric.compute(predictions=[1, 0, 0, 0], references=[1, 0, 1, 0])
{'accuracy': 0.75, 'f1': 0.6666666666666666}
>>> hf_deberta.metrics.compute_metric("glue", "mrpc", predictions=[1, 0, 0, 0], references=[1, 0, 1, 0])
{'accuracy': 0.75, 'f1': 0.6666666666666666}
"""

from importlib import import_module
from pathlib import Path
from typing import Any

# The metrics of each module by configuration. The first of a task selects its best checkpoint.
CONFIGURATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "glue": {
        "cola": ("matthews_correlation",),
        "sst2": ("accuracy",),
        "mrpc": ("accuracy", "f1"),
        "stsb": ("pearson", "spearmanr"),
        "qqp": ("accuracy", "f1"),
        "mnli": ("accuracy",),
        "qnli": ("accuracy",),
        "rte": ("accuracy",),
        "wnli": ("accuracy",),
        "ax": ("matthews_correlation",),
        "classification": ("accuracy", "f1"),
        "regression": ("pearson", "spearmanr"),
        "multi_label": ("f1_micro", "f1_macro", "accuracy"),
    },
    "super_glue": {
        "boolq": ("accuracy",),
        "cb": ("f1", "accuracy"),
        "copa": ("accuracy",),
        "multirc": ("f1_a", "exact_match"),
        "record": ("f1", "exact_match"),
        "rte": ("accuracy",),
        "wic": ("accuracy",),
        "wsc": ("accuracy",),
        "axb": ("matthews_correlation",),
        "axg": ("accuracy", "gender_parity"),
    },
    "squad": {"default": ("f1", "exact_match")},
    "squad_v2": {
        "default": ("f1", "exact", "HasAns_f1", "HasAns_exact", "NoAns_f1", "NoAns_exact", "best_f1", "best_exact")
    },
    "named_entities": {"default": ("f1", "precision", "recall", "accuracy")},
    "multiple_choice": {"default": ("accuracy",), "race": ("accuracy", "accuracy_middle", "accuracy_high")},
}
NAMES = tuple(CONFIGURATIONS)


def path(name: str) -> str:
    """Return the file of a metric, for `evaluate.load`."""
    if name not in NAMES:
        raise ValueError(f"there is no metric {name!r}: choose one of {', '.join(NAMES)}")
    return str(Path(__file__).with_name(f"{name}.py"))


def compute_metric(name: str, config_name: str | None = None, **inputs: Any) -> dict[str, Any]:
    """Return the values of a metric, as its module of `evaluate` does; nothing is written to a cache.

    Args:
        config_name: such as "mrpc" of "glue"; not needed where a metric has one configuration.
        inputs: predictions and references, and what else the metric takes.
    """
    configuration = config_name or "default"  # as in evaluate
    require_configuration(name, configuration)
    function = getattr(import_module(f"{__name__}.{name}"), name)
    return function(**inputs) if len(CONFIGURATIONS[name]) == 1 else function(configuration, **inputs)


def require_configuration(metric: str, configuration: str) -> None:
    """Require one of the configurations of a metric."""
    path(metric)
    if configuration not in CONFIGURATIONS[metric]:
        names = ", ".join(CONFIGURATIONS[metric])
        raise ValueError(f"the metric {metric} has no configuration {configuration!r}: choose one of {names}")
