"""The configurations of accelerate in configs/: accelerate's launcher reads them, and two processes train as one.

`accelerate launch` takes 15 seconds to start, so the script of this file asks accelerate's launcher for the environment
of the processes, and forks them. accelerate shards on GPUs only; the script makes it take CPUs for them.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from two_processes import fork_two, run_script

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM
from hf_deberta.commands import mlm

CONFIGS = Path(__file__).parents[1] / "configs"
TYPES = {
    "cpu": "MULTI_GPU",
    "ddp": "MULTI_GPU",
    "two_nodes": "MULTI_GPU",
    "fsdp2": "FSDP",
    "deepspeed_zero2": "DEEPSPEED",
    "deepspeed_zero3": "DEEPSPEED",
}
FLAGS = {"cpu": ["--use_cpu", "--save_steps", "2"], "fsdp2": ["--save_strategy", "no"]}
ROWS = 8  # per step, over all processes


def launch_arguments(name: str, *flags: str) -> Any:
    """Return what `accelerate launch --config_file` makes of a file and flags."""
    words = ["--config_file", str(CONFIGS / f"{name}.yaml"), *flags, "script.py"]
    return _validate_launch_command(launch_command_parser().parse_args(words))[0]


def test_every_file_is_tested_and_described():
    page = (CONFIGS.parent / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert {path.name for path in CONFIGS.iterdir()} == {f"{name}.yaml" for name in TYPES}
    assert not [name for name in TYPES if f"configs/{name}.yaml" not in page]


@pytest.mark.parametrize("name", TYPES)
def test_accelerate_reads_the_file(name):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.distributed_type == DistributedType(TYPES[name]) and config.num_processes > 1
    arguments = launch_arguments(name)
    assert (arguments.use_fsdp, arguments.use_deepspeed) == (TYPES[name] == "FSDP", TYPES[name] == "DEEPSPEED")
    assert arguments.multi_gpu == (TYPES[name] == "MULTI_GPU") and arguments.mixed_precision == "no"
    flags = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for section in ("fsdp_config", "deepspeed_config"):
        assert not [flag for flag in flags.get(section, {}) if flag not in known]


def test_wrapped_class_is_that_of_our_layers(monkeypatch):
    for name, value in environment("fsdp2").items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    model = HfDebertaForMaskedLM(HfDebertaConfig.from_preset("tiny"))
    plugin.set_auto_wrap_policy(model)
    wrapped = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    assert wrapped == {type(model.deberta.encoder.layer[0])} and plugin.fsdp_version == 2


def environment(name: str) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for two processes."""
    variables = prepare_multi_gpu_env(launch_arguments(name, "--num_processes", "2"))
    return {key: value for key, value in variables.items() if key.startswith(("ACCELERATE_", "FSDP_"))}


def command(folder: Path, rows_per_device: int, *flags: str) -> list[str]:
    """Return a command line of four steps without dropout."""
    overrides = "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    words = f"run_mlm.py --config_preset tiny --train_tokenizer 60 --max_seq_length 16 --config_overrides {overrides} "
    words += f"--train_file {folder.parent / 'text.txt'} --validation_split_percentage 0 --max_steps 4 "
    words += f"--logging_steps 1 --disable_tqdm true --report_to none --per_device_train_batch_size {rows_per_device} "
    return [*f"{words} --output_dir {folder}".split(), *flags]


def run_alone(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[float]:
    monkeypatch.setattr(sys, "argv", command(folder, ROWS, *FLAGS["cpu"]))
    mlm.main()
    return losses(folder)


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def interrupted(folder: Path, copy: Path) -> Path:
    """Copy a run as if it had been killed after its first checkpoint."""
    copy.mkdir()
    for name in ("checkpoint-2", "tokenizer", "_tokens"):
        shutil.copytree(folder / name, copy / name)
    shutil.copy(folder / "run.json", copy)
    return copy


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    """A folder with a run of two processes for "cpu" and "fsdp2", and its text."""
    folder = tmp_path_factory.mktemp("two")
    words = ["the", "small", "dog", "sees", "a", "big", "cat", "under", "the", "green", "tree", "by", "the", "river"]
    documents = (" ".join(words[(n * k) % 14] for k in range(5 + n % 9)) for n in range(200))
    (folder / "text.txt").write_text("\n".join(documents))
    run_script(__file__, folder)
    return folder


@pytest.mark.slow
def test_two_processes_train_as_one_and_resume_as_one(two_processes, monkeypatch, caplog):
    expected = run_alone(monkeypatch, two_processes / "alone")
    assert len(expected) == 4
    for name in ("cpu", "fsdp2"):
        assert losses(two_processes / name) == pytest.approx(expected, rel=1e-5), name
    resumed = interrupted(two_processes / "cpu", two_processes / "resumed")
    assert run_alone(monkeypatch, resumed) == pytest.approx(expected, rel=1e-5)
    assert "resuming from" in caplog.text


@pytest.mark.slow
def test_fsdp2_divides_every_parameter(two_processes):
    sizes = [json.loads((two_processes / f"fsdp2-{rank}.json").read_text()) for rank in (0, 1)]
    whole = HfDebertaForMaskedLM.from_pretrained(two_processes / "fsdp2")
    assert sum(size["here"] for size in sizes) == whole.num_parameters()
    for size in sizes:
        assert size["sharded"] == size["parameters"]
        assert size["here"] == pytest.approx(whole.num_parameters() / 2, rel=0.01)


def run_as_configured(name: str, rank: int, folder: Path) -> None:
    """Train in one of two processes, and write how many parameters it holds."""
    os.environ |= environment(name)
    sys.argv = command(folder / name, ROWS // 2, *FLAGS[name])
    trainers, make_trainer = [], mlm.make_trainer
    mlm.make_trainer = lambda *arguments: trainers.append(make_trainer(*arguments)) or trainers[0]
    mlm.main()
    parameters = [*trainers[0].model.parameters()]
    local = [value.to_local() for value in parameters if isinstance(value, torch.distributed.tensor.DTensor)]
    sizes = {"parameters": len(parameters), "sharded": len(local), "here": sum(value.numel() for value in local)}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(sizes))


def run_cpu(rank: int, folder: Path) -> None:
    run_as_configured("cpu", rank, folder)


def run_fsdp2(rank: int, folder: Path) -> None:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    run_as_configured("fsdp2", rank, folder)


if __name__ == "__main__":
    fork_two(run_cpu)
    fork_two(run_fsdp2)
