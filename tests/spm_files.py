"""Write the tokenizer files of a released v3: a SentencePiece model, trained on a few sentences."""

import json
from pathlib import Path

SPECIAL_PIECES = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}


def write_spm(folder: Path, sentences: list[str], **options: object) -> Path:
    """Write `spm.model` and `tokenizer_config.json`; needs sentencepiece."""
    import sentencepiece

    settings = {"model_type": "unigram", "vocab_size": 260, "hard_vocab_limit": False, "minloglevel": 2}
    for number, (kind, piece) in enumerate(SPECIAL_PIECES.items()):
        settings |= {f"{kind}_id": number, f"{kind}_piece": piece}
    folder.mkdir(exist_ok=True)
    with open(folder / "spm.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences * 20), model_writer=file, **settings | options
        )
    config = {"do_lower_case": False, "vocab_type": "spm"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
