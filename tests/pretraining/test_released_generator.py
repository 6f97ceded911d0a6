"""The configuration of a generator that lies beside its discriminator; official weights: `test_rtd_pretraining`."""

import json

import pytest
import torch
from numerics import tiny_config

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaForPreTraining
from hf_deberta.pretraining.released_generator import load_released_generator, released_generator_config

CONFIG = tiny_config(num_hidden_layers=3)


@pytest.fixture
def folder(tmp_path):
    HfDebertaForPreTraining(CONFIG).save_pretrained(tmp_path)
    generator = HfDebertaForMaskedLM(tiny_config(num_hidden_layers=2))
    torch.save(generator.half().state_dict(), tmp_path / "pytorch_model.generator.bin")
    return tmp_path


def test_without_configuration_file_layers_are_counted(folder):
    found = load_released_generator(folder, hidden_dropout_prob=0.2, dtype="float32")
    assert (found.config.num_hidden_layers, found.config.hidden_dropout_prob, found.dtype) == (2, 0.2, torch.float32)
    weights = torch.load(folder / "pytorch_model.generator.bin", weights_only=True)
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, weights[name].float(), msg=name)
    assert HfDebertaForPreTraining.from_pretrained(folder).config.num_hidden_layers == 3


def test_configuration_file(folder):
    fields = {**CONFIG.to_dict(), "num_hidden_layers": 2, "layer_norm_eps": 1e-5}
    (folder / "generator_config.json").write_text(json.dumps(fields))
    found = released_generator_config(folder, hidden_dropout_prob=0.2)
    assert (found.num_hidden_layers, found.layer_norm_eps, found.hidden_dropout_prob) == (2, 1e-5, 0.2)
    assert HfDebertaConfig.from_pretrained(folder).layer_norm_eps != 1e-5


def test_missing_generator(folder):
    (folder / "pytorch_model.generator.bin").unlink()
    with pytest.raises(ValueError, match="no generator beside .*pytorch_model.generator.bin.*--generator_name_or_path"):
        released_generator_config(folder)
