"""`hf-deberta inspect`: a folder, a preset, and what is counted."""

import json
import textwrap
from pathlib import Path

import pytest
import torch

from hf_deberta import HfDebertaConfig, HfDebertaForCausalLM, HfDebertaForSequenceClassification
from hf_deberta.__main__ import main
from hf_deberta.commands import inspect_checkpoint


def lines_of(output: str) -> dict[str, str]:
    """The lines by name."""
    return {line[2:32].strip(): line[32:].strip() for line in output.splitlines() if line.startswith("  ")}


def test_a_checkpoint(tmp_path, capsys):
    model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny", emd_steps=2))
    model.save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{tmp_path}: hf_deberta checkpoint, HfDebertaForSequenceClassification")
    lines = lines_of(output)
    assert lines["size"].startswith("2 layers, hidden size 32, 4 heads") and "enhanced mask decoder" not in lines
    assert lines["longest row"] == "any length"
    assert lines["all"] == f"{model.num_parameters():,}"
    parts = [int(lines[part].replace(",", "")) for part in ("embeddings", "encoder", "head")]
    assert sum(parts) == model.num_parameters() and parts[2] == model.num_parameters() - model.deberta.num_parameters()
    assert lines["weights, float32"] == f"{4 * model.num_parameters() / 2**20:,.1f} MiB"


@pytest.mark.parametrize("emd_steps, longest", [(2, "64 tokens"), (0, "any length")])
def test_a_causal_model_has_the_positions_of_its_decoder(tmp_path, capsys, emd_steps, longest):
    HfDebertaForCausalLM(HfDebertaConfig.from_preset("tiny", emd_steps=emd_steps)).save_pretrained(tmp_path)
    main(["inspect", str(tmp_path)])
    assert lines_of(capsys.readouterr().out)["longest row"] == longest


def test_official_files_without_the_name_of_their_head(tmp_path, capsys):
    fields = {"model_type": "deberta", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    main(["inspect", str(tmp_path)])
    output = capsys.readouterr().out
    assert output.startswith(f"{tmp_path}: v1 checkpoint, HfDebertaModel\n")
    assert lines_of(output)["head"] == "0"


def test_a_preset_and_its_tied_matrix(capsys):
    main(["inspect", "tiny"])
    lines = lines_of(capsys.readouterr().out)
    assert lines["longest row"] == "64 tokens"
    assert lines["enhanced mask decoder"] == "2 steps" and lines["attention terms"] == "c2c, c2p, p2c"


def test_the_page_shows_lines_of_the_output(capsys):
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    shown = lines_of(textwrap.dedent(page.partition("$ hf-deberta inspect v3-base\n")[2].partition("## Convert")[0]))
    main(["inspect", "v3-base"])
    printed = lines_of(capsys.readouterr().out)
    assert len(shown) == 5
    assert shown.items() <= printed.items()


def test_the_backend_has_a_reason(monkeypatch):
    config = HfDebertaConfig.from_preset("tiny")
    monkeypatch.setattr(inspect_checkpoint.gpu_check, "current_gpu", lambda: None)
    assert inspect_checkpoint.describe_backend(config)["sdpa"].startswith("there is no CUDA device")
    monkeypatch.setattr(inspect_checkpoint.attention_auto, "FORCED_BACKEND", "triton")
    assert "HF_DEBERTA_ATTENTION" in inspect_checkpoint.describe_backend(config)["triton"]
    config._attn_implementation = "eager"
    assert "configuration" in inspect_checkpoint.describe_backend(config)["eager"]


def test_activations_grow_with_the_batch():
    fields = {"position_biased_input": True, "embedding_size": 16, "emd_steps": 0}
    with torch.device("meta"):
        model = HfDebertaForSequenceClassification(HfDebertaConfig.from_preset("tiny", **fields))
    one, two = (inspect_checkpoint.saved_by_one_layer(model, batch, 100) for batch in (1, 2))  # it has 64 positions
    assert one > 4 * 64 * 32  # more than the hidden states
    assert two == pytest.approx(2 * one, rel=0.2)  # what belongs to the position table does not grow
