"""Peers of the benchmarks compute what their model computes, and tables take ratios from one machine at a time."""

import csv
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from fine_tuning_models import save_models
from test_parity_with_transformers import in_tree


@pytest.mark.slow
@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("int8", 0.2)])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_runners_compute_what_the_model_computes(load, runtime, dtype, limit):
    runtimes = load("runtimes")
    for module in runtimes.MODULES[runtime]:
        pytest.importorskip(module)
    model = in_tree(
        "v3", "Model", vocab_size=60, position_buckets=8, max_position_embeddings=32, initializer_range=0.02
    )
    ids = torch.randint(5, 60, (3, 20))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        expected = model(**inputs)[0][mask.bool()]
    runners = list(runtimes.all_runners(f"{runtime} in-tree", model, (3, 20), dtype, runtimes.Graphs()))
    assert len({runner.settings for runner in runners}) == len(runners)
    for runner in runners:
        states = runner(**inputs)[0][mask.bool()]
        if "bfloat16" in runner.settings and not states.isfinite().all():
            continue  # of OpenVINO, on some processors; fastest_runner leaves it out
        assert (states - expected).abs().max() < limit, runner.settings
    states = runtimes.fastest_runner(f"{runtime} in-tree", model, inputs, dtype, runtimes.Graphs())(**inputs)[0]
    assert (states[mask.bool()] - expected).abs().max() < limit


@pytest.mark.slow
def test_libraries_give_the_numbers_of_transformers(tmp_path):
    """Those that are installed, with a tiny model."""
    save_models(tmp_path, ["the man is on a dog and in of to not with"] * 20)
    script = Path(__file__).parents[1] / "benchmarks" / "consumers.py"
    command = [sys.executable, "-W", "ignore", script, "--model", tmp_path / "in_tree", "--repeats", "1"]
    ran = subprocess.run(command, env={**os.environ, "RESULTS": str(tmp_path)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = list(csv.DictReader((tmp_path / "consumers.csv").open()))
    assert {row["way"] for row in rows} == {"in-tree", "enable()", "native"}
    assert all(float(row["max_abs_difference"]) < 1e-3 for row in rows), rows


def test_ratios_are_taken_on_one_machine_at_a_time(load, tmp_path, monkeypatch):
    table = load("table")
    times = {
        ("A, 2 threads", "v3-base"): {"in-tree": 40, "ours sdpa": 20, "ours optimized": 8, "openvino ours": 10},
        ("B, 2 threads", "v3-base"): {"in-tree": 90, "ours sdpa": 30},
        ("B, 2 threads", "v3-small"): {"in-tree": 90, "ours sdpa": 10},
    }
    names = ("machine", "preset", "peer", "milliseconds", "mode", "case", "dtype", "device")
    with (tmp_path / "encoder.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for (machine, preset), by_peer in times.items():
            for peer, time in by_peer.items():
                writer.writerow((machine, preset, peer, time, "forward", "1x32", "float32", "cpu"))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.ratio_table("float32").splitlines()[2:] == ["| 1 row of 32 tokens | 2.0 to 3.0 | 5.0 | 4.0 |"]


def test_the_drawing_comes_from_the_results(load):
    figure = load("figure")
    assert figure.TARGET.read_text(encoding="utf-8") == figure.figure(), "run python benchmarks/figure.py"


@pytest.mark.slow
def test_the_gpu_hour_rehearsed_without_a_gpu(tmp_path):
    """With the packages of a bare machine: steps that fail do not stop others, and finished ones are not repeated."""
    for name in ("datasets", "evaluate", "seqeval"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('blocked')")
    script, results = Path(__file__).parents[1] / "benchmarks" / "gpu_hour.sh", tmp_path / "results"

    def run(**settings):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "ON": "cpu", **settings}
        ran = subprocess.run([script, results, sys.executable], env=environment, capture_output=True, text=True)
        return ran.returncode, [line.rpartition(" after ")[0] for line in ran.stdout.splitlines()]

    assert run(ONLY="check", TOTAL="0") == (0, [])
    assert run(ONLY="check", LIMIT="1") == (1, ["check: failed with status 124"])
    assert run(ONLY="check|forward, short") == (0, ["check: finished", "forward, short: finished"])
    assert run(ONLY="check|forward, short") == (0, [])
    rows = list(csv.DictReader((results / "encoder.csv").open()))
    assert {row["peer"] for row in rows} == {"in-tree", "bert", "ours sdpa"}
    assert "no CUDA device" in (results / "log.txt").read_text()


def test_end_to_end_keeps_what_was_measured_before_it_was_stopped(load, tmp_path, monkeypatch):
    rates = iter([7.0])
    end_to_end = load("end_to_end")
    monkeypatch.setattr(end_to_end, "measure", lambda *_: next(rates))
    monkeypatch.setattr(end_to_end, "report_failure", nullcontext)
    monkeypatch.setattr(load("timing"), "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["end_to_end.py", "--preset", "tiny", "--rows", "2"])
    with pytest.raises(StopIteration):
        end_to_end.main()
    rows = list(csv.DictReader((tmp_path / "end_to_end.csv").open()))
    assert [(row["peer"], row["rows_per_second"]) for row in rows] == [("trainer in-tree", "7.0")]


WRITE_RESULTS = """
import csv, os, pathlib
with (pathlib.Path(os.environ["RESULTS"]) / "some.csv").open("w", newline="") as file:
    rows = [("peer", "seed", "loss", "ms", "machine"), ("a", 1, 5.0, 30, "B"), ("b", 1, 4.0, 10, "B")]
    csv.writer(file).writerows(rows)
"""


@pytest.mark.parametrize(
    "recorded_loss, script, status, verdicts",
    [
        (5.0, WRITE_RESULTS, 0, {"ok"}),
        (5.3, WRITE_RESULTS, 0, {"ok"}),  # seeds differ by 0.4
        (6.0, WRITE_RESULTS, 1, {"ok", "DIFFERS"}),
        (5.0, "raise SystemExit('no such thing')", 1, {"MISSING"}),
    ],
)
def test_a_recorded_value_that_is_off_is_reported(
    load, tmp_path, monkeypatch, capsys, recorded_loss, script, status, verdicts
):
    reproduce = load("reproduce")
    with (tmp_path / "some.csv").open("w", newline="") as file:
        rows = [("peer", "seed", "loss", "ms", "machine"), ("a", 1, recorded_loss, 7, "A"), ("b", 1, 4, 2, "A")]
        csv.writer(file).writerows([*rows, ("a", 2, recorded_loss + 0.4, 7, "A")])
    (tmp_path / "script.py").write_text(script)
    limits = {"loss": reproduce.SEEDS, "ms": reproduce.Limits(times=1.5, peer="a")}  # a / b was 3.5, is 3
    repeat = reproduce.Repeat("some.csv", str(tmp_path / "script.py"), ("peer",), limits)
    needy = reproduce.Repeat("some.csv", "other.py {data} {model}", ("peer",), limits)
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path)
    monkeypatch.setattr(reproduce, "REPEATS", [repeat, needy])
    monkeypatch.setattr("sys.argv", ["reproduce.py"])
    with pytest.raises(SystemExit) as stopped:
        reproduce.main()
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert stopped.value.code == status
    assert {line[-1].strip(" |") for line in lines if line[0] == "| some.csv"} == verdicts
    assert ["not repeated: some.csv needs DATA=folder MODEL=folder: other.py {data} {model}"] in lines


def test_every_result_file_is_repeated_or_says_why_not(load):
    reproduce = load("reproduce")
    repeated = {repeat.result_file for repeat in reproduce.REPEATS}
    assert repeated.isdisjoint(reproduce.NOT_REPEATED)
    assert repeated | reproduce.NOT_REPEATED.keys() == {path.name for path in reproduce.RESULTS.glob("*.csv")}
