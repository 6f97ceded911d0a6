"""Models sharded by FSDP2 in two processes train as in one, and are saved and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numerics import assert_same_by_name
from tiny_pairs import batch_of, tiny_pair, tiny_rows, trained
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from two_processes import fork_two, run_script

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, export_to_transformers

pytestmark = pytest.mark.slow


def make() -> HfDebertaForMaskedLM:
    torch.manual_seed(0)
    config = HfDebertaConfig.from_preset("tiny", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return HfDebertaForMaskedLM(config).train()


def batches() -> list[dict[str, torch.Tensor]]:
    """Two rows of two documents per step, with the same number of labels in both rows."""
    generator = torch.Generator().manual_seed(1)
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)
    result = []
    for _ in range(3):
        ids = torch.randint(5, 128, (2, 12), generator=generator)
        labels = ids.clone()
        labels[:, 0] = labels[:, 4:8] = -100
        result.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return result


def train(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for row in rows:
        loss = model(**row).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_sharded(rank: int, folder: Path) -> list[float]:
    """Train on half of the rows, save the model, and return the mean losses."""
    model = make()
    model.gradient_checkpointing_enable()
    for layer in model.deberta.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    losses = torch.tensor(train(model, [{name: value[[rank]] for name, value in row.items()} for row in batches()]))
    dist.all_reduce(losses)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        make().save_pretrained(folder / "sharded", state_dict=state)
    return (losses / 2).tolist()


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


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    run_script(__file__, folder)
    return folder, torch.load(folder / "results.pt", weights_only=False)


def test_sharded_pair_has_the_gradients_of_one_process(two_processes):
    assert_same_by_name(two_processes[1]["gradients"], trained(tiny_pair(), **batch_of(tiny_rows()))[1])


def test_a_sharded_model_trains_saves_and_exports(two_processes, tmp_path):
    folder, results = two_processes
    alone = make()
    assert results["losses"] == pytest.approx(train(alone, batches()), rel=1e-5)
    loaded = HfDebertaForMaskedLM.from_pretrained(folder / "sharded")
    for (name, value), other in zip(alone.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.allclose(value, other, atol=1e-5), name
    export_to_transformers(loaded, tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()


def one_of_two(rank: int, folder: Path) -> None:
    results = {"losses": train_sharded(rank, folder), "gradients": sharded_gradients(rank)}
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()


if __name__ == "__main__":
    fork_two(one_of_two)
