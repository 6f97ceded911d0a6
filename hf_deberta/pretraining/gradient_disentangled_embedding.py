"""Gradient-disentangled embedding sharing (GDES, section 3.3 of the DeBERTaV3 paper), and two alternatives.

The two losses pull word embeddings in different directions: the generator's towards words that fit the same context,
the discriminator's towards words of the same meaning. With one table for both ("es") they interfere; with two tables
("nes") the models learn nothing from each other. GDES gives the discriminator

    E_D = stop_gradient(E_G) + E_delta          E_delta starts at zero

so E_G is trained by masked-language modelling alone, and E_delta by replaced token detection alone. Position embeddings
are shared in the same way in models that add them to the input.

    name     embeddings of the discriminator    trained by
    "gdes"   E_G, without gradient, + E_delta   E_G: the generator's loss, E_delta: the discriminator's loss
    "es"     E_G                                both losses
    "nes"    its own                            the discriminator's loss
"""

import torch
from torch import nn
from torch.nn import functional

from hf_deberta import HfDebertaForMaskedLM, HfDebertaForPreTraining

SHARINGS = ("gdes", "es", "nes")


class SharedEmbedding(nn.Module):
    """An embedding of the discriminator that uses the generator's table: "es".

    It has no parameter of its own and saves none. It reads the generator's table at each call, so that table may be
    moved, cast or replaced. Not supported with DeepSpeed ZeRO stage 3, which frees the weights of a module outside its
    own forward. With FSDP2 both models must be under one root.
    """

    def __init__(self, embeddings: nn.Module, name: str):
        """Share the table `name` of the generator's `embeddings`."""
        super().__init__()
        # In a tuple: a module would be registered, and its table counted and saved twice.
        self.generator, self.name = (embeddings,), name

    @property
    def shared(self) -> nn.Embedding:
        return getattr(self.generator[0], self.name)

    @property
    def weight(self) -> torch.Tensor:
        """The generator's table [V, h], for callers that need its device, dtype or shape. See also `table`."""
        return self.shared.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight, self.shared.padding_idx)

    @torch.no_grad()
    def table(self) -> torch.Tensor:
        """Return the weight [V, h] of an equivalent ordinary embedding."""
        return self.weight.clone()

    def set_table(self, table: torch.Tensor) -> None:
        """Make `table()` return this table. With "es" nothing changes: the table is the generator's."""


class GradientDisentangledEmbedding(SharedEmbedding):
    """The generator's table, without gradient, plus a trained `delta`: "gdes"."""

    def __init__(self, embeddings: nn.Module, name: str):
        super().__init__(embeddings, name)
        self.delta = nn.Parameter(torch.zeros_like(self.weight))

    @property
    def weight(self) -> torch.Tensor:
        return self.shared.weight.detach()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # Two lookups are cheaper than adding two tables [V, h] in each step.
        return super().forward(ids) + functional.embedding(ids, self.delta, self.shared.padding_idx)

    @torch.no_grad()
    def table(self) -> torch.Tensor:
        return self.weight + self.delta

    @torch.no_grad()
    def set_table(self, table: torch.Tensor) -> None:
        self.delta.copy_(table.to(self.delta) - self.weight)


def share_embeddings(generator: HfDebertaForMaskedLM, discriminator: HfDebertaForPreTraining, sharing: str) -> None:
    """Replace the discriminator's word embeddings, and position embeddings if it has any, by shared ones.

    >>> share_embeddings(generator, discriminator, "gdes")
    >>> discriminator.deberta.embeddings.word_embeddings.delta
    """
    if sharing == "nes":
        return
    kind = GradientDisentangledEmbedding if sharing == "gdes" else SharedEmbedding
    ours, theirs = discriminator.deberta.embeddings, generator.deberta.embeddings
    for name in ("word_embeddings", "position_embeddings"):
        if hasattr(ours, name):
            setattr(ours, name, kind(theirs, name))


def shared_embeddings(model: nn.Module) -> dict[str, SharedEmbedding]:
    """Return the shared embeddings of a discriminator, or of a module that contains one, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SharedEmbedding)}


def fold(discriminator: HfDebertaForPreTraining) -> dict[str, torch.Tensor]:
    """Return the state dict of an equivalent ordinary `HfDebertaForPreTraining`, with its own tables."""
    state = dict(discriminator.state_dict())
    for name, embedding in shared_embeddings(discriminator).items():
        state.pop(f"{name}.delta", None)
        state[f"{name}.weight"] = embedding.table()
    return state


def unfold(discriminator: HfDebertaForPreTraining, state: dict[str, torch.Tensor]) -> None:
    """Load an ordinary state dict. With "gdes" a delta becomes the difference to the generator's table."""
    state = dict(state)
    for name, embedding in shared_embeddings(discriminator).items():
        embedding.set_table(state.pop(f"{name}.weight"))
        state |= {f"{name}.{key}": value for key, value in embedding.state_dict().items()}
    discriminator.load_state_dict(state)
