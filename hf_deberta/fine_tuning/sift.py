"""Scale-invariant fine-tuning (SiFT): adversarial training on normalized word embeddings.

Section 4 of the DeBERTa paper: virtual adversarial training whose perturbation is added to normalized embeddings, so
that one size of perturbation fits all words and models. `sift_loss` computes the loss for your own training loop,
`SiftTrainer` adds it to any `Trainer`, and `docs/sift.md` has the equations and the differences from the released code.

Legend: B batch, N tokens, C classes, M predictions in a batch (one or more per row).
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, Trainer

from hf_deberta.model.batch_layout import real_tokens
from hf_deberta.model.losses import IGNORED, mean_over_items
from hf_deberta.model.modeling_heads import label_answers
from hf_deberta.training.command_line import flag
from hf_deberta.training.errors import InputError

LABELS = ("labels", "label_ids", "start_positions", "end_positions")
LOSSES = ("symmetric-kl", "kl", "mse")
DROPOUTS = ("independent", "shared")
NORM_EPSILON = 1e-7  # of the normalization of embeddings
GRADIENT_EPSILON = 1e-6  # added to the largest component of a gradient before dividing by it
LOSS_SCALE = 2.0**10  # float16 cannot hold the gradients of the perturbation; a power of two is exact


@dataclass
class SiftArguments:
    """Scale-invariant fine-tuning (SiFT)."""

    sift: bool = flag(False, "Scale-invariant fine-tuning: a more robust model for three forward passes per step.")
    sift_lambda: float = flag(5.0, "Weight of the adversarial loss (default: 5; 3 for v3-xsmall on MNLI).")
    sift_learning_rate: float = flag(1e-4, "Size of the step that changes the perturbation (its largest entry).")
    sift_init_perturbation: float = flag(1e-2, "Standard deviation of the noise that the perturbation starts from.")
    sift_loss: Literal["symmetric-kl", "kl", "mse"] = flag(
        "symmetric-kl", "Loss between the predictions with and without the perturbation."
    )
    sift_dropout: Literal["independent", "shared"] = flag(
        "independent",
        "Masks of dropout in the passes with the perturbation: their own, as in the released code, or "
        "those of the clean pass, so that only the perturbation makes the predictions differ.",
    )
    sift_layer: str | None = flag(
        None, "End of the name of the LayerNorm to perturb; by default the one after the word embeddings."
    )

    def __post_init__(self) -> None:
        for name, choices in (("sift_loss", LOSSES), ("sift_dropout", DROPOUTS)):
            if getattr(self, name) not in choices:
                raise InputError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if self.sift_lambda < 0:
            raise InputError(f"sift_lambda must not be negative, not {self.sift_lambda}")
        for name in ("sift_learning_rate", "sift_init_perturbation"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be positive, not {getattr(self, name)}; without SiFT, leave it out")


class PerturbedEmbeddings:
    """Context manager that normalizes, and on request perturbs, the input of the LayerNorm after the word embeddings.

    Inside the context the LayerNorm gets x, its normalized input, or x + delta. Each call of a LayerNorm within a
    forward pass has its own delta.

    >>> with PerturbedEmbeddings(model) as embeddings:
    ...     outputs = model(**batch)  # with x
    ...     loss = outputs.loss + 5.0 * sift_loss(model, batch, outputs, embeddings)
    >>> loss.backward()

    Args:
        measures_share: `sift_loss` sets `share`, the divergence with the dropout of the clean pass over the whole
            divergence, which costs one more forward pass.
    """

    def __init__(self, model: nn.Module, settings: SiftArguments | None = None, measures_share: bool = False):
        self.settings = settings or SiftArguments()
        self.measures_share = measures_share
        self.share: torch.Tensor | None = None
        device = next(model.parameters()).device
        self.generator: Any = torch.random if device.type == "cpu" else torch.get_device_module(device)  # of dropout
        self.before_clean_pass: torch.Tensor | None = None  # its state
        self.layer_norms = embedding_layer_norms(unwrapped(model), self.settings.sift_layer)
        self.hooks: list[RemovableHandle] = []
        self.clean: list[torch.Tensor] = []  # x in each call of a LayerNorm in the clean pass
        self.deltas: Iterator[torch.Tensor] | None = None

    def __enter__(self) -> "PerturbedEmbeddings":
        if self.measures_share or self.settings.sift_dropout == "shared":
            self.before_clean_pass = self.generator.get_rng_state()
        self.hooks = [layer_norm.register_forward_pre_hook(self._normalize) for layer_norm in self.layer_norms]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _normalize(self, layer_norm: nn.Module, inputs: tuple) -> tuple:
        embeddings, *others = inputs  # [B, N, hidden]
        precise = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        x = functional.layer_norm(precise, precise.shape[-1:], eps=NORM_EPSILON)
        if self.deltas is None:
            self.clean.append(x.detach())
        else:
            x = x.detach() + next(self.deltas)
        return x.to(embeddings.dtype), *others

    @contextmanager
    def perturbed(self, deltas: list[torch.Tensor]) -> Iterator[None]:
        """Add a delta to x in each call of a LayerNorm."""
        self.deltas = iter(deltas)
        try:
            yield
        finally:
            self.deltas = None

    @contextmanager
    def clean_masks(self) -> Iterator[None]:
        """Use the dropout masks of the clean pass."""
        state = self.generator.get_rng_state()
        self.generator.set_rng_state(self.before_clean_pass)
        try:
            yield
        finally:
            self.generator.set_rng_state(state)

    def dropout(self) -> AbstractContextManager:
        return self.clean_masks() if self.settings.sift_dropout == "shared" else nullcontext()

    def draw_noise(self, x: torch.Tensor) -> torch.Tensor:
        """Gaussian noise in the shape of x, clamped to two standard deviations."""
        std = self.settings.sift_init_perturbation
        return torch.empty_like(x).normal_(0, std).clamp_(-2 * std, 2 * std)


def sift_loss(
    model: nn.Module,
    inputs: dict[str, Any],
    outputs: Any,
    embeddings: PerturbedEmbeddings,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The adversarial loss, a mean over predictions; `PerturbedEmbeddings` shows its use.

    Args:
        inputs: those of the clean forward pass, with labels.
        outputs: those of the clean forward pass.
        num_items_in_batch: labels in the whole batch under gradient accumulation; the result is then the share of
            these inputs in the mean over that batch.
    """
    model = unwrapped(model)
    settings = embeddings.settings
    without_labels = {name: value for name, value in inputs.items() if name not in LABELS}
    predictions = Predictions.from_outputs(model, inputs, outputs)
    clean = predictions.logits(outputs)

    # 1. Add noise
    noise = [embeddings.draw_noise(x).requires_grad_() for x in embeddings.clean]
    embeddings.clean.clear()
    with embeddings.perturbed(noise), frozen(model), embeddings.dropout():
        noisy = predictions.logits(model(**without_labels))
        distance = predictions.squared_distance if settings.sift_loss == "mse" else predictions.divergence
        # 2. Move the noise of each token one step towards larger changes of the predictions
        loss = LOSS_SCALE * distance(noisy, clean.detach())
        gradients = torch.autograd.grad(loss, noise, allow_unused=True, materialize_grads=True)
    deltas = ascend(noise, [gradient / LOSS_SCALE for gradient in gradients], settings.sift_learning_rate)

    # 3. Predict with that perturbation, and compare with the clean predictions
    def divergence(dropout: AbstractContextManager) -> torch.Tensor:
        with embeddings.perturbed(deltas), dropout:
            perturbed = predictions.logits(model(**without_labels))
        return mean_over_items(predictions.divergences(perturbed, clean), predictions.is_target)

    adversarial = divergence(embeddings.dropout())
    if embeddings.measures_share:
        with torch.no_grad():
            embeddings.share = divergence(embeddings.clean_masks()) / adversarial
    return adversarial * share_of_batch(inputs, num_items_in_batch)


def ascend(deltas: list[torch.Tensor], gradients: list[torch.Tensor], rate: float) -> list[torch.Tensor]:
    """delta + rate * g / max |g| per token; delta itself where a gradient is not finite."""
    ascended = []
    for delta, gradient in zip(deltas, gradients, strict=True):
        step = rate * gradient / (GRADIENT_EPSILON + gradient.abs().amax(-1, keepdim=True))
        ascended.append(delta.detach() + step.where(gradient.norm().isfinite(), 0))
    return ascended


@dataclass(frozen=True)
class Predictions:
    """The predictions of any head as logits [M, C], and which of them have a target.

    Args:
        kind: "classes" (softmax), "spans" (softmax over real tokens), "labels" (sigmoid), or "numbers" (regression).
        is_target: bool [M].
        real: bool [B, N], the tokens that are not padding; for spans only.
    """

    kind: Literal["classes", "spans", "labels", "numbers"]
    is_target: torch.Tensor
    real: torch.Tensor | None = None

    @classmethod
    def from_outputs(cls, model: nn.Module, inputs: dict[str, Any], outputs: Any) -> "Predictions":
        mask, labels = inputs.get("attention_mask"), inputs.get("labels")
        if "start_logits" in outputs:
            starts = outputs["start_logits"]
            real = None if mask is None else real_tokens(mask, *starts.shape).to(starts.device)
            is_target = starts.new_ones(2 * len(starts), dtype=torch.bool)
            if "start_positions" in inputs:
                is_target = (answer_labels(inputs) != IGNORED).flatten().to(starts.device)
            return cls("spans", is_target, real)
        logits = outputs["logits"]
        kind = prediction_kind(model, logits, labels)
        number = logits.numel() // (logits.shape[-1] if kind == "classes" else 1)
        is_target = logits.new_ones(number, dtype=torch.bool)
        if labels is not None and labels.numel() == number:
            is_target = is_target & (labels != IGNORED).flatten().to(logits.device)
        if logits.dim() == 3 and mask is not None:
            is_target = is_target & real_tokens(mask, *logits.shape[:2]).flatten().to(logits.device)
        return cls(kind, is_target)

    def logits(self, outputs: Any) -> torch.Tensor:
        """Logits [M, C] ([2 B, N] for spans, [M, 1] for labels and numbers), in float32 or more."""
        if self.kind == "spans":
            logits = torch.cat([outputs["start_logits"], outputs["end_logits"]])
        else:
            logits = outputs["logits"]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.real is not None:
            logits = logits.masked_fill(~self.real.repeat(2, 1), torch.finfo(logits.dtype).min)
        return logits.reshape(-1, 1 if self.kind in ("labels", "numbers") else logits.shape[-1])

    def divergences(self, logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """[M]: KL divergences in both directions, each with its target detached; squared differences of numbers."""
        if self.kind == "numbers":
            return (logits - others).square().sum(-1)
        divergence = binary_kl_divergence if self.kind == "labels" else kl_divergence
        return divergence(logits, others.detach()) + divergence(others, logits.detach())

    def divergence(self, logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """The sum: the perturbation of a row must not depend on the other rows of its batch."""
        return self.divergences(logits, others).masked_fill(~self.is_target, 0).sum()

    def squared_distance(self, logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return mean_over_items((logits - others).square().mean(-1), self.is_target)


def prediction_kind(
    model: nn.Module, logits: torch.Tensor, labels: torch.Tensor | None
) -> Literal["classes", "labels", "numbers"]:
    problem = getattr(model.config, "problem_type", None)
    if problem == "regression" or (problem is None and logits.dim() == 2 and logits.shape[-1] == 1):
        return "numbers"
    # integer labels in the shape of the logits, as in entity choice, are 0 or 1 each; floats may be a distribution
    one_label_per_logit = labels is not None and labels.shape == logits.shape and not labels.is_floating_point()
    return "labels" if problem == "multi_label_classification" or one_label_per_logit else "classes"


def kl_divergence(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """KL(softmax(targets) || softmax(logits)) over the last axis. With respect to `logits` it has the gradient of the
    cross entropy, but it is zero for equal predictions."""
    inputs, targets = logits.log_softmax(-1), targets.log_softmax(-1)
    return functional.kl_div(inputs, targets, reduction="none", log_target=True).sum(-1)


def binary_kl_divergence(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same for labels that are predicted by a sigmoid each."""
    both_logits, both_targets = torch.stack([logits, -logits]), torch.stack([targets, -targets])  # of yes and of no
    inputs, targets = functional.logsigmoid(both_logits), functional.logsigmoid(both_targets)
    return functional.kl_div(inputs, targets, reduction="none", log_target=True).sum(0).sum(-1)


def share_of_batch(inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | float:
    """The share of the labels of these inputs in the whole batch under gradient accumulation, counted as Trainer does.

    An answer to a question counts as one item; its start and its end as half an item each.
    """
    labels = inputs.get("labels")
    if num_items_in_batch is None or (labels is None and "start_positions" not in inputs):
        return 1.0
    number = (answer_labels(inputs) != IGNORED).sum() / 2 if labels is None else (labels != IGNORED).sum()
    return number / torch.as_tensor(num_items_in_batch, device=number.device).clamp(min=1)


def answer_labels(inputs: dict[str, Any]) -> torch.Tensor:
    """Start and end positions of answers [2, B], with -100 for those that the loss ignores."""
    shape, mask = inputs["input_ids"].shape, inputs.get("attention_mask")
    return torch.stack([label_answers(inputs[name], mask, *shape) for name in ("start_positions", "end_positions")])


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Turn off gradients of parameters, so that autograd keeps and computes only what the perturbation needs."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel or DeepSpeed's engine: these expect a backward pass per forward pass."""
    deepspeed = sys.modules.get("deepspeed")  # imported by accelerate if the model is in an engine
    wrappers = (DistributedDataParallel,) if deepspeed is None else (DistributedDataParallel, deepspeed.DeepSpeedEngine)
    return cast(nn.Module, model.module) if isinstance(model, wrappers) else model


def embedding_layer_norms(model: nn.Module, name: str | None = None) -> list[nn.Module]:
    """The LayerNorm that follows the word embeddings, or those whose names end with `name`."""
    if name is not None:
        layer_norms = {path: module for path, module in model.named_modules() if is_layer_norm(module)}
        matching = [module for path, module in layer_norms.items() if f".{path}".endswith(f".{name}")]
        if not matching:
            examples = ", ".join([*layer_norms][:4]) or "none"
            raise InputError(
                f"no LayerNorm of {type(model).__name__} has a name that ends with {name!r}; it has {examples}"
            )
        return matching
    words = cast(PreTrainedModel, model).get_input_embeddings()
    for parent in model.modules():
        children = iter(parent.children())
        if not any(child is words for child in children):  # any() stops after the word embeddings
            continue
        for child in children:
            if isinstance(child, nn.ModuleList):  # the layers: what follows is not part of the embeddings
                break
            if is_layer_norm(child):
                return [child]
    raise InputError(
        f"{type(model).__name__} has no LayerNorm after its word embeddings for SiFT to perturb; if there is one "
        "elsewhere, set sift_layer to the end of its name"
    )


def is_layer_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("LayerNorm")


class SiftTrainer(Trainer):
    """Mixin that adds the loss of SiFT to training steps: put it before your `Trainer`. Evaluation is unchanged.

    The logs have `task_loss` and `sift_loss` beside `loss`, which is task_loss + sift_lambda * sift_loss; the metrics
    of the whole training are `train_task_loss` and `train_sift_loss`. `sift_share`, of the step that logs, is the part
    of sift_loss that the perturbation explains; the rest comes from other masks of dropout.

    >>> class MyTrainer(SiftTrainer, Trainer): ...
    >>> MyTrainer(model, arguments, ..., sift=SiftArguments(sift=True)).train()
    """

    def __init__(self, *args: Any, sift: SiftArguments | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sift = sift if sift is not None and sift.sift else None
        self.share: torch.Tensor | None = None  # of the last step, if it logs
        if self.sift is None:
            return
        if self.args.n_gpu > 1:
            raise InputError(
                f"SiFT needs one process per device, and this process has {self.args.n_gpu} GPUs: start it with "
                "accelerate launch --multi_gpu, or set CUDA_VISIBLE_DEVICES to one of them"
            )
        embedding_layer_norms(cast(nn.Module, self.model), self.sift.sift_layer)  # fails if there is none
        # means since the last log, and since training began
        self.losses = {"loss": LossParts(), "train_loss": LossParts()}

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.sift is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with PerturbedEmbeddings(model, self.sift, measures_share=self._logs_share()) as embeddings:
            task_loss, outputs = super().compute_loss(model, dict(inputs), True, num_items_in_batch)
            adversarial = sift_loss(model, inputs, outputs, embeddings, num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            adversarial = adversarial * self.accelerator.num_processes  # as Trainer does: gradients are averaged
        self.share = embeddings.share
        self.last_losses = torch.stack([task_loss.detach(), adversarial.detach()])
        loss = task_loss + self.sift.sift_lambda * adversarial
        return (loss, outputs) if return_outputs else loss

    def _logs_share(self) -> bool:
        logs = self.args.logging_strategy == "steps" and (self.state.global_step + 1) % self.state.logging_steps == 0
        return logs and cast(SiftArguments, self.sift).sift_dropout == "independent"

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.sift is not None:
            # Trainer may have divided the loss by the number of micro-batches: do the same with its parts
            whole = self.last_losses[0] + self.sift.sift_lambda * self.last_losses[1]
            parts = self.last_losses * (loss / whole).where(whole != 0, 0)
            for losses in self.losses.values():
                losses.sums = losses.sums + parts
                losses.steps += 1 / self.current_gradient_accumulation_steps
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for name, losses in self.losses.items() if self.sift is not None else ():
            if name in logs and losses.steps:
                means = self.accelerator.reduce(losses.sums / losses.steps, "mean")
                prefix = name.removesuffix("loss")
                logs |= dict(zip((f"{prefix}task_loss", f"{prefix}sift_loss"), means.tolist(), strict=True))
                self.losses[name] = LossParts()
        if self.share is not None and "loss" in logs:
            logs["sift_share"] = self.accelerator.reduce(self.share, "mean").item()
        super().log(logs, start_time)


@dataclass
class LossParts:
    """Sums over training steps of the loss of the task and the adversarial loss, kept on the device."""

    sums: torch.Tensor | float = 0.0  # [2]
    steps: float = 0.0
