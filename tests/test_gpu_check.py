"""`python -m hf_deberta gpu-check`; without a GPU, its device, check and clock are replaced."""

import subprocess
import sys

import pytest
import torch

from hf_deberta import gpu_check
from hf_deberta.__main__ import main
from hf_deberta.engines.attention_auto import Failure
from hf_deberta.engines.attention_check import KernelVariant
from hf_deberta.engines.attention_sdpa import sdpa_attention
from hf_deberta.model.attention import BACKENDS, Backend


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "hf_deberta", "gpu-check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and not ran.stderr
    assert ran.stdout.count("\n") == 1 and "no CUDA device" in ran.stdout


@pytest.fixture
def gpu(monkeypatch):
    """A function that sets faults by precision and times by backend, runs the command and returns status and table."""
    monkeypatch.setattr(gpu_check, "current_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")

    def run(capsys, *arguments, faults=None, times=None, unsupported=None, loss_fault=None):
        monkeypatch.setitem(BACKENDS, "triton", Backend(BACKENDS["triton"].attend, lambda *call: unsupported))
        monkeypatch.setattr(gpu_check, "find_fault", lambda kernel: (faults or {}).get(kernel.precision))
        monkeypatch.setattr(gpu_check, "kernel_fault", lambda device, dtype: loss_fault)
        results = {"sdpa": 2.0, "triton": 1.0, **(times or {})}

        def make_step(backend, *_):
            if isinstance(results[backend], Exception):
                raise results[backend]
            return lambda: None

        monkeypatch.setattr(gpu_check, "make_step", make_step)
        monkeypatch.setattr(gpu_check, "time_interleaved", lambda steps, *_: {name: results[name] for name in steps})
        status = main(["gpu-check", *arguments])
        first, header, *lines = capsys.readouterr().out.splitlines()
        assert "Some GPU" in first and header.startswith("dtype")
        return status, [line.split() for line in lines if "  " in line], [line for line in lines if "  " not in line]

    return run


def test_a_row_for_each_kernel_and_shape(gpu, capsys):
    status, rows, notes = gpu(capsys, "--dtypes", "bfloat16", "float32", "--shapes", "2x8", "1x16", "--heads", "2")
    assert status == 0 and not notes
    assert len(rows) == 8
    assert rows[0] == ["bfloat16", "64", "inference", "passed", "2x8", "2.000", "1.000", "triton"]
    assert rows[-1] == ["float32", "64", "training", "passed", "1x16", "2.000", "1.000", "sdpa"]  # whatever the times


@pytest.mark.parametrize("training", [False, True])
def test_a_step_calls_the_backend(monkeypatch, training):
    calls, gradients = [], []

    def attend(*call):
        calls.append(call)
        context, _ = sdpa_attention(*call)
        if training:
            context.register_hook(gradients.append)
        return context, None

    monkeypatch.setitem(BACKENDS, "sdpa", Backend(attend))
    kernel = KernelVariant(torch.device("cpu"), torch.bfloat16, 16)
    gpu_check.make_step("sdpa", kernel, training, 2, 3, 20)()
    query, _, _, positions, *_ = calls[0]
    assert query.shape == (2, 3, 20, 16) and positions.terms == ("c2p", "p2c") and query.requires_grad == training
    assert len(calls) == 1 and len(gradients) == training


SMALL = ("--dtypes", "bfloat16", "float32", "--shapes", "1x8", "--heads", "1")


def test_failed_checks_are_shown_and_are_errors(gpu, capsys):
    loss_fault, faults = Failure("other losses"), {"bfloat16": Failure("the context is off by 0.5")}
    status, rows, notes = gpu(capsys, *SMALL, loss_fault=loss_fault, faults=faults)
    assert status == 1
    assert [row[3] for row in rows] == ["FAILED", "FAILED", "passed", "passed"]
    assert {row[-1] for row in rows} == {"sdpa"}
    of_loss = [f"{dtype}, loss over the vocabulary: the kernel failed its check: other losses" for dtype in SMALL[1:3]]
    assert sorted(notes) == sorted(["bfloat16, heads of 64: the context is off by 0.5", *of_loss])
    for only in ({"loss_fault": loss_fault}, {"faults": faults}):
        assert gpu(capsys, *SMALL, **only)[0] == 1


def test_a_backend_that_cannot_be_timed_is_shown_with_the_reason(gpu, capsys):
    status, rows, notes = gpu(capsys, *SMALL, times={"sdpa": torch.OutOfMemoryError("CUDA out of memory")})
    assert status == 0
    assert [row[5:] for row in rows] == [["-", "1.000", "triton"]] * 2 + [["-", "1.000", "sdpa"]] * 2
    assert len(notes) == 4 and all("1x8: sdpa failed: OutOfMemoryError" in note for note in notes)


def test_unsupported_gpus_are_not_checked(gpu, capsys):
    status, rows, notes = gpu(capsys, *SMALL, unsupported="the GPU is older than compute capability 8.0")
    assert status == 2
    assert all(row[3:] == ["-", "1x8", "2.000", "-", "sdpa"] for row in rows)
    assert all("older than compute capability 8.0" in note for note in notes)


@pytest.mark.parametrize(
    "flag, value", [("--shapes", "8"), ("--shapes", "0x4"), ("--heads", "-4"), ("--head_sizes", "x")]
)
def test_wrong_numbers_are_refused(flag, value, capsys):
    with pytest.raises(SystemExit):
        main(["gpu-check", flag, value])
    assert "is not a whole number above 0" in capsys.readouterr().err
