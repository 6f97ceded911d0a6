"""`hf-deberta score` that is killed at random moments: what it writes in the end is as if nothing had happened."""

import gzip
import json
import random
import signal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from example_rows import sentiment_rows
from fault_cases import SEED, number_of_cases
from kill_and_resume import Forks

from hf_deberta import HfDebertaConfig, HfDebertaForSequenceClassification
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.training.text_files import csv_line

ROWS = [{"text": row["sentence"], "n": str(number)} for number, row in enumerate(sentiment_rows(30, seed=0))]
SCRIPT = """
import sys, hf_deberta.commands.score, hf_deberta.__main__
hf_deberta.commands.score.PART_ROWS = 3
sys.exit(hf_deberta.__main__.main(["score", *sys.argv[1:]]))
"""


def write_inputs(folder: Path) -> list[str]:
    """Write a model, a script that scores in small parts, and files of three formats; return the flags."""
    tokenizer = train_tokenizer([row["text"] for row in ROWS], 300, "bpe")
    config = HfDebertaConfig.from_preset("tiny", vocab_size=len(tokenizer), emd_steps=0)
    for saved in (tokenizer, HfDebertaForSequenceClassification(config)):
        saved.save_pretrained(folder / "model")
    (folder / "run_score.py").write_text(SCRIPT)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=7)
    lines = [csv_line(row, "csv") for row in (ROWS[0], *map(dict.values, ROWS))]
    (folder / "b.csv").write_text("\n".join(lines))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    return ["--model", f"{folder}/model", "--input", f"{folder}/*.parquet", f"{folder}/*.csv", f"{folder}/*.gz"]


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """Files of three formats equal those of a run that was not killed, byte for byte."""
    flags, rng = write_inputs(tmp_path), random.Random(SEED)
    flags, script = [*flags, "--all_scores", "--output"], tmp_path / "run_score.py"
    with Forks("run_score.py") as forks:
        whole, kills = tmp_path / "whole", 0
        done = forks.run(script, [*flags, str(whole)])
        assert done["status"] == 0, done["output"]
        seconds = done["seconds"]
        while kills < number_of_cases(sample=20, full=200):
            output, status = tmp_path / f"{len([*tmp_path.iterdir()])}", -signal.SIGKILL
            while status == -signal.SIGKILL:
                delay = rng.uniform(0.3, 1) * seconds
                done = forks.run(script, [*flags, str(output)], signal=signal.SIGKILL, delay=delay)
                status, kills = done["status"], kills + (done["status"] != 0)
            assert status == 0, done["output"]
            names = {path.name for path in output.iterdir()}
            assert names == {path.name for path in whole.iterdir()}
            for name in names:
                assert (output / name).read_bytes() == (whole / name).read_bytes(), name
