"""`hf-deberta attention`: an HTML page with the attention of one text, by part, layer and head."""

import argparse
from pathlib import Path
from typing import Any

from hf_deberta import HfDebertaTokenizer
from hf_deberta.commands.any_checkpoint import CHECKPOINT_ERRORS, MODEL_HELP, load_checkpoint
from hf_deberta.pretraining.released_generator import WEIGHTS, load_released_generator
from hf_deberta.training.errors import input_errors
from hf_deberta.visualize import attention_page
from hf_deberta.visualize.page import missing_candidates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("text", help='such as "The new [MASK] opened."')
    parser.add_argument("pair", nargs="?", help="the second text of a model that reads two")
    parser.add_argument("--output", type=Path, default=Path("attention.html"), help="default: %(default)s")
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--architecture", help="class of hf_deberta, by default that of the checkpoint's head")
    head.add_argument("--generator", action="store_true", help=f"show the generator of a v3 release, {WEIGHTS}")


def main(args: argparse.Namespace) -> None:
    """Write the page."""
    with input_errors(args.model, *CHECKPOINT_ERRORS):
        if args.generator:
            model: Any = load_released_generator(args.model, dtype="float32").eval()
        else:
            model = load_checkpoint(args.model, args.architecture)
        tokenizer = HfDebertaTokenizer.from_pretrained(args.model)
    note = missing_candidates(model)
    if note and tokenizer.mask_token in f"{args.text} {args.pair}":
        print(note)
    with input_errors("", OSError, ValueError):
        attention_page(model, tokenizer, args.text, args.output, args.pair)
        print(f"wrote {args.output}")
