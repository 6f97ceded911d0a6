"""Commands: hf-deberta --help, or python -m hf_deberta --help

This file is not in the package, whose import takes seconds: --help, --version, a mistyped command and missing packages
are answered at once.
"""

import argparse
import re
import sys
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

PROGRAM = "hf-deberta"
# commands with a command line of their own; run_NAME.py starts them in a copy of the repository
SCRIPTS = {
    "glue": "fine-tune on GLUE, or on your own texts or text pairs",
    "superglue": "fine-tune on SuperGLUE",
    "squad": "fine-tune on questions with answers in a text",
    "ner": "fine-tune on named entities, or other labels of words",
    "race": "fine-tune on multiple choice",
    "mlm": "pretrain a masked or an autoregressive language model",
    "rtd": "pretrain a generator and a discriminator, as DeBERTaV3",
}
OTHERS = {
    "inspect": "show configuration, parameters, attention backend and memory of a checkpoint",
    "convert": "write a checkpoint in the format of this package, of Transformers, or of Microsoft's code",
    "score": "classify all texts of files: parquet, jsonl, csv, tsv or txt, here or on a cluster of Ray",
    "ensemble": "average the predictions of several runs, and compare them with the labels",
    "attention": "write an HTML page with the attention of one text, by part, layer and head",
    "gpu-check": "check the Triton kernels on this machine's GPU, and time them against sdpa",
    "demo": "see what the enhanced mask decoder is for, in a few minutes, offline",
}
OTHER_NAMES = {"classify": "glue", "multiple-choice": "race"}
MODULES = {  # the others: commands.NAME
    **{name: f"fine_tuning.tasks.{name}" for name in ("glue", "superglue", "squad", "ner", "race")},
    "ensemble": "fine_tuning.ensemble",
    "inspect": "commands.inspect_checkpoint",
    "gpu-check": "gpu_check",
}
PACKAGES = ("accelerate", "numpy", "safetensors", "tokenizers", "torch", "transformers")
TRAIN_PACKAGES = ("datasets", "evaluate", "filelock", "scipy", "sentencepiece", "sklearn")  # the extra "train"


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words[:1] = [OTHER_NAMES.get(word, word) for word in words[:1]]
    if words and words[0] in SCRIPTS:
        sys.argv = [f"{PROGRAM} {words[0]}", *words[1:]]  # its name in messages and --help
        import_command(words[0]).main()
        return 0
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=18, width=110),
        description="Train, inspect and convert DeBERTa models. Each command has a --help.",
        epilog="classify and multiple-choice are other names of glue and race. On several GPUs: accelerate launch -m "
        "hf_deberta glue, or another of the first seven.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {read_version()}")
    chosen, commands = parser, parser.add_subparsers(title="commands", required=True, metavar="COMMAND FLAGS")
    for name, summary in (SCRIPTS | OTHERS).items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if words[:1] == [name]:  # only this one is imported: gpu-check runs where `datasets` is missing
            module = import_command(name)
            module.add_arguments(command)
            command.set_defaults(run=module.main, name=name)
            chosen = command
    args, unknown = parser.parse_known_args(words)
    if unknown:
        similar = [name for word in unknown for name in get_close_matches(word, chosen._option_string_actions, 1)]
        hint = f"; did you mean {', '.join(similar)}?" if similar else ""
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    import_module("transformers.utils.logging").disable_progress_bar()  # of loading
    with import_module("hf_deberta.training.errors").user_errors_in_one_line(f"{PROGRAM} {args.name}"):
        return args.run(args) or 0  # gpu-check has a status of its own


def read_version() -> str:
    """Return the version of the package without importing it."""
    text = (Path(__file__).parent / "hf_deberta" / "__init__.py").read_text(encoding="utf-8")
    return re.findall('__version__ = "(.+)"', text)[0]


def import_command(name: str) -> ModuleType:
    """Import a command; exit with one line if packages that it needs are missing."""
    packages = PACKAGES + TRAIN_PACKAGES * (name in SCRIPTS or name in ("score", "ensemble", "demo"))
    packages += ("matplotlib",) * (name == "demo")
    if missing := [package for package in packages if find_spec(package) is None]:
        raise SystemExit(
            f"{Path(sys.argv[0]).name}: {name} needs {', '.join(missing)}: run pip install "
            f"'.[{'demo' if name == 'demo' else 'train'}]' in a copy of the repository, with Python 3.11 or later"
        )
    return import_module("hf_deberta." + MODULES.get(name, f"commands.{name}"))
