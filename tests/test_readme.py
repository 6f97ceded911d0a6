"""Every Python snippet of the README runs, in order, with Hub ids pointing at tiny folders of the same kind."""

import importlib.util
import inspect
import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import HfArgumentParser

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM
from hf_deberta.fine_tuning.arguments import FineTuningArguments
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments
from hf_deberta.fine_tuning.task_model import ModelArguments
from hf_deberta.pretraining.arguments import MaskingArguments, PretrainingArguments
from hf_deberta.pretraining.corpus import CorpusArguments

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SPECIAL_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]


def released_v1(folder: Path) -> Path:
    """vocab.json, merges.txt, config.json of model type deberta, and weights in the fused v1 layout."""
    from hf_deberta.model.checkpoint_conversion import to_v1_layout

    folder.mkdir()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(["Paris is the capital of France. A good, very bad store."] * 4, trainer)
    bpe.model.save(str(folder))
    fields = {"vocab_size": bpe.get_vocab_size(), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"intermediate_size": 64, "relative_attention": True, "pos_att_type": "c2p|p2c"}
    fields |= {"position_biased_input": False, "model_type": "deberta"}
    (folder / "config.json").write_text(json.dumps(fields))
    model = HfDebertaForMaskedLM(HfDebertaConfig.from_dict(fields))
    weights = {name: value.clone() for name, value in model.state_dict().items() if ".decoder." not in name}
    torch.save(to_v1_layout(weights, 4), folder / "pytorch_model.bin")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = released_v1(tmp_path_factory.mktemp("released") / "deberta-base")
    return {"microsoft/deberta-base": folder, "microsoft/deberta-v3-base": folder}


def test_python_snippets(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(snippets) >= 4
    names = {}
    for snippet in snippets:
        for hub_id, folder in folders.items():
            snippet = snippet.replace(f'"{hub_id}"', repr(str(folder)))
        exec(compile(snippet, "README.md", "exec"), names)
    assert (tmp_path / "my-deberta" / "modeling_hf_deberta.py").exists()
    assert json.loads((tmp_path / "my-deberta-v2" / "config.json").read_text())["model_type"] == "deberta"


def test_the_table_of_times_is_that_of_the_results():
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() in README


def test_named_files_and_targets_exist():
    for name in re.findall(r"^  (\w+\.py) ", README, flags=re.MULTILINE):
        assert (ROOT / "hf_deberta" / name).exists(), name
    for name in re.findall(r"^    ((?:\w+\.py(?:, )?)+)", README, flags=re.MULTILINE):
        for part in name.split(", "):
            assert any((ROOT / "hf_deberta" / folder / part).exists() for folder in ("training", "tasks")), part
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    targets = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in re.findall(r"make ([a-z][a-z-]+)", README):
        assert f"make {target} " in targets, target


def test_commands_know_their_flags(tmp_path):
    """Each command of a script parses; what it does is tested by tests/test_run_*.py."""
    commands = re.findall(r"^(?:python|accelerate launch.*?) (run_\w+\.py) (.*)$", README, flags=re.MULTILINE)
    assert {script for script, _ in commands} == {path.name for path in ROOT.glob("run_*.py")}
    for script, flags in commands:
        main = runpy.run_path(str(ROOT / script))
        if script in ("run_mlm.py", "run_rtd.py"):
            kinds = (main.get("ModelArguments") or main["PairArguments"], CorpusArguments, MaskingArguments)
            kinds += (PretrainingArguments,)
        else:
            (of_task,) = (
                kind for kind in main.values() if inspect.isclass(kind) and is_strict_child(kind, DataArguments)
            )
            kinds = (ModelArguments, of_task, SiftArguments, FineTuningArguments)
        HfArgumentParser(kinds).parse_args_into_dataclasses(shlex.split(flags, comments=True))


def is_strict_child(kind: type, parent: type) -> bool:
    return issubclass(kind, parent) and kind is not parent


def test_every_module_is_on_the_map():
    for path in (ROOT / "hf_deberta").rglob("*.py"):
        assert path.name == "__init__.py" or path.name in README, path.name
