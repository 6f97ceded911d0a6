"""`hf-deberta convert`: write a checkpoint in another format.

- `hf_deberta`: of this package, with its source files
- `transformers`: of Transformers' own DeBERTa classes
- `official`: of Microsoft's code, `pytorch_model.bin` and config.json
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_deberta import HfDebertaTokenizer, export_to_transformers
from hf_deberta.commands.any_checkpoint import MODEL_HELP, load_checkpoint
from hf_deberta.training.errors import InputError, input_errors
from hf_deberta.training.json_files import atomic_write, write_json
from hf_deberta.transformers_format import in_tree_config, official_weights

OFFICIAL_TOKENIZERS = ("spm.model", "bpe_encoder.bin")  # v2 and v3, v1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("output", type=Path, help="folder to write; it must be empty or new")
    parser.add_argument("--to", "--save_format", required=True, choices=WRITERS, help="format")
    parser.add_argument("--architecture", help="class of hf_deberta, by default that of the checkpoint's head")


def main(args: argparse.Namespace) -> None:
    """Load, write, and say what was written."""
    if args.output.is_file() or (args.output.is_dir() and any(args.output.iterdir())):
        raise InputError(f"{args.output} exists and is not an empty folder: name another output")
    model = load_checkpoint(args.model, args.architecture)
    with input_errors("", ValueError):
        WRITERS[args.to](model, args.output)
    tokenizer = write_tokenizer(args.model, args.output, args.to)
    print(f"wrote {type(model).__name__} to {args.output} in the format {args.to}, {tokenizer}")


def write_tokenizer(source: str, folder: Path, to: str) -> str:
    """Write the tokenizer too; return what to say of it."""
    if to == "official":
        files = [Path(source) / name for name in OFFICIAL_TOKENIZERS if (Path(source) / name).exists()]
        for file in files:
            shutil.copy(file, folder)
        return f"with {files[0].name}" if files else f"without a tokenizer: add {' or '.join(OFFICIAL_TOKENIZERS)}"
    try:
        HfDebertaTokenizer.from_pretrained(source).save_pretrained(folder)
    except (OSError, ValueError) as error:
        return f"without a tokenizer: {source} has none ({str(error).partition(chr(10))[0]})"
    return "with its tokenizer"


def write_official(model: PreTrainedModel, folder: Path) -> None:
    weights, fields = official_weights(model), json.loads(in_tree_config(model).to_json_string())
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "pytorch_model.bin") as unfinished:
        torch.save(weights, unfinished)
    write_json(folder / "config.json", official_fields(fields))


def official_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with position terms as one text, and without what only Transformers reads."""
    terms = fields.get("pos_att_type") or []
    left_out = ("architectures", "transformers_version", "legacy", "dtype")
    kept = {name: value for name, value in fields.items() if name not in left_out}
    return kept | {"pos_att_type": "|".join(terms)}


WRITERS = {
    "hf_deberta": lambda model, folder: model.save_pretrained(folder),
    "transformers": export_to_transformers,
    "official": write_official,
}
