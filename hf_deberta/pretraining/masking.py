"""Mask tokens for masked-language modelling: whole words and spans of words.

Two generators:

`unbiased` (default)  Every word of a row is masked with the same probability. Spans of 1 to `max_ngram` words, with
                      P(n) ~ 1/n, and the unmasked words are arranged at random on a circle. So the number of masked
                      words is exact, and the ends of a row and long words are masked as often as all others.
                      Each token is a word in scripts without spaces (Chinese, Thai), and in words above 10 tokens.
`official`            The released generator, for reproduction. Windows of 6n words (at 15 %) hold one span of n words
                      each, from left to right, until 15 % of the row is masked: 1/6 of the words up to there, and none
                      after it. With max_ngram 1 it masks tokens, otherwise whole words.

Of the chosen tokens 80 % become [MASK], 10 % a random token, 10 % stay. The draws depend on (seed, epoch, row) alone,
not on workers or processes.
"""

import random
import string
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerBase

from hf_deberta.model.losses import IGNORED
from hf_deberta.training.errors import InputError

GENERATORS = ("unbiased", "official")
UNSPACED_SCRIPTS = ("CJK", "HIRAGANA ", "KATAKANA ", "THAI", "LAO", "KHMER", "MYANMAR")  # as Unicode names letters
MAX_WORD_LENGTH = 10  # tokens; what is longer is mostly no word: DNA, hashes, numbers


@dataclass(frozen=True)
class Vocabulary:
    """The properties of a tokenizer that masking needs."""

    mask_token_id: int
    special: np.ndarray  # bool, [V]: neither masked nor used as a replacement
    begins_word: np.ndarray  # bool, [V]: the first token of a word; all others continue a word
    replacements: np.ndarray  # ids that may replace a token
    unspaced: np.ndarray  # bool, [V]: of a script without spaces; for the unbiased generator a word

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> "Vocabulary":
        """Find the tokens that begin a word: those with "▁" (SentencePiece) or "Ġ" (byte BPE), and punctuation.

        If more tokens begin with "##" (WordPiece), all others begin a word. Without any mark, each token is a word.
        """
        if tokenizer.mask_token_id is None:
            raise InputError("masking needs a mask token, but this tokenizer has none: add mask_token='[MASK]'")
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        begins = np.array([piece is None or piece[:1] in ("▁", "Ġ") for piece in pieces])
        special = np.isin(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        continues = np.array([piece is not None and piece[:2] == "##" for piece in pieces])
        if continues.sum() >= begins.sum():
            begins = ~continues
        if {piece[:1] for piece in pieces if piece} & {"Ġ", "▁"} == {"Ġ"}:  # each letter stands for a byte
            pieces = [piece and ByteLevel().decode([piece]) for piece in pieces]
        begins |= special | np.array([piece is not None and is_punctuation(piece) for piece in pieces])
        letters = [piece[0] if piece and piece[0].isalpha() else "_" for piece in pieces]
        unspaced = np.array([unicodedata.name(letter, "").startswith(UNSPACED_SCRIPTS) for letter in letters])
        return cls(tokenizer.mask_token_id, special, begins, np.flatnonzero(~special), unspaced)


@dataclass(frozen=True)
class Masking:
    """Masks a row: `masking(ids, (seed, epoch, row))` returns input ids, and labels, -100 at tokens not to predict.

    >>> masking = Masking(Vocabulary.from_tokenizer(tokenizer))
    >>> input_ids, labels = masking(np.array(tokenizer("Paris is the capital of France.")["input_ids"]), (0, 0, 0))
    """

    vocabulary: Vocabulary
    mlm_probability: float = 0.15
    max_ngram: int = 3
    generator: str = "unbiased"
    mask_prob: float = 0.8
    random_prob: float = 0.1
    whole_words: bool = True  # False: the unbiased generator treats each token as a word

    def __post_init__(self) -> None:
        if self.generator not in GENERATORS:
            raise InputError(f"--masking must be {' or '.join(GENERATORS)}, not {self.generator!r}")
        if not 0 < self.mlm_probability < 1:
            raise InputError(f"--mlm_probability must lie between 0 and 1, not {self.mlm_probability}")
        if self.max_ngram < 1:
            raise InputError(f"--max_ngram must be 1 or more, not {self.max_ngram}")
        if min(self.mask_prob, self.random_prob) < 0 or self.mask_prob + self.random_prob > 1:
            raise InputError(
                "--mask_prob and --random_prob are shares of the chosen tokens: 0 or more, and at most 1 together, not "
                f"{self.mask_prob} and {self.random_prob}"
            )

    def __call__(self, ids: np.ndarray, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return input ids [N] and labels [N] of a row of ids [N]."""
        if self.generator == "official":
            return self._official(ids, random.Random(":".join(map(str, key))))
        rng = np.random.default_rng(np.random.SeedSequence(key))
        positions, word = number_words(ids, self.vocabulary, self.whole_words)
        words = word[-1] + 1 if len(word) else 0
        targets = positions[choose_words(words, self.mlm_probability, self.max_ngram, rng)[word]]
        labels = np.full(len(ids), IGNORED, dtype=np.int64)
        labels[targets] = ids[targets]
        draws = rng.random(len(targets))
        masked = ids.astype(np.int64)
        masked[targets[draws < self.mask_prob]] = self.vocabulary.mask_token_id
        changed = targets[(draws >= self.mask_prob) & (draws < self.mask_prob + self.random_prob)]
        masked[changed] = rng.choice(self.vocabulary.replacements, len(changed))
        return masked, labels

    def _official(self, ids: np.ndarray, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
        vocabulary = self.vocabulary
        units = official_units(ids, vocabulary, whole_words=self.max_ngram > 1)
        number = max(1, round(len(ids) * self.mlm_probability))
        masked, labels = ids.astype(np.int64), np.full(len(ids), IGNORED, dtype=np.int64)
        all_ids = range(len(vocabulary.special))  # including special tokens, as released
        for position in official_positions(units, number, int(1 / self.mlm_probability), self.max_ngram, rng):
            labels[position] = ids[position]
            draw = rng.random()
            if draw < self.mask_prob:
                masked[position] = vocabulary.mask_token_id
            elif draw >= 1 - self.random_prob:
                masked[position] = rng.choice(all_ids)
        return masked, labels


def is_punctuation(piece: str) -> bool:
    """Return whether a piece is a single character that is not part of a word: "," and "—", but not "...".

    The same rule as in the released code.
    """
    return len(piece) == 1 and (piece in string.punctuation or unicodedata.category(piece)[0] in "PCZ")


def number_words(ids: np.ndarray, vocabulary: Vocabulary, whole_words: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of tokens that may be masked, and for each the number of its word."""
    positions = np.flatnonzero(~vocabulary.special[ids])
    if not whole_words:
        return positions, np.arange(len(positions))
    begins = vocabulary.begins_word[ids[positions]] | vocabulary.unspaced[ids[positions]]
    begins[1:] |= np.diff(positions) > 1  # after a special token
    word = np.cumsum(begins)
    begins |= np.bincount(word)[word] > MAX_WORD_LENGTH
    return positions, np.cumsum(begins) - begins[:1].sum()


def choose_words(words: int, probability: float, max_ngram: int, rng: np.random.Generator) -> np.ndarray:
    """Return which words to mask, bool [words]: each with the same probability, in spans of up to max_ngram words."""
    number = min(int(words * probability + rng.random()), words)
    weights = 1 / np.arange(1, max_ngram + 1)
    lengths = rng.choice(np.arange(1, max_ngram + 1), size=number, p=weights / weights.sum())
    ends = lengths.cumsum()
    used = int(np.searchsorted(ends, number)) + 1 if number else 0
    lengths = lengths[:used]
    if used:
        lengths[-1] -= ends[used - 1] - number
    pieces = np.concatenate([lengths, np.ones(words - number, dtype=lengths.dtype)])
    in_span = np.arange(len(pieces)) < used
    order = rng.permutation(len(pieces))
    circle = np.repeat(in_span[order], pieces[order])
    return np.roll(circle, rng.integers(words)) if words else circle


def official_units(ids: np.ndarray, vocabulary: Vocabulary, whole_words: bool) -> list[list[int]]:
    """Group positions into the units that the official generator masks together.

    Special tokens do not separate words.
    """
    positions = np.flatnonzero(~vocabulary.special[ids])
    word = np.cumsum(vocabulary.begins_word[ids[positions]]) if whole_words else np.arange(len(positions))
    return [unit.tolist() for unit in np.split(positions, np.flatnonzero(np.diff(word)) + 1)]


def official_positions(
    units: list[list[int]], number: int, window_per_word: int, max_ngram: int, rng: random.Random
) -> Iterator[int]:
    """Yield positions to mask, unit by unit from the left, until there are `number` or more.

    The order of draws is that of the official code: a length and a start for each window, then one draw per token.
    """
    cumulative = list(accumulate(1 / n for n in range(1, max_ngram + 1)))
    numbers: set[int] = set()
    at = 0
    while at < len(units):
        n = 1 + min(bisect_right(cumulative, rng.random() * cumulative[-1]), max_ngram - 1)
        window = min(n * window_per_word, len(units) - at)
        start = at + rng.randint(0, window - 1)
        end = min(start + n, len(units))
        numbers.update(range(start, end))
        at = max(at + window, end)
    count = 0
    for i in sorted(numbers):
        yield from units[i]
        count += len(units[i])
        if count >= number:
            return
