"""Train a tokenizer on a corpus, of one of DeBERTa's two types.

`unigram`  as v2 and v3: SentencePiece, text normalised by NFKC, words marked with "▁"
`bpe`      as v1: byte-level BPE, which has no unknown characters

Ids 0 to 3 are [PAD], [CLS], [SEP], [UNK], and [MASK] is the last id, as in the released models.
"""

import random
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils import logging

from hf_deberta.tokenization_hf_deberta import HfDebertaTokenizer, build_unigram
from hf_deberta.training.errors import InputError

logger = logging.get_logger(__name__)

FIRST_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
MAX_CHARACTERS = 200_000_000  # for SentencePiece, which needs some 20 bytes of memory per character
MAX_LINE_LENGTH = 4000  # longer lines are cut: if they repeat, SentencePiece's time grows with their square
SENTENCEPIECE_NAMES = ("pad", "bos", "eos", "unk")  # of FIRST_TOKENS
SPECIAL_PIECES: dict[str, Any] = {f"{name}_id": i for i, name in enumerate(SENTENCEPIECE_NAMES)}
SPECIAL_PIECES |= {f"{name}_piece": token for name, token in zip(SENTENCEPIECE_NAMES, FIRST_TOKENS, strict=True)}
UNIGRAM: dict[str, Any] = {
    "model_type": "unigram",
    "normalization_rule_name": "nmt_nfkc",
    "character_coverage": 1.0,
    "hard_vocab_limit": False,  # a small corpus may give fewer tokens
    "max_sentence_length": 1 << 30,  # no line is skipped for its length
    "minloglevel": 2,
}


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, kind: str = "unigram", model_max_length: int = 512
) -> HfDebertaTokenizer:
    """Train a tokenizer with `vocab_size` tokens, special ones included; fewer if the texts give no more.

    >>> tokenizer = train_tokenizer(open("corpus.txt", encoding="utf-8"), 8000)
    >>> tokenizer.save_pretrained("my-tokenizer")
    """
    count, failure = 0, None

    def nonempty_texts() -> Iterator[str]:
        nonlocal count, failure
        try:
            for text in texts:
                if text := text.strip("\r\n"):
                    count += 1
                    yield text
        except Exception as error:
            failure = error  # trainers would hide it in an exception of their own
            raise

    try:
        train = {"unigram": _train_unigram, "bpe": _train_byte_bpe}[kind]
        tokenizer = train(nonempty_texts(), vocab_size - 1)  # [MASK] is added below
    except Exception as error:  # tokenizers raises a bare Exception if reading the texts fails
        if failure is not None:
            raise failure from failure.__cause__
        if not isinstance(error, RuntimeError):
            raise
        raise InputError(f"no {kind} vocabulary of {vocab_size} could be trained on {count} texts ({error})") from error
    if count == 0:
        raise InputError("there is no text to train a tokenizer on: the corpus is empty")
    size = tokenizer.get_vocab_size() + 1
    if size > vocab_size:
        raise InputError(
            f"a vocabulary of {vocab_size} is too small for this corpus: its characters and the special tokens alone "
            f"are {size}"
        )
    if size < vocab_size:
        logger.warning(f"The tokenizer has {size} tokens instead of {vocab_size}: the text has no more pieces.")
    # In byte BPE the space belongs to the word, and [MASK] replaces both.
    mask = AddedToken("[MASK]", lstrip=kind == "bpe", normalized=kind == "bpe", special=True)
    return HfDebertaTokenizer(tokenizer_object=tokenizer, mask_token=mask, model_max_length=model_max_length)


def _train_unigram(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    lines = subsample_lines(line for text in texts for line in text.split("\n"))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "spm.model")
        with open(path, "wb") as file:
            SentencePieceTrainer.train(
                sentence_iterator=lines, model_writer=file, vocab_size=vocab_size, **SPECIAL_PIECES, **UNIGRAM
            )
        return build_unigram(path, do_lower_case=False, split_by_punct=False, add_prefix_space=None)[0]


def subsample_lines(lines: Iterable[str], max_characters: int | None = None, seed: int = 0) -> Iterator[str]:
    """Yield the lines in order; if they have more than `max_characters`, a random sample with at most so many.

    Each line is kept with the same probability, which is halved whenever too many characters have been kept. Very long
    lines are cut.

    >>> list(subsample_lines(["a line", "another"]))
    ['a line', 'another']
    """
    max_characters, rng = MAX_CHARACTERS if max_characters is None else max_characters, random.Random(seed)
    sample: deque[str] = deque()
    probability, characters_read, characters_kept = 1.0, 0, 0
    for line in lines:
        for start in range(0, len(line), MAX_LINE_LENGTH):
            part = line[start : start + MAX_LINE_LENGTH]
            characters_read += len(part)
            if rng.random() < probability:
                sample.append(part)
                characters_kept += len(part)
            while characters_kept > max_characters:
                probability /= 2
                sample = deque(part for part in sample if rng.random() < 0.5)
                characters_kept = sum(map(len, sample))
    if probability < 1:
        logger.info(
            f"the vocabulary is trained on a random sample of {characters_kept:,} of the corpus's {characters_read:,} "
            "characters"
        )
    while sample:
        yield sample.popleft()  # SentencePiece makes a copy


def _train_byte_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
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
