"""Metrics of `evaluate` from functions."""

import inspect
from collections.abc import Callable
from typing import Any

import evaluate
from datasets import Features, Value

from hf_deberta.metrics import compute_metric, require_configuration

NUMBER, TEXT = Value("int64"), Value("string")
NUMBERS = {"predictions": NUMBER, "references": NUMBER}


def evaluate_metric(function: Callable[..., dict[str, Any]], **types: dict[str, Any]) -> type[evaluate.Metric]:
    """Return the metric of `evaluate` that has the name, the docstring and the values of a function.

    Args:
        types: the types of the inputs of each configuration; those of `default` where it has none.
    """

    class FunctionMetric(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            require_configuration(function.__name__, self.config_name)
            features = Features(types.get(self.config_name) or types["default"])
            documentation = inspect.getdoc(function) or ""
            return evaluate.MetricInfo(documentation, citation="", features=features, inputs_description=documentation)

        def _compute(self, **inputs: Any) -> dict[str, Any]:
            return compute_metric(function.__name__, self.config_name, **inputs)

    FunctionMetric.__name__ = function.__name__  # evaluate's name of the metric
    return FunctionMetric
