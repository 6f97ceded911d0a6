"""The unlabelled text of the tasks' training files, a line each, to pretrain on before fine-tuning.

    python benchmarks/task_text.py --data ../data > tasks.txt

The two texts of a pair stay on one line, so that a masked word may be looked up in the other one; labels and answers
are left out, and so are validation files.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

NOT_TEXT = {"label", "idx", "id", "example_id", "answer"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of glue/cola/train.jsonl and so on")
    data = parser.parse_args().data
    lines = (line for source in (json_lines, columns, squad) for line in source(data))
    for line in dict.fromkeys(" ".join(line.split()) for line in lines):
        print(line)


def json_lines(data: Path) -> Iterator[str]:
    """GLUE, CB, COPA, DREAM: every field that is text, one after the other."""
    for path in [*sorted(data.glob("glue/*/train.jsonl")), *(data / name / "train.jsonl" for name in OTHERS)]:
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            words = [value for name, value in row.items() if name not in NOT_TEXT]
            yield " ".join(part for value in words for part in (value if isinstance(value, list) else [value]))


OTHERS = ("superglue/cb", "superglue/copa", "dream")


def columns(data: Path) -> Iterator[str]:
    """CoNLL-2003: a sentence's tokens."""
    sentences = (data / "conll2003" / "train.txt").read_text(encoding="utf-8").split("\n\n")
    for sentence in sentences:
        words = [line.split()[0] for line in sentence.splitlines() if line.strip()]
        if words and words[0] != "-DOCSTART-":
            yield " ".join(words)


def squad(data: Path) -> Iterator[str]:
    """SQuAD: a question and its paragraph."""
    articles = json.loads((data / "squad" / "train-v1.1.json").read_text(encoding="utf-8"))["data"]
    for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
        yield from (f"{answers['question']} {paragraph['context']}" for answers in paragraph["qas"])


if __name__ == "__main__":
    main()
