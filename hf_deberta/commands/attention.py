"""`hf-deberta attention`: an HTML page with the attention of one text, by part, layer and head."""

import argparse
from pathlib import Path

from hf_deberta import HfDebertaForMaskedLM, HfDebertaTokenizer
from hf_deberta.commands.any_checkpoint import MODEL_HELP, checkpoint_errors, load_checkpoint
from hf_deberta.runs.errors import InputError
from hf_deberta.visualize import attention_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("text", help='such as "The new [MASK] opened."')
    parser.add_argument("--output", type=Path, default=Path("attention.html"), help="default: %(default)s")
    parser.add_argument("--architecture", help="class of hf_deberta, by default that of the checkpoint's head")


def main(args: argparse.Namespace) -> int:
    """Write the page; a head that fills no masks is left out."""
    model = load_checkpoint(args.model, args.architecture)
    if not isinstance(model, HfDebertaForMaskedLM):
        print(f"{type(model).__name__} is no masked-language model: the page has no candidates for [MASK].")
        model = model.base_model
    with checkpoint_errors(args.model):
        tokenizer = HfDebertaTokenizer.from_pretrained(args.model)
    try:
        attention_page(model, tokenizer, args.text, args.output)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from error
    print(f"wrote {args.output}")
    return 0
