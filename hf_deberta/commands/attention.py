"""`hf-deberta attention`: an HTML page with the attention of one text, by part, layer and head, or a website of it."""

import argparse
from pathlib import Path
from typing import Any

from hf_deberta import HfDebertaTokenizer
from hf_deberta.commands.any_checkpoint import MODEL_HELP, checkpoint_errors, load_checkpoint
from hf_deberta.pretraining.released_generator import WEIGHTS, load_released_generator
from hf_deberta.training.errors import InputError, input_errors
from hf_deberta.visualize import attention_page
from hf_deberta.visualize.candidates import missing_candidates
from hf_deberta.visualize.server import EXAMPLE, serve_attention


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("text", nargs="?", help='such as "The new [MASK] opened."; with --serve, the first one')
    parser.add_argument("pair", nargs="?", help="the second text of a model that reads two")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--serve", action="store_true", help="open a website to type texts in, instead of a file")
    goal.add_argument("--output", type=Path, default=Path("attention.html"), help="default: %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="of --serve, default: %(default)s, this machine only")
    parser.add_argument("--port", type=int, default=8765, help="of --serve, default: %(default)s")
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--architecture", help="class of hf_deberta, by default that of the checkpoint's head")
    head.add_argument("--generator", action="store_true", help=f"show the generator of a v3 release, {WEIGHTS}")


def main(args: argparse.Namespace) -> int:
    """Write or serve the page."""
    if not args.serve and args.text is None:
        raise InputError('name a text, such as "The new [MASK] opened.", or pass --serve and type it in the browser')
    with checkpoint_errors(args.model):
        if args.generator:
            model: Any = load_released_generator(args.model, dtype="float32").eval()
        else:
            model = load_checkpoint(args.model, args.architecture)
        tokenizer = HfDebertaTokenizer.from_pretrained(args.model)
    note = missing_candidates(model)
    if note and tokenizer.mask_token in f"{args.text} {args.pair}":
        print(note)
    with input_errors("", ImportError, OSError, ValueError):
        if args.serve:
            serve_attention(model, tokenizer, args.text or EXAMPLE, args.host, args.port, args.pair)
        else:
            attention_page(model, tokenizer, args.text, args.output, args.pair)
            print(f"wrote {args.output}")
    return 0
