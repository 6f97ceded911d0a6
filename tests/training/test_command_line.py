"""Flags from the command line and a file, `--help`."""

import re
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hf_deberta.training.command_line import ScriptParser, make_dataclasses, read_command_line
from hf_deberta.training.errors import InputError

ROOT = Path(__file__).parents[2]
SCRIPTS = ("glue", "squad", "race", "ner", "superglue", "mlm", "rtd")


@dataclass
class BaseArguments:
    """A path and more. Others too."""

    path: str | None = field(default=None, metadata={"help": "A path."})
    rate: float = field(default=5e-5, metadata={"help": "A rate."})
    save: bool = field(default=True, metadata={"help": "Save it."})


@dataclass
class MyTaskArguments(BaseArguments):
    """My task."""

    rate: float = 1e-3
    quick: bool = field(default=False, metadata={"help": "Be quick."})
    names: list[str] | None = field(default=None, metadata={"help": "Some names."})

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"--rate must not be negative, not {self.rate}")


# Flags


def parse(argument_class, words):
    parser = ScriptParser((argument_class,))
    return make_dataclasses(parser, parser.parse_args(words))


def test_flags_of_a_file_and_flags_that_win_over_it(tmp_path, monkeypatch):
    texts = {
        "a.json": '{"rate": 0.5, "quick": true, "path": null, "names": ["a", "b"]}',
        "a.yaml": "rate: 5e-1\nquick: yes\nnames: [a, b]\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        for words, rate in {"": 0.5, "--rate 0.1": 0.1}.items():
            monkeypatch.setattr(sys, "argv", ["x.py", str(tmp_path / name), *words.split()])
            (parsed,) = parse(MyTaskArguments, read_command_line())
            assert (parsed.rate, parsed.quick, parsed.save, parsed.path) == (rate, True, True, None)
            assert parsed.names == ["a", "b"]


def test_a_file_without_flags_is_an_input_error(tmp_path, monkeypatch):
    for name, text in {"a.json": "{", "b.yaml": "a: {", "c.yaml": "rate", "d.yml": None}.items():
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(sys, "argv", ["x.py", str(file)])
        with pytest.raises(InputError, match=re.escape(str(file))):
            read_command_line()


def test_values_that_a_dataclass_refuses_and_unknown_flags_are_input_errors():
    refused = {
        "--rate -1": "--rate must not be negative",
        "--zzz 1": "--zzz 1; --help-all lists all flags",
        "--rat 3": "--rat 3; did you mean --rate? --help-all",  # no abbreviation of --rate
        "--paths 1 --qiuck": "--paths 1 --qiuck; did you mean --path, --quick? --help-all lists all flags",
    }
    for words, message in refused.items():
        with pytest.raises(InputError) as raised:
            parse(MyTaskArguments, words.split())
        assert message in str(raised.value)


# Help


def test_help_has_a_group_for_each_dataclass_and_the_default_in_use():
    parser = ScriptParser((MyTaskArguments,), set_by_recipe=("path",))
    text = parser.format_help()
    groups = re.split(r"^(\S.*):$", text, flags=re.MULTILINE)[1:]
    assert groups[::2] == ["A path and more", "My task", "Recipe"]
    base, task, recipe = groups[1::2]
    assert "A rate. (default: 0.001)" in base  # the default of the subclass, the help of its base
    assert "--save BOOL" in base and "(default: True)" in base and "no_save" not in text
    assert "--quick  " in task
    assert "--path VALUE" in recipe and "A path. (default: set by the recipe)" in recipe
    assert make_dataclasses(parser, parser.parse_args(["--no_save"]))[0].save is False


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_of_the_scripts(name, monkeypatch, capsys):
    """The script's docstring first; each flag once; Trainer's flags last, with --help-all."""
    script, texts = str(ROOT / f"run_{name}.py"), {}
    for flag in ("--help", "--help-all"):
        monkeypatch.setattr(sys, "argv", [script, flag])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(script, run_name="__main__")
        assert stopped.value.code in (0, None)
        texts[flag] = capsys.readouterr().out
    short, text = texts.values()
    own, all_flags = (re.findall(r"^  (--\w+)", part, flags=re.MULTILINE) for part in (short, text))
    assert f"--help-all shows {len(all_flags) - len(own)} more flags" in short and len(short.splitlines()) < 160
    assert text.startswith(short[: short.index("\n--help-all shows")].rstrip())
    assert text.index(f"hf-deberta {name} --") < text.index(":\n  --")
    flags = re.findall(r"^  --(\w+)", text, flags=re.MULTILINE)
    assert len(flags) == len(set(flags)) > 130
    trainer = text.index("\nTransformers' Trainer:")
    assert text.index("  --output_dir") < text.index("  --weight_decay") and trainer < text.index("  --weight_decay")
    assert all(text.index(f"  --{flag} ") < trainer for flag in ("train_file", "max_seq_length", "tokenizer_name"))
    assert "(default: trainer_output" in text
    assert ("cls_dropout" in flags) == (name not in ("squad", "mlm", "rtd"))
