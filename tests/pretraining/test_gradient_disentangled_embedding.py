"""Embedding sharing: which table each loss trains, one table in memory and files, conversion to an ordinary model."""

import copy

import pytest
import torch
from numerics import tiny_inputs, tiny_model

from hf_deberta import HfDebertaForMaskedLM, HfDebertaForPreTraining
from hf_deberta.pretraining.gradient_disentangled_embedding import (
    SHARINGS,
    GradientDisentangledEmbedding,
    SharedEmbedding,
    fold,
    share_embeddings,
    shared_embeddings,
)

pytestmark = pytest.mark.usefixtures("unpad_tiny_models")

INPUTS = tiny_inputs((9, 5, 7))
KINDS = {"gdes": GradientDisentangledEmbedding, "es": SharedEmbedding, "nes": torch.nn.Embedding}
TABLES = ("word_embeddings", "position_embeddings")


def pair(sharing, **fields):
    """Both with positions at the input, a delta that is not zero, and different tables where there are two."""
    fields = {"position_biased_input": True, **fields}
    generator, discriminator = (
        tiny_model(kind, seed, **fields) for seed, kind in enumerate((HfDebertaForMaskedLM, HfDebertaForPreTraining))
    )
    share_embeddings(generator, discriminator, sharing)
    for embedding in shared_embeddings(discriminator).values():
        for delta in embedding.parameters():
            torch.nn.init.normal_(delta, std=0.1)
    return torch.nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def tables(models, name):
    """The embedding of the generator, and that of the discriminator."""
    return (getattr(models[which].deberta.embeddings, name) for which in ("generator", "discriminator"))


@pytest.mark.parametrize("sharing", ["gdes", "es"])
def test_padding_learns_nothing(sharing):
    models = pair(sharing)
    for name in TABLES:
        theirs, ours = tables(models, name)
        ours(torch.tensor([0, 3])).sum().backward()
        gradient = theirs.weight.grad if sharing == "es" else ours.delta.grad
        assert gradient[3].sum() == 32 and gradient[0].sum() == (0 if name == "word_embeddings" else 32)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_gradient_is_that_of_an_ordinary_table(sharing):
    models = pair(sharing)
    ordinary = tiny_model(HfDebertaForPreTraining, position_biased_input=True)
    ordinary.load_state_dict(fold(models["discriminator"]))
    labels = INPUTS["input_ids"] % 2
    for model in (models["discriminator"], ordinary):
        model(**INPUTS, labels=labels).loss.backward()
    for name in TABLES:
        theirs, ours = tables(models, name)
        learning = {"gdes": getattr(ours, "delta", None), "es": theirs.weight, "nes": ours.weight}[sharing]
        torch.testing.assert_close(learning.grad, getattr(ordinary.deberta.embeddings, name).weight.grad)
        assert (theirs.weight.grad is None) is (sharing != "es")


@pytest.mark.parametrize("sharing", ["gdes", "es"])
def test_a_shared_table_exists_once(sharing):
    models = pair(sharing)
    expected = [f"generator.deberta.embeddings.{name}.weight" for name in TABLES]
    if sharing == "gdes":
        expected += [f"discriminator.deberta.embeddings.{name}.delta" for name in TABLES]
    ours = (".word_embeddings.", ".position_embeddings.")
    for names in (models.state_dict(), dict(models.named_parameters())):
        assert [name for name in names if any(part in name for part in ours)] == expected
    assert len({id(p) for p in models.parameters()}) == len(list(models.parameters()))


def test_positions_are_shared_only_where_the_discriminator_adds_them():
    models = pair("gdes", position_biased_input=False)
    assert list(shared_embeddings(models["discriminator"])) == ["deberta.embeddings.word_embeddings"]
    assert hasattr(models["generator"].deberta.embeddings, "position_embeddings")  # its decoder's


@pytest.mark.parametrize("sharing", ["gdes", "es"])
def test_copies_and_files(sharing, tmp_path):
    models = pair(sharing)
    expected = models["discriminator"].eval()(**INPUTS).logits
    torch.save(models, tmp_path / "models.pt")
    for other in (copy.deepcopy(models), torch.load(tmp_path / "models.pt", weights_only=False)):
        torch.testing.assert_close(other["discriminator"](**INPUTS).logits, expected)
        theirs, ours = tables(other, "word_embeddings")
        assert ours.shared is theirs
        with torch.no_grad():
            theirs.weight.add_(torch.randn_like(theirs.weight))
        assert not torch.allclose(other["discriminator"](**INPUTS).logits, expected)
    torch.testing.assert_close(models["discriminator"](**INPUTS).logits, expected)
