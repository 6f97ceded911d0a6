"""Print the unlabelled text of the tasks' training files, one row a line, to pretrain on before fine-tuning.

    python benchmarks/task_text.py --data ../data > tasks.txt

The two texts of a pair stay on one line, so that a model can look up a masked word in the other text. Labels, answers
and validation files are left out.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

FIELDS_WITHOUT_TEXT = {"label", "idx", "id", "example_id", "answer"}
OTHER_TASKS = ("superglue/cb", "superglue/copa", "dream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with glue/cola/train.jsonl and so on")
    data = parser.parse_args().data
    lines = (line for source in (read_json_lines, read_columns, read_squad) for line in source(data))
    for line in dict.fromkeys(" ".join(line.split()) for line in lines):
        print(line)


def read_json_lines(data: Path) -> Iterator[str]:
    """Yield the text fields of each row of GLUE, CB, COPA and DREAM."""
    for path in [*sorted(data.glob("glue/*/train.jsonl")), *(data / name / "train.jsonl" for name in OTHER_TASKS)]:
        for row in map(json.loads, path.read_text(encoding="utf-8").removesuffix("\n").split("\n")):
            values = [value for name, value in row.items() if name not in FIELDS_WITHOUT_TEXT]
            yield " ".join(part for value in values for part in (value if isinstance(value, list) else [value]))


def read_columns(data: Path) -> Iterator[str]:
    """Yield the words of each sentence of CoNLL-2003."""
    sentences = (data / "conll2003" / "train.txt").read_text(encoding="utf-8").split("\n\n")
    for sentence in sentences:
        words = [line.split()[0] for line in sentence.splitlines() if line.strip()]
        if words and words[0] != "-DOCSTART-":
            yield " ".join(words)


def read_squad(data: Path) -> Iterator[str]:
    """Yield each question of SQuAD with its paragraph."""
    articles = json.loads((data / "squad" / "train-v1.1.json").read_text(encoding="utf-8"))["data"]
    for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
        yield from (f"{question['question']} {paragraph['context']}" for question in paragraph["qas"])


if __name__ == "__main__":
    main()
