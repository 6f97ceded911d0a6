"""FSDP2 on two processes: the losses of one, and a folder that loads without it."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaForPreTraining, export_to_transformers

STEPS = 3


def make(kind: type) -> torch.nn.Module:
    torch.manual_seed(0)
    config = HfDebertaConfig.from_preset("tiny", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return kind(config).train()


def batches(kind: type) -> list[dict[str, torch.Tensor]]:
    """Two rows of two documents each, per step; both rows have as many labels."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(5, 128, (2, 12), generator=generator)
        labels = torch.full_like(ids, -100)
        labels[:, 1:4] = ids[:, 1:4] if kind is HfDebertaForMaskedLM else 1
        labels[:, 8:] = ids[:, 8:] if kind is HfDebertaForMaskedLM else 0
        places = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)
        found.append({"input_ids": ids, "labels": labels, "position_ids": places})
    return found


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


def worker(rank: int, kind: type, checkpointing: bool, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = make(kind)
    if checkpointing:
        model.gradient_checkpointing_enable()
    for layer in model.deberta.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    rows = [{name: value[rank : rank + 1] for name, value in batch.items()} for batch in batches(kind)]
    losses = torch.tensor(train(model, rows))
    dist.all_reduce(losses)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        make(kind).save_pretrained(f"{folder}/model", state_dict=state)
        torch.save(losses / 2, f"{folder}/losses.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "checkpointing"), [(HfDebertaForMaskedLM, True), (HfDebertaForPreTraining, False)])
def test_fsdp2_trains_saves_and_exports(kind, checkpointing, tmp_path):
    mp.spawn(worker, (kind, checkpointing, str(tmp_path)), nprocs=2)
    alone = make(kind)
    expected = train(alone, batches(kind))
    assert torch.load(tmp_path / "losses.pt").tolist() == pytest.approx(expected, rel=1e-5)
    loaded = kind.from_pretrained(tmp_path / "model")
    for (name, value), other in zip(alone.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.allclose(value, other, atol=1e-5), name
    export_to_transformers(loaded, tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()
