"""The example of GLiNER: the same entities with and without `enable()`."""

from itertools import chain

import pytest
import torch

pytest.importorskip("gliner", reason="needs pip install gliner")
import gliner
import gliner_entities

TEXTS = ["the good film was quite so", "a cast and the plot"]


def test_same_entities(in_tree_model, tmp_path, capsys):
    torch.manual_seed(0)
    settings = {"model_name": str(in_tree_model), "hidden_size": 64, "max_width": 3, "span_mode": "markerV0"}
    gliner.GLiNER.from_config({**settings, "max_len": 64}).save_pretrained(tmp_path / "finder")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    flags = ["--model", str(tmp_path / "finder"), "--texts", "texts.txt", "--types", "work", "person"]
    plain, entities = gliner_entities.main([*flags, "--threshold", "0"])
    assert len(entities) == 2 and all(entities)
    mine, theirs = ([*chain(*rows)] for rows in (entities, plain))
    assert [{**entity, "score": 0} for entity in mine] == [{**entity, "score": 0} for entity in theirs]
    assert [entity["score"] for entity in mine] == pytest.approx([entity["score"] for entity in theirs], abs=1e-4)
    assert all(
        TEXTS[row][entity["start"] : entity["end"]] == entity["text"] for row in (0, 1) for entity in entities[row]
    )
    *printed, times = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{mine[0]['start']}:{mine[0]['end']}  {mine[0]['label']}")
    assert times.startswith("2 texts: ") and len(printed) == len(mine)
