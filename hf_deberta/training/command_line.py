"""The command line of the scripts: flags, a file of flags or both, a grouped --help, user mistakes in one line.

>>> parser = ScriptParser((ModelArguments, DataArguments, TrainingArguments))
>>> with user_errors_in_one_line("run_glue.py"):
...     flags = parser.parse_args(read_command_line())
...     model_args, data_args, training_args = make_dataclasses(parser, flags)
"""

import json
import re
import sys
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Sequence
from dataclasses import Field, field, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from hf_deberta.training.errors import InputError, input_errors
from hf_deberta.training.json_files import read_json_object

RECIPE, TRAINER = LAST_GROUPS = ("Recipe", "Transformers' Trainer")  # titles in --help
METAVARS = {int: "N", float: "X", string_to_bool: "BOOL"}


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """Return the field of a dataclass that becomes a flag."""
    return field(default=default, metadata={"help": help, **metadata})


def free_flag(default: Any, help: str) -> Any:
    """Return the field of a flag that may change when a run resumes, see `run_identity`."""
    return flag(default, help, identifies=False)


class ScriptParser(HfArgumentParser):
    """HfArgumentParser whose --help shows a description and our flags by group; --help-all shows Trainer's too.

    A group holds the flags of one dataclass; its title is the first line of the docstring.

    Args:
        set_by_recipe: flags whose default comes from the recipe; they are shown in a group of their own.
    """

    def __init__(
        self, argument_classes: Sequence[type], set_by_recipe: Collection[str] = (), description: str | None = None
    ) -> None:
        self.set_by_recipe = set_by_recipe
        super().__init__(
            cast(Any, argument_classes),  # Transformers annotates it with a NewType
            description=cleandoc(description or ""),
            usage='%(prog)s [FLAGS.json or .yaml, with {"learning_rate": 1e-5, ...}] --FLAG VALUE ...',
            formatter_class=partial(_HelpFormatter, max_help_position=30, width=120),
            allow_abbrev=False,
        )
        names = {cls: [field.name for field in fields(cls) if field.init] for cls in argument_classes}
        described = {name: _described_field(cls, name) for cls in argument_classes for name in names[cls]}
        groups: dict[str, list[Action]] = {}
        for action in self._actions:
            if action.const is False:  # --no_x: accepted, but --x false says it
                action.help = SUPPRESS
            if action.dest not in described or action.help == SUPPRESS:
                continue
            owner, field = described[action.dest]
            action.help = field.metadata.get("help", "")
            if action.dest in set_by_recipe:
                action.help += " (default: set by the recipe)"
            title = TRAINER if owner is TrainingArguments else cleandoc(owner.__doc__ or "").partition(".")[0]
            if action.dest in ("recipe", *set_by_recipe):
                title = RECIPE
            groups.setdefault(title, []).append(action)
        groups.get(RECIPE, []).sort(key=lambda action: action.dest != "recipe")  # --recipe first
        self._action_groups.clear()
        first_groups = [title for title in groups if title not in LAST_GROUPS]
        for title in (*first_groups, *LAST_GROUPS):
            self.add_argument_group(title)._group_actions += groups.get(title, [])
        self.add_argument("--help-all", action=_HelpAll, nargs=0, dest=SUPPRESS, default=SUPPRESS, help=SUPPRESS)

    def add_argument(self, *names: Any, identifies: bool = True, **options: Any) -> Action:
        """Add an argument; HfArgumentParser passes on the metadata of fields, and `identifies` is no option of one."""
        return super().add_argument(*names, **options)

    def format_help(self) -> str:
        """Return the text of --help; Trainer's flags, the last group, are counted."""
        *own, trainer = groups = self._action_groups
        self._action_groups = own
        self.epilog = f"--help-all shows {len(trainer._group_actions)} more flags, of Transformers' Trainer."
        text = super().format_help()
        self._action_groups, self.epilog = groups, None
        return text

    def error(self, message: str) -> NoReturn:
        words = re.findall(r"--[^ =]+", message.partition("unrecognized arguments: ")[2])
        names = [action.option_strings[0] for action in self._actions]
        similar = [name for word in words for name in get_close_matches(word, names, 1)]
        hint = f"did you mean {', '.join(similar)}? " if similar else ""
        raise InputError(f"{message}; {hint}--help-all lists all flags")


class _HelpAll(Action):
    def __call__(self, parser: Any, *args: Any) -> None:
        print(HfArgumentParser.format_help(parser), end="")
        parser.exit()


class _HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """One spelling of each flag, short placeholders for values, defaults other than None."""

    def _format_action_invocation(self, action: Action) -> str:
        name = action.option_strings[0]
        if action.nargs == "?" and not action.default:
            return name  # --sift
        if action.choices is not None and len(list(action.choices)) <= 8:
            return f"{name} {{{','.join(map(str, action.choices))}}}"
        metavar = METAVARS.get(cast(Any, action.type), "VALUE")
        return f"{name} {metavar}{' ...' if action.nargs == '+' else ''}"

    def _get_help_string(self, action: Action) -> str | None:
        text = action.help or ""
        if action.default is None or action.default is False or action.default == "" or "(default: " in text:
            return text
        return f"{text} (default: %(default)s)".lstrip()


def _described_field(argument_class: type, name: str) -> tuple[type, Field]:
    """The field with the help text of a flag, and the class that defines it.

    A subclass that only changes the default of a flag has a field without help.
    """
    classes = [cls for cls in argument_class.__mro__ if is_dataclass(cls)]
    by_class = {cls: field for cls in classes for field in fields(cls) if field.name == name}
    field = next((field for field in by_class.values() if "help" in field.metadata), by_class[argument_class])
    return next(cls for cls in reversed(classes) if by_class.get(cls) is field), field


def read_command_line() -> list[str]:
    """The arguments of the command line, with the flags of a JSON or YAML file that comes first in its place.

    Flags after the file win over its own. A flag that is null there is not given.
    """
    file, *words = sys.argv[1:] or [""]
    if not file.endswith((".json", ".yaml", ".yml")):
        return sys.argv[1:]
    with input_errors(file, OSError, ValueError, yaml.YAMLError):
        path = Path(file)
        flags = read_json_object(path) if path.suffix == ".json" else yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(flags, dict):
        raise InputError(f"{file} must hold names and values of flags, such as learning_rate: 1e-5")
    for name, value in flags.items():
        values = [] if value is None else value if isinstance(value, list) else [value]
        texts = [part if isinstance(part, str) else json.dumps(part) for part in values]
        words = [f"--{name}", *texts, *words] if texts else words
    return words


def make_dataclasses(parser: HfArgumentParser, flags: Namespace) -> tuple[Any, ...]:
    """One instance per dataclass of the parser; invalid values raise InputError."""
    with input_errors("", ValueError):
        return parser.parse_dict(vars(flags))
