"""Tokenizer of DeBERTa v1 (byte-level BPE) and of v2 and v3 (SentencePiece Unigram), as their authors trained with it.

Where the rules come from, first match wins:

1. `tokenizer.json`: obeyed as it is, normalizer and post-processor included. Whoever saved it trained with it, so it wins
   over an `spm.model` beside it. It cannot show whether a faulty class wrote it; to leave it aside, name the original
   file: `HfDebertaTokenizer(vocab_file="folder/spm.model")`.
2. `spm.model` (v2, v3): the pieces, scores, byte fallback and normalization table of that file. Only `tokenizers` reads
   it, so neither sentencepiece nor protobuf has to be installed.
3. `vocab.json` + `merges.txt` (v1): GPT-2's byte-level BPE, with the special token ids that `vocab.json` gives.
"""

import copy
import struct
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

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
from transformers import TokenizersBackend
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
NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4  # kinds of piece in an spm.model
UNIGRAM = 1  # its kind of model
ANY_PUNCTUATION = r"[\p{P}$+<=>^`|~]"  # the ASCII symbols count as punctuation too, as in BERT


class SentencePieceUnigram(NamedTuple):
    """What an `spm.model` says: (text, score, kind) of each piece, and how text is prepared."""

    pieces: list[tuple[str, float, int]]
    byte_fallback: bool
    normalization_table: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def protobuf_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a serialized protobuf message; nested messages stay bytes."""
    at, end = 0, len(message)

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < end:
        key = varint()
        wire_type = key & 7
        if wire_type == 0:
            yield key >> 3, varint()
            continue
        if wire_type not in (1, 2, 5):
            raise ValueError(f"unknown wire type {wire_type}")
        size = varint() if wire_type == 2 else 8 if wire_type == 1 else 4
        if at + size > end:
            raise ValueError(f"the file ends {at + size - end} bytes early")
        yield key >> 3, message[at : at + size]
        at += size


def read_piece(message: bytes) -> tuple[str, float, int]:
    fields = dict(protobuf_fields(message))
    return (
        fields[1].decode(),
        struct.unpack("<f", fields.get(2, bytes(4)))[0],
        fields.get(3, NORMAL),
    )


def read_sentencepiece(path: str) -> SentencePieceUnigram:
    """Read an `spm.model`, or say in one sentence why it is not a SentencePiece Unigram model."""
    pieces, trainer, normalizer = [], None, None
    with open(path, "rb") as file:
        content = file.read()
    try:
        for number, value in protobuf_fields(content):
            if number == 1:
                pieces.append(read_piece(value))
            elif number == 2:
                trainer = dict(protobuf_fields(value))
            elif number == 3:
                normalizer = dict(protobuf_fields(value))
        # The two specs follow the pieces: a file cut between two fields has lost them.
        if not pieces or trainer is None or normalizer is None:
            raise ValueError("its pieces, trainer or normalizer settings are missing")
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(
            f"{path} is not a whole SentencePiece model ({error}; {len(content)} bytes): download it again, "
            "with `git lfs pull` if it is a Git LFS pointer."
        ) from error
    if trainer.get(3, UNIGRAM) != UNIGRAM:
        kind = {2: "BPE", 3: "word", 4: "char"}.get(trainer[3], trainer[3])
        raise ValueError(
            f"{path} must be a SentencePiece Unigram model, as DeBERTa v2 and v3 use, and it is a {kind} model: "
            "train it with model_type='unigram', or convert it to a tokenizer.json."
        )
    return SentencePieceUnigram(
        pieces,
        byte_fallback=bool(trainer.get(35, 0)),
        normalization_table=normalizer.get(2, b""),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def unigram_normalizer(
    spm: SentencePieceUnigram, do_lower_case: bool, split_by_punct: bool
) -> normalizers.Sequence:
    """SentencePiece's own normalization, in its order: table first, spaces after it."""
    steps = [normalizers.Lowercase()] if do_lower_case else []
    if split_by_punct:
        # The authors encode the stretches between punctuation marks one by one. Each stretch is stripped and gets a
        # dummy prefix, which is what a space on both sides of every mark comes to.
        sides = f"(?<={ANY_PUNCTUATION})|(?={ANY_PUNCTUATION})"
        steps.append(normalizers.Replace(Regex(sides), " "))
    if spm.normalization_table:
        table = normalizers.Precompiled(spm.normalization_table)
        # `Precompiled` looks a character up with at most its first accent and drops a second one ("ệ" in three code
        # points becomes "ẹ"); SentencePiece composes all of them. NFC does what is then left undone, and is the
        # identity on text that is composed already. The second one is for what the table itself takes apart (ｶﾞ).
        composes = table.normalize_str("e\u0301") == "\u00e9"
        steps += [normalizers.NFC(), table, normalizers.NFC()] if composes else [table]
    if spm.remove_extra_whitespaces:
        # Not `Strip`, which takes more than the ASCII space away, and not ^ and $, which here mean lines.
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r"(?<![\s\S]) | (?![\s\S])"), ""))
    return normalizers.Sequence(steps)


def build_unigram(
    path: str, do_lower_case: bool, split_by_punct: bool, add_prefix_space: bool | None
) -> tuple[Tokenizer, str]:
    """Turn an `spm.model` into a `Tokenizer`; also return its unknown piece.

    >>> tokenizer, unknown = build_unigram("spm.model", False, False, None)
    >>> tokenizer.encode("ﬁnd out…").tokens
    ['▁find', '▁out', '...']
    """
    spm = read_sentencepiece(path)
    kinds = [kind for _, _, kind in spm.pieces]
    if UNKNOWN not in kinds:
        raise ValueError(
            f"{path} has no unknown piece: train it with an unk_id that is not negative."
        )
    best = max((score for _, score, kind in spm.pieces if kind == NORMAL), default=0.0)
    # A user-defined symbol wins over any other way to cut its text: SentencePiece's score for it depends on its length.
    vocabulary = [
        (text, len(text.encode()) * best - 0.1 if kind == USER_DEFINED else score)
        for text, score, kind in spm.pieces
    ]
    unknown = kinds.index(UNKNOWN)
    tokenizer = Tokenizer(models.Unigram(vocabulary, unknown, spm.byte_fallback))
    tokenizer.normalizer = unigram_normalizer(spm, do_lower_case, split_by_punct)
    prefix = spm.add_dummy_prefix if add_prefix_space is None else add_prefix_space
    scheme = "always" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if spm.byte_fallback:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), tokenizer.decoder])
    return tokenizer, vocabulary[unknown][0]


def build_byte_bpe(vocab_path: str, merges_path: str, add_prefix_space: bool) -> Tokenizer:
    """Turn `vocab.json` and `merges.txt` into a `Tokenizer`, GPT-2's way; offsets keep the space before a word."""
    try:
        model = models.BPE.from_file(vocab_path, merges_path)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(
            f"{vocab_path} and {merges_path} are not a byte-level BPE ({error}): download both again."
        ) from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def read_tokenizer_json(path: str) -> Tokenizer:
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(
            f"{path} is not a tokenizer.json that tokenizers can read: {error}."
        ) from error


def byte_level(tokenizer: Tokenizer) -> pre_tokenizers.ByteLevel | None:
    """The byte-level step of `tokenizer`, the mark of v1; None for v2 and v3."""
    step = tokenizer.pre_tokenizer
    steps = step if isinstance(step, pre_tokenizers.Sequence) else [step]
    return next((step for step in steps if isinstance(step, pre_tokenizers.ByteLevel)), None)


class HfDebertaTokenizer(TokenizersBackend):
    """Tokenizer of every DeBERTa, v1 to v3, from a folder, the Hub, single files or a `tokenizers.Tokenizer`.

    A pair is `[CLS] A [SEP] B [SEP]` with token types 0 and 1.

    >>> tokenizer = HfDebertaTokenizer.from_pretrained("microsoft/deberta-v3-base")
    >>> tokenizer("A man eats.", "Someone eats.")["token_type_ids"]
    [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    >>> HfDebertaTokenizer(vocab_file="spm.model")                              # v2, v3
    >>> HfDebertaTokenizer(vocab_file="vocab.json", merges_file="merges.txt")   # v1
    >>> HfDebertaTokenizer.from_pretrained("microsoft/deberta-base", add_prefix_space=True)   # v1 on lists of words

    `save_pretrained` writes a `tokenizer.json` and a `tokenizer_config.json` from which
    `AutoTokenizer.from_pretrained` of plain Transformers 5 gives the same encodings, without this class.

    Args:
        vocab_file: `spm.model`, or `vocab.json` together with `merges_file`.
        merges_file: `merges.txt` of v1.
        tokenizer_file: a `tokenizer.json`, which wins over the two above.
        tokenizer_object: a `tokenizers.Tokenizer`, which is copied and wins over every file.
        do_lower_case: lower-case first. For `spm.model` only, like `split_by_punct`; the authors' v1 ignores both.
        split_by_punct: never let a piece span a punctuation mark.
        add_prefix_space: encode the first word as if a space came before it. None means what the files say, which
            is no for v1. Set it to True to give v1 lists of words.
        vocab_json_file: name of `vocab.json` inside `from_pretrained`, where `vocab_file` is `spm.model`.
        kwargs: special tokens (`mask_token="[MASK]"`, ...), `model_max_length` and everything else that
            Transformers' tokenizers take.
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
        defaults = dict(SPECIAL_TOKENS)
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
            # The mask stands for a word and for the space before it.
            mask = kwargs.get("mask_token", defaults["mask_token"])
            if isinstance(mask, str):
                kwargs["mask_token"] = AddedToken(mask, lstrip=True, normalized=True, special=True)
        else:
            self._raise_no_files(kwargs.get("name_or_path"), vocab_json_file, merges_file)

        step = byte_level(self._tokenizer)
        if step is not None and add_prefix_space is not None:
            step.add_prefix_space = add_prefix_space
        self.do_lower_case, self.split_by_punct = do_lower_case, split_by_punct
        self._warn_about_ignored_options()
        # Transformers 4 saved these two; here they would replace the post-processor by one without [CLS] and [SEP].
        kwargs.pop("add_bos_token", None)
        kwargs.pop("add_eos_token", None)
        without_template = self._tokenizer.post_processor is None
        kwargs.setdefault(
            "model_input_names", self.model_input_names
        )  # saved, for Transformers without this class
        super().__init__(
            do_lower_case=do_lower_case,
            split_by_punct=split_by_punct,
            add_prefix_space=step.add_prefix_space
            if step is not None
            else add_prefix_space is not False,
            **{**defaults, **kwargs},
        )
        if without_template:
            self._tokenizer.post_processor = self._pair_template()

    @staticmethod
    def _raise_no_files(
        folder: str | None, vocab_json_file: str | None, merges_file: str | None
    ) -> None:
        place = f"in {folder}" if folder else "given"
        if vocab_json_file or merges_file:
            there, missing = (
                ("vocab.json", "merges.txt") if vocab_json_file else ("merges.txt", "vocab.json")
            )
            raise ValueError(
                f"DeBERTa v1 needs vocab.json and merges.txt, and {place} is only {there}: add {missing}."
            )
        raise ValueError(
            f"No tokenizer file {place}: HfDebertaTokenizer looks for tokenizer.json, then spm.model (v2, v3), "
            "then vocab.json with merges.txt (v1)."
        )

    def _warn_about_ignored_options(self) -> None:
        """Say so when a tokenizer that is obeyed as it is does not do what an option asks for."""
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        text = normalizer.normalize_str("A,B") if normalizer is not None else "A,B"
        words = pre_tokenizer.pre_tokenize_str(text) if pre_tokenizer is not None else [text]
        ignored = {
            "do_lower_case": self.do_lower_case and text != text.lower(),
            "split_by_punct": self.split_by_punct and len(words) < 3,
        }
        for option in (name for name, is_ignored in ignored.items() if is_ignored):
            logger.warning(
                f"{option}=True has no effect on tokenizer.json, nor on DeBERTa v1: "
                f'for v2 and v3, give HfDebertaTokenizer(vocab_file="spm.model", {option}=True).'
            )

    def _pair_template(self) -> processors.TemplateProcessing:
        cls, sep = self.cls_token, self.sep_token
        return processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, self.cls_token_id), (sep, self.sep_token_id)],
        )

    def _encode_plus(self, *args, is_split_into_words: bool = False, **kwargs):
        if (
            is_split_into_words
            and byte_level(self._tokenizer) is not None
            and not self.add_prefix_space
        ):
            raise ValueError(
                "DeBERTa v1 needs add_prefix_space=True for is_split_into_words=True, for it tells words apart by the "
                "space before them: load the tokenizer with from_pretrained(..., add_prefix_space=True)."
            )
        return super()._encode_plus(*args, is_split_into_words=is_split_into_words, **kwargs)
