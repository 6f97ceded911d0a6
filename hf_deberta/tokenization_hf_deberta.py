"""Tokenizer of DeBERTa v1 (byte-level BPE) and of v2 and v3 (SentencePiece Unigram), equal to the released ones.

It is built from the first of these files that exists:

1. `tokenizer.json`, unchanged, with its normalizer and post-processor. It comes before `spm.model` because a model may
   have been trained with it. If it may have been saved by a faulty class, ignore it and read the original files:
   `from_pretrained(name, tokenizer_file="")`.
2. `spm.model` (v2, v3): the pieces, scores, byte fallback and normalization table of that file. Reading it requires
   neither sentencepiece nor protobuf.
3. `vocab.json` with `merges.txt` (v1): GPT-2's byte-level BPE, with the special token ids of `vocab.json`.
"""

import copy
import json
import struct
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    DebertaTokenizer,
    DebertaV2Tokenizer,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)
from transformers.utils import logging

logger = logging.get_logger(__name__)

SPECIAL_TOKENS = {
    "bos_token": "[CLS]",
    "eos_token": "[SEP]",
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
# what Transformers raises for files of wrong content; tokenizers raises a bare Exception
ERRORS_OF_DAMAGE = (AttributeError, LookupError, RecursionError, TypeError, json.JSONDecodeError, UnicodeDecodeError)
MAX_LABELS = 10**6  # as in HfDebertaConfig
# values of enumerations in an spm.model
UNIGRAM = 1  # type of model
NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4  # types of pieces
PUNCTUATION = r"[\p{P}$+<=>^`|~]"  # with the ASCII symbols, as in BERT
HANGUL = (range(0x1100, 0x1113), range(0x1161, 0x1176), range(0x11A8, 0x11C3))  # initial, vowel, final of a syllable
SEPARATOR, BOUNDARY, ESCAPE = "\ufdd0", "\ufdd1", "\ufdd2"  # code points that Unicode reserves for internal use


class UnigramFile(NamedTuple):
    """Contents of an `spm.model`: pieces, and settings of the normalization."""

    pieces: list[tuple[str, float, int]]  # text, score, type
    byte_fallback: bool
    normalization_table: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def protobuf_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of a serialized message; a value is an int, or bytes for all other types."""
    offset = 0

    def read_varint() -> int:
        nonlocal offset
        value = shift = 0
        while True:
            byte = message[offset]
            offset, value, shift = offset + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while offset < len(message):
        key = read_varint()
        wire_type = key & 7
        if wire_type == 0:
            yield key >> 3, read_varint()
            continue
        if wire_type not in (1, 2, 5):
            raise ValueError(f"unknown wire type {wire_type} at byte {offset}")
        size = read_varint() if wire_type == 2 else 8 if wire_type == 1 else 4
        if offset + size > len(message):
            raise ValueError(f"{offset + size - len(message)} bytes are missing at the end")
        yield key >> 3, message[offset : offset + size]
        offset += size


def read_unigram_file(path: str) -> UnigramFile:
    """Read an `spm.model`; raise a ValueError if it is not a complete SentencePiece Unigram model."""
    with open(path, "rb") as file:
        content = file.read()
    pieces: list[tuple[str, float, int]] = []
    specs: dict[int, dict[int, Any]] = {}
    try:
        for number, value in protobuf_fields(content):
            if number == 1:
                piece = dict(protobuf_fields(value))
                (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
                pieces.append((piece[1].decode(), score, piece.get(3, NORMAL)))
            elif number in (2, 3):
                specs[number] = dict(protobuf_fields(value))
        # The specs follow the pieces, so a file truncated between two fields lacks them.
        trainer, normalizer = specs[2], specs[3]
        table = normalizer.get(2, b"")
        if table:
            normalizers.Precompiled(table)
    except Exception as error:  # random bytes can fail anywhere, and tokenizers raises bare Exception
        raise ValueError(
            f"{path} ({len(content)} bytes) is not a complete SentencePiece model ({type(error).__name__}: {error}); "
            "download it again, with `git lfs pull` if it is a Git LFS pointer"
        ) from error
    if (model_type := trainer.get(3, UNIGRAM)) != UNIGRAM:
        name = {2: "BPE", 3: "word", 4: "character"}.get(model_type, f"type {model_type}")
        raise ValueError(
            f"{path} must be a SentencePiece Unigram model, as in DeBERTa v2 and v3, but is a {name} model; train it "
            "with model_type='unigram', or convert it to a tokenizer.json"
        )
    return UnigramFile(
        pieces,
        byte_fallback=bool(trainer.get(35, 0)),
        normalization_table=table,
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


@cache
def composing_marks() -> tuple[str, str]:
    """Return the characters that SentencePiece's tables may compose with a letter, and a pattern of where they do.

    The tables compose full decompositions only: e with a circumflex and an acute accent becomes one character, but ê
    with an acute accent stays. Any character may be a variant, such as a full-width e. Korean syllables are letters.
    """
    variants: dict[str, str] = defaultdict(str)
    following: dict[tuple[str, ...], str] = defaultdict(str)  # (base, mark, ...) to the possible next marks
    for letter in map(chr, range(0xA0, 0x20000)):  # no character beyond consists of a base and marks
        if not (decomposition := unicodedata.decomposition(letter)):
            continue
        if len(single := unicodedata.normalize("NFKD", letter)) == 1:
            variants[single] += letter
        elif decomposition[0] != "<" and len(parts := unicodedata.normalize("NFD", letter)) > 1:
            following[tuple(parts[:-1])] += parts[-1]
    bases: dict[tuple[str, ...], str] = defaultdict(str)  # (mark, ..., possible next marks) to the bases
    for (base, *marks), next_marks in following.items():
        all_marks = (*marks, next_marks)
        bases[all_marks] += base
    initials, vowels, finals = ("".join(map(chr, codes)) for codes in HANGUL)
    bases |= {(vowels,): initials, (vowels, finals): initials}

    def character_class(characters: str) -> str:
        return "[" + "".join(c + variants[c] for c in dict.fromkeys(characters)) + "]"

    rules = []
    for (*marks, last), base in bases.items():
        before = "".join(map(character_class, [base, *marks]))
        rules.append(f"(?<={before}){character_class(last)}")
    composing = character_class("".join(last for *_, last in bases))
    return composing, f"(?={composing})(?:{'|'.join(rules)})"  # the first part saves time


def table_steps(table: normalizers.Precompiled) -> list[normalizers.Normalizer]:
    """Return the steps that apply a normalization table as SentencePiece does, also to accents.

    SentencePiece replaces the longest match. `Precompiled` looks up a character together with its accents, but replaces
    all of these by the shortest match: of "ệ" in three code points it keeps "ẹ". Therefore each accent is separated
    from its letter while the table is applied, and NFC composes them. A boundary keeps NFC from composing and sorting
    accents that SentencePiece leaves alone. An escape marks separators and boundaries of the text itself.
    """
    if table.normalize_str("e\u0301") != "\u00e9":
        return [table]
    composing, pattern = composing_marks()
    # `tokenizers` miscounts offsets if the table deletes the first character, or if an accent is separated before it
    controls = map(chr, (*range(1, 0x20), *range(0x7F, 0xA0)))
    deleted = "".join(character for character in controls if not table.normalize_str(character))
    first = [normalizers.Replace(Regex(rf"\A[{deleted}]+"), "")] if deleted else []
    accents = f"(?=[\\p{{M}}\u200c\u200d\u0e33\u0eb3]|{composing})(?<=[\\s\\S])"
    return [
        *first,
        *(normalizers.Replace(mark, mark + ESCAPE) for mark in (SEPARATOR, BOUNDARY)),
        normalizers.Replace(Regex(f"{accents}(?!{pattern})"), BOUNDARY),
        normalizers.Replace(Regex(accents), SEPARATOR),
        table,
        normalizers.Replace(Regex(f"{SEPARATOR}(?!{ESCAPE})"), ""),
        normalizers.NFC(),
        normalizers.Replace(Regex(f"{BOUNDARY}(?!{ESCAPE})|{ESCAPE}(?<=[{SEPARATOR}{BOUNDARY}]{ESCAPE})"), ""),
    ]


def unigram_normalizer(spm: UnigramFile, do_lower_case: bool, split_by_punct: bool) -> normalizers.Sequence:
    """Return SentencePiece's normalization: the table first, then the spaces, because the table produces some."""
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if do_lower_case else []
    if split_by_punct:
        # The official code encodes each stretch between punctuation marks separately, so each is stripped and gets a
        # dummy prefix. Spaces on both sides of every mark have the same effect.
        sides = f"(?<={PUNCTUATION})(?=[\\s\\S])|(?<=[\\s\\S])(?={PUNCTUATION})"
        steps.append(normalizers.Replace(Regex(sides), " "))
    if spm.normalization_table:
        steps += table_steps(normalizers.Precompiled(spm.normalization_table))
    if spm.remove_extra_whitespaces:
        # not `Strip`, which removes more than spaces, and not ^ and $, which match at every line here
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r"(?<![\s\S]) | (?![\s\S])"), ""))
    return normalizers.Sequence(steps)


def build_unigram(
    path: str, do_lower_case: bool, split_by_punct: bool, add_prefix_space: bool | None
) -> tuple[Tokenizer, str]:
    """Return a `Tokenizer` made from an `spm.model`, and the text of its unknown piece.

    >>> tokenizer, unknown = build_unigram("spm.model", False, False, None)
    >>> tokenizer.encode("ﬁnd out…").tokens
    ['▁find', '▁out', '...']
    """
    spm = read_unigram_file(path)
    types = [piece_type for _, _, piece_type in spm.pieces]
    if UNKNOWN not in types:
        raise ValueError(f"{path} has no unknown piece; train it with unk_id=3 and unk_piece='[UNK]'")
    unknown = types.index(UNKNOWN)
    best = max((score for _, score, piece_type in spm.pieces if piece_type == NORMAL), default=0.0)
    vocabulary = []
    for text, score, piece_type in spm.pieces:
        if piece_type == USER_DEFINED:  # wins over every other segmentation of its text, as in SentencePiece
            score = len(text.encode()) * best - 0.1
        # Nine digits distinguish any two float32 numbers and, unlike seventeen, survive a tokenizer.json.
        vocabulary.append((text, float(f"{score:.9g}")))
    tokenizer = Tokenizer(models.Unigram(vocabulary, unknown, spm.byte_fallback))
    tokenizer.normalizer = unigram_normalizer(spm, do_lower_case, split_by_punct)
    has_prefix = spm.add_dummy_prefix if add_prefix_space is None else add_prefix_space
    scheme = "always" if has_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if spm.byte_fallback:
        # "<0x41>" in a text is six characters, not the byte piece of that name
        literal = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, literal])
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), tokenizer.decoder])
    return tokenizer, vocabulary[unknown][0]


def build_byte_bpe(vocab_path: str, merges_path: str, add_prefix_space: bool) -> Tokenizer:
    """Return a `Tokenizer` made from `vocab.json` and `merges.txt`; offsets of a word include the space before it."""
    tokenizer = Tokenizer(models.BPE.from_file(vocab_path, merges_path))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@contextmanager
def damage_as_value_error(name: Any) -> Iterator[None]:
    """Raise a ValueError that names the folder if its tokenizer files are damaged."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, ERRORS_OF_DAMAGE):
            raise
        raise ValueError(
            f"the tokenizer files of {name} cannot be read ({type(error).__name__}: {error}); save the tokenizer again"
        ) from error


def check_number_of_labels(config_file: Path) -> None:
    """Raise a ValueError for an absurd number of labels, which AutoTokenizer would list one by one."""
    if config_file.is_file():
        labels = json.loads(config_file.read_text(encoding="utf-8")).get("num_labels")
        if isinstance(labels, int) and labels > MAX_LABELS:
            raise ValueError(f"{config_file} has num_labels {labels}, and the largest accepted is {MAX_LABELS}")


def find_byte_level(tokenizer: Tokenizer) -> pre_tokenizers.ByteLevel | None:
    """Return the pre-tokenizer that splits words in v1, or None for v2 and v3."""
    pre_tokenizer = tokenizer.pre_tokenizer
    steps: Any = pre_tokenizer if isinstance(pre_tokenizer, pre_tokenizers.Sequence) else [pre_tokenizer]
    return next((step for step in steps if isinstance(step, pre_tokenizers.ByteLevel)), None)


class HfDebertaTokenizer(TokenizersBackend):
    """Tokenizer of DeBERTa v1, v2 and v3. A pair is `[CLS] A [SEP] B [SEP]` with token types 0 and 1.

    >>> tokenizer = HfDebertaTokenizer.from_pretrained("microsoft/deberta-v3-base")
    >>> tokenizer("A man eats.", "Someone eats.")["token_type_ids"]
    [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    >>> HfDebertaTokenizer(vocab_file="spm.model")  # v2, v3
    >>> HfDebertaTokenizer(vocab_file="vocab.json", merges_file="merges.txt")  # v1
    >>> HfDebertaTokenizer.from_pretrained("microsoft/deberta-base", add_prefix_space=True)  # NER

    A folder written by `save_pretrained` gives the same encodings without this class: with `AutoTokenizer` in
    Transformers 5, and with `PreTrainedTokenizerFast` in Transformers 4.

    Args:
        vocab_file: path of `spm.model`, or of `vocab.json` together with `merges_file`.
        merges_file: path of `merges.txt` (v1).
        tokenizer_file: path of a `tokenizer.json`; takes precedence over the files above.
        tokenizer_object: a `tokenizers.Tokenizer`, which is copied; takes precedence over every file.
        do_lower_case: lowercase the text. Only for `spm.model`.
        split_by_punct: split the text at punctuation marks, so that no piece contains one. Only for `spm.model`.
        add_prefix_space: encode the first word as if a space preceded it. None keeps the setting of the files, which
            is False in v1; v1 needs True to encode lists of words.
        vocab_json_file: path of `vocab.json`, as `from_pretrained` passes it.
        kwargs: arguments of every tokenizer in Transformers: `mask_token`, `model_max_length`, ...
    """

    vocab_files_names = {
        "vocab_file": "spm.model",
        "vocab_json_file": "vocab.json",
        "merges_file": "merges.txt",
        "tokenizer_file": "tokenizer.json",
    }
    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    padding_side = "right"
    _tokenizer: Any  # a Tokenizer

    def __init__(
        self,
        vocab_file: str | None = None,
        merges_file: str | None = None,
        tokenizer_file: str | None = None,
        tokenizer_object: Tokenizer | None = None,
        do_lower_case: bool = False,
        split_by_punct: bool = False,
        add_prefix_space: bool | None = None,
        vocab_json_file: str | None = None,
        **kwargs: Any,
    ) -> None:
        if vocab_file and vocab_file.endswith(".json"):
            vocab_file, vocab_json_file = None, vocab_file
        defaults: dict[str, Any] = {**SPECIAL_TOKENS, "model_input_names": self.model_input_names}
        if tokenizer_object is not None:
            self._tokenizer = copy.deepcopy(tokenizer_object)
        elif tokenizer_file:
            self._tokenizer = Tokenizer.from_file(tokenizer_file)
        elif vocab_file:
            self._tokenizer, defaults["unk_token"] = build_unigram(
                vocab_file, do_lower_case, split_by_punct, add_prefix_space
            )
        elif vocab_json_file and merges_file:
            self._tokenizer = build_byte_bpe(vocab_json_file, merges_file, bool(add_prefix_space))
            mask = kwargs.get("mask_token", defaults["mask_token"])
            if isinstance(mask, str):  # it replaces a word and the space before it
                kwargs["mask_token"] = AddedToken(mask, lstrip=True, normalized=True, special=True)
        else:
            raise ValueError(
                f"no tokenizer file in {kwargs.get('name_or_path') or 'the arguments'}; HfDebertaTokenizer reads "
                "tokenizer.json, spm.model (v2, v3), or vocab.json with merges.txt (v1)"
            )

        self.do_lower_case, self.split_by_punct = do_lower_case, split_by_punct
        self._warn_about_ignored_options()
        byte_level = find_byte_level(self._tokenizer)
        if byte_level is not None and add_prefix_space is not None:
            byte_level.add_prefix_space = add_prefix_space
        needs_template = self._tokenizer.post_processor is None
        for name in ("add_bos_token", "add_eos_token"):
            kwargs.pop(name, None)  # Transformers 4 saved False for v1, which would remove [CLS] and [SEP] here
        super().__init__(
            do_lower_case=do_lower_case,
            split_by_punct=split_by_punct,
            add_prefix_space=add_prefix_space is not False if byte_level is None else byte_level.add_prefix_space,
            **{**defaults, **kwargs},
        )
        if needs_template:
            self._set_pair_template()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers; damaged files are a ValueError."""
        with damage_as_value_error(pretrained_model_name_or_path):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments unchanged; Transformers would reduce the files to their vocabulary."""
        return kwargs

    def _warn_about_ignored_options(self) -> None:
        """Warn if the tokenizer that was read does not do what an option requests."""
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        text = normalizer.normalize_str("A,B") if normalizer is not None else "A,B"
        words = pre_tokenizer.pre_tokenize_str(text) if pre_tokenizer is not None else [text]
        is_ignored = {
            "do_lower_case": self.do_lower_case and text != text.lower(),
            "split_by_punct": self.split_by_punct and len(words) < 3,
        }
        for option in filter(is_ignored.get, is_ignored):
            logger.warning(
                f"{option}=True has no effect on DeBERTa v1, nor on a tokenizer.json that was saved without it; use "
                f'HfDebertaTokenizer(vocab_file="spm.model", {option}=True)'
            )

    def _set_pair_template(self) -> None:
        cls, sep = self.cls_token, self.sep_token
        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, self.cls_token_id), (sep, self.sep_token_id)],
        )

    def _encode_plus(self, *args: Any, **kwargs: Any) -> BatchEncoding:
        if kwargs.get("is_split_into_words") and find_byte_level(self._tokenizer) and not self.add_prefix_space:
            raise ValueError(
                "is_split_into_words=True needs add_prefix_space=True in DeBERTa v1, where a word contains the space "
                "before it; load the tokenizer with from_pretrained(..., add_prefix_space=True)"
            )
        return super()._encode_plus(*args, **kwargs)


def load_tokenizer(name: str, trust_remote_code: bool = False, **loading: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint, with `HfDebertaTokenizer` in place of Transformers' DeBERTa tokenizers.

    Args:
        trust_remote_code: allow code beside the tokenizer to run. False refuses it, where AutoTokenizer would ask.
    """
    with damage_as_value_error(name):
        check_number_of_labels(Path(name) / "config.json")
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **loading)
    if isinstance(tokenizer, DebertaTokenizer | DebertaV2Tokenizer):
        return HfDebertaTokenizer.from_pretrained(name, trust_remote_code=False, **loading)
    return tokenizer
