"""`hf-deberta attention`: an HTML page with the attention of one text, by part, layer and head, or a website of it."""

import argparse
from pathlib import Path
from typing import Any

from transformers.utils import has_file

from hf_deberta import HfDebertaTokenizer
from hf_deberta.commands.any_checkpoint import MODEL_HELP, checkpoint_errors, load_checkpoint
from hf_deberta.pretraining.released_generator import WEIGHTS, load_released_generator
from hf_deberta.training.errors import InputError
from hf_deberta.visualize import attention_page
from hf_deberta.visualize.candidates import missing_candidates
from hf_deberta.visualize.server import EXAMPLE, serve_attention

OUTPUT = Path("attention.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("text", nargs="?", help='such as "The new [MASK] opened."; with --serve, the first one')
    parser.add_argument("pair", nargs="?", help="the second text of a model that reads two")
    parser.add_argument("--serve", action="store_true", help="open a website to type texts in, instead of a file")
    parser.add_argument("--host", default="127.0.0.1", help="of --serve, default: %(default)s, this machine only")
    parser.add_argument("--port", type=int, default=8765, help="of --serve, default: %(default)s")
    parser.add_argument("--output", type=Path, help=f"default: {OUTPUT}")
    parser.add_argument("--architecture", help="class of hf_deberta, by default that of the checkpoint's head")
    parser.add_argument("--generator", action="store_true", help=f"show the generator of a v3 release, {WEIGHTS}")


def main(args: argparse.Namespace) -> int:
    """Write or serve the page."""
    if not args.serve and args.text is None:
        raise InputError('name a text, such as "The new [MASK] opened.", or pass --serve and type it in the browser')
    if args.serve and args.output is not None:
        raise InputError("--serve writes no file: leave out --output, or --serve")
    if args.generator and args.architecture is not None:
        raise InputError("--generator has a class of its own: leave out --architecture")
    model = _load_generator(args.model) if args.generator else load_checkpoint(args.model, args.architecture)
    with checkpoint_errors(args.model):
        tokenizer = HfDebertaTokenizer.from_pretrained(args.model)
    note = missing_candidates(model)
    if note and tokenizer.mask_token in f"{args.text} {args.pair}":
        print(note)
    try:
        if args.serve:
            text = EXAMPLE if args.text is None else args.text
            serve_attention(model, tokenizer, text, args.host, args.port, args.pair)
            return 0
        output = args.output or OUTPUT
        attention_page(model, tokenizer, args.text, output, args.pair)
    except (ImportError, OSError, ValueError) as error:
        raise InputError(str(error)) from error
    print(f"wrote {output}")
    return 0


def _load_generator(name: str) -> Any:
    with checkpoint_errors(name):
        if not has_file(name, WEIGHTS):
            raise InputError(f"{name} has no generator beside the discriminator ({WEIGHTS}): leave out --generator")
        return load_released_generator(name, dtype="float32").eval()
