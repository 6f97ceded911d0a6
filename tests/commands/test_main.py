"""`hf-deberta` and `python -m hf_deberta`: each command starts, and mistakes are one line."""

import subprocess
import sys
from pathlib import Path

import pytest

import hf_deberta
from hf_deberta_command import OTHERS, SCRIPTS, import_command, main

ROOT = Path(__file__).parents[2]


def test_help_lists_all_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for name in (*SCRIPTS, *OTHERS):
        assert f"\n    {name} " in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_commands(name, capsys, monkeypatch):
    """run_NAME.py calls the same function."""
    assert f'import_command("{name}").main()' in (ROOT / f"run_{name}.py").read_text()
    monkeypatch.setattr(sys, "argv", ["hf-deberta", name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        main()
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    first_line = import_command(name).__doc__.partition("\n")[0]
    assert text.startswith(f"usage: hf-deberta {name} ") and first_line in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "./nowhere"], "hf-deberta inspect: there is no folder ./nowhere"),
        (["glue", "--model_name_or_path", "./nowhere", "--task_name", "bleu"], "hf-deberta glue: "),
        (["multiple-choice", "--model_name_or_path", "./nowhere", "--task_name", "bleu"], "hf-deberta race: "),
        (["convert", "./nowhere", "out", "--to", "official"], "hf-deberta convert: there is no folder ./nowhere"),
    ],
)
def test_mistakes_are_reported_in_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hf-deberta"])
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code.startswith(message) and "\n" not in stopped.value.code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("inspect x --batc 2", "inspect: error: unrecognized arguments: --batc 2; did you mean --batch?\n"),
        ("--foo inspect x", "hf-deberta: error: unrecognized arguments: --foo x\n"),
    ],
)
def test_flags_are_not_abbreviated(words, message, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    assert message in capsys.readouterr().err


def test_help_version_and_mistakes_need_no_import():
    """They would take seconds."""
    for words, expected in {"--help": "inspect", "--version": hf_deberta.__version__, "glu": "invalid choice"}.items():
        no_packages = [sys.executable, "-S"]
        command = [*no_packages, "-c", "import hf_deberta_command as command; command.main()", words]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert expected in ran.stdout + ran.stderr and "Traceback" not in ran.stderr


COMMAND = "import hf_deberta_command as command, sys; sys.argv[0] = 'hf-deberta'; command.main()"


@pytest.mark.parametrize(
    ("program", "words", "extra"),
    [("run_glue.py", ["run_glue.py"], "train"), ("hf-deberta", ["-c", COMMAND, "demo"], "demo")],
)
def test_a_script_without_its_packages_names_the_line_of_pip(program, words, extra):
    command = [sys.executable, "-S", *words, "--demo"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith(program) and "torch, transformers, datasets" in ran.stderr
    assert f"pip install '.[{extra}]'" in ran.stderr


@pytest.mark.slow
def test_gpu_check_needs_no_datasets():
    code = "import sys; sys.modules['datasets'] = None; from hf_deberta_command import main; main(['gpu-check', '-h'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "--head_sizes" in ran.stdout, ran.stderr
