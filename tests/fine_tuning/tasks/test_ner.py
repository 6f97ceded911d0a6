"""Named entities: file formats, one label per word in any windows."""

import random
from itertools import pairwise

import datasets
import pytest
from datasets import Dataset
from transformers import DataCollatorForTokenClassification

from hf_deberta import HfDebertaTokenizer
from hf_deberta.fine_tuning.tasks import ner
from hf_deberta.fine_tuning.tasks.ner import Sentence
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.errors import InputError

CONLL = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter NNP I-NP I-PER

-DOCSTART- -X- O O

Rome NNP I-NP I-LOC
Paris NNP I-NP B-LOC
"""
CONTEXTS = ("none", "merged", "around")
LABELS = ["O", "B-LOC", "I-LOC", "B-MISC", "I-MISC", "B-ORG", "I-ORG", "B-PER", "I-PER"]
TEXTS = ["EU rejects German call", "Peter Blackburn went to Rome and Paris", "unfathomable extraordinarily"] * 20


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request, tmp_path_factory):
    """Tokenizers as in v2 and v3, and in v1, which needs a space before the first word."""
    trained = train_tokenizer(TEXTS, 300 if request.param == "bpe" else 60, request.param)
    folder = tmp_path_factory.mktemp(request.param)
    trained.save_pretrained(folder)
    return HfDebertaTokenizer.from_pretrained(folder, add_prefix_space=True)


def read(folder, text, encoding="utf-8") -> list[Sentence]:
    (folder / "train.txt").write_bytes(text.encode(encoding))
    rows = ner.read_conll(folder / "train.txt")
    return ner.sentences_from_table(rows, tags_column="ner_tags" if "ner_tags" in rows.column_names else None)


def encoded(sentences, tokenizer, length=64, context="none", **options):
    """Encode in batches, as `Dataset.map` does."""
    rows = Dataset.from_list(list(ner.group_sentences(sentences, context)))
    options = {"labels": LABELS, "max_length": length, "context": context, **options}
    return rows.map(
        lambda batch: ner.encode_sentences(batch, tokenizer, **options),
        batched=True,
        batch_size=3,
        remove_columns=rows.column_names,
    )


# 1. Sentences


def test_conll_file(tmp_path):
    sentences = read(tmp_path, CONLL)
    assert [sentence.words for sentence in sentences] == [["EU", "rejects"], ["Peter"], ["Rome", "Paris"]]
    assert [sentence.document for sentence in sentences] == [0, 0, 1]
    assert sentences[2].tags == ["I-LOC", "B-LOC"]
    assert ner.convert_to_iob2(sentences)[2].tags == ["B-LOC", "B-LOC"]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("a\tB-X\nb\tO\n\nc\tO\n", "utf-8"),  # WNUT
        ("\n\na B-X\nb O\n\n\n\nc O", "utf-8"),  # extra blank lines, no newline at the end
        ("a B-X\r\nb O\r\n\r\nc O\r\n", "utf-8-sig"),  # Windows
        ("a  _  B-X\nb  _  O\n \t\nc  _  O\n", "utf-8"),  # several spaces, a line of spaces
    ],
)
def test_variants_of_the_format(tmp_path, text, encoding):
    assert read(tmp_path, text, encoding) == [Sentence(["a", "b"], ["B-X", "O"]), Sentence(["c"], ["O"])]


def test_only_spaces_and_tabs_separate_columns(tmp_path):
    assert read(tmp_path, "10\u00a0000 O\n\u2028 O\n")[0].words == ["10\u00a0000", "\u2028"]
    assert read(tmp_path, "New York\tB-LOC\n")[0].words == ["New York"]
    assert read(tmp_path, "a\nb\n\nc\n") == [Sentence(["a", "b"]), Sentence(["c"])]  # without labels


@pytest.mark.parametrize(
    ("text", "encoding", "message"),
    [
        ("a O\nb\n", "utf-8", "train.txt, line 2 .*'b'"),
        ("\n\n", "utf-8", "train.txt has no sentence"),
        ("é O\n", "latin1", "train.txt, line 1: "),
    ],
)
def test_invalid_files(tmp_path, text, encoding, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, text, encoding)


def test_table_with_class_labels():
    names = datasets.List(datasets.ClassLabel(names=["O", "B-X", "I-X"]))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": names})
    rows = Dataset.from_dict({"tokens": [["a", "b"], []], "ner_tags": [[1, 2], []]}, features=features)
    sentences = ner.sentences_from_table(rows, names=features["ner_tags"].feature.names)
    assert sentences == [Sentence(["a", "b"], ["B-X", "I-X"]), Sentence([], [])]
    assert ner.sentences_from_table([{"words": ["a"]}], "words", None) == [Sentence(["a"])]


@pytest.mark.parametrize(
    "rows",
    [
        [{"tokens": [w], "ner_tags": ["O"], "document_id": d} for w, d in zip("abc", "xxy", strict=True)],
        [{"tokens": [w], "ner_tags": ["O"]} for w in ("a", "b", "-DOCSTART-", "c")],
    ],
    ids=["column", "docstart"],
)
def test_documents_in_tables(rows):
    first, second, third = ner.sentences_from_table(rows)
    assert first.document == second.document != third.document


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"words": ["a"]}, "tokens must be a list, not null or missing"),
        ({"tokens": "a b", "ner_tags": ["O"]}, "tokens must .*'a b'"),
        ({"tokens": ["a"], "ner_tags": [2]}, "label 2; .* 0 to 1: O, B-X"),
    ],
)
def test_invalid_rows(row, message):
    with pytest.raises(InputError, match=f"row 1: .*{message}"):
        ner.sentences_from_table([row], names=["O", "B-X"])


# 2. Labels


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("I-P I-P B-P O I-P", "B-P I-P B-P O B-P"),  # IOB1
        ("I-P I-L I-P", "B-P B-L B-P"),
        ("B-P I-P O B-L", "B-P I-P O B-L"),  # IOB2 does not change
        ("B-P I-P E-P S-P S-L O", "B-P I-P I-P B-P B-L O"),  # IOBES
        ("B-P L-P U-P B-L I-L L-L", "B-P I-P B-P B-L I-L I-L"),  # BILOU
        ("I I O B", "B I O B"),  # one entity type, without a name
    ],
)
def test_tags_to_iob2(tags, expected):
    assert ner.tags_to_iob2(tags.split()) == expected.split()
    assert ner.tags_to_iob2(expected.split()) == expected.split()


@pytest.mark.parametrize(
    ("tags", "names"), [("B-X", "O B-X I-X"), ("VB NN", "NN VB"), ("person-actor O", "O person-actor")]
)
def test_label_names(tags, names):
    """Both prefixes of each type, also of one that the rows lack; O where labels are entities."""
    assert ner.label_names([Sentence(["a"] * len(tags.split()), tags.split())]) == names.split()


def test_invalid_labels():
    with pytest.raises(InputError, match="'O'"):
        ner.label_names([Sentence(["a"], ["O"]), Sentence(["b", "c"], ["O", "O"])])
    with pytest.raises(InputError, match="B-X .*'BX'"):
        ner.convert_to_iob2([Sentence(["a", "b"], ["B-X", "BX"])])
    tags = {1: ["B-Y"], 2: ["O"], 3: None, 6: ["I-X"]}
    sentences = [Sentence(["a"], of_row, row=row) for row, of_row in tags.items()]
    with pytest.raises(InputError, match="rows 2, 7: labels that .*: B-Y, I-X; it has O, B-X"):
        ner.require_known_labels(sentences, ["O", "B-X"])
    ner.require_known_labels(sentences, ["O", "B-Y", "I-X"])


# 3. Model inputs


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("limit", [1, 2, 7, 30, 1000])
def test_windows_label_each_word_once(context, limit):
    rng = random.Random(limit)
    lengths = [rng.randint(1, min(5, limit)) for _ in range(200)]
    bounds = sorted({0, 200, *rng.sample(range(200), 12)})
    bounds.insert(3, bounds[3])  # an empty sentence
    windows = list(ner.plan_windows(lengths, bounds, limit, context))
    labelled = [word for window in windows for word in range(window.label_start, window.label_end)]
    assert labelled == list(range(200))
    for window in windows:
        assert 0 <= window.start <= window.label_start < window.label_end <= window.end <= 200
        assert sum(lengths[window.start : window.end]) <= limit
        if context != "around":
            is_partial = any(
                start < window.label_start < end or start < window.label_end < end for start, end in pairwise(bounds)
            )
            assert window.start in bounds or is_partial
        elif window.start > 0:  # no room for another word on the left
            assert lengths[window.start - 1] > limit - sum(lengths[window.start : window.end])


def test_merged_windows_hold_as_many_sentences_as_fit():
    windows = list(ner.plan_windows([1] * 10, [0, 3, 6, 9, 10], 6, "merged"))
    assert [(w.label_start, w.label_end) for w in windows] == [(0, 6), (6, 10)]


def test_parts_of_a_long_sentence_have_context_on_both_sides():
    first, *inner, last = ner.plan_windows([1] * 40, [0, 40], 10, "none")
    assert (first.start, first.label_start, first.label_end, first.end) == (0, 0, 5, 10)
    assert [(w.label_start - w.start, w.end - w.label_end) for w in inner] == [(3, 2)] * 6
    assert last.end == last.label_end == 40 and last.start == 30


def test_first_tokens_are_labelled(tokenizer):
    sentence = Sentence(["Peter", "unfathomable", "Rome"], ["B-PER", "I-PER", "B-LOC"])
    (window,) = encoded([sentence], tokenizer)
    ids, labels, positions = window["input_ids"], window["labels"], window["word_positions"]
    assert ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id
    assert [labels[position] for position in positions] == [LABELS.index(tag) for tag in sentence.tags]
    assert sum(label >= 0 for label in labels) == 3 < len(ids) - 2
    pieces = [tokenizer.decode(ids[a:b]).strip() for a, b in pairwise([*positions, len(ids) - 1])]
    assert pieces == sentence.words
    every = encoded([sentence], tokenizer, label_all_tokens=True)["labels"][0]
    assert every[0] == every[-1] == -100 and all(label >= 0 for label in every[1:-1])
    assert every[positions[0]] == LABELS.index("B-PER")
    assert set(every[positions[2] + 1 : -1]) <= {LABELS.index("I-LOC")}
    assert set(every[positions[1] : positions[2]]) == {LABELS.index("I-PER")}


SENTENCES = [
    Sentence(["EU", "rejects", "German", "call"], ["B-ORG", "O", "B-MISC", "O"], 0),
    Sentence([], [], 0),
    Sentence(["Peter", "\u200b", "", "Blackburn"], ["B-PER", "I-PER", "O", "B-PER"], 0),  # words without a token
    Sentence(["unfathomable"] * 9, ["B-LOC", *["I-LOC"] * 8], 0),
    Sentence(["extraordinarily" * 9, "Rome"], ["B-MISC", "O"], 1),  # a word longer than the limit
    Sentence(["Paris"], ["B-LOC"], 2),
]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("length", [12, 40, 200])
def test_every_word_is_predicted(tokenizer, context, length):
    """Labels as predictions, padded as Trainer pads them, give the tags."""
    features = encoded(SENTENCES, tokenizer, length, context)
    assert max(map(len, features["input_ids"])) <= length
    batch = DataCollatorForTokenClassification(tokenizer)([*features.remove_columns("word_positions")])
    assert set(batch) == {*tokenizer.model_input_names, "labels"} - {"token_type_ids"}
    labels = batch["labels"].numpy()
    tags = ner.labels_of_words(labels, labels / 8, features, SENTENCES, LABELS).labels
    assert tags == [sentence.tags for sentence in SENTENCES]


def test_context_stays_within_the_document(tokenizer):
    sentences = [Sentence(["Rome"], ["O"], document) for document in (1, 1, 2)]
    for context, lengths in (("merged", [2, 1]), ("around", [2, 2, 1])):
        rows = encoded(sentences, tokenizer, 64, context)
        one = len(rows["input_ids"][-1]) - 2  # tokens of a word
        assert [(len(ids) - 2) // one for ids in rows["input_ids"]] == lengths


def test_sentences_that_cannot_be_encoded(tokenizer):
    rome = Sentence(["Rome"])
    features = encoded([rome], tokenizer)
    assert "labels" not in features.column_names
    with pytest.raises(InputError, match="'merged' needs documents"):
        list(ner.group_sentences([rome], "merged"))
    with pytest.raises(ValueError, match="add_prefix_space=True"):
        encoded([rome], train_tokenizer(TEXTS, 300, "bpe"))


# 4. Predictions


def test_predictions_as_columns(tmp_path):
    sentences = [*read(tmp_path, CONLL), Sentence(["New York", ""], ["B-LOC", "O"], 3)]
    path = tmp_path / "out" / "predictions.txt"
    ner.write_conll_predictions(path, sentences, [["O"] * len(sentence.words) for sentence in sentences])
    lines = path.read_text().splitlines()
    assert lines[:4] == ["-DOCSTART- O O", "", "EU I-ORG O", "rejects O O"]
    assert lines[-3:] == ["New_York B-LOC O", "_ O O", ""]
    again = ner.sentences_from_table(ner.read_conll(path))
    assert [(s.words, s.document) for s in again[:3]] == [(s.words, s.document) for s in sentences[:3]]
    ner.write_conll_predictions(path, [Sentence(["a"])], [["B-first  name"]])
    assert path.read_text() == "a B-first_name\n\n" and not path.with_name("predictions.txt.unfinished").exists()
