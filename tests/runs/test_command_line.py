"""What is said of a command line or a file of flags that cannot be run, and whose an error is."""

import subprocess
import sys
from pathlib import Path

import pytest

from hf_deberta import HfDebertaConfig
from hf_deberta.runs.command_line import errors_as_sentences, is_of_training, read_flags

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("file", "expected"), [("/lib/transformers/trainer.py", True), ("run_glue.py", False)])
def test_errors_of_training_are_known_by_where_they_come_from(file, expected):
    code = compile("raise ValueError('of this file')", file, "exec")
    with pytest.raises(ValueError) as caught:
        exec(code)
    assert is_of_training(caught.value) == expected
    with pytest.raises(ValueError if expected else SystemExit, match="of this file"), errors_as_sentences("x.py"):
        exec(code)


def test_of_a_configuration_the_sentence_is_ours():
    with pytest.raises(SystemExit) as caught, errors_as_sentences("run_mlm.py"):
        HfDebertaConfig(hidden_size=10, num_attention_heads=3)
    assert str(caught.value).startswith("run_mlm.py: num_attention_heads must divide hidden_size")


@pytest.mark.parametrize(("content", "said"), [("{", "is not JSON"), ("[1]", "must hold flags by name")])
def test_files_that_hold_no_flags(tmp_path, content, said):
    file = tmp_path / "flags.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=said):
        read_flags(file)


@pytest.mark.parametrize("script", ["run_mlm.py", "run_glue.py"])
def test_scripts_say_which_file_is_wrong(tmp_path, script):
    file = tmp_path / "flags.json"
    file.write_text("{")
    found = subprocess.run([sys.executable, ROOT / script, file], capture_output=True, text=True)
    assert found.returncode == 1 and f"{script}: {file} is not JSON" in found.stderr and "Traceback" not in found.stderr
