"""Gradient-disentangled embedding sharing (GDES, section 3.3 of the DeBERTaV3 paper), and what it is compared with.

Generator and discriminator want the same words near one another for different reasons: words that fit alike, words
that mean alike. One table for both ("es") is pulled two ways; two tables ("nes") learn nothing from one another. GDES
gives the discriminator

    E_D = stop_gradient(E_G) + E_delta          E_delta starts at zero

so E_G learns from masked-language modelling alone, and E_delta from replaced token detection alone. Positions are
shared like words where the models add them to the input.

    name     table of the discriminator     learns from
    "gdes"   E_G, fixed, and its delta      E_G: generator's loss, delta: discriminator's
    "es"     E_G                            both losses
    "nes"    its own                        the discriminator's loss
"""

import torch
from torch import nn
from torch.nn import functional

from hf_deberta import HfDebertaForMaskedLM, HfDebertaForPreTraining

SHARINGS = ("gdes", "es", "nes")


class SharedEmbedding(nn.Module):
    """The generator's table, where the discriminator looks up: "es".

    It holds no table and saves none. The generator's is found through the generator's embeddings at each call, so it
    may move, change its type or be replaced; DeepSpeed's third stage, which keeps no module's weights outside its own
    call, is not supported. Sharded by FSDP2, both models must be under one root.
    """

    def __init__(self, embeddings: nn.Module, name: str):
        """`name` is the table's in the generator's `embeddings`."""
        super().__init__()
        # in a tuple, since a module would be registered, and its table counted and saved twice
        self.generator, self.name = (embeddings,), name

    @property
    def shared(self) -> nn.Embedding:
        return getattr(self.generator[0], self.name)

    @property
    def weight(self) -> torch.Tensor:
        """The generator's table [V, h], for whoever asks for a device, a type or a shape; see `table`."""
        return self.shared.weight

    @property
    def num_embeddings(self) -> int:
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.weight.shape[1]

    @property
    def padding_idx(self) -> int | None:
        return self.shared.padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight, self.padding_idx)

    @torch.no_grad()
    def table(self) -> torch.Tensor:
        """What an ordinary embedding would hold in this place: [V, h]."""
        return self.weight.clone()

    def take(self, table: torch.Tensor) -> None:
        """Become such that `table()` is the given one, as far as sharing allows: here it is the generator's."""

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, of the generator's {self.name}"


class GradientDisentangledEmbedding(SharedEmbedding):
    """The generator's table, which this one's gradient does not reach, and a `delta` of its own: "gdes"."""

    def __init__(self, embeddings: nn.Module, name: str):
        super().__init__(embeddings, name)
        self.delta = nn.Parameter(torch.zeros_like(self.weight))

    @property
    def weight(self) -> torch.Tensor:
        return self.shared.weight.detach()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.delta.shape != self.weight.shape:
            raise ValueError(
                f"the generator's {self.name} are {tuple(self.weight.shape)} and the discriminator's delta is "
                f"{tuple(self.delta.shape)}; a pair is not resized: save_pair, resize both models, from_pair"
            )
        # two lookups: the sum of the tables would be [V, h] in each step
        return super().forward(ids) + functional.embedding(ids, self.delta, self.padding_idx)

    @torch.no_grad()
    def table(self) -> torch.Tensor:
        return self.weight + self.delta

    @torch.no_grad()
    def take(self, table: torch.Tensor) -> None:
        self.delta.copy_(table.to(self.delta) - self.weight)


def share_embeddings(generator: HfDebertaForMaskedLM, discriminator: HfDebertaForPreTraining, sharing: str) -> None:
    """Put the generator's tables where the discriminator has its own, words, and positions where it has them.

    >>> share_embeddings(generator, discriminator, "gdes")
    >>> discriminator.deberta.embeddings.word_embeddings.delta
    """
    if sharing not in SHARINGS:
        raise ValueError(f"embedding_sharing is one of {', '.join(SHARINGS)}, not {sharing!r}")
    if sharing == "nes":
        return
    kind = GradientDisentangledEmbedding if sharing == "gdes" else SharedEmbedding
    ours, theirs = discriminator.deberta.embeddings, generator.deberta.embeddings
    for name in ("word_embeddings", "position_embeddings"):
        if hasattr(ours, name):
            setattr(ours, name, kind(theirs, name))


def shared_embeddings(model: nn.Module) -> dict[str, SharedEmbedding]:
    """Those of a discriminator, or of whatever holds one, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SharedEmbedding)}


def folded(discriminator: HfDebertaForPreTraining) -> dict[str, torch.Tensor]:
    """The state of an ordinary `HfDebertaForPreTraining`: whole tables in place of what is shared."""
    state = dict(discriminator.state_dict())
    for name, embedding in shared_embeddings(discriminator).items():
        state.pop(f"{name}.delta", None)
        state[f"{name}.weight"] = embedding.table()
    return state


def unfold(discriminator: HfDebertaForPreTraining, state: dict[str, torch.Tensor]) -> None:
    """The way back: load an ordinary state. With "gdes" a delta becomes the difference to the generator's table."""
    state = dict(state)
    for name, embedding in shared_embeddings(discriminator).items():
        embedding.take(state.pop(f"{name}.weight"))
        state |= {f"{name}.{key}": value for key, value in embedding.state_dict().items()}
    discriminator.load_state_dict(state)
