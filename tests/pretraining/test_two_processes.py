"""The pair of replaced token detection, sharded by FSDP2 in two processes; tests/test_configs.py has single models."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from numerics import assert_same_by_name
from tiny_pairs import batch_of, tiny_pair, tiny_rows, trained
from torch.distributed.fsdp import fully_shard
from two_processes import fork_two, run_script

pytestmark = pytest.mark.slow


def sharded_gradients(rank: int) -> dict[str, torch.Tensor]:
    """Gradients of half the rows with FSDP2: the discriminator reads the generator's table in the pair's forward."""
    model, rows = tiny_pair(), tiny_rows()
    for layer in (*model.generator.deberta.encoder.layer, *model.discriminator.deberta.encoder.layer):
        fully_shard(layer)
    fully_shard(model)
    whole = batch_of(rows)
    items = torch.stack([(whole["labels"] >= 0).sum(), whole["attention_mask"].sum()])
    output = model(**batch_of(rows[4 * rank : 4 * rank + 4]), num_items_in_batch=items)
    (2 * output.loss).backward()  # gradients are averaged
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def test_sharded_pair_has_the_gradients_of_one_process(tmp_path):
    run_script(__file__, tmp_path)
    gradients = torch.load(tmp_path / "gradients.pt", weights_only=False)
    assert_same_by_name(gradients, trained(tiny_pair(), **batch_of(tiny_rows()))[1])


def one_of_two(rank: int, folder: Path) -> None:
    gradients = sharded_gradients(rank)
    if rank == 0:
        torch.save(gradients, folder / "gradients.pt")
    dist.barrier()


if __name__ == "__main__":
    fork_two(one_of_two)
