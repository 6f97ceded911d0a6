"""HfDebertaTokenizer against sentencepiece itself, and against plain Transformers without the plugin."""

import copy
import functools
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizer_files import write_spm
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from hf_deberta import HfDebertaTokenizer
from hf_deberta.tokenization_hf_deberta import load_tokenizer

# ruff: noqa: RUF001 (similar characters are tested)

try:
    import sentencepiece
except ImportError:
    sentencepiece = None

needs_sentencepiece = pytest.mark.skipif(sentencepiece is None, reason="needs `pip install sentencepiece`")

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "A man eats; someone is eating food (or drinking) near the old café — “quietly”…",
    "In 1998, 42% of the voters said: we don't know what to find out or whom to ask!",
    "naïve façade déjà vu Zürich Ångström, find the difficult file in the office",
    "word words wording worded reword, play plays playing played replay [in brackets]",
]
UNUSUAL = {
    "empty": "",
    "spaces only": "   ",
    "newline only": "\n",
    "inner and outer spaces": "  many   spaces  here ",
    "tab, newline, carriage return": "a\tb\nc\r\nd",
    "trailing newline": "the end\n",
    "ligatures": "ﬁnd the diﬃcult ﬁle in the oﬃce",
    "full width": "Ｆｉｎｄ ｏｕｔ，４２％！",
    "no-break space": "the\u00a0old\u00a0café",
    "zero-width space inside": "zero\u200bwidth",
    "zero-width space at the ends": "\u200bthe\u200b",
    "ellipsis": "eats… quietly …",
    "byte order mark": "\ufeffThe fox",
    "soft hyphen": "dif\u00adficult",
    "decomposed accent": "cafe\u0301 Zu\u0308rich A\u030angstro\u0308m",
    "two accents on one letter": "Vie\u0323\u0302t Nam o\u031b\u0300",
    "accent on a no-break space": "a\u00a0\u0301b",
    "accent first": "\u0301a",
    "Hangul letters": "\u1103\u1161\u11b0 \u1100\u1161\u11af\u1107\u1175",
    "half-width Katakana": "ｶﾞｷﾞﾊﾟ",
    "Devanagari": "हिन्दी में क़लम",
    "Bengali vowel in two parts": "\u0995\u09c7\u09be",
    "Hebrew points": "שָׁלוֹם",
    "fractions and circled digits": "½ ① x² ™",
    "emoji sequence": "👩\u200d👩\u200d👧 ☕\ufe0f 🇩🇪",
    "control characters": "a\x00b\x01c\x1b[0m\x7f",
    "next line at the ends": "\x85the\x85",
    "line separator": "the\u2028fox",
    "ideographic space": "the\u3000fox",
    "lower block": "▁the▁fox",
    "typed byte piece": "<0x41> <0xZZ> <0x0A>",
    "typed bracket": "[CLS of [in brackets]",
    "accents out of order": "e\u0302\u0323 e\u0323\u0302 \u05e9\u05bc\u05b2",
    "composed in part": "\u00ea\u0301 \u1ecd\u0302 \uac00\u11a8",
    "accent on a variant": "\uff45\u0302\u0301 \u24d4\u0301 \u30ff\u3099 \uff76\uff9e",
    "accent after a control character": "e\u009f\u0301",
    "jamo": "\u1112\u1161\u11ab\u3131\u3163",
    "outside the basic plane": "𝐀𝐁 \U0010ffff",
    "right-to-left mark": "\u202eRTL\u202c",
    "unknown letters": "ж日本",
    "marks of our normalizer": "\ufdd0a \ufdd1\u0301e \ufdd2\ufdd0\ufdd2\ufdd1 e\u0302\ufdd0\u0301\ufdd1",
}
PLAIN = {"english": CORPUS[0], "pieces across words": " ".join(CORPUS), "numbers": "In 1998, 42%"}
TEXTS = {**PLAIN, **UNUSUAL}
BATCH = [*TEXTS.values(), "the [MASK] eats", "the[MASK].", "[UNK] fox", "Don't PLAY, ok?"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Return a folder with checkpoints like the released ones: `v1`, and `v3` with an `spm.model` only."""
    root = tmp_path_factory.mktemp("released")
    write_v1(root / "v1")
    if sentencepiece is not None:
        write_spm(root / "v3", CORPUS)
        write_spm(root / "v3-bytes", CORPUS, byte_fallback=True, vocab_size=520)
    return root


def write_v1(folder: Path) -> Path:
    folder.mkdir()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS * 9, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    bpe.model.save(str(folder))
    pieces = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    order = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *sorted(pieces, key=pieces.get), "[MASK]"]
    write_json(folder / "vocab.json", {piece: number for number, piece in enumerate(order)})
    write_json(folder / "tokenizer_config.json", {"do_lower_case": False, "vocab_type": "gpt2", "add_bos_token": False})
    return folder


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def encode(tokenizer) -> list:
    """Return, as JSON, everything in which two tokenizers must agree."""
    options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    single = tokenizer(BATCH, **options)
    pairs = tokenizer(BATCH, BATCH[::-1], padding=True, truncation=True, max_length=24, **options)
    facts = [dict(single), dict(pairs), tokenizer.batch_decode(single["input_ids"])]
    facts += [tokenizer.batch_decode(single["input_ids"], skip_special_tokens=True)]
    facts += [tokenizer.mask_token_id, tokenizer.special_tokens_map, len(tokenizer), tokenizer.padding_side]
    facts += [tokenizer.model_max_length, sorted(tokenizer.model_input_names), single.word_ids(1)]
    return json.loads(json.dumps(facts))


def oracle(folder: Path) -> "sentencepiece.SentencePieceProcessor":
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))


@needs_sentencepiece
class TestAgainstSentencePiece:
    @pytest.mark.parametrize("name", ["v3", "v3-bytes"])
    @pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
    def test_ids_and_text_are_those_of_sentencepiece(self, folders, name, text):
        tokenizer, spm = cached(folders / name), oracle(folders / name)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == [spm.id_to_piece(i) for i in spm.encode(text)]
        assert ids == spm.encode(text)
        if tokenizer.unk_token_id not in ids:
            assert tokenizer.decode(ids) == spm.decode(ids)

    def test_special_ids_are_the_released_ones_and_mask_follows_the_last_piece(self, folders):
        tokenizer, size = cached(folders / "v3"), oracle(folders / "v3").get_piece_size()
        assert tokenizer.convert_tokens_to_ids(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]) == [0, 1, 2, 3, size]
        assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("[CLS]", "[SEP]", size + 1)

    @pytest.mark.parametrize("text", ["a,b", "Hello , world!", "wait…what", "(x)", "“a” $b", "don't"])
    def test_split_by_punct_encodes_each_stretch_alone(self, folders, text):
        tokenizer = HfDebertaTokenizer.from_pretrained(folders / "v3", split_by_punct=True)
        marked = "".join(f"\0{c}\0" if not c.isalnum() and not c.isspace() else c for c in text)
        expected = [i for stretch in marked.split("\0") for i in oracle(folders / "v3").encode(stretch)]
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected

    def test_do_lower_case_from_the_config_file(self, folders, tmp_path):
        folder = copy_folder(folders / "v3", tmp_path / "lower", {"do_lower_case": True})
        for text in TEXTS.values():
            ids = cached(folder)(text, add_special_tokens=False)["input_ids"]
            assert ids == oracle(folder).encode(text.lower()), text

    @pytest.mark.parametrize(
        "options",
        [
            {"normalization_rule_name": "identity"},
            {"normalization_rule_name": "nfkc"},
            {"normalization_rule_name": "nmt_nfkc_cf"},
            {"add_dummy_prefix": False},
            {"user_defined_symbols": ["(", "over"]},
            {"unk_piece": "<unk>"},
        ],
        ids=str,
    )
    def test_other_spm_settings_are_followed(self, tmp_path, options):
        folder = write_spm(tmp_path / "other", CORPUS, **options)
        tokenizer, spm = cached(folder), oracle(folder)
        for text in [*PLAIN.values(), "ﬁnd  (over) THE fox", "cafe\u0301", " the\u00a0end "]:
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == spm.encode(text), text
        assert tokenizer.unk_token_id == spm.unk_id()

    def test_offsets_point_at_the_text_before_normalization(self, folders):
        text = "Oﬃce  cafe\u0301… (find)"
        encoding = cached(folders / "v3-bytes")(text, return_offsets_mapping=True)
        words: dict[int, list[int]] = {}
        for word, (start, end) in zip(encoding.word_ids(), encoding["offset_mapping"], strict=True):
            if word is not None:
                words.setdefault(word, []).extend((start, end))
        assert [text[min(at) : max(at)].strip() for at in words.values()] == ["Oﬃce", "cafe\u0301…", "(find)"]

    @pytest.mark.parametrize("first", ["\x05", "\x7f\x01 ", "\ufeff", "\n\x1f"])
    def test_offsets_after_characters_that_the_normalization_removes(self, folders, first):
        text = f"{first}find out"
        offsets = cached(folders / "v3")(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
        assert "".join(text[start:end] for start, end in offsets).lstrip() == "find out"

    def test_reads_without_sentencepiece_and_protobuf(self, folders, monkeypatch):
        for name in ("sentencepiece", "google.protobuf"):
            monkeypatch.setitem(sys.modules, name, None)
        assert HfDebertaTokenizer.from_pretrained(folders / "v3")("find out")["input_ids"][0] == 1


def copy_folder(source: Path, target: Path, config: dict) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    write_json(target / "tokenizer_config.json", config)
    return target


@functools.cache
def cached(folder: Path) -> HfDebertaTokenizer:
    return HfDebertaTokenizer.from_pretrained(folder)


class TestVersion1:
    def test_ids_come_from_the_vocabulary(self, folders):
        tokenizer = cached(folders / "v1")
        vocabulary = json.loads((folders / "v1" / "vocab.json").read_text(encoding="utf-8"))
        tokens = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
        assert tokenizer.convert_tokens_to_ids(tokens) == [vocabulary[token] for token in tokens]
        assert len(tokenizer) == len(vocabulary)

    def test_mask_includes_the_space_before_it(self, folders):
        encoding = cached(folders / "v1")("a [MASK] fox", return_offsets_mapping=True)
        assert encoding.tokens() == ["[CLS]", "a", " [MASK]", "Ġfox", "[SEP]"]
        assert encoding["offset_mapping"][1:-1] == [(0, 1), (1, 8), (8, 12)]

    def test_decode_gives_the_text_back(self, folders):
        tokenizer = cached(folders / "v1")
        for text in TEXTS.values():
            assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text

    def test_words_need_a_prefix_space(self, folders, tmp_path):
        with pytest.raises(ValueError, match=r"needs add_prefix_space=True"):
            cached(folders / "v1")(["the", "fox"], is_split_into_words=True)
        tokenizer = HfDebertaTokenizer.from_pretrained(folders / "v1", add_prefix_space=True)
        encoding = tokenizer(["the", "fox", "doesn't"], is_split_into_words=True)
        assert encoding.tokens()[1:3] == ["Ġthe", "Ġfox"]
        assert list(dict.fromkeys(encoding.word_ids())) == [None, 0, 1, 2]
        # It also applies to a tokenizer.json that was saved without it, and through AutoTokenizer.
        cached(folders / "v1").save_pretrained(tmp_path)
        again = AutoTokenizer.from_pretrained(tmp_path, add_prefix_space=True)
        assert again(["the", "fox"], is_split_into_words=True).tokens()[1:3] == ["Ġthe", "Ġfox"]


def released(folders: Path, name: str) -> HfDebertaTokenizer:
    if name != "v1" and sentencepiece is None:
        pytest.skip("needs `pip install sentencepiece`")
    return cached(folders / name)


@pytest.mark.parametrize("name", ["v1", "v3", "v3-bytes"])
class TestEveryVersion:
    def test_two_round_trips_change_nothing(self, folders, tmp_path, name):
        first = released(folders, name)
        first.save_pretrained(tmp_path / "1")
        second = HfDebertaTokenizer.from_pretrained(tmp_path / "1")
        second.save_pretrained(tmp_path / "2")
        third = HfDebertaTokenizer.from_pretrained(tmp_path / "2")
        assert encode(first) == encode(second) == encode(third)
        assert (tmp_path / "1/tokenizer.json").read_text() == (tmp_path / "2/tokenizer.json").read_text()

    def test_auto_tokenizer_finds_it_by_model_type(self, folders, tmp_path, name):
        expected = released(folders, name)
        folder = copy_folder(folders / name, tmp_path / "auto", {"do_lower_case": False})
        write_json(folder / "config.json", {"model_type": "hf_deberta"})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert isinstance(tokenizer, HfDebertaTokenizer)
        assert encode(tokenizer) == encode(expected)

    def test_pair_template_types_and_padding(self, folders, name):
        tokenizer = released(folders, name)
        batch = tokenizer(["the fox", "the"], ["dog", "the lazy dog"], padding=True)
        for ids, types, mask in zip(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], strict=True):
            length = sum(mask)
            first = ids.index(tokenizer.sep_token_id) + 1
            assert ids[0] == tokenizer.cls_token_id and ids[length - 1] == tokenizer.sep_token_id
            assert ids.count(tokenizer.sep_token_id) == 2
            assert ids[length:] == [tokenizer.pad_token_id] * (len(ids) - length)
            assert types[:length] == [0] * first + [1] * (length - first)

    def test_pickle_and_tokenizer_object(self, folders, name):
        tokenizer = released(folders, name)
        expected = encode(tokenizer)
        assert encode(pickle.loads(pickle.dumps(tokenizer))) == expected
        wrapped = HfDebertaTokenizer(tokenizer_object=tokenizer.backend_tokenizer)
        assert encode(wrapped) == expected
        wrapped.add_tokens(["<only here>"])
        assert "<only here>" not in tokenizer.get_vocab()

    def test_train_new_from_iterator_keeps_the_rules(self, folders, tmp_path, name):
        trained = released(folders, name).train_new_from_iterator([CORPUS] * 20, 300, show_progress=False)
        assert isinstance(trained, HfDebertaTokenizer)
        encoding = trained("Oﬃce", "the dog")
        assert (encoding.tokens()[0], encoding.tokens()[-1], encoding["token_type_ids"][-1]) == ("[CLS]", "[SEP]", 1)
        assert trained.decode(trained("the lazy dog", add_special_tokens=False)["input_ids"]) == "the lazy dog"
        trained.save_pretrained(tmp_path)
        assert encode(HfDebertaTokenizer.from_pretrained(tmp_path)) == encode(trained)


def test_a_bare_tokenizer_object_gets_the_pair_template():
    bare = Tokenizer(models.Unigram([("[UNK]", 0.0), ("▁", -2.0), ("a", -1.0)], 0, False))
    bare.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = HfDebertaTokenizer(tokenizer_object=bare)
    assert tokenizer("a", "aa").tokens() == ["[CLS]", "▁", "a", "[SEP]", "▁", "a", "a", "[SEP]"]


def test_tokenizer_json_takes_precedence_over_the_original_files(folders, tmp_path):
    folder = copy_folder(folders / "v1", tmp_path / "both", {"add_bos_token": False, "add_eos_token": False})
    other = copy.deepcopy(cached(folders / "v1").backend_tokenizer)
    other.add_tokens(["the fox"])
    other.save(str(folder / "tokenizer.json"))
    assert "the fox" in HfDebertaTokenizer.from_pretrained(folder)("the fox", "b").tokens()
    for original in (
        HfDebertaTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")),
        HfDebertaTokenizer.from_pretrained(folder / "vocab.json", merges_file=str(folder / "merges.txt")),
    ):
        assert "the fox" not in original("the fox").tokens()


@needs_sentencepiece
def test_tokenizer_json_can_be_ignored(folders, tmp_path):
    folder = copy_folder(folders / "v3", tmp_path / "both", {})
    cached(folders / "v1").backend_tokenizer.save(str(folder / "tokenizer.json"))
    assert "Ġfox" in HfDebertaTokenizer.from_pretrained(folder)("the fox").tokens()
    original = HfDebertaTokenizer.from_pretrained(folder, tokenizer_file="")
    assert original("the fox", add_special_tokens=False)["input_ids"] == oracle(folder).encode("the fox")


def test_saved_folders_load_in_plain_transformers(folders, tmp_path):
    """Load all folders in one process that cannot import the plugin, with every kind of config.json."""
    cases = {}
    for name, options, native in [
        ("v1", {}, "deberta"),
        ("v1", {"add_prefix_space": True}, "deberta"),
        ("v3", {}, "deberta-v2"),
        ("v3-bytes", {"do_lower_case": True, "split_by_punct": True}, "deberta-v2"),
    ]:
        if name != "v1" and sentencepiece is None:
            continue
        tokenizer = HfDebertaTokenizer.from_pretrained(folders / name, **options)
        for model_type in (None, "hf_deberta", native):
            folder = tmp_path / str(len(cases))
            tokenizer.save_pretrained(folder)
            if model_type is not None:
                write_json(folder / "config.json", {"model_type": model_type})
            assert sorted(p.name for p in folder.glob("tok*")) == ["tokenizer.json", "tokenizer_config.json"]
            assert type(AutoTokenizer.from_pretrained(folder)) is HfDebertaTokenizer
            cases[str(folder)] = encode(tokenizer)
    write_json(tmp_path / "batch.json", {"BATCH": BATCH, "folders": list(cases)})
    program = f"""
import json, sys
sys.modules["hf_deberta"] = None
{inspect.getsource(encode)}
inputs = json.load(open("batch.json", encoding="utf-8"))
BATCH = inputs["BATCH"]
from transformers import AutoTokenizer
got = {{folder: encode(AutoTokenizer.from_pretrained(folder)) for folder in inputs["folders"]}}
json.dump(got, open("got.json", "w"))
"""
    subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, check=True, timeout=120)
    got = json.loads((tmp_path / "got.json").read_text())
    for folder, expected in cases.items():
        assert got[folder] == expected, folder


class TestBadInput:
    def test_no_files(self, tmp_path):
        with pytest.raises(ValueError, match=r"no tokenizer file in .*tokenizer\.json.*spm\.model.*merges\.txt"):
            HfDebertaTokenizer.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match="arguments"):
            HfDebertaTokenizer()

    def test_broken_merges(self, folders, tmp_path):
        folder = copy_folder(folders / "v1", tmp_path / "broken", {})
        (folder / "merges.txt").write_text("#version: 0.2\nqqq zzz\n")
        with pytest.raises(ValueError, match=r"tokenizer files of .*broken cannot be read \(.*qqq"):
            HfDebertaTokenizer.from_pretrained(folder)

    @pytest.mark.parametrize(
        "content",
        [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", b"\x00" * 64, b"\xff" * 64],
        ids=["empty", "Git LFS pointer", "zeros", "ones"],
    )
    def test_not_an_spm_model(self, tmp_path, content):
        (tmp_path / "spm.model").write_bytes(content)
        with pytest.raises(ValueError, match=r"spm\.model \(\d+ bytes\) .*SentencePiece model"):
            HfDebertaTokenizer.from_pretrained(tmp_path)

    @needs_sentencepiece
    def test_truncated_spm_model(self, folders, tmp_path):
        whole = (folders / "v3" / "spm.model").read_bytes()
        path = tmp_path / "spm.model"
        for length in [*range(1, len(whole), len(whole) // 50), len(whole) - 1]:
            path.write_bytes(whole[:length])
            with pytest.raises(ValueError, match="not a complete SentencePiece model"):
                HfDebertaTokenizer(vocab_file=str(path))

    @needs_sentencepiece
    @pytest.mark.parametrize("model_type, name", [("bpe", "BPE"), ("word", "word"), ("char", "character")])
    def test_not_unigram(self, tmp_path, model_type, name):
        folder = write_spm(tmp_path / model_type, CORPUS, model_type=model_type, vocab_size=120)
        with pytest.raises(ValueError, match=f"SentencePiece Unigram model.* is a {name} model"):
            HfDebertaTokenizer.from_pretrained(folder)

    def test_option_that_tokenizer_json_does_not_have(self, folders, tmp_path, caplog):
        cached(folders / "v1").save_pretrained(tmp_path)
        HfDebertaTokenizer.from_pretrained(tmp_path, do_lower_case=True)
        assert "do_lower_case=True has no effect" in caplog.text


@pytest.mark.parametrize("load", [HfDebertaTokenizer.from_pretrained, load_tokenizer])
@pytest.mark.parametrize(
    "file, text",
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", '{"version": "1.0", "model": {'),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"version": "1.0", "added_tokens": []}'),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "Nope"}}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"mask_token": 5}'),
    ],
)
def test_damaged_files_are_a_value_error(file, text, load, tmp_path):
    vocabulary = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}, "[UNK]"))
    HfDebertaTokenizer(tokenizer_object=vocabulary).save_pretrained(tmp_path)
    HfDebertaTokenizer.from_pretrained(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match="mask_token|tokenizer files of .* cannot be read"):
        load(str(tmp_path))
