"""Scale-invariant fine-tuning (SiFT): the model is to predict the same for word embeddings that are slightly wrong.

Section 5 of the DeBERTa paper: virtual adversarial training whose perturbation is applied to normalised word
embeddings, so that one size fits all words and all models. `sift_loss` has the four steps, for loops of your own;
`SiftTrainer` adds it to any `Trainer`; `docs/sift.md` has the equations and what the released code does otherwise.

Legend: B batch, N tokens, C classes, M predictions of a batch, one or more per row.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from hf_deberta.model.attention_context import real_tokens
from hf_deberta.model.batch_loss import IGNORED, mean_over_items

LABELS = ("labels", "label_ids", "start_positions", "end_positions")
LOSSES = ("symmetric-kl", "kl", "mse")
EPSILON = 1e-7  # of the normalisation
SMALLEST = 1e-6  # added to the largest component of a gradient
SCALE = 2.0**10  # of the loss that is ascended, whose gradients are too small for float16; a power of two loses nothing


@dataclass
class SiftArguments:
    """Whether and how to add the adversarial loss; a group of flags for `HfArgumentParser`."""

    sift: bool = field(default=False, metadata={"help": "Scale-invariant fine-tuning: three forward passes a step."})
    sift_lambda: float = field(default=5.0, metadata={"help": "Weight of the adversarial loss; 5 for MNLI, xsmall 3."})
    sift_learning_rate: float = field(default=1e-4, metadata={"help": "Largest step of a perturbation's component."})
    sift_init_perturbation: float = field(default=1e-2, metadata={"help": "Standard deviation of the noise."})
    sift_loss: Literal["symmetric-kl", "kl", "mse"] = field(
        default="symmetric-kl", metadata={"help": "What the perturbation is to increase."}
    )
    sift_layer: str | None = field(
        default=None, metadata={"help": "End of the name of the LayerNorm, if not the one after the word embeddings."}
    )

    def __post_init__(self):
        if self.sift_loss not in LOSSES:
            raise ValueError(f"sift_loss is one of {', '.join(LOSSES)}, not {self.sift_loss!r}")
        if self.sift_lambda < 0:
            raise ValueError(f"sift_lambda is 0 or more, not {self.sift_lambda}")
        for name in ("sift_learning_rate", "sift_init_perturbation"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} is more than 0, not {getattr(self, name)}; to train without SiFT, leave it out"
                )


class PerturbedEmbeddings:
    """What the LayerNorm after the word embeddings sees while this is entered: x, normalised, or x + delta.

    Each time the LayerNorm is called in a forward pass has a delta of its own, as has each of several LayerNorms.

    >>> with PerturbedEmbeddings(model) as embeddings:
    ...     outputs = model(**batch)  # of x
    ...     loss = outputs.loss + 5.0 * sift_loss(model, batch, outputs, embeddings)
    >>> loss.backward()

    Args:
        generator: where the noise comes from, instead of PyTorch's generator of the device.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: SiftArguments | None = None,
        generator: torch.Generator | None = None,
    ):
        self.settings = settings or SiftArguments()
        self.generator = generator
        self.layer_norms = embedding_layer_norms(unwrapped(model), self.settings.sift_layer)
        self.hooks: list = []
        self.next_delta: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __enter__(self) -> "PerturbedEmbeddings":
        self.hooks = [layer_norm.register_forward_pre_hook(self._normalise) for layer_norm in self.layer_norms]
        return self

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()

    def _normalise(self, layer_norm: nn.Module, inputs: tuple) -> tuple:
        embeddings, *others = inputs  # [B, N, hidden]
        exact = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        x = functional.layer_norm(exact, exact.shape[-1:], eps=EPSILON)
        if self.next_delta is not None:
            x = x.detach() + self.next_delta(x)
        return x.to(embeddings.dtype), *others

    @contextmanager
    def noise(self) -> Iterator[list[torch.Tensor]]:
        """Perturbed by noise; gives the list of deltas that a forward pass fills."""
        deltas = []

        def draw(x: torch.Tensor) -> torch.Tensor:
            deltas.append(self.draw(x).requires_grad_())
            return deltas[-1]

        with self._perturbed(draw):
            yield deltas

    @contextmanager
    def given(self, deltas: list[torch.Tensor]) -> Iterator[None]:
        """Perturbed by deltas, in the order in which a forward pass asks for them."""
        remaining = iter(deltas)
        with self._perturbed(lambda x: next(remaining)):
            yield

    @contextmanager
    def _perturbed(self, next_delta: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        self.next_delta = next_delta
        try:
            yield
        finally:
            self.next_delta = None

    def draw(self, x: torch.Tensor) -> torch.Tensor:
        """Gaussian noise like x, cut off at two standard deviations."""
        size = self.settings.sift_init_perturbation
        noise = torch.empty_like(x).normal_(0, size, generator=self.generator)
        return noise.clamp_(-2 * size, 2 * size)


def sift_loss(
    model: nn.Module,
    inputs: dict[str, Any],  # what the model was given, labels too
    outputs: dict[str, Any],  # what it gave
    embeddings: PerturbedEmbeddings,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The adversarial loss, a mean over predictions; see `PerturbedEmbeddings` for use.

    With `num_items_in_batch`, labels of all pieces of an optimisation batch, it is this piece's share of their mean.
    """
    model = unwrapped(model)
    settings = embeddings.settings
    without_labels = {name: value for name, value in inputs.items() if name not in LABELS}
    predictions = Predictions.of(model, inputs, outputs)
    clean = predictions.scores(outputs)

    # 1. noise
    with embeddings.noise() as noise, frozen(model):
        noisy = predictions.scores(model(**without_labels))
        objective = predictions.squares if settings.sift_loss == "mse" else predictions.divergence
        distance = objective(noisy, clean.detach())
        # 2. one step of each token's noise to where predictions change most
        gradients = torch.autograd.grad(SCALE * distance, noise, allow_unused=True, materialize_grads=True)
    deltas = ascended(noise, [gradient / SCALE for gradient in gradients], settings.sift_learning_rate)
    # 3. the model sees the worst that was found
    with embeddings.given(deltas):
        perturbed = predictions.scores(model(**without_labels))
    # 4. how far the two predictions are apart
    return predictions.mean(perturbed, clean) * share_of_batch(inputs.get("labels"), num_items_in_batch)


def ascended(deltas: list[torch.Tensor], gradients: list[torch.Tensor], rate: float) -> list[torch.Tensor]:
    """delta + rate * g / max |g| over a token's components; delta where a gradient is not finite as a whole."""
    found = []
    for delta, gradient in zip(deltas, gradients, strict=True):
        step = rate * gradient / (SMALLEST + gradient.abs().amax(-1, keepdim=True))
        found.append(delta.detach() + step.where(gradient.norm().isfinite(), 0))
    return found


@dataclass(frozen=True)
class Predictions:
    """What a model predicts, as scores [M, C] of which some count, for every kind of head."""

    kind: str  # "classes", "spans", "labels" (each on or off) or "numbers"
    counted: torch.Tensor  # bool [M]
    real: torch.Tensor | None = None  # bool [B, N], for spans

    @classmethod
    def of(cls, model: nn.Module, inputs: dict[str, Any], outputs: dict[str, Any]) -> "Predictions":
        mask, labels = inputs.get("attention_mask"), inputs.get("labels")
        if "start_logits" in outputs:
            starts = outputs["start_logits"]
            real = None if mask is None else real_tokens(mask, *starts.shape).to(starts.device)
            return cls("spans", starts.new_ones(2 * len(starts), dtype=torch.bool), real)
        logits = outputs["logits"]
        problem = getattr(model.config, "problem_type", None)
        kind = "classes"
        if problem == "regression" or (problem is None and logits.dim() == 2 and logits.shape[-1] == 1):
            kind = "numbers"
        elif problem == "multi_label_classification" or is_label_of_each(logits, labels):
            kind = "labels"
        number = logits.numel() // (logits.shape[-1] if kind == "classes" else 1)
        counted = logits.new_ones(number, dtype=torch.bool)
        if labels is not None and labels.numel() == number:
            counted = counted & (labels != IGNORED).flatten().to(logits.device)
        if logits.dim() == 3 and mask is not None:
            counted = counted & real_tokens(mask, *logits.shape[:2]).flatten().to(logits.device)
        return cls(kind, counted)

    def scores(self, outputs: dict[str, Any]) -> torch.Tensor:
        """[M, C], [2 B, N] for spans, [M, 1] for labels and numbers; in float32 at least."""
        if self.kind == "spans":
            logits = torch.cat([outputs["start_logits"], outputs["end_logits"]])
        else:
            logits = outputs["logits"]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.real is not None:
            logits = logits.masked_fill(~self.real.repeat(2, 1), torch.finfo(logits.dtype).min)
        return logits.reshape(-1, 1 if self.kind in ("labels", "numbers") else logits.shape[-1])

    def distances(self, scores: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """[M]: cross entropies both ways, each with its target detached; squared differences of numbers."""
        if self.kind == "numbers":
            return (scores - others).square().sum(-1)
        cross_entropy = binary_cross_entropy if self.kind == "labels" else cross_entropy_of_classes
        return cross_entropy(scores, others.detach()) + cross_entropy(others, scores.detach())

    def mean(self, scores: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return mean_over_items(self.distances(scores, others), self.counted)

    def divergence(self, scores: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """The sum, so that a perturbation does not depend on the other rows of its batch."""
        return self.distances(scores, others).masked_fill(~self.counted, 0).sum()

    def squares(self, scores: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return mean_over_items((scores - others).square().mean(-1), self.counted)


def is_label_of_each(logits: torch.Tensor, labels: torch.Tensor | None) -> bool:
    """Whether each logit [B, C] has a 0 or 1 of its own, as in entity choice; floats may be a distribution."""
    return labels is not None and labels.shape == logits.shape and not labels.is_floating_point()


def cross_entropy_of_classes(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -(targets.softmax(-1) * scores.log_softmax(-1)).sum(-1)


def binary_cross_entropy(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(scores, targets.sigmoid(), reduction="none").sum(-1)


def share_of_batch(labels: torch.Tensor | None, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | float:
    """Of an optimisation batch's labels, counted as Trainer does, the share of this piece."""
    if labels is None or num_items_in_batch is None:
        return 1.0
    here = (labels != IGNORED).sum()
    return here / torch.as_tensor(num_items_in_batch, device=here.device).clamp(min=1)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No gradients of parameters, so that a graph keeps, and computes, only what the perturbation needs."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def unwrapped(model: nn.Module) -> nn.Module:
    """Without DistributedDataParallel, which expects one backward pass for each of its forward passes."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def embedding_layer_norms(model: nn.Module, name: str | None = None) -> list[nn.Module]:
    """The LayerNorm that follows the word embeddings, or those whose names end with `name`."""
    if name is not None:
        layer_norms = {path: module for path, module in model.named_modules() if is_layer_norm(module)}
        found = [module for path, module in layer_norms.items() if f".{path}".endswith(f".{name}")]
        if not found:
            known = ", ".join([*layer_norms][:4]) or "none"
            raise ValueError(
                f"no LayerNorm of {type(model).__name__} has a name that ends with {name!r}; known: {known}"
            )
        return found
    words = model.get_input_embeddings()
    for parent in model.modules():
        children = iter(parent.children())
        if not any(child is words for child in children):  # this also goes on to what follows the words
            continue
        for child in children:
            if isinstance(child, nn.ModuleList):  # layers; what comes after is not of the embeddings
                break
            if is_layer_norm(child):
                return [child]
    raise ValueError(
        f"{type(model).__name__} has no LayerNorm after its word embeddings, which SiFT perturbs; if there is one "
        "elsewhere, give the end of its name as sift_layer"
    )


def is_layer_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("LayerNorm")


class SiftTrainer(Trainer):
    """Mixin: put it before the `Trainer` that is to train so. Evaluation sees the model as it is saved.

    >>> class MyTrainer(SiftTrainer, Trainer): ...
    >>> MyTrainer(model, arguments, ..., sift=SiftArguments(sift=True)).train()
    """

    def __init__(self, *args, sift: SiftArguments | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.sift = sift if sift is not None and sift.sift else None
        if self.sift is None:
            return
        if self.args.n_gpu > 1:
            raise ValueError(
                f"SiFT needs a process for each device, and this one has {self.args.n_gpu}; start with "
                "accelerate launch --multi_gpu, or set CUDA_VISIBLE_DEVICES to one of them"
            )
        embedding_layer_norms(self.model, self.sift.sift_layer)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.sift is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with PerturbedEmbeddings(model, self.sift) as embeddings:
            loss, outputs = super().compute_loss(model, dict(inputs), True, num_items_in_batch)
            adversarial = sift_loss(model, inputs, outputs, embeddings, num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            adversarial = adversarial * self.accelerator.num_processes  # as Trainer does; gradients are averaged
        loss = loss + self.sift.sift_lambda * adversarial
        return (loss, outputs) if return_outputs else loss
