"""The recipe that a command line gets: for how many devices, for which head, and what is said of it."""

from argparse import Namespace

import pytest
import torch

from hf_deberta import HfDebertaConfig
from hf_deberta.fine_tuning.arguments import recipe_flags


def flags(folder, size: str, **given) -> Namespace:
    HfDebertaConfig.from_preset(size).save_pretrained(folder)
    defaults = {"model_name_or_path": str(folder), "intermediate": None, "config_name": None, "cache_dir": None}
    defaults |= {"model_revision": "main", "token": None, "use_cpu": False, "gradient_accumulation_steps": 1}
    defaults |= dict.fromkeys(("per_device_train_batch_size", "learning_rate", "cls_dropout"))
    return Namespace(**{**defaults, **given})


@pytest.mark.parametrize(("use_cpu", "batch"), [(False, 4), (True, 32)])
def test_devices_that_are_not_used_do_not_share_the_batch(tmp_path, monkeypatch, use_cpu, batch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    chosen, _ = recipe_flags(flags(tmp_path, "v3-large", use_cpu=use_cpu), "cola")
    assert chosen["per_device_train_batch_size"] == batch


@pytest.mark.parametrize(
    ("size", "hinted"), [("v1-xlarge", True), ("v2-xlarge", True), ("v3-large", False), ("tiny", False)]
)
def test_which_sizes_start_from_mnli(tmp_path, caplog, size, hinted):
    recipe_flags(flags(tmp_path, size), "rte")
    assert ("starts this task from a checkpoint fine-tuned on MNLI" in caplog.text) == hinted


@pytest.mark.parametrize(("task", "has_one"), [("squad_v2", False), ("conll2003", True)])
def test_dropout_for_a_head_that_has_it(tmp_path, task, has_one):
    chosen, _ = recipe_flags(flags(tmp_path, "v3-large"), task)
    assert ("cls_dropout" in chosen) == has_one
