"""The Triton kernel of the loss over the vocabulary against PyTorch, in Triton's interpreter or on a GPU.

`test_in_the_interpreter` of test_attention_triton.py runs this file too.
"""

import pytest
import torch
from torch.nn import functional

from hf_deberta.engines import linear_cross_entropy as module
from hf_deberta.engines.attention_auto import Failure
from hf_deberta.engines.attention_triton import INTERPRETING
from hf_deberta.engines.linear_cross_entropy import kernel_fault, linear_cross_entropy, tokens_and_residual

vocabulary_triton = pytest.importorskip("hf_deberta.engines.vocabulary_triton", exc_type=ImportError)
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in the process of test_in_the_interpreter")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETING, reason="needs a CUDA device")


def random_rows(tokens, vocabulary, dtype=torch.float32, device="cpu"):
    """Logits [M, V] and labels [M], of which one in three is ignored."""
    torch.manual_seed(tokens)
    logits = (4 * torch.randn(tokens, vocabulary)).to(device, dtype)
    labels = torch.randint(0, vocabulary, (tokens,)).masked_fill(torch.arange(tokens) % 3 == 1, -100)
    return logits, labels.to(device)


def assert_equals_pytorch(logits, labels):
    residual = logits.clone()
    losses, predictions, samples = vocabulary_triton.losses_and_residual(residual, labels, None, needs_residual=True)
    expected, expected_residual = tokens_and_residual(logits.clone(), labels, None, True, torch.float32)
    torch.testing.assert_close(losses, expected.losses, atol=1e-5, rtol=1e-5)
    assert torch.equal(predictions, expected.predictions) and samples is None
    errors = (residual.float() - expected_residual.float()).abs()[labels >= 0]
    # probabilities have the rounding of their exponents, numbers up to 30, and then that of the type
    assert errors.max() <= 2 * torch.finfo(logits.dtype).eps + 30 * torch.finfo(torch.float32).eps
    untouched = logits.clone()
    assert torch.equal(vocabulary_triton.losses_and_residual(untouched, labels, None, needs_residual=False)[0], losses)
    assert torch.equal(untouched, logits)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 4096), (4, 4097), (3, 9000)], ids=str)
def test_losses_predictions_and_residual(shape, dtype):
    assert_equals_pytorch(*random_rows(*shape, dtype))


@interpreted
def test_labels_may_lie_apart():
    logits, labels = random_rows(4, 50)
    assert_equals_pytorch(logits, torch.stack([labels, labels + 1], 1)[:, 0])


@interpreted
def test_of_equal_logits_the_first_is_most_likely():
    logits = torch.zeros(1, 9000)
    logits[0, [8500, 4200, 40 + 4096]] = 1.0  # a lane of its own, an earlier column in another block
    assert vocabulary_triton.losses_and_residual(logits, torch.tensor([0]), None, False)[1].tolist() == [40 + 4096]


@interpreted
@pytest.mark.parametrize("number", [0.0, torch.nan, torch.inf])
def test_logits_that_are_no_numbers_and_labels_that_do_not_exist_make_the_loss_nan(number):
    logits, _ = random_rows(3, 50)
    logits[1, 7] = number
    losses = vocabulary_triton.losses_and_residual(logits, torch.tensor([3, 3, 50]), None, False)[0]
    assert losses.isnan().tolist() == [False, number != 0, True]


@interpreted
def test_tokens_are_sampled_from_the_softmax(monkeypatch):
    wide = torch.zeros(2, 9000)
    first, second = (
        vocabulary_triton.losses_and_residual(wide, torch.zeros(2).long(), 1.0, False)[2].tolist() for _ in range(2)
    )
    assert len({*first, *second}) == 4  # other draws for each token and in each call
    monkeypatch.setattr(vocabulary_triton, "BLOCK", 8)  # the interpreter is slow
    logits, tokens = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]), 300
    labels = torch.zeros(tokens, dtype=torch.long)
    torch.manual_seed(0)
    for temperature in (0.5, 3.0):
        samples = vocabulary_triton.losses_and_residual(logits.repeat(tokens, 1), labels, temperature, False)[2]
        expected = (logits / temperature).softmax(-1)
        deviation = (expected * (1 - expected) / tokens).sqrt()
        assert ((samples.bincount(minlength=5) / tokens - expected).abs() < 4 * deviation).all(), temperature
    predictions, samples = vocabulary_triton.losses_and_residual(*random_rows(3, 50), 0, False)[1:]
    assert torch.equal(predictions, samples)


@interpreted
def test_the_loss_uses_the_kernel(monkeypatch):
    calls, compute = [], vocabulary_triton.losses_and_residual
    monkeypatch.setattr(module, "_kernel_faults", {})
    monkeypatch.setattr(vocabulary_triton, "losses_and_residual", lambda *given: calls.append(1) or compute(*given))
    monkeypatch.setattr(module, "kernel_fault", lambda *kind: None)
    monkeypatch.setattr(module, "MAX_CHUNK_LOGITS", 1)
    torch.manual_seed(0)
    states, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((20, 8), (30, 8), (30,)))
    _, labels = random_rows(20, 30)
    loss, losses, _, samples = linear_cross_entropy(states, weight, bias, labels, sampling_temperature=1.0)
    found = torch.autograd.grad(loss, (states, weight, bias))
    whole = functional.cross_entropy(functional.linear(states, weight, bias), labels)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(found, torch.autograd.grad(whole, (states, weight, bias)), atol=1e-6, rtol=1e-5)
    assert len(calls) == 2 and len(losses) == len(samples) == 20  # chunks of 16 tokens


@interpreted
def test_the_kernel_passes_its_check_and_a_wrong_one_does_not(monkeypatch, caplog):
    assert kernel_fault(torch.device("cpu"), torch.float32) is None
    compute = vocabulary_triton.losses_and_residual

    def wrong(logits, *given, **options):
        losses, predictions, samples = compute(logits, *given, **options)
        logits[0, 0] += 0.01
        return losses, predictions + 1, samples

    monkeypatch.setattr(module, "_kernel_faults", {})
    monkeypatch.setattr(vocabulary_triton, "losses_and_residual", wrong)
    logits, _ = random_rows(2, 50)
    assert not module.may_use_kernel(logits) and not module.may_use_kernel(logits)
    (record,) = caplog.records
    assert "predictions and residual" in record.getMessage()


@interpreted
def test_a_check_without_memory_is_repeated(monkeypatch, caplog):
    faults = iter([Failure("OutOfMemoryError: 5 GiB", out_of_memory=True), None])
    monkeypatch.setattr(module, "_kernel_faults", {})
    monkeypatch.setattr(module, "kernel_fault", lambda *kind: next(faults))
    logits, _ = random_rows(2, 50)
    assert [module.may_use_kernel(logits) for _ in range(3)] == [False, True, True]
    assert "5 GiB" in caplog.text


def test_the_kernel_is_for_gpus():
    if not INTERPRETING:
        assert not module.may_use_kernel(torch.zeros(2, 50))
    assert not module.may_use_kernel(torch.zeros(2, 50, dtype=torch.float64))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(700, 128100), (5, 251000), (33, 50265)], ids=str)
def test_real_sizes(shape, dtype):
    assert_equals_pytorch(*random_rows(*shape, dtype, "cuda"))
    assert kernel_fault(torch.device("cuda"), dtype) is None
