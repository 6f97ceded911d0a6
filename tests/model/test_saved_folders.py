"""A saved folder loads in a process where this package cannot be imported."""

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from test_parity_with_transformers import in_tree
from transformers import AutoConfig, AutoModelForMaskedLM, Trainer, TrainingArguments

import hf_deberta
from hf_deberta import HfDebertaConfig
from hf_deberta.engines import unpadding
from hf_deberta.model import pretrained_model
from hf_deberta.model.pretrained_model import AUTO_MAP

INPUT = {"input_ids": torch.tensor([[1, 5, 9, 7, 2, 0], [1, 8, 8, 4, 3, 2]])}
INPUT["attention_mask"] = (INPUT["input_ids"] > 0).long()
MODELS = [auto_class for auto_class in AUTO_MAP if auto_class != "AutoConfig"]

# Loads each folder of cases.json in turn, and reports what happened.
OTHER_PROCESS = """
import json, sys, traceback, torch, transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

sys.modules["hf_deberta"] = None  # importing it is an error


def load(folder, auto_class):
    if hasattr(transformers, auto_class):
        return getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
    reference = json.load(open(folder + "/config.json"))["auto_map"][auto_class]
    return get_class_from_dynamic_module(reference, folder).from_pretrained(folder).eval()


def run(folder, auto_class, without_triton, saved_again):
    if without_triton:
        sys.modules["triton"] = None
    model = load(folder, auto_class)
    with torch.no_grad():
        outputs = model(**inputs[auto_class]).to_tuple()
    if auto_class == "AutoModelForCausalLM":
        model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=2)
    model.save_pretrained(saved_again)
    if without_triton:
        del sys.modules["triton"]
    return type(model).__name__, type(model).__module__, outputs


inputs, results = torch.load("inputs.pt"), {}
for name, case in json.load(open("cases.json")).items():
    try:
        results[name] = run(*case)
    except Exception:
        results[name] = traceback.format_exc()
torch.save(results, "results.pt")
"""


def model_class_of(auto_class):
    return getattr(hf_deberta, AUTO_MAP[auto_class].partition(".")[2])


def inputs_for(auto_class):
    if auto_class == "AutoModelForMultipleChoice":
        return {name: torch.stack([value, value.flip(0)], 1) for name, value in INPUT.items()}
    if auto_class == "HfDebertaForEntityChoice":
        return {**INPUT, "entity_indices": torch.tensor([[[1, 2], [3, 0]], [[4, 0], [0, 0]]])}
    return INPUT


def save_trainer_checkpoint(folder):
    model = hf_deberta.HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny"))
    data = Dataset.from_dict({"input_ids": [[1, 5, 6, 2]] * 4, "labels": [0, 1, 0, 1]})
    arguments = TrainingArguments(folder, max_steps=1, save_steps=1, report_to="none", disable_tqdm=True)
    Trainer(model, arguments, train_dataset=data).train()


@pytest.fixture(scope="module")
def other_process(tmp_path_factory):
    """Folders of all models, and results of one process that loaded them, by name; a traceback where that failed."""
    folder = tmp_path_factory.mktemp("export")
    models = {}
    for auto_class in MODELS:
        fields = {"conv_kernel_size": 0 if auto_class == "AutoModelForCausalLM" else 3}  # it cannot be causal
        models[auto_class] = model_class_of(auto_class)(HfDebertaConfig.from_preset("tiny", **fields)).eval()
        models[auto_class].save_pretrained(folder / auto_class)
    save_trainer_checkpoint(folder / "run")
    cases = {name: (name, name) for name in MODELS}  # folder to load, Auto class
    cases["another head"] = "AutoModel-again", "AutoModelForQuestionAnswering"
    cases["trainer checkpoint"] = "run/checkpoint-1", "AutoModelForSequenceClassification"
    arguments = {
        name: [saved, auto_class, name == "AutoModel", f"{name}-again"] for name, (saved, auto_class) in cases.items()
    }
    (folder / "cases.json").write_text(json.dumps(arguments))
    torch.save({auto_class: inputs_for(auto_class) for auto_class in MODELS}, folder / "inputs.pt")
    process = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS],
        cwd=folder,
        env={"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules"), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return SimpleNamespace(folder=folder, models=models, results=torch.load(folder / "results.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("auto_class", MODELS)
def test_every_head_loads_without_the_package(auto_class, other_process, monkeypatch):
    monkeypatch.setattr(unpadding, "COST_OF_EXTRA_CALLS", 1e8)  # as in the other process
    model, result = other_process.models[auto_class], other_process.results[auto_class]
    assert not isinstance(result, str), result
    name, module, outputs = result
    assert name == type(model).__name__ and module.startswith("transformers_modules.")
    with torch.no_grad():
        expected = model(**inputs_for(auto_class)).to_tuple()
    torch.testing.assert_close(outputs, expected)


@pytest.mark.slow
@pytest.mark.parametrize("auto_class", MODELS)
def test_the_other_process_saves_code_and_weights_too(auto_class, other_process):
    model = other_process.models[auto_class]
    saved, again = other_process.folder / auto_class, other_process.folder / f"{auto_class}-again"
    assert {path.name for path in again.glob("*.py")} == {path.name for path in saved.glob("*.py")}
    assert json.loads((again / "config.json").read_text())["auto_map"] == AUTO_MAP
    reloaded = type(model).from_pretrained(again)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, reloaded.state_dict()[key]), key


@pytest.mark.slow
def test_other_folders_load_without_the_package(other_process):
    """A folder that the other process saved, with another head, and a checkpoint of Trainer."""
    results = [other_process.results[case] for case in ("another head", "trainer checkpoint")]
    names = ["HfDebertaForQuestionAnswering", "HfDebertaForSequenceClassification"]
    assert [result[0] for result in results] == names, results


@pytest.mark.slow
def test_a_folder_holds_the_files_of_the_model(other_process):
    model_files = {path.name for path in Path(pretrained_model.__file__).parent.glob("*.py")} - {"__init__.py"}
    assert {path.name for path in (other_process.folder / "AutoModel").glob("*.py")} == model_files


def test_registered_class_wins_with_and_without_trust(tmp_path):
    hf_deberta.HfDebertaForMaskedLM(HfDebertaConfig.from_preset("tiny")).save_pretrained(tmp_path)
    for trust in (True, False, None):
        model = AutoModelForMaskedLM.from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(model) is hf_deberta.HfDebertaForMaskedLM
        assert type(AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)) is HfDebertaConfig


def test_a_head_of_somebody_else_with_its_own_model_type(tmp_path):
    class OwnConfig(HfDebertaConfig):
        model_type = "own_deberta"

    class OwnHead(hf_deberta.HfDebertaForSequenceClassification):
        config_class = OwnConfig

    v1 = in_tree("v1", "ForSequenceClassification").eval()
    v1.save_pretrained(tmp_path / "v1")
    OwnHead.from_pretrained(tmp_path / "v1").save_pretrained(tmp_path / "own", max_shard_size="30KB")
    assert (tmp_path / "own" / "model.safetensors.index.json").exists()
    model = OwnHead.from_pretrained(tmp_path / "own")
    assert type(model.config) is OwnConfig
    torch.testing.assert_close(model(**INPUT).logits, v1(**INPUT).logits)
    card = (tmp_path / "own" / "README.md").read_text()
    assert "from your_module import OwnHead\n" in card and "export_to_transformers" not in card


def test_model_card_says_how_to_load_and_is_not_overwritten(tmp_path):
    model = hf_deberta.HfDebertaForQuestionAnswering(HfDebertaConfig.from_preset("tiny"))
    model.save_pretrained(tmp_path / "my-model")
    card = ModelCard.load(tmp_path / "my-model" / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "question-answering"
    assert 'AutoModelForQuestionAnswering.from_pretrained("my-model", trust_remote_code=True)' in card.text
    oldest = re.search(r'"transformers>=([\d.]+)', (Path(__file__).parents[2] / "pyproject.toml").read_text())[1]
    assert f"needs Transformers {oldest} or later" in card.text
    (tmp_path / "my-model" / "README.md").write_text("mine")
    model.save_pretrained(tmp_path / "my-model")
    assert (tmp_path / "my-model" / "README.md").read_text() == "mine"


class FakeHub:
    """Replaces HfApi and keeps what would be uploaded."""

    def __init__(self, has_card, card=None):
        self.has_card, self.card, self.uploads = has_card, card, []

    def __call__(self, token=None):
        return self

    def create_repo(self, repo_id, **kwargs):
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def file_exists(self, repo_id, name, revision=None):
        return self.has_card

    def hf_hub_download(self, repo_id, name, revision=None):
        return self.card

    def upload_folder(self, repo_id, folder_path, **kwargs):
        ignored = kwargs.pop("ignore_patterns")
        paths = [path for path in Path(folder_path).iterdir() if not any(fnmatch(path.name, p) for p in ignored)]
        self.uploads.append((repo_id, {path.name: path.read_bytes() for path in paths if path.is_file()}, kwargs))
        return "url"


@pytest.mark.parametrize("has_card", [False, True])
@pytest.mark.parametrize("method", ["push_to_hub", "save_pretrained"])
def test_push_uploads_weights_code_and_card(method, has_card, tmp_path, monkeypatch):
    hub = FakeHub(has_card)
    monkeypatch.setattr("hf_deberta.model.pretrained_model.HfApi", hub)
    model = hf_deberta.HfDebertaModel(HfDebertaConfig.from_preset("tiny"))
    options = {"commit_message": "first", "tags": None if has_card else ["dutch"]}
    if method == "push_to_hub":
        model.push_to_hub("mine", **options)
    else:
        model.save_pretrained(tmp_path / "mine", push_to_hub=True, max_shard_size="30KB", **options)
    ((repo, files, options),) = hub.uploads
    assert repo == "me/mine" and options["commit_message"] == "first"
    weights = "model.safetensors" if method == "push_to_hub" else "model.safetensors.index.json"  # as it was saved
    assert {"config.json", "modeling_hf_deberta.py", "pretrained_model.py", weights} <= files.keys()
    assert ("README.md" in files) is not has_card
    assert has_card or (b"dutch" in files["README.md"] and b"mine" in files["README.md"])


def test_push_adds_tags_to_the_card_of_the_repository(tmp_path, monkeypatch):
    card = tmp_path / "README.md"
    card.write_text("---\ntags: [old]\n---\nwritten by hand\n")
    hub = FakeHub(True, card)
    monkeypatch.setattr("hf_deberta.model.pretrained_model.HfApi", hub)
    hf_deberta.HfDebertaModel(HfDebertaConfig.from_preset("tiny")).push_to_hub("mine", tags=["dutch"])
    ((_, files, options),) = hub.uploads
    assert options["commit_message"] == "Upload model"
    assert all(text in files["README.md"] for text in (b"- old", b"- dutch", b"written by hand"))
