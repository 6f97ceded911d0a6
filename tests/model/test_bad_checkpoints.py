"""Broken or foreign checkpoints raise an error that says what to do, and a failed export writes nothing."""

import json

import pytest
import torch

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaModel, export_to_transformers
from hf_deberta.model.pretrained_model import check_declared_size, check_json_files


@pytest.fixture
def folder(tmp_path):
    HfDebertaForMaskedLM(HfDebertaConfig.from_preset("tiny")).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_truncated_safetensors(folder, size):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(OSError, match=r"model has a truncated .*\.safetensors.*again"):
        HfDebertaModel.from_pretrained(folder)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_truncated_bin(folder, size, is_zip):
    (folder / "model.safetensors").unlink()
    weights = folder / "pytorch_model.bin"
    torch.save({"x": torch.zeros(64, 64)}, weights, _use_new_zipfile_serialization=is_zip)
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(OSError, match=r"model has a .*truncated .*\.bin|model has a \.bin .*truncated"):
        HfDebertaModel.from_pretrained(folder)


def test_weights_of_other_sizes_than_the_configuration(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "hidden_size": 64, "pooler_hidden_size": 64, "embedding_size": 64})
    )
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        HfDebertaModel.from_pretrained(folder)


def test_config_of_another_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    with pytest.raises(ValueError, match="not 'bert'.*another architecture"):
        HfDebertaModel.from_pretrained(tmp_path)


def test_pickle_with_code_is_refused(folder):
    class Payload:
        def __reduce__(self):
            return (print, ("executed",))

    (folder / "model.safetensors").unlink()
    torch.save(
        {"deberta.embeddings.word_embeddings.weight": torch.zeros(2), "x": Payload()}, folder / "pytorch_model.bin"
    )
    with pytest.raises(OSError, match=r"\.bin .*more than tensors.*code"):
        HfDebertaModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "shard", ["../other/model.safetensors", "/other/model.safetensors", "a/../../x.safetensors", 5]
)
def test_an_index_cannot_name_files_of_another_folder(folder, shard):
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"deberta.embeddings.word_embeddings.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OSError, match=r"index\.json must name files in its own folder, not "):
        HfDebertaModel.from_pretrained(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 5}', '{"metadata": {}, "weight_map": {}}'])
def test_damaged_index(folder, text):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(OSError, match=r"model\.safetensors\.index\.json (is not valid JSON|must )"):
        HfDebertaModel.from_pretrained(folder)


def test_sharded_weights_load(folder, tmp_path):
    model = HfDebertaModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    found = HfDebertaModel.from_pretrained(tmp_path / "sharded").state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())


def test_a_declared_size_that_the_weights_do_not_have(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10**9}))
    with pytest.raises(
        OSError, match=r"a model of 32,\d+,\d+,\d+ parameters, and its weights are a file of \d+,\d+ bytes"
    ):
        HfDebertaModel.from_pretrained(folder)


def test_files_that_are_not_the_weights_of_the_model_are_not_checked(folder):
    """Such as an adapter beside the configuration of its large base model."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10**9}))
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "training_args.bin").write_bytes(b"a pickle")
    (folder / "pages.index.json").write_text("[]")
    check_json_files(folder)
    check_declared_size(folder, None)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_an_attention_backend_from_the_hub_is_refused(folder, field):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: "evil/kernel"}))
    with pytest.raises(ValueError, match=f"{field} must be the name of a backend, .*not 'evil/kernel'"):
        HfDebertaModel.from_pretrained(folder)


def test_failed_export_writes_nothing(folder, tmp_path, monkeypatch):
    model = HfDebertaModel.from_pretrained(folder)

    def raise_disk_full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_deberta.export.transformers_format.save_torch_state_dict", raise_disk_full)
    with pytest.raises(OSError, match="No space left"):
        export_to_transformers(model, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
