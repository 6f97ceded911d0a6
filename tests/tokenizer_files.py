"""Write the tokenizer files of a released v1 or v3, trained on a few sentences."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

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


def write_bpe(folder: Path, sentences: list[str]) -> int:
    """Write `vocab.json` and `merges.txt`; return the size of the vocabulary."""
    bpe, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(sentences, trainer)
    bpe.model.save(str(folder))
    return bpe.get_vocab_size()
