"""Broken or foreign checkpoints raise an error that says what to do, and a failed export writes nothing."""

import json

import pytest
import torch

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaModel, export_to_transformers
from hf_deberta.model.pretrained_model import check_declared_size, check_indices


@pytest.fixture
def folder(tmp_path):
    HfDebertaForMaskedLM(HfDebertaConfig.from_preset("tiny")).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_truncated_weights(folder, size, kind):
    weights = folder / "model.safetensors"
    if kind != "safetensors":
        weights.unlink()
        weights = folder / "pytorch_model.bin"
        torch.save({"x": torch.zeros(64, 64)}, weights, _use_new_zipfile_serialization=kind == "zip")
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(OSError, match="model has a .*truncated") as caught:
        HfDebertaModel.from_pretrained(folder)
    assert weights.suffix in str(caught.value)


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


def index_of(shard):
    return json.dumps({"metadata": {}, "weight_map": {"deberta.embeddings.word_embeddings.weight": shard}})


DAMAGED, FOREIGN = r"index\.json must have a weight_map", r"index\.json must name files in its own folder, not "
BAD_INDICES = {
    "": DAMAGED,
    '{"metadata": {}, "weight_map": 5}': DAMAGED,
    '{"metadata": {}, "weight_map": {}}': DAMAGED,
    index_of("../other/model.safetensors"): FOREIGN,
    index_of("/other/model.safetensors"): FOREIGN,
    index_of("a/../../x.safetensors"): FOREIGN,
}


@pytest.mark.parametrize("text", BAD_INDICES)
def test_an_index_that_is_damaged_or_names_files_of_another_folder(folder, text):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(OSError, match=BAD_INDICES[text]):
        HfDebertaModel.from_pretrained(folder)


def test_a_declared_size_that_the_weights_do_not_have(folder):
    change_config(folder, vocab_size=10**9)
    with pytest.raises(
        OSError, match=r"a model of 32,\d+,\d+,\d+ parameters, and its weights are a file of \d+,\d+ bytes"
    ):
        HfDebertaModel.from_pretrained(folder)


def test_files_that_are_not_the_weights_of_the_model_are_not_checked(folder):
    """Such as an adapter beside the configuration of its large base model."""
    change_config(folder, vocab_size=10**9)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "training_args.bin").write_bytes(b"a pickle")
    (folder / "pages.index.json").write_text("[]")
    check_indices(folder)
    check_declared_size(folder, None, HfDebertaConfig)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_an_attention_backend_from_the_hub_is_refused(folder, field):
    change_config(folder, **{field: "evil/kernel"})
    with pytest.raises(ValueError, match=f"{field} must be the name of a backend, .*not 'evil/kernel'"):
        HfDebertaModel.from_pretrained(folder)


def test_failed_export_writes_nothing(folder, tmp_path, monkeypatch):
    model = HfDebertaModel.from_pretrained(folder)

    def raise_disk_full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_deberta.transformers_format.save_torch_state_dict", raise_disk_full)
    with pytest.raises(OSError, match="No space left"):
        export_to_transformers(model, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
