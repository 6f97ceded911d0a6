"""Weights written in every way between two passes: the outputs are those of the weights as they are now."""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from fault_cases import number_of_cases, seeds
from numerics import V1_ATTENTION
from test_parity_with_transformers import in_tree
from torch import nn

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaModel, enable, reference_mode
from hf_deberta.engines.weight_cache import checksums

SIZES = {"vocab_size": 37, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 16}
SIZES |= {"num_hidden_layers": 2, "initializer_range": 0.3}


def cached_weights(model):
    """Parameters on which the projected position tables depend."""
    names = ("rel_embeddings", "encoder.LayerNorm", "key_proj", "query_proj")
    return [(name, weight) for name, weight in model.named_parameters() if any(part in name for part in names)]


def random_block(weight, rng):
    """A view of `.data`: a value, a row, a column, some of them, a block, or all."""
    index = []
    for size in weight.shape:
        first = rng.randrange(size)
        whole, one, several = slice(None), slice(first, first + 1), slice(first, rng.randint(first + 1, size))
        index.append(rng.choice((whole, one, several, slice(first, None, 2))))
    return weight.data[tuple(index)]


BLOCK_WRITES = (
    lambda block, rng: block.fill_(rng.uniform(-1, 1)),
    lambda block, rng: block.mul_(rng.choice((-1, 0, 0.5, 1.5))),
    lambda block, rng: block.add_(rng.uniform(0.1, 1)),
    lambda block, rng: block.copy_(torch.randn_like(block)),
    lambda block, rng: block.copy_(block.flip(rng.randrange(block.dim())).clone()),
)


def write_block(model, rng):
    rng.choice(BLOCK_WRITES)(random_block(rng.choice(cached_weights(model))[1], rng), rng)


def write_weight(model, rng):
    """In place, by NumPy, or as other storage or data."""
    weight = rng.choice(cached_weights(model))[1]
    match rng.randrange(4):
        case 0:
            weight.add_(0.1)
        case 1:
            weight.detach().numpy().reshape(-1)[rng.randrange(weight.numel())] += 0.5
        case 2:
            weight.set_(torch.randn_like(weight))
        case 3:
            weight.data = weight.data * 1.1


def swap_two_weights(model, rng):
    weights = [weight for name, weight in cached_weights(model) if name.endswith("proj.weight")]
    first, second = rng.sample(weights, 2)
    first.data, second.data = second.data, first.data


def replace_parameter(model, rng):
    name, weight = rng.choice(cached_weights(model))
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(weight.detach() * 1.2))


def load_state(model, rng):
    model.load_state_dict({name: tensor * 0.95 for name, tensor in model.state_dict().items()})


def cast_there_and_back(model, rng):
    model.to(rng.choice((torch.bfloat16, torch.float16))).float()


def train_a_step(model, rng):
    optimizer = rng.choice((torch.optim.SGD, torch.optim.AdamW))(model.parameters(), 0.05)
    with torch.enable_grad():
        model.train()(torch.randint(1, 37, (1, 5)))[0].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


WRITES = [*[write_block] * 9, *[write_weight] * 4, swap_two_weights, replace_parameter]
WRITES += [load_state, cast_there_and_back, train_a_step]


def ours(rng):
    fields = {**SIZES, **(V1_ATTENTION if rng.random() < 0.3 else {"position_buckets": 8})}
    head = rng.choice((HfDebertaModel, HfDebertaForMaskedLM))
    terms = rng.choice(("c2p|p2c", "c2p|p2c", "c2p", "p2c", "p2p"))
    return head(HfDebertaConfig(**fields, pos_att_type=terms, max_position_embeddings=40)), nullcontext


def theirs(rng):
    fields = {**SIZES, "position_buckets": 8, "max_position_embeddings": 40}
    return in_tree("v3", "Model", **fields), enable


@pytest.mark.parametrize("build", [ours, theirs])
@pytest.mark.parametrize("seed", seeds(sample=4, full=150))
def test_random_writes_between_passes(build, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model, enabled = build(rng)
    model.eval()
    with enabled(), torch.no_grad():
        for write in rng.sample(WRITES, len(WRITES)):
            ids = torch.randint(1, 37, (rng.randint(1, 2), rng.randint(1, 20)))
            model(ids)  # fills the cache
            if rng.random() < 0.05:
                model = copy.deepcopy(model)
            write(model, rng)
            found = model(ids)[0]
            with reference_mode():
                expected = model(ids)[0]
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max(), write.__name__


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(768, 768), (512, 768), (1024, 1024), (301, 257)], ids=str)
def test_random_blocks_of_a_large_weight(shape, dtype):
    """Widths at which many values share a sum: see `checksums`."""
    torch.manual_seed(0)
    rng, weight = random.Random(0), nn.Parameter((torch.randn(shape) * 0.02).to(dtype))
    before = [part.clone() for part in checksums(weight)]
    for _ in range(number_of_cases(30, 250)):
        block = random_block(weight, rng)
        old = block.clone()
        rng.choice(BLOCK_WRITES)(block, rng)
        assert torch.equal(old, block) == all(map(torch.equal, before, checksums(weight)))
        block.copy_(old)
