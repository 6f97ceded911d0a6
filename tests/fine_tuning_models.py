"""Tiny checkpoints of three families, and scripts run in this process as a user starts them."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from transformers import BertConfig, BertModel, DebertaV2Config, DebertaV2Model

from hf_deberta import HfDebertaConfig, HfDebertaModel
from hf_deberta.pretraining.tokenizer_training import train_tokenizer

ROOT = Path(__file__).parents[1]
RUN = ["--use_cpu", "--disable_tqdm", "true", "--per_device_train_batch_size", "8", "--learning_rate", "1e-3"]
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def save_models(folder: Path, texts: list[str], vocab_size: int = 300) -> dict:
    """`ours`, `in_tree` and `bert`, each with a tokenizer of these texts; gives the fields of that vocabulary."""
    tokenizer = train_tokenizer(texts, vocab_size, "bpe")
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    in_tree = {"pos_att_type": ["c2p", "p2c"], "relative_attention": True, "position_buckets": 8}
    models = {
        "ours": HfDebertaModel(HfDebertaConfig.from_preset("tiny", **words)),
        "in_tree": DebertaV2Model(DebertaV2Config(**TINY, **words, **in_tree, max_position_embeddings=64)),
        "bert": BertModel(BertConfig(**TINY, **words)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return words


def runner(monkeypatch, script: str) -> Callable[..., None]:
    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *map(str, arguments)])
        runpy.run_path(str(ROOT / script), run_name="__main__")

    return run


def results(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text())
