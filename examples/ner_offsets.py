"""Find named entities with Transformers' pipeline, as exact character offsets into your text.

    python run_ner.py --model_name_or_path microsoft/deberta-v3-base --data_dir conll2003 --output_dir ner
    python examples/ner_offsets.py --model ner --texts texts.txt

It prints line, start, end, type, score and text of each entity, tab-separated:

    1	0	12	PER	...	Barack Obama

DeBERTa's tokens include the space before a word, so the pipeline's offsets begin one character early, and a model that
was trained on words sees "Paris." as one. Here the text is split first, at spaces and around punctuation ("U.S." is
four words, unlike in CoNLL-2003), and the pipeline gets words; the type of a word is that of its first token, the one
that was trained.
"""

import argparse
import re
import warnings
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from transformers import pipeline

import hf_deberta


def find_entities(tagger: Any, text: str) -> list[dict[str, Any]]:
    """Return type, score, start and end of each entity of a text, which may be longer than the model's input."""
    words = list(re.finditer(r"\w+|[^\w\s]", text))
    if not words:
        return []
    joined = [0, *accumulate(len(word[0]) + 1 for word in words[:-1])]  # where words begin if one space separates them

    def word_at(character: int) -> re.Match[str]:
        return words[bisect_right(joined, character) - 1]

    (entities,) = tagger([[word[0] for word in words]], is_split_into_words=True)
    found: list[dict[str, Any]] = []
    for entity in entities:
        start, end = word_at(entity["start"]).start(), word_at(entity["end"] - 1).end()
        if not found or start >= found[-1]["end"]:  # else a later token of the same word: "…" is three
            found.append({"type": entity["entity_group"], "score": float(entity["score"]), "start": start, "end": end})
    return found


def main(flags: list[str] | None = None) -> list[list[dict[str, Any]]]:
    """Return the entities of each text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ner", help="folder or Hub id of a token classifier")
    parser.add_argument("--texts", type=Path, required=True, help="file with a text per line")
    parser.add_argument("--stride", type=int, default=64, help="tokens that two parts of a long text share")
    arguments = parser.parse_args(flags)
    texts = arguments.texts.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    warnings.filterwarnings("ignore", message="Tokenizer does not support real words")  # it gets words
    with hf_deberta.enable():  # the model may be one of Transformers
        tagger = pipeline(
            "token-classification",
            model=arguments.model,
            aggregation_strategy="first",
            stride=arguments.stride,
            trust_remote_code=False,
        )
        found = [find_entities(tagger, text) for text in texts]
    for number, (text, entities) in enumerate(zip(texts, found, strict=True), 1):
        for entity in entities:
            start, end = entity["start"], entity["end"]
            print(number, start, end, entity["type"], f"{entity['score']:.3f}", text[start:end], sep="\t")
    return found


if __name__ == "__main__":
    main()
