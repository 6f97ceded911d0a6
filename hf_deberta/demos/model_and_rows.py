"""Write a tiny untrained model, its tokenizer and files of rows for a demonstration."""

import json
from pathlib import Path
from typing import Any

from transformers import set_seed

from hf_deberta import HfDebertaConfig, HfDebertaModel
from hf_deberta.pretraining.tokenizer_training import train_tokenizer


def write_model_and_rows(
    folder: Path, texts: list[str], splits: dict[str, list[dict]], vocab_size: int = 400
) -> dict[str, Any]:
    """Write a tiny model, a tokenizer trained on `texts`, and a JSON Lines file per split.

    Returns the flags that make a fine-tuning script use them. The texts must have pieces for `vocab_size` tokens.
    """
    model = folder / "model"
    tokenizer = train_tokenizer(texts, vocab_size, "bpe")
    config = HfDebertaConfig.from_preset(
        "tiny", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=64, intermediate_size=256
    )
    set_seed(0)
    tokenizer.save_pretrained(model)
    HfDebertaModel(config).save_pretrained(model)
    flags = {"model_name_or_path": str(model)}
    for split, rows in splits.items():
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        flags[f"{split}_file"] = str(path)
    return flags
