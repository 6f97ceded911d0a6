"""Check a released or fine-tuned checkpoint against Transformers' classes: weights, exactness, tokens, labels.

    python benchmarks/released.py --model FOLDER --texts FILE... --rows pairs.jsonl
    python benchmarks/released.py --print v3-xsmall-nli     # the table in results/README.md, from the csv

The model is a folder or a name on the Hub. Each line of the texts is one text; of .jsonl files, each string of a row.
The rows are texts, or pairs of texts (--columns), of which a sequence classifier predicts the labels. Hidden states and
logits are those of real texts with padding. Peers are those of encoder.py: ours sdpa, in-tree, and enabled. `hf-deberta
bench` times a checkpoint. Writes benchmarks/results/released.csv.
"""

import argparse
import itertools
import json
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from encoder import settings
from table import RESULTS, markdown, read_rows
from timing import record
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file

import hf_deberta

COLUMNS = {"in-tree": "Transformers' DeBERTa", "enabled": "after `enable()`", "ours sdpa": "hf_deberta"}
PEERS = tuple(COLUMNS)
MAX_ROWS, MAX_TEXTS = 384, 64  # of --rows; of --texts whose hidden states are compared

Batch = dict[str, torch.Tensor]


def is_classifier(model: str) -> bool:
    """Return whether the checkpoint is a sequence classifier, whose logits are compared."""
    architectures = AutoConfig.from_pretrained(model).architectures or [""]
    return architectures[0].endswith("ForSequenceClassification")


def load(model: str, peer: str, dtype: torch.dtype = torch.float32) -> tuple[Any, list[str]]:
    """Return the model of a peer, and the names of weights that the checkpoint lacks.

    Transformers' classes load a checkpoint that this package saved from its export.
    """
    ours, in_tree = hf_deberta.HfDebertaModel, transformers.AutoModel
    if is_classifier(model):
        ours, in_tree = hf_deberta.HfDebertaForSequenceClassification, transformers.AutoModelForSequenceClassification
    model_class = ours if peer.startswith("ours") else in_tree
    with tempfile.TemporaryDirectory() as folder:
        if model_class is in_tree and AutoConfig.from_pretrained(model).model_type == "hf_deberta":
            hf_deberta.export_to_transformers(ours.from_pretrained(model, dtype=dtype), folder)
            model = folder
        loaded, info = model_class.from_pretrained(model, dtype=dtype, output_loading_info=True)
    return loaded.eval(), sorted(info["missing_keys"])


def read_texts(files: list[Path]) -> list[str]:
    """Return the distinct texts of the files, in order."""
    texts: list[str] = []
    for file in files:
        lines = file.read_text(encoding="utf-8").split("\n")
        if file.suffix == ".jsonl":
            values = [value for line in lines if line.strip() for value in json.loads(line).values()]
            texts += [value for value in values if isinstance(value, str)]
        else:
            texts += lines
    return [text for text in dict.fromkeys(texts) if text.strip()]


def read_batches(model: str, file: Path, columns: list[str], count: int) -> list[Batch]:
    """Return the first tokenized rows of a file of JSON lines, in batches of 32 of similar length."""
    lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")[:count]
    rows = sorted(([json.loads(line)[column] for column in columns] for line in lines), key=lambda r: sum(map(len, r)))
    return encode(model, rows, 32)


def encode(model: str, rows: list[list[str]], batch_size: int) -> list[Batch]:
    """Return rows of one or two texts as padded batches of neighbours."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    batches = []
    for start in range(0, len(rows), batch_size):
        texts = map(list, zip(*rows[start : start + batch_size], strict=True))
        inputs = tokenizer(*texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        batches.append({name: inputs[name] for name in ("input_ids", "attention_mask")})
    return batches


@torch.no_grad()
def outputs_of(model: Any, peer: str, batches: list[Batch]) -> dict[str, list[torch.Tensor]]:
    """Return the hidden states of all layers at real tokens, and the logits of a classifier, by batch."""
    outputs: dict[str, list[torch.Tensor]] = {"hidden states": [], "logits": []}
    for batch in batches:
        with settings(peer):
            output = model(**batch, output_hidden_states=True)
        real = batch["attention_mask"].bool()
        outputs["hidden states"].append(torch.stack([states[real] for states in output.hidden_states]))
        if "logits" in output:
            outputs["logits"].append(output.logits)
    return outputs


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> tuple[float, float]:
    """Return the largest absolute difference, and the same divided by the largest value of `theirs`."""
    pairs = list(zip(ours, theirs, strict=True))
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    return difference, difference / max(float(b.abs().max()) for _, b in pairs)


def exactness_rows(model: str, batches: list[Batch]) -> Iterator[dict[str, str]]:
    """Compare hidden states and logits in float32 with in-tree's, and with ours in float64."""
    outputs = {peer: outputs_of(load(model, peer)[0], peer, batches) for peer in PEERS}
    exact = outputs_of(load(model, "ours sdpa", torch.float64)[0], "ours sdpa", batches)
    references = {"in-tree": outputs["in-tree"], "ours in float64": exact}
    for peer in PEERS:
        for reference, expected in references.items():
            for kind, tensors in outputs[peer].items():
                if peer == reference or not tensors:
                    continue
                absolute, relative = largest_difference(tensors, expected[kind])
                where = f"{relative:.1e} of the largest value, {len(tensors)} batches of real texts"
                yield make_row(f"{kind}, difference from {reference}", peer, f"{absolute:.1e}", where)


def tokenization_rows(model: str, texts: list[str]) -> Iterator[dict[str, str]]:
    """Compare the pieces of texts with those of sentencepiece itself."""
    original = cached_file(model, "spm.model", _raise_exceptions_for_missing_entries=False)
    if original is None:
        print("tokenization is skipped: the checkpoint has no spm.model, which sentencepiece reads")
        return
    import sentencepiece

    expected = sentencepiece.SentencePieceProcessor(model_file=original).encode(texts)
    tokenizers = {
        "in-tree": transformers.DebertaV2Tokenizer.from_pretrained(model),
        "ours, spm.model": hf_deberta.HfDebertaTokenizer.from_pretrained(model, tokenizer_file=""),
    }
    if cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False):
        tokenizers["ours, tokenizer.json"] = hf_deberta.HfDebertaTokenizer.from_pretrained(model)
    for name, tokenizer in tokenizers.items():
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        rows = zip(texts, encoded["input_ids"], expected, encoded["offset_mapping"], strict=True)
        places = Counter(first_difference(*row) for row in rows if row[1] != row[2])
        where = "; ".join(f"{place}: {count}" for place, count in places.most_common(8))
        measure = f"texts with other pieces than sentencepiece's, of {len(texts)}"
        yield make_row(measure, name, str(places.total()), where)


def first_difference(text: str, ids: list[int], expected: list[int], offsets: list[tuple[int, int]]) -> str:
    """Return the Unicode names of the unusual characters in the first piece that differs, or "ASCII"."""
    number = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), len(ids))
    start, end = offsets[number] if number < len(offsets) else (offsets[-1][1] if offsets else 0, len(text))
    unusual = [character for character in text[start : end + 1] if not " " <= character <= "~"]
    return " + ".join(unicodedata.name(each, f"U+{ord(each):04X}") for each in dict.fromkeys(unusual)) or "ASCII"


def label_rows(model: str, batches: list[Batch]) -> Iterator[dict[str, str]]:
    """Count rows that get in-tree's label."""
    if not is_classifier(model):
        print("labels are skipped: the checkpoint is no sequence classifier")
        return
    labels = {}
    for peer in PEERS:
        loaded, _ = load(model, peer)
        labels[peer] = torch.cat([logits.argmax(-1) for logits in outputs_of(loaded, peer, batches)["logits"]])
    for peer in PEERS[1:]:
        equal = int((labels[peer] == labels["in-tree"]).sum())
        counts = ", ".join(map(str, torch.bincount(labels[peer]).tolist()))
        measure = f"rows with in-tree's label, of {len(labels[peer])}"
        yield make_row(measure, peer, str(equal), f"rows by label: {counts}")


def weight_rows(model: str) -> Iterator[dict[str, str]]:
    """Count weights that the checkpoint lacks, that its export lacks, and that change by export and back."""
    for peer in ("in-tree", "ours sdpa"):
        ours, missing = load(model, peer)
        yield make_row("weights missing in the checkpoint", peer, str(len(missing)), type(ours).__name__)
    with tempfile.TemporaryDirectory() as folder:
        hf_deberta.export_to_transformers(ours, folder)
        _, missing = load(folder, "in-tree")
        yield make_row("weights missing after export", "in-tree", str(len(missing)), " ".join(missing[:4]))
        back, _ = load(folder, "ours sdpa")
    weights, weights_back = ours.state_dict(), back.state_dict()
    changed = [name for name in weights if not torch.equal(weights[name], weights_back[name])]
    yield make_row("weights changed by export and back", "ours sdpa", str(len(changed)), f"of {len(weights)}")


def make_row(measure: str, peer: str, value: str, where: str) -> dict[str, str]:
    return {"measure": measure, "peer": peer, "value": value, "where": where}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name on the Hub")
    parser.add_argument("--print", metavar="NAME", help="only print the table of this model in the result file")
    parser.add_argument("--model_name", help="its name in the result file; default: that of the folder")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], help="files of real texts")
    parser.add_argument("--rows", type=Path, help="JSON lines for labels")
    parser.add_argument("--columns", nargs="+", default=["premise", "hypothesis"], help="of the text, or of both texts")
    args = parser.parse_args()
    if args.print:
        print(table(args.print))
        return
    if args.model is None:
        parser.error("--model FOLDER is required, or --print NAME")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name = args.model_name or Path(args.model).name
    texts = read_texts(args.texts)
    chosen = [[text] for text in texts[:: max(1, len(texts) // MAX_TEXTS)][:MAX_TEXTS]]  # evenly spread over all
    measured = [weight_rows(args.model)]
    if texts:
        measured.append(exactness_rows(args.model, encode(args.model, chosen, 8)))
        measured.append(tokenization_rows(args.model, texts))
    if args.rows:
        measured.append(label_rows(args.model, read_batches(args.model, args.rows, args.columns, MAX_ROWS)))
    for row in itertools.chain(*measured):
        print(" | ".join(row.values()), flush=True)
        record("released.csv", [{"model": name, **row}], ("model", "measure", "peer"))


def table(name: str) -> str:
    """The rows of a model in the result file, as in results/README.md.

    In brackets: a difference divided by the largest value.
    """
    cells: dict[str, dict[str, list[str]]] = {}
    for row in read_rows(RESULTS / "released.csv"):
        if row["model"] != name:
            continue
        tokenizer = row["peer"].partition("ours, ")[2]
        in_brackets = row["where"].split()[0] if "of the largest value" in row["where"] else tokenizer
        by_column = cells.setdefault(row["measure"], {column: [] for column in COLUMNS})
        values = by_column["ours sdpa" if tokenizer else row["peer"]]
        values.append(f"{row['value']} ({in_brackets})" if in_brackets else row["value"])
    rows = [[measure, *(", ".join(values) or "-" for values in cells[measure].values())] for measure in cells]
    return markdown(["", *COLUMNS.values()], rows)


if __name__ == "__main__":
    main()
