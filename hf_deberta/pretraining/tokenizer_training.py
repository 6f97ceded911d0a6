"""A tokenizer of DeBERTa's two kinds, learnt from a corpus.

`unigram`  as v2 and v3: by SentencePiece, text normalised by NFKC, words marked with "▁"
`bpe`      as v1: byte-level BPE, which knows no unknown character

Ids 0 to 3 are [PAD], [CLS], [SEP], [UNK], and [MASK] is the last, as in the released models.
"""

import random
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils import logging

from hf_deberta.tokenization_hf_deberta import HfDebertaTokenizer, build_unigram

logger = logging.get_logger(__name__)

KINDS = ("unigram", "bpe")
FIRST_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
BYTES = 256
MOST_CHARACTERS = 200_000_000  # that SentencePiece is given, for it takes some 20 bytes of memory for each
LONGEST = 1_000_000  # characters of a line that are drawn together
KINDS_OF_PIECE = ("pad", "bos", "eos", "unk")
SPECIAL_PIECES = {f"{kind}_id": i for i, kind in enumerate(KINDS_OF_PIECE)}
SPECIAL_PIECES |= {f"{kind}_piece": piece for kind, piece in zip(KINDS_OF_PIECE, FIRST_TOKENS, strict=True)}
UNIGRAM = {
    "model_type": "unigram",
    "normalization_rule_name": "nmt_nfkc",
    "character_coverage": 1.0,
    "hard_vocab_limit": False,  # a small corpus gives fewer pieces
    "max_sentence_length": 1 << 30,  # nothing is left out for its length
    "minloglevel": 2,
}


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, kind: str = "unigram", model_max_length: int = 512
) -> HfDebertaTokenizer:
    """Learn a vocabulary of `vocab_size` tokens, special ones included; fewer if the texts hold no more.

    >>> tokenizer = train_tokenizer(open("corpus.txt", encoding="utf-8"), 8000)
    >>> tokenizer.save_pretrained("my-tokenizer")
    """
    if kind not in KINDS:
        raise ValueError(f"a tokenizer is one of {', '.join(KINDS)}, not {kind!r}")
    least = len(FIRST_TOKENS) + 1 + (BYTES if kind == "bpe" else 1)
    if vocab_size < least:
        raise ValueError(f"a vocabulary of {vocab_size} is too small: {kind} needs {least} at least, better thousands")
    seen = _Counted(texts)
    try:
        tokenizer = (_unigram if kind == "unigram" else _byte_bpe)(seen, vocab_size - 1)  # [MASK] comes after
    except Exception as error:  # tokenizers raises bare Exception
        if seen.failure is not None:
            raise seen.failure from seen.failure.__cause__
        if seen.texts == 0:
            raise ValueError("there is no text to learn a tokenizer from: the corpus is empty") from None
        advice = (
            f"; a Unigram vocabulary must hold every character of the corpus, here {len(seen.characters)}: ask for "
            "more tokens, or take kind 'bpe'"
        )
        raise ValueError(
            f"no {kind} vocabulary of {vocab_size} could be learnt from {seen.texts} texts ({error})"
            + (advice if "required_chars" in str(error) else "")
        ) from error
    if seen.texts == 0:
        raise ValueError("there is no text to learn a tokenizer from: the corpus is empty")
    if tokenizer.get_vocab_size() > vocab_size - 1:
        raise ValueError(
            f"a vocabulary of {vocab_size} is too small for this corpus: its {len(seen.characters)} characters and the "
            f"special tokens alone are {tokenizer.get_vocab_size() + 1}"
        )
    if tokenizer.get_vocab_size() < vocab_size - 1:
        logger.warning(f"the corpus gives {tokenizer.get_vocab_size() + 1} tokens of {vocab_size} wanted")
    # in byte BPE the space belongs to the word, and [MASK] stands for both
    mask = AddedToken("[MASK]", lstrip=kind == "bpe", normalized=kind == "bpe", special=True)
    return HfDebertaTokenizer(tokenizer_object=tokenizer, mask_token=mask, model_max_length=model_max_length)


def _unigram(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    lines = drawn(line for text in texts for line in text.splitlines())
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "spm.model")
        with open(path, "wb") as file:
            SentencePieceTrainer.train(
                sentence_iterator=lines, model_writer=file, vocab_size=vocab_size, **SPECIAL_PIECES, **UNIGRAM
            )
        return build_unigram(path, do_lower_case=False, split_by_punct=False, add_prefix_space=None)[0]


def drawn(lines: Iterable[str], most: int | None = None, seed: int = 0) -> Iterator[str]:
    """The lines in order; of more than `most` characters, lines drawn from all over them that hold no more than that.

    Each is kept with the same probability, which is halved whenever too much has been kept. Very long ones are cut.

    >>> list(drawn(["a line", "another"]))
    ['a line', 'another']
    """
    most, rng = MOST_CHARACTERS if most is None else most, random.Random(seed)
    kept, share, read, held = deque(), 1.0, 0, 0
    for line in lines:
        for start in range(0, len(line), LONGEST):
            part = line[start : start + LONGEST]
            read += len(part)
            if rng.random() < share:
                kept.append(part)
                held += len(part)
            while held > most:
                share /= 2
                kept = deque(part for part in kept if rng.random() < 0.5)
                held = sum(map(len, kept))
    if share < 1:
        logger.warning(f"the vocabulary is learnt from {held:,} of the corpus's {read:,} characters, drawn at random")
    while kept:
        yield kept.popleft()  # which SentencePiece has a copy of


def _byte_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=FIRST_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class _Counted:
    """The texts, and afterwards what has been seen of them."""

    def __init__(self, texts: Iterable[str]):
        self.given, self.texts, self.characters = texts, 0, set()
        self.failure: Exception | None = None  # of the texts, which a trainer would hide in one of its own

    def __iter__(self):
        try:
            for text in self.given:
                if text := text.strip("\r\n"):
                    self.texts += 1
                    self.characters.update(text)
                    yield text
        except Exception as error:
            self.failure = error
            raise
