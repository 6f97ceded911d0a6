"""Folders made to run code, to read other folders or to take all memory: each loads safely, or is an error.

Whatever is attacked, the user answers "y" to every question. Code of a folder that ran would leave a file behind, and
weights read from another folder would have a value that no other weights have.
"""

import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from fault_cases import seeds
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from hf_deberta import HfDebertaConfig, HfDebertaForCausalLM, HfDebertaForSequenceClassification, HfDebertaTokenizer
from hf_deberta.fine_tuning import task_model
from hf_deberta.model.pretrained_model import HfDebertaPreTrainedModel
from hf_deberta.tokenization_hf_deberta import load_tokenizer

SPECIAL = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
FROM_OUTSIDE = 1234.5  # every value of the weights in the other folder
HUGE = (10**7, 10**9, 10**12, 2**63, 10**30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A sound folder, and another one that no attack may read."""
    root = tmp_path_factory.mktemp("folders")
    for name in ("sound", "outside"):
        model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny"))
        if name == "outside":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(FROM_OUTSIDE)
        model.save_pretrained(root / name)
        vocabulary = Tokenizer(models.WordLevel(SPECIAL, "[UNK]"))
        HfDebertaTokenizer(tokenizer_object=vocabulary).save_pretrained(root / name)
    return root


class Attack:
    """What every attack gets: the folder to change, the code to hide in it, and random choices."""

    def __init__(self, folder: Path, outside: Path, sentinel: Path, rng: random.Random):
        self.folder, self.outside, self.sentinel, self.rng = folder, outside, sentinel, rng
        self.only_ours = False
        self.code = f"open({str(sentinel)!r}, 'w').close()\n"

    def change_json(self, name: str, **fields):
        path = self.folder / name
        try:
            old = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError):  # an earlier attack damaged or removed it
            old = {}
        path.write_text(json.dumps({**old, **fields} if isinstance(old, dict) else fields))

    def weights(self) -> dict:
        path = self.folder / "model.safetensors"
        try:
            return load_file(path)
        except Exception:  # an earlier attack damaged or removed it
            return {}

    def remove_weights(self):
        for path in self.folder.glob("*.safetensors"):
            path.unlink()


class Payload:
    def __init__(self, code: str):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


def pickle_with_code(attack):
    content = {**attack.weights(), attack.rng.choice(["x", "classifier.weight"]): Payload(attack.code)}
    attack.remove_weights()
    name = attack.folder / attack.rng.choice(["pytorch_model.bin", "model.safetensors", "pytorch_model-00001-of-1.bin"])
    match attack.rng.choice(("torch", "pickle", "zip")):
        case "torch":
            torch.save(content, name, pickle_protocol=attack.rng.choice([2, 4]))
        case "pickle":
            name.write_bytes(pickle.dumps(Payload(attack.code), attack.rng.choice([0, 2, 4])))
        case "zip":
            with zipfile.ZipFile(attack.folder / "pytorch_model.bin", "w") as file:
                file.writestr("archive/data.pkl", pickle.dumps(Payload(attack.code), 2))
                file.writestr("archive/code/__torch__.py", attack.code)
                file.writestr("../../evil.py", attack.code)


def pickled_side_files(attack):
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "tokenizer.pkl", "config.pkl"):
        (attack.folder / name).write_bytes(pickle.dumps(Payload(attack.code)))


def code_files(attack):
    for name in ("evil.py", "__init__.py", "modeling_hf_deberta.py", "configuration_hf_deberta.py", "sitecustomize.py"):
        (attack.folder / name).write_text(attack.code + "class Evil: pass\n")


def auto_map_of_config(attack):
    code_files(attack)
    evil = attack.rng.choice(["evil.Evil", "outside--evil.Evil", "../outside/evil.Evil"])
    names = ("AutoConfig", "AutoModel", "AutoModelForSequenceClassification", "AutoTokenizer")
    kind = attack.rng.choice(["hf_deberta", "evil", "bert", "deberta-v2", "timm_wrapper"])
    attack.change_json("config.json", model_type=kind, auto_map=dict.fromkeys(names, evil))


def auto_map_of_tokenizer(attack):
    code_files(attack)
    entry = attack.rng.choice([["evil.Evil", None], [None, "evil.Evil"], "evil.Evil"])
    kind = attack.rng.choice(["Evil", "HfDebertaTokenizer", "TokenizersBackend", "DebertaV2Tokenizer"])
    attack.change_json("tokenizer_config.json", auto_map={"AutoTokenizer": entry}, tokenizer_class=kind)


def code_in_the_attention_backend(attack):
    field = attack.rng.choice(["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
    attack.change_json("config.json", **{field: attack.rng.choice(["evil/kernel", "evil/kernel:evil", "../outside"])})


def generation_config(attack):
    value = attack.rng.choice(["{", "[]", '{"max_length": 1e400}', '{"custom_generate": "evil"}', "[" * 50_000])
    (attack.folder / "generation_config.json").write_text(value)
    (attack.folder / "custom_generate").mkdir(exist_ok=True)
    (attack.folder / "custom_generate" / "generate.py").write_text(attack.code)


def index_of_another_folder(attack):
    """Or a damaged one."""
    names = list(attack.weights()) or ["classifier.weight"]
    attack.remove_weights()
    paths = (attack.outside / "model.safetensors", "../outside/model.safetensors", "x/../../outside/model.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, str(attack.rng.choice(paths)))})
    damaged = ("", "[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}, "metadata": {}}', '{"weight_map": {}}')
    (attack.folder / "model.safetensors.index.json").write_text(attack.rng.choice((*[index] * 5, *damaged)))


def weights_of_another_folder(attack):
    attack.change_json("config.json", transformers_weights="../outside/model.safetensors")
    if attack.rng.random() < 0.5:
        attack.change_json("tokenizer_config.json", tokenizer_file=str(attack.outside / "tokenizer.json"))
        (attack.folder / "tokenizer.json").unlink(missing_ok=True)


def absurd_safetensors(attack):
    name = "deberta.embeddings.word_embeddings.weight"
    shape = attack.rng.choice([[10**12, 32], [-1, 32], [2**62, 2**62], [0], [128, 32]])
    offsets = attack.rng.choice([[0, 128 * 10**12], [0, 16384], [16384, 0], [0, -1]])
    kind = attack.rng.choice(["F32", "F64", "I8", "EVIL", "F8_E4M3"])
    header = json.dumps({name: {"dtype": kind, "shape": shape, "data_offsets": offsets}}).encode()
    size = attack.rng.choice([len(header), len(header), 2**63, 10**9, 0])
    (attack.folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + bytes(16384))


def changed_bytes(attack):
    paths = sorted(path for path in attack.folder.iterdir() if path.suffix in (".json", ".safetensors"))
    path = attack.rng.choice(paths)
    content = bytearray(path.read_bytes())
    if attack.rng.random() < 0.5:
        del content[attack.rng.randrange(len(content) + 1) :]
    for _ in range(attack.rng.randint(1, 20) if content else 0):
        content[attack.rng.randrange(len(content))] = attack.rng.randrange(256)
    path.write_bytes(bytes(content))


def absurd_sizes(attack):
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")
    names += ("max_relative_positions", "position_buckets", "num_labels", "emd_steps", "conv_kernel_size")
    name = attack.rng.choice(names)
    attack.change_json("config.json", **{name: attack.rng.choice(HUGE)})
    attack.only_ours |= name == "num_labels"  # AutoTokenizer builds that many labels


ATTACKS = [
    *(pickle_with_code, pickled_side_files, code_files, auto_map_of_config, auto_map_of_tokenizer),
    *(code_in_the_attention_backend, generation_config, index_of_another_folder, weights_of_another_folder),
    *(absurd_safetensors, changed_bytes, absurd_sizes),
]


def load_for_a_task(folder):
    args = task_model.ModelArguments(folder)
    config = task_model.load_config(args)
    return task_model.load_model(args, config, HfDebertaForSequenceClassification, do_train=False)


OUR_LOADERS = {
    "configuration": HfDebertaConfig.from_pretrained,
    "model": HfDebertaForSequenceClassification.from_pretrained,
    "causal model": HfDebertaForCausalLM.from_pretrained,
    "tokenizer": HfDebertaTokenizer.from_pretrained,
    "load_tokenizer": load_tokenizer,
    "load_model": load_for_a_task,
}
# Transformers' own, called as the model card says; it asks whether code may run unless trust_remote_code is given
AUTO_LOADERS = {
    "AutoConfig": lambda folder: AutoConfig.from_pretrained(folder, trust_remote_code=False),
    "AutoTokenizer": lambda folder: AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
    "AutoModel": lambda folder: AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False),
}


@pytest.mark.parametrize("seed", seeds(sample=len(ATTACKS), full=1500))
def test_hostile_folder(seed, folders, tmp_path, monkeypatch):
    rng = random.Random(seed)
    folder, sentinel = tmp_path / "model", tmp_path / "code ran"
    shutil.copytree(folders / "sound", folder)
    shutil.copytree(folders / "outside", tmp_path / "outside")
    attack = Attack(folder, tmp_path / "outside", sentinel, rng)
    chosen = [ATTACKS[seed % len(ATTACKS)], *rng.sample(ATTACKS, rng.choice([0, 0, 1, 2]))]
    for change in chosen:
        change(attack)
    monkeypatch.chdir(folder)  # where its Python files could be imported by accident
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 1000))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    modules = set(os.listdir(folders))
    for name, load in (OUR_LOADERS if attack.only_ours else OUR_LOADERS | AUTO_LOADERS).items():
        try:
            loaded = load(str(folder))
        except Exception as error:
            if name in OUR_LOADERS and (isinstance(error, MemoryError) or "allocate memory" in str(error)):
                raise AssertionError(f"{name} after {[change.__name__ for change in chosen]}") from error
        else:
            if isinstance(loaded, HfDebertaPreTrainedModel):
                assert not any((weight == FROM_OUTSIDE).any() for weight in loaded.parameters()), name
        assert not sentinel.exists(), f"{name} ran code after {[change.__name__ for change in chosen]}"
    assert set(os.listdir(folders)) == modules
