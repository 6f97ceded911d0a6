"""A saved folder loads in a fresh process where this package cannot be imported."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

import hf_deberta
from hf_deberta import HfDebertaConfig
from hf_deberta.model import unpadding
from hf_deberta.model.hub_export import AUTO_MAP

TINY = {"conv_kernel_size": 3}
INPUT = {"input_ids": torch.tensor([[1, 5, 9, 7, 2, 0], [1, 8, 8, 4, 3, 2]])}
INPUT["attention_mask"] = (INPUT["input_ids"] > 0).long()

FRESH = """
import sys, json, torch, transformers
sys.modules["hf_deberta"] = None  # importing it is an error
if {without_triton}:
    sys.modules["triton"] = None
folder, auto, out = sys.argv[1:]
if hasattr(transformers, auto):
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
else:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    reference = json.load(open(folder + "/config.json"))["auto_map"][auto]
    model = get_class_from_dynamic_module(reference, folder).from_pretrained(folder).eval()
inputs = torch.load(out + "/inputs.pt")
with torch.no_grad():
    output = model(**inputs)
torch.save((type(model).__name__, type(model).__module__, output.to_tuple()), out + "/outputs.pt")
model.save_pretrained(out + "/again")
"""


def inputs_for(auto):
    if auto == "AutoModelForMultipleChoice":
        return {name: torch.stack([value, value.flip(0)], 1) for name, value in INPUT.items()}
    if auto == "HfDebertaForEntityChoice":
        return {**INPUT, "entity_indices": torch.tensor([[[1, 2], [3, 0]], [[4, 0], [0, 0]]])}
    return INPUT


def load_elsewhere(folder, auto, tmp_path, without_triton=False):
    tmp_path.mkdir(exist_ok=True)
    torch.save(inputs_for(auto), tmp_path / "inputs.pt")
    subprocess.run(
        [sys.executable, "-c", FRESH.format(without_triton=without_triton), folder, auto, tmp_path],
        cwd=tmp_path,
        env={"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    return torch.load(tmp_path / "outputs.pt")


@pytest.mark.parametrize("auto", [auto for auto in AUTO_MAP if auto != "AutoConfig"])
def test_every_head_loads_without_the_package(auto, tmp_path, monkeypatch):
    monkeypatch.setattr(unpadding, "COST_OF_EXTRA_CALLS", 1e8)  # as in the other process
    model_class = getattr(hf_deberta, AUTO_MAP[auto].partition(".")[2])
    fields = {"conv_kernel_size": 0} if auto == "AutoModelForCausalLM" else TINY  # the convolution looks ahead
    model = model_class(HfDebertaConfig.from_preset("tiny", **fields)).eval()
    model.save_pretrained(tmp_path / "saved")
    name, module, outputs = load_elsewhere(
        tmp_path / "saved", auto, tmp_path / "fresh", without_triton=auto == "AutoModel"
    )
    assert name == model_class.__name__ and module.startswith("transformers_modules.")
    with torch.no_grad():
        expected = model(**inputs_for(auto)).to_tuple()
    for found, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(found, wanted)
    # saved again by that process: code, auto_map and weights are whole
    again = tmp_path / "fresh" / "again"
    assert {path.name for path in again.glob("*.py")} == {path.name for path in (tmp_path / "saved").glob("*.py")}
    assert json.loads((again / "config.json").read_text())["auto_map"] == AUTO_MAP
    reloaded = model_class.from_pretrained(again).eval()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, reloaded.state_dict()[key]), key


def test_saved_again_elsewhere_still_loads_another_head(tmp_path):
    hf_deberta.HfDebertaModel(HfDebertaConfig.from_preset("tiny")).save_pretrained(tmp_path / "saved")
    load_elsewhere(tmp_path / "saved", "AutoModel", tmp_path / "first")
    name, _, _ = load_elsewhere(tmp_path / "first" / "again", "AutoModelForQuestionAnswering", tmp_path / "second")
    assert name == "HfDebertaForQuestionAnswering"


def test_registered_class_wins_with_and_without_trust(tmp_path):
    from transformers import AutoConfig, AutoModelForMaskedLM

    hf_deberta.HfDebertaForMaskedLM(HfDebertaConfig.from_preset("tiny")).save_pretrained(tmp_path)
    for trust in (True, False, None):
        model = AutoModelForMaskedLM.from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(model) is hf_deberta.HfDebertaForMaskedLM
        assert type(AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)) is HfDebertaConfig


def test_model_card_says_how_to_load_and_is_not_overwritten(tmp_path):
    from huggingface_hub import ModelCard

    model = hf_deberta.HfDebertaForQuestionAnswering(HfDebertaConfig.from_preset("tiny"))
    model.save_pretrained(tmp_path / "my-model")
    card = ModelCard.load(tmp_path / "my-model" / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "question-answering"
    assert 'AutoModelForQuestionAnswering.from_pretrained("my-model", trust_remote_code=True)' in card.text
    (tmp_path / "my-model" / "README.md").write_text("mine")
    model.save_pretrained(tmp_path / "my-model")
    assert (tmp_path / "my-model" / "README.md").read_text() == "mine"


class FakeHub:
    """Stands in for HfApi: keeps what would be uploaded."""

    def __init__(self, has_card):
        self.has_card, self.uploads = has_card, []

    def __call__(self, token=None):
        return self

    def create_repo(self, repo_id, **kwargs):
        return type("Repo", (), {"repo_id": f"me/{repo_id}"})

    def file_exists(self, repo_id, name, revision=None):
        return self.has_card

    def upload_folder(self, repo_id, folder_path, **kwargs):
        from fnmatch import fnmatch
        from pathlib import Path

        ignored = kwargs.pop("ignore_patterns")
        kept = [path for path in Path(folder_path).iterdir() if not any(fnmatch(path.name, p) for p in ignored)]
        self.uploads.append((repo_id, {path.name: path.read_bytes() for path in kept if path.is_file()}, kwargs))
        return "url"


@pytest.mark.parametrize("has_card", [False, True])
@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_push_uploads_weights_code_and_card(way, has_card, tmp_path, monkeypatch):
    hub = FakeHub(has_card)
    monkeypatch.setattr("hf_deberta.model.hub_export.HfApi", hub)
    model = hf_deberta.HfDebertaModel(HfDebertaConfig.from_preset("tiny"))
    if way == "push_to_hub":
        model.push_to_hub("mine", commit_message="first", tags=None if has_card else ["dutch"])
    else:
        options = {"commit_message": "first", "tags": None if has_card else ["dutch"], "max_shard_size": "30KB"}
        model.save_pretrained(tmp_path / "mine", push_to_hub=True, **options)
    ((repo, files, options),) = hub.uploads
    assert repo == "me/mine" and options["commit_message"] == "first"
    assert {"config.json", "modeling_hf_deberta.py", "hub_export.py"} <= files.keys()
    weights = "model.safetensors" if way == "push_to_hub" else "model.safetensors.index.json"  # what was saved
    assert weights in files
    assert ("README.md" in files) is not has_card
    if not has_card:
        assert b"dutch" in files["README.md"] and b"mine" in files["README.md"]


def test_trainer_checkpoint_folder_loads_elsewhere(tmp_path):
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    model = hf_deberta.HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny"))
    data = Dataset.from_dict({"input_ids": [[1, 5, 6, 2]] * 4, "labels": [0, 1, 0, 1]})
    arguments = TrainingArguments(tmp_path / "run", max_steps=1, save_steps=1, report_to="none", disable_tqdm=True)
    Trainer(model, arguments, train_dataset=data).train()
    name, _, _ = load_elsewhere(
        tmp_path / "run" / "checkpoint-1", "AutoModelForSequenceClassification", tmp_path / "fresh"
    )
    assert name == "HfDebertaForSequenceClassification"


def test_the_way_named_in_the_error_works():
    """Without the package and without trust, Transformers says what to do."""
    code = textwrap.dedent("""
        import sys
        sys.modules["hf_deberta"] = None
        import transformers
        try:
            transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=False)
        except ValueError as error:
            assert "trust_remote_code=True" in str(error), error
        else:
            raise SystemExit("loaded custom code without trust")
    """)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        hf_deberta.HfDebertaModel(HfDebertaConfig.from_preset("tiny")).save_pretrained(folder)
        subprocess.run([sys.executable, "-c", code, folder], check=True, cwd=folder, env={"HF_HUB_OFFLINE": "1"})
