"""`hf-deberta bench`: a row for each shape, with equal hidden states, from any format."""

import pytest
from transformers import DebertaV2Config, DebertaV2Model

from hf_deberta import HfDebertaConfig, HfDebertaModel
from hf_deberta.__main__ import main

IN_TREE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "vocab_size": 128}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "mode"), [("ours", []), ("in-tree", []), ("tiny", ["--training"])])
def test_a_row_for_each_shape(source, mode, tmp_path, capsys):
    if source == "ours":
        HfDebertaModel(HfDebertaConfig.from_preset("tiny")).save_pretrained(tmp_path)
    elif source == "in-tree":
        DebertaV2Model(DebertaV2Config(**IN_TREE, **SIZES, max_position_embeddings=64)).save_pretrained(tmp_path)
    model = source if source == "tiny" else str(tmp_path)
    assert main(["bench", model, "--shapes", "1x8", "2x16", "--repeats", "1", *mode]) == 0
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert ("training" if mode else "inference") in first and "Transformers / hf_deberta" in header
    assert ("optimize()" in header) == (not mode)
    assert [row.split()[0] for row in rows] == ["1x8", "2x16"]
    assert all(float(row.split()[-1]) < 1e-4 for row in rows)
