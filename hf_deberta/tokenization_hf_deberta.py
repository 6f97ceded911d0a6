"""Tokenizer of DeBERTa v1 (byte-level BPE) and of v2 and v3 (SentencePiece Unigram), as released.

The rules come from the first of these that is there:

1. `tokenizer.json`, obeyed as it is, normalizer and post-processor included: whoever saved it has
   trained with it, so it wins over an `spm.model` beside it. It cannot show whether a faulty class
   wrote it; `from_pretrained(name, tokenizer_file="")` leaves it aside for the original files.
2. `spm.model` (v2, v3): pieces, scores, byte fallback and normalization table of that file. Neither
   sentencepiece nor protobuf is needed to read it.
3. `vocab.json` with `merges.txt` (v1): GPT-2's byte-level BPE, special token ids as listed there.
"""

import copy
import struct
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, NoReturn

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
UNIGRAM = 1  # kind of model in an spm.model
NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4  # kinds of piece in it
PUNCTUATION = r"[\p{P}$+<=>^`|~]"  # with the ASCII symbols, as in BERT
BREAK = "\x01"  # a control character, which SentencePiece's nmt tables delete


class UnigramFile(NamedTuple):
    """What an `spm.model` says: its pieces as (text, score, kind), and how text is prepared."""

    pieces: list[tuple[str, float, int]]
    byte_fallback: bool
    normalization_table: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def protobuf_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a serialized message; nested messages stay bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"unknown wire type {wire} at byte {at}")
        size = varint() if wire == 2 else 8 if wire == 1 else 4
        if at + size > len(message):
            raise ValueError(f"it ends {at + size - len(message)} bytes early")
        yield key >> 3, message[at : at + size]
        at += size


def read_unigram_file(path: str) -> UnigramFile:
    """Read an `spm.model`, or say in one sentence why it is not a SentencePiece Unigram model."""
    with open(path, "rb") as file:
        content = file.read()
    pieces, specs = [], {}
    try:
        for number, value in protobuf_fields(content):
            if number == 1:
                piece = dict(protobuf_fields(value))
                (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
                pieces.append((piece[1].decode(), score, piece.get(3, NORMAL)))
            elif number in (2, 3):
                specs[number] = dict(protobuf_fields(value))
        # The specs follow the pieces: a file cut between two fields has lost them.
        trainer, normalizer = specs[2], specs[3]
        table = normalizer.get(2, b"")
        if table:
            normalizers.Precompiled(table)
    except Exception as error:  # garbage can fail anywhere, and tokenizers raises bare Exception
        raise ValueError(
            f"{path} ({len(content)} bytes) is not a whole SentencePiece model "
            f"({type(error).__name__}: {error}): download it again, with `git lfs pull` if it is a "
            "Git LFS pointer."
        ) from error
    if (kind := trainer.get(3, UNIGRAM)) != UNIGRAM:
        name = {2: "BPE", 3: "word", 4: "character"}.get(kind, f"type {kind}")
        raise ValueError(
            f"{path} must be a SentencePiece Unigram model, as in DeBERTa v2 and v3, and is a "
            f"{name} model: train it with model_type='unigram', or convert it to a tokenizer.json."
        )
    return UnigramFile(
        pieces,
        byte_fallback=bool(trainer.get(35, 0)),
        normalization_table=table,
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def table_steps(table: normalizers.Precompiled) -> list[normalizers.Normalizer]:
    """The normalization table, and what it takes for `Precompiled` to apply it to accents.

    SentencePiece replaces the longest match. `Precompiled` looks up a character together with the
    accents on it, but takes the shortest match for the whole of that: of "ệ" in three code points
    it keeps "ẹ". So accents are composed first (NFC, the identity on most text), those left over
    are set apart, and what the table itself has taken apart is composed afterwards.
    """
    if table.normalize_str("e\u0301") != "\u00e9":
        return [table]
    # Not before the first character: `tokenizers` loses count of offsets there.
    accents = Regex("(?<=[\\s\\S])(?=[\\p{M}\u200c\u200d])")
    apart = [normalizers.Replace(accents, BREAK)] if table.normalize_str(BREAK) == "" else []
    return [normalizers.NFC(), *apart, table, normalizers.NFC()]


def unigram_normalizer(spm: UnigramFile, do_lower_case: bool, split_by_punct: bool) -> normalizers.Sequence:
    """SentencePiece's own order: the table first, then the spaces, since the table makes some."""
    steps = [normalizers.Lowercase()] if do_lower_case else []
    if split_by_punct:
        # The authors encode each stretch between punctuation marks alone, so each is stripped and
        # gets a dummy prefix: the same as a space on both sides of every mark.
        sides = f"(?<={PUNCTUATION})(?=[\\s\\S])|(?<=[\\s\\S])(?={PUNCTUATION})"
        steps.append(normalizers.Replace(Regex(sides), " "))
    if spm.normalization_table:
        steps += table_steps(normalizers.Precompiled(spm.normalization_table))
    if spm.remove_extra_whitespaces:
        # Not `Strip`, which takes more than spaces away, and not ^ and $, which mean lines here.
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r"(?<![\s\S]) | (?![\s\S])"), ""))
    return normalizers.Sequence(steps)


def build_unigram(
    path: str, do_lower_case: bool, split_by_punct: bool, add_prefix_space: bool | None
) -> tuple[Tokenizer, str]:
    """Turn an `spm.model` into a `Tokenizer`; return its unknown piece beside it.

    >>> tokenizer, unknown = build_unigram("spm.model", False, False, None)
    >>> tokenizer.encode("ﬁnd out…").tokens
    ['▁find', '▁out', '...']
    """
    spm = read_unigram_file(path)
    kinds = [kind for _, _, kind in spm.pieces]
    if UNKNOWN not in kinds:
        raise ValueError(f"{path} has no unknown piece: train it with unk_id=3 and unk_piece='[UNK]'.")
    unknown = kinds.index(UNKNOWN)
    best = max((score for _, score, kind in spm.pieces if kind == NORMAL), default=0.0)
    vocabulary = []
    for text, score, kind in spm.pieces:
        if kind == USER_DEFINED:  # outweighs every other way to cut its text, as in SentencePiece
            score = len(text.encode()) * best - 0.1
        # Nine digits tell any two float32 apart and, unlike seventeen, survive a tokenizer.json.
        vocabulary.append((text, float(f"{score:.9g}")))
    tokenizer = Tokenizer(models.Unigram(vocabulary, unknown, spm.byte_fallback))
    tokenizer.normalizer = unigram_normalizer(spm, do_lower_case, split_by_punct)
    has_prefix = spm.add_dummy_prefix if add_prefix_space is None else add_prefix_space
    scheme = "always" if has_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if spm.byte_fallback:
        # "<0x41>" typed in a text is six characters, not the byte piece of that name.
        typed = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, typed])
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), tokenizer.decoder])
    return tokenizer, vocabulary[unknown][0]


def build_byte_bpe(vocab_path: str, merges_path: str, add_prefix_space: bool) -> Tokenizer:
    """Turn `vocab.json` and `merges.txt` into a `Tokenizer`. Offsets include a word's space."""
    try:
        tokenizer = Tokenizer(models.BPE.from_file(vocab_path, merges_path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{vocab_path} and {merges_path} do not make a BPE ({error}): download both again.") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def read_tokenizer_json(path: str) -> Tokenizer:
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path} is not a readable tokenizer.json ({error}): save it again.") from error


def byte_level_step(tokenizer: Tokenizer) -> pre_tokenizers.ByteLevel | None:
    """What splits words in v1; None in v2 and v3."""
    step = tokenizer.pre_tokenizer
    steps = step if isinstance(step, pre_tokenizers.Sequence) else [step]
    return next((step for step in steps if isinstance(step, pre_tokenizers.ByteLevel)), None)


class HfDebertaTokenizer(TokenizersBackend):
    """Tokenizer of every DeBERTa, v1 to v3. A pair is `[CLS] A [SEP] B [SEP]`, token types 0 and 1.

    >>> tokenizer = HfDebertaTokenizer.from_pretrained("microsoft/deberta-v3-base")
    >>> tokenizer("A man eats.", "Someone eats.")["token_type_ids"]
    [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    >>> HfDebertaTokenizer(vocab_file="spm.model")  # v2, v3
    >>> HfDebertaTokenizer(vocab_file="vocab.json", merges_file="merges.txt")  # v1
    >>> HfDebertaTokenizer.from_pretrained("microsoft/deberta-base", add_prefix_space=True)  # NER

    `save_pretrained` writes files from which `AutoTokenizer` of plain Transformers 5 gives the same
    encodings without this class, and Transformers 4 does with `PreTrainedTokenizerFast`.

    Args:
        vocab_file: `spm.model`, or `vocab.json` with `merges_file`.
        merges_file: `merges.txt` of v1.
        tokenizer_file: a `tokenizer.json`; wins over the two above.
        tokenizer_object: a `tokenizers.Tokenizer`; is copied, and wins over every file.
        do_lower_case: lower-case the text. Like the next, for `spm.model` only: v1 has neither.
        split_by_punct: let no piece span a punctuation mark.
        add_prefix_space: encode the first word as if a space came before it. None leaves it to the
            files, which for v1 means no; v1 needs True to encode lists of words.
        vocab_json_file: `vocab.json` where `vocab_file` is taken, as in `from_pretrained`.
        kwargs: `mask_token`, `model_max_length` and whatever else tokenizers of Transformers take.
    """

    vocab_files_names: ClassVar = {
        "vocab_file": "spm.model",
        "vocab_json_file": "vocab.json",
        "merges_file": "merges.txt",
        "tokenizer_file": "tokenizer.json",
    }
    model_input_names: ClassVar = ["input_ids", "token_type_ids", "attention_mask"]
    padding_side = "right"

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
        **kwargs,
    ) -> None:
        if vocab_file and vocab_file.endswith(".json"):
            vocab_file, vocab_json_file = None, vocab_file
        defaults = {**SPECIAL_TOKENS, "model_input_names": self.model_input_names}
        if tokenizer_object is not None:
            self._tokenizer = copy.deepcopy(tokenizer_object)
        elif tokenizer_file:
            self._tokenizer = read_tokenizer_json(tokenizer_file)
        elif vocab_file:
            self._tokenizer, defaults["unk_token"] = build_unigram(
                vocab_file, do_lower_case, split_by_punct, add_prefix_space
            )
        elif vocab_json_file and merges_file:
            self._tokenizer = build_byte_bpe(vocab_json_file, merges_file, bool(add_prefix_space))
            mask = kwargs.get("mask_token", defaults["mask_token"])
            if isinstance(mask, str):  # it stands for a word and for the space before it
                kwargs["mask_token"] = AddedToken(mask, lstrip=True, normalized=True, special=True)
        else:
            self._raise_no_files(kwargs.get("name_or_path"), vocab_json_file, merges_file)

        self.do_lower_case, self.split_by_punct = do_lower_case, split_by_punct
        self._warn_of_options_without_effect()
        words = byte_level_step(self._tokenizer)
        if words is not None and add_prefix_space is not None:
            words.add_prefix_space = add_prefix_space
        needs_template = self._tokenizer.post_processor is None
        for name in ("add_bos_token", "add_eos_token"):
            # Saved for v1 by Transformers 4; here they would take [CLS] and [SEP] off every text.
            kwargs.pop(name, None)
        super().__init__(
            do_lower_case=do_lower_case,
            split_by_punct=split_by_punct,
            add_prefix_space=add_prefix_space is not False if words is None else words.add_prefix_space,
            **{**defaults, **kwargs},
        )
        if needs_template:
            self._set_pair_template()

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs) -> dict[str, Any]:
        """Leave the files to `__init__`: Transformers would keep no more than the vocabulary of them."""
        return kwargs

    @staticmethod
    def _raise_no_files(folder: str | None, vocab_json_file: str | None, merges_file: str | None) -> NoReturn:
        place = f"in {folder}" if folder else "among the arguments"
        if vocab_json_file or merges_file:
            names = ("vocab.json", "merges.txt")
            found, missing = names if vocab_json_file else reversed(names)
            raise ValueError(f"DeBERTa v1 needs {missing} beside {found}, and {place} there is none.")
        raise ValueError(
            f"No tokenizer file {place}: HfDebertaTokenizer looks for tokenizer.json, then "
            "spm.model (v2, v3), then vocab.json with merges.txt (v1)."
        )

    def _warn_of_options_without_effect(self) -> None:
        """A tokenizer that is obeyed as it is may not do what an option asks for."""
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        text = normalizer.normalize_str("A,B") if normalizer is not None else "A,B"
        words = pre_tokenizer.pre_tokenize_str(text) if pre_tokenizer is not None else [text]
        without_effect = {
            "do_lower_case": self.do_lower_case and text != text.lower(),
            "split_by_punct": self.split_by_punct and len(words) < 3,
        }
        for option in (name for name, is_so in without_effect.items() if is_so):
            logger.warning(
                f"{option}=True has no effect on a tokenizer.json that does not do it, nor on "
                f'DeBERTa v1: use HfDebertaTokenizer(vocab_file="spm.model", {option}=True).'
            )

    def _set_pair_template(self) -> None:
        cls, sep = self.cls_token, self.sep_token
        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, self.cls_token_id), (sep, self.sep_token_id)],
        )

    def _encode_plus(self, *args, is_split_into_words: bool = False, **kwargs) -> BatchEncoding:
        if is_split_into_words and byte_level_step(self._tokenizer) and not self.add_prefix_space:
            raise ValueError(
                "is_split_into_words=True needs add_prefix_space=True in DeBERTa v1, where a space "
                "belongs to the word after it: use from_pretrained(..., add_prefix_space=True)."
            )
        return super()._encode_plus(*args, is_split_into_words=is_split_into_words, **kwargs)


def load_tokenizer(name: str, **loading) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint; in place of Transformers' own for DeBERTa, the one with the original rules."""
    tokenizer = AutoTokenizer.from_pretrained(name, **loading)
    if isinstance(tokenizer, DebertaTokenizer | DebertaV2Tokenizer):
        return HfDebertaTokenizer.from_pretrained(name, **loading)
    return tokenizer
