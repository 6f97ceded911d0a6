"""`hf-deberta bench`: a row for each shape, with equal hidden states, from any format."""

import pytest
from test_parity_with_transformers import in_tree

from hf_deberta import HfDebertaConfig, HfDebertaModel
from hf_deberta.__main__ import main


@pytest.mark.slow
@pytest.mark.parametrize(("source", "mode"), [("ours", []), ("in-tree", []), ("tiny", ["--training"])])
def test_a_row_for_each_shape(source, mode, tmp_path, capsys):
    if source == "ours":
        HfDebertaModel(HfDebertaConfig.from_preset("tiny")).half().save_pretrained(tmp_path)
    elif source == "in-tree":
        in_tree("v3", "Model").save_pretrained(tmp_path)
    model = source if source == "tiny" else str(tmp_path)
    assert main(["bench", model, "--shapes", "1x8", "2x16", "--repeats", "1", *mode]) == 0
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert ("training" if mode else "inference") in first and "Transformers / hf_deberta" in header
    assert ("optimize()" in header) == (not mode)
    assert [row.split()[0] for row in rows] == ["1x8", "2x16"]
    assert all(float(row.split()[-1]) < 1e-4 for row in rows)
