"""Which tokens a masked-language model has to guess: whole words and spans of words.

Two generators:

`unbiased` (default)  every word of a row is masked with the same probability. Spans of 1 to `max_ngram` words, drawn
                      with P(n) ~ 1/n, and the words that stay are put into random order around a circle. So the number
                      of masked words is exact, and neither the ends of a row nor long words fare differently.
`official`            what the released code does, for reproduction. Windows of 6n words (at 15 %) hold one span of n
                      words each, from left to right, until 15 % of the row is reached: 1/6 of the words are masked up
                      to there and none after it. With max_ngram 1 it masks pieces, otherwise whole words.

Of the chosen tokens 80 % become [MASK], 10 % a random word, 10 % stay. What is drawn depends on (seed, epoch, row)
alone, not on workers or processes.
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

from hf_deberta.model.batch_loss import IGNORED

GENERATORS = ("unbiased", "official")


@dataclass(frozen=True)
class Vocabulary:
    """What masking has to know of a tokenizer."""

    mask_token_id: int
    special: np.ndarray  # bool, [V]: never masked, never put in
    begins_word: np.ndarray  # bool, [V]: begins a word, all others go on with one
    words: np.ndarray  # ids that may replace a token

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Vocabulary":
        """Pieces begin a word with "▁" (SentencePiece) or "Ġ" (byte BPE), and punctuation is a word of its own.

        Without any "▁" or "Ġ", each piece is a word.
        """
        if tokenizer.mask_token_id is None:
            raise ValueError("masking needs a mask token, and this tokenizer has none; add mask_token='[MASK]'")
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        begins = np.array([piece is None or piece[:1] in ("▁", "Ġ") for piece in pieces])
        special = np.zeros(len(tokenizer), dtype=bool)
        special[[i for i in tokenizer.all_special_ids if i < len(tokenizer)]] = True
        if not begins.any():
            begins[:] = True
        if {piece[:1] for piece in pieces if piece} & {"Ġ", "▁"} == {"Ġ"}:  # each letter stands for a byte
            pieces = [piece and ByteLevel().decode([piece]) for piece in pieces]
        begins |= special | np.array([piece is not None and is_punctuation(piece) for piece in pieces])
        return cls(tokenizer.mask_token_id, special, begins, np.flatnonzero(~special))


@dataclass(frozen=True)
class Masking:
    """Masks a row: `masking(ids, (seed, epoch, row))` gives input ids, and labels, -100 where nothing is to be guessed.

    >>> masking = Masking(Vocabulary.of(tokenizer))
    >>> input_ids, labels = masking(np.array(tokenizer("Paris is the capital of France.")["input_ids"]), (0, 0, 0))
    """

    vocabulary: Vocabulary
    mlm_probability: float = 0.15
    max_ngram: int = 3
    generator: str = "unbiased"
    mask_prob: float = 0.8
    random_prob: float = 0.1
    whole_words: bool = True  # False: the unbiased generator takes every piece for a word

    def __post_init__(self) -> None:
        if self.generator not in GENERATORS:
            raise ValueError(f"masking is one of {', '.join(GENERATORS)}, not {self.generator!r}")
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"mlm_probability must lie between 0 and 1, not {self.mlm_probability}")
        if self.max_ngram < 1:
            raise ValueError(f"max_ngram must be 1 or more, not {self.max_ngram}")
        if min(self.mask_prob, self.random_prob) < 0 or self.mask_prob + self.random_prob > 1:
            raise ValueError(
                "mask_prob and random_prob are shares of the chosen tokens, not "
                f"{self.mask_prob} and {self.random_prob}"
            )

    def __call__(self, ids: np.ndarray, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Input ids and labels [N] of a row of ids [N]."""
        if self.generator == "official":
            return self._official(ids, random.Random(":".join(map(str, key))))
        rng = np.random.default_rng(np.random.SeedSequence(key))
        places, word = words_of(ids, self.vocabulary, self.whole_words)
        words = word[-1] + 1 if len(word) else 0
        chosen = places[spans(words, self.mlm_probability, self.max_ngram, rng)[word]] if words else places
        labels = np.full(len(ids), IGNORED, dtype=np.int64)
        labels[chosen] = ids[chosen]
        fate = rng.random(len(chosen))
        masked = ids.astype(np.int64)
        masked[chosen[fate < self.mask_prob]] = self.vocabulary.mask_token_id
        changed = chosen[(fate >= self.mask_prob) & (fate < self.mask_prob + self.random_prob)]
        masked[changed] = rng.choice(self.vocabulary.words, len(changed))
        return masked, labels

    def _official(self, ids: np.ndarray, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
        vocabulary = self.vocabulary
        units = official_units(ids, vocabulary, whole_words=self.max_ngram > 1)
        wanted = max(1, round(len(ids) * self.mlm_probability))
        masked, labels = ids.astype(np.int64), np.full(len(ids), IGNORED, dtype=np.int64)
        everything = range(len(vocabulary.special))  # special tokens too, as released

        for place in official_choice(units, wanted, int(1 / self.mlm_probability), self.max_ngram, rng):
            labels[place] = ids[place]
            fate = rng.random()
            if fate < self.mask_prob:
                masked[place] = vocabulary.mask_token_id
            elif fate >= 1 - self.random_prob:
                masked[place] = rng.choice(everything)
        return masked, labels


def is_punctuation(piece: str) -> bool:
    """A single character that is no part of a word, as the released code has it: "," and "—", but not "..."."""
    return len(piece) == 1 and (piece in string.punctuation or unicodedata.category(piece)[0] in "PCZ")


def words_of(ids: np.ndarray, vocabulary: Vocabulary, whole_words: bool) -> tuple[np.ndarray, np.ndarray]:
    """Places of tokens that may be masked, and the number of the word that each belongs to."""
    places = np.flatnonzero(~vocabulary.special[ids])
    if not whole_words:
        return places, np.arange(len(places))
    begins = vocabulary.begins_word[ids[places]]
    begins[1:] |= np.diff(places) > 1  # after a special token
    return places, np.cumsum(begins) - begins[:1].sum()


def spans(words: int, probability: float, max_ngram: int, rng: np.random.Generator) -> np.ndarray:
    """Which of so many words to mask, bool [words]: each with the given probability, in spans of up to max_ngram."""
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
    """Places grouped into what the official generator masks together; special tokens do not part a word."""
    units: list[list[int]] = []
    for place in np.flatnonzero(~vocabulary.special[ids]).tolist():
        if whole_words and units and not vocabulary.begins_word[ids[place]]:
            units[-1].append(place)
        else:
            units.append([place])
    return units


def official_choice(
    units: list[list[int]], wanted: int, window_of_word: int, max_ngram: int, rng: random.Random
) -> Iterator[int]:
    """Yield places to mask, unit by unit from the left, until so many are reached.

    The draws come in the order of the official code: for each window a length and a start, later a fate per token.
    """
    cumulative = list(accumulate(1 / n for n in range(1, max_ngram + 1)))
    taken, at = set(), 0
    while at < len(units):
        n = 1 + min(bisect_right(cumulative, rng.random() * cumulative[-1]), max_ngram - 1)
        window = min(n * window_of_word, len(units) - at)
        start = at + rng.randint(0, window - 1)
        end = min(start + n, len(units))
        taken.update(range(start, end))
        at = max(at + window, end)
    count = 0
    for i in sorted(taken):
        yield from units[i]
        count += len(units[i])
        if count >= wanted:
            return
