"""What `--demo` runs on: a tiny untrained model and made-up rows, as files beside the output."""

import json
from pathlib import Path
from typing import Any

from transformers import set_seed

from hf_deberta import HfDebertaConfig, HfDebertaModel
from hf_deberta.pretraining.tokenizer_training import train_tokenizer


def write_made_up(folder: Path, texts: list[str], files: dict[str, list[dict]]) -> dict[str, Any]:
    """A tiny untrained model with a tokenizer of these texts, and rows as files; the flags that use them."""
    model = folder / "model"
    tokenizer = train_tokenizer(texts, 400, "bpe")
    config = HfDebertaConfig.from_preset(
        "tiny", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=64, intermediate_size=256
    )
    set_seed(0)
    tokenizer.save_pretrained(model)
    HfDebertaModel(config).save_pretrained(model)
    flags = {"model_name_or_path": str(model)}
    for split, rows in files.items():
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        flags[f"{split}_file"] = str(path)
    return flags
