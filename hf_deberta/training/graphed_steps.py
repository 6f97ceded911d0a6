"""Replay training steps as CUDA graphs: Python starts a step with one call, and the GPU does not wait for it.

    class GraphedTrainer(GraphedStepsMixin, Trainer): ...
    GraphedTrainer(model, arguments, ...).train()

A graph holds the kernels of one micro-batch, forward and backward, with their sizes and addresses. So there is a graph
for each combination of shapes, inputs and gradients have fixed addresses, and whatever Python decides is decided once.
Clipping, optimizer, schedule and logging run as before. docs/gpu.md names what a graph cannot hold.
"""

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import TrainingArguments
from transformers.utils import logging

from hf_deberta.engines.guards import PLAIN_TENSORS, has_global_hooks_or_modes, hooks
from hf_deberta.engines.unpadding import round_up
from hf_deberta.training.cuda_graphs import GraphMemory, capture
from hf_deberta.training.errors import one_line
from hf_deberta.training.real_tokens import CountingCollator, RealTokensMixin

WARMUP_CALLS = 2  # for each combination of shapes, they run eagerly: they compile kernels and fill caches
MAX_GRAPHS = 32
MAX_CHANGES = 10  # of weights or settings without a graph in between: more would mean eager steps without a word
# of loss and gradient norm: cuBLAS may choose other kernels in a graph, and some gradients are summed in any order
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}

PLAIN = (bool, int, float, str)  # settings of modules: rates of dropout, names of active adapters
INTERNALS = vars(nn.Module()).keys()

logger = logging.get_logger(__name__)


class Graph(NamedTuple):
    """The captured step of one combination of shapes."""

    replay: Callable[[], None]
    inputs: dict[str, torch.Tensor]  # which it reads
    outputs: Any  # which it overwrites
    gradients: list[tuple[nn.Parameter, torch.Tensor]]  # to which it adds


class GraphedSteps:
    """A step that is replayed as a CUDA graph from its third call with inputs of the same shapes on.

    Before that, the graph must compute what the step computes: if outputs or the norm of gradients differ, or if the
    step cannot be captured, all steps run eagerly, and a warning gives the reason. Gradients add up as in eager steps.
    Weights may change in place; other weights, or other settings of modules, `training` too, mean new graphs.

    >>> step = GraphedSteps(model, compute)  # compute(inputs) runs forward and backward, and returns the loss
    >>> for batch in loader:
    ...     loss = step(batch)
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    Args:
        step: takes a dictionary of tensors and numbers, and returns tensors.
        dtype: of the products in the step, for the tolerance of the check; by default that of the weights.
        statistics: returns further tensors that the step changes in place.
        memory: which these graphs share with others.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[dict[str, Any]], Any],
        dtype: torch.dtype | None = None,
        statistics: Callable[[], Iterable[torch.Tensor]] = tuple,
        memory: GraphMemory | None = None,
    ) -> None:
        weight = next(model.parameters())
        self.model, self.step, self.statistics, self.device = model, step, statistics, weight.device
        self.tolerance = TOLERANCES.get(dtype or weight.dtype, max(TOLERANCES.values()))
        self.memory = memory or GraphMemory(self.device)
        self.reason: str | None = None  # why all steps run eagerly
        self.state: list[Any] = []
        self.changes = 0  # since the last capture
        self.forget()

    def forget(self) -> None:
        """Drop all graphs."""
        self.graphs: dict[Hashable, Graph] = {}
        self.calls: Counter[Hashable] = Counter()
        self.gradients: dict[nn.Parameter, torch.Tensor] = {}  # shared by all graphs

    def __call__(self, inputs: dict[str, Any]) -> Any:
        if self.reason is not None or not self._may_replay(inputs):
            return self.step(inputs)
        kind = self.device.type
        autocast_dtype = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        modes = autocast_dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        key = *((name, shape_of(value)) for name, value in inputs.items()), *modes
        self.calls[key] += 1
        if self.calls[key] > WARMUP_CALLS and key not in self.graphs and len(self.graphs) < MAX_GRAPHS:
            self._try_to_capture(key, inputs)
        return self._replay(self.graphs[key], inputs) if key in self.graphs else self._run(inputs)

    def _run(self, inputs: dict[str, Any]) -> Any:
        """Run a step eagerly on the stream of the captures: autograd adds gradients where it added them last."""
        stream = self.memory.stream
        if stream is None:
            return self.step(inputs)
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            outputs = self.step(inputs)
        current.wait_stream(stream)
        return outputs

    def _may_replay(self, inputs: dict[str, Any]) -> bool:
        """Return whether a graph holds all that the model does; drop the graphs of another state of the model."""
        state, reason = inspect(self.model)
        for name, value in inputs.items():
            if not isinstance(value, torch.Tensor | int | float | str | None):  # it may hold tensors
                reason = f"the input {name} is a {type(value).__name__}"
        if state != self.state:
            self.forget()
            self.state, self.changes = state, self.changes + 1
        if self.changes > MAX_CHANGES:
            reason = "weights, or settings of modules, change at every step or two"
        if reason is not None:
            self._stop(reason)
        return reason is None

    def _stop(self, reason: str) -> None:
        self.forget()
        self.memory.small_graph = None  # eager steps can then use the memory
        self.reason = reason
        logger.warning(f"steps run without CUDA graphs: {reason}")

    def _replay(self, graph: Graph, inputs: dict[str, Any]) -> Any:
        for name, fixed in graph.inputs.items():
            fixed.copy_(inputs[name], non_blocking=True)
        unset = [fixed for weight, fixed in graph.gradients if weight.grad is None]
        if unset:
            torch._foreach_zero_(unset)
        for weight, fixed in graph.gradients:
            if weight.grad is not None and weight.grad is not fixed:  # of an eager step
                fixed.copy_(weight.grad)
            weight.grad = fixed
        graph.replay()
        return tree_map_only(torch.Tensor, torch.clone, graph.outputs)

    def _try_to_capture(self, key: Hashable, inputs: dict[str, Any]) -> None:
        """Add a graph, or say why there is none. Gradients, buffers and statistics stay as they are."""
        try:
            with self._restored():
                graph = self._capture_and_check(inputs)
        except Exception as error:  # whatever the model or the device may answer
            self._stop(f"a step cannot be captured, {first_cause(error)}")
            return
        if graph is not None:
            self.graphs[key], self.changes = graph, 0
            logger.info_once("steps are replayed as CUDA graphs")

    def _capture_and_check(self, inputs: dict[str, Any]) -> Graph | None:
        """Return a graph that computes what the step computes; None while gradients are not finite."""
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.zero_grad()
        with torch.random.fork_rng(devices):
            *_, norm = expected = self._results(self._run(inputs))
        if not norm.isfinite():
            return None  # fp16 looks for its scale
        fixed = {name: value.to(self.device, copy=True) for name, value in inputs.items() if torch.is_tensor(value)}
        gradients = []
        for weight in self.model.parameters():
            if weight.grad is not None:
                weight.grad = self.gradients.setdefault(weight, weight.grad)
                gradients.append((weight, weight.grad))
        random_states = host_random_states()
        torch.clear_autocast_cache()  # an outer autocast has cast the weights; replays must cast them again
        replay, outputs = capture(lambda: self.step({**inputs, **fixed}), self.memory)
        if host_random_states() != random_states:
            raise RuntimeError("it draws random numbers on the host")
        graph = Graph(replay, fixed, tree_map_only(torch.Tensor, torch.detach, outputs), gradients)
        self.model.zero_grad()
        with torch.random.fork_rng(devices):
            results = self._results(self._replay(graph, inputs))
        error = max(relative_error(*pair) for pair in zip(results, expected, strict=True))
        if not error <= self.tolerance:  # also if it is NaN
            raise RuntimeError(f"the first replay differs from the eager step by {error:.1e} of its value")
        return graph

    def _results(self, outputs: Any) -> list[torch.Tensor]:
        """Return the outputs, and the norm of all gradients."""
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        results = [each for each in tree_leaves(outputs) if torch.is_tensor(each) and each.is_floating_point()]
        return [*results, nn.utils.get_total_norm(gradients)]

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore gradients, buffers and statistics at the end of the block."""
        gradients = [(weight, weight.grad) for weight in self.model.parameters()]
        changed = [gradient for _, gradient in gradients if gradient is not None]
        changed += [*self.statistics(), *self.model.buffers()]
        copies = [tensor.clone() for tensor in changed]
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            for weight, gradient in gradients:
                weight.grad = gradient
            with torch.no_grad():
                for tensor, copy in zip(changed, copies, strict=True):
                    tensor.copy_(copy)


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def wants_graphs(args: TrainingArguments) -> bool:
    """Return whether graphs are requested; arguments without `cuda_graphs` request them by their Trainer's class."""
    return getattr(args, "cuda_graphs", "true") == "true"


def first_cause(error: BaseException) -> str:
    """Describe the first error in one line: the last says only that a capture failed before."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {one_line(error)}"


def shape_of(value: Any) -> Any:
    return (value.shape, value.dtype) if torch.is_tensor(value) else value


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, relative to the value and to the median of all: some may be masked by huge values."""
    actual, expected = actual.detach().float(), expected.detach().float()
    size = expected.abs() + expected.abs().median()
    errors = (actual - expected).abs() / size
    return float(errors.masked_fill(actual == expected, 0).max()) if actual.numel() else 0.0


def host_random_states() -> tuple[Any, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def inspect(model: nn.Module) -> tuple[list[Any], str | None]:
    """Return addresses of weights, whether they are trained, and settings of modules; and what no graph would hold."""
    state: list[Any] = []
    reason = None
    if isinstance(model, DistributedDataParallel):
        reason = "DistributedDataParallel exchanges gradients"
    elif torch.is_anomaly_enabled() or has_global_hooks_or_modes():
        reason = "anomaly detection, a hook of all modules or a dispatch mode is on"
    modules = [model]
    while modules:  # takes a third of the time of model.modules()
        module = modules.pop()
        modules += [child for child in module._modules.values() if child is not None]
        attributes = vars(module)
        state.append(module.training)
        for name in attributes.keys() - INTERNALS:
            value = attributes[name]
            if isinstance(value, PLAIN):
                state.append(value)
            elif isinstance(value, dict | list):
                parts = value.values() if isinstance(value, dict) else value
                state += [part for part in parts if isinstance(part, PLAIN)]
        for weight in (*module._parameters.values(), *module._buffers.values()):
            if weight is not None:
                state.append((weight.data_ptr(), weight.requires_grad))
                if type(weight) not in PLAIN_TENSORS:
                    reason = f"{type(module).__name__} has weights of type {type(weight).__name__}"
                elif weight._backward_hooks or weight._post_accumulate_grad_hooks:
                    reason = f"a weight of {type(module).__name__} has a hook"
        # those of Transformers return outputs of layers, or add noise, which a graph does too
        if any(hooks(module)) and not all(
            getattr(function, "__module__", "").startswith("transformers.")
            for registered in hooks(module)
            for function in registered.values()
        ):
            reason = f"{type(module).__name__} has a hook"
        elif module.training and attributes.get("gradient_checkpointing"):
            reason = "gradient checkpointing is on"
    return state, reason


class GraphedStepsMixin(RealTokensMixin):
    """Mixin for a `Trainer` whose steps on a GPU are replayed as CUDA graphs, in training, evaluation and prediction.

    Let the collator pad to a multiple (`pad_to_multiple_of=64`), so that there are few combinations of shapes. With an
    argument `cuda_graphs` of "false" or "auto", steps run eagerly. Put it before the other `Trainer` classes. A graph
    keeps what `compute_loss` read in Python, such as `self.state.global_step`: pass such numbers as tensors in a batch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graphed: dict[Hashable, GraphedSteps] = {}
        is_requested, reason = wants_graphs(self.args), self.reason_against_graphs()
        self.uses_graphs = is_requested and reason is None and has_graphs(self.args.device)
        if is_requested and reason is not None:
            logger.warning_once(f"steps run without CUDA graphs: {reason}")
        if self.uses_graphs and isinstance(self.data_collator, CountingCollator):
            self.data_collator.round_number = round_up

    def reason_against_graphs(self) -> str | None:
        """Return what in this trainer a graph would leave out, or None."""
        reasons = {
            "there is no GPU": hasattr(self.args, "cuda_graphs") and not has_graphs(self.args.device),
            "there are several GPUs": self.args.world_size > 1 or self.args.n_gpu > 1,
            "DeepSpeed or FSDP computes the gradients": self.is_deepspeed_enabled or self.is_fsdp_enabled,
            "--torch_compile": self.args.torch_compile,
            "--torch_empty_cache_steps": self.args.torch_empty_cache_steps is not None,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def step_statistics(self) -> Iterable[torch.Tensor]:
        """Return tensors that `compute_loss` changes in place, beside gradients: whatever else it notes is lost."""
        return ()

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        compute = super().training_step
        if not self.uses_graphs:
            return compute(model, inputs, num_items_in_batch)

        def step(values: dict[str, Any]) -> torch.Tensor:
            others = dict(values)
            del others["micro_batches"]
            return compute(model, others, others.pop("num_items_in_batch"))

        for part in (model, self.optimizer):
            if not getattr(part, "training", False) and callable(train := getattr(part, "train", None)):
                train()
        # Trainer divides the loss by the number of micro-batches, unless the model takes that of items
        micro_batches = getattr(self, "current_gradient_accumulation_steps", 1)
        values = {**inputs, "num_items_in_batch": num_items_in_batch, "micro_batches": micro_batches}
        return self._graphed("training", model, step)(values)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        compute, settings = super().prediction_step, (prediction_loss_only, ignore_keys)
        if not self.uses_graphs or model.training:
            return compute(model, inputs, *settings)
        return self._graphed(repr(settings), model, lambda values: compute(model, values, *settings))(dict(inputs))

    def _graphed(self, kind: str, model: Any, step: Callable[[dict[str, Any]], Any]) -> GraphedSteps:
        steps = self.graphed.get(kind)
        if steps is None or steps.model is not model:
            dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
            memory = next((others.memory for others in self.graphed.values()), None)
            steps = self.graphed[kind] = GraphedSteps(model, step, dtype, self.step_statistics, memory)
        return steps
