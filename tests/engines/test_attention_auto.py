"""`attn_implementation="auto"`: what is checked, how often, and which backend follows.

Devices and checks are replaced: the CPU stands for a GPU, and a check is what a test says.
`test_attention_triton` has the real check of the real kernels.
"""

import copy
import pickle
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from numerics import graphs_may_have_operators, import_again, tiny_inputs, tiny_model
from test_attention_triton import on_gpu
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForSequenceClassification

from hf_deberta import HfDebertaForSequenceClassification
from hf_deberta.engines import attention_auto, attention_check, attention_triton
from hf_deberta.engines.attention_auto import checked_backend
from hf_deberta.engines.attention_check import CALLS, KernelVariant
from hf_deberta.model.attention import BACKENDS, Backend, disentangled_attention
from hf_deberta.model.attention_reference import position_terms, reference_attention, visible_softmax
from hf_deberta.model.batch_layout import AttentionMask
from hf_deberta.model.relative_position import RelativePositions, rows_at, rows_of_distances, saturation_of

CPU = torch.device("cpu")
BFLOAT16 = KernelVariant(CPU, torch.bfloat16, 64)
PASSED = {"the context": 0.0, "the gradient of query": 1e-7}


class Gpu:
    """The CPU as a GPU with Triton; counts checks, which give `errors` or raise them."""

    def __init__(self):
        self.errors, self.checked = PASSED, []  # kernels

    def install(self, monkeypatch):
        for name in ("INTERPRETING", "IS_INSTALLED"):
            monkeypatch.setattr(attention_triton, name, True)
        monkeypatch.setattr(attention_auto, "may_use_triton", lambda query: type(query) is torch.Tensor)
        monkeypatch.setattr(attention_auto, "triton_errors", self.check)
        monkeypatch.setattr(attention_auto, "_faults", {})

    def check(self, kernel):
        self.checked.append(kernel)
        if isinstance(self.errors, Exception):
            raise self.errors
        return self.errors


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    gpu.install(monkeypatch)
    return gpu


def call(batch=2, heads=3, tokens=20, size=8, dtype=torch.bfloat16, training=False, dropout_p=0.0, terms=True, **mask):
    """Arguments of a backend."""
    states = [torch.randn(batch, heads, tokens, size, dtype=dtype, requires_grad=training) for _ in range(3)]
    tables = [torch.randn(heads, 32, size, dtype=dtype, requires_grad=training) for _ in range(2)]
    positions = RelativePositions.from_tables(*tables, rows_of_distances(16)) if terms else None
    return *states, positions, AttentionMask(**mask), dropout_p, size**-0.5


def choose(**options):
    return checked_backend(*call(**options))


# ---- without a GPU -----------------------------------------------------------------------------------------------


def test_the_cpu_uses_sdpa_and_looks_at_nothing(monkeypatch):
    def fail(*arguments):
        raise AssertionError("the Triton backend was looked at")

    monkeypatch.setattr(attention_auto, "triton_errors", fail)
    monkeypatch.setattr(attention_triton, "unsupported_reason", fail)
    assert choose() == choose(training=True) == "sdpa"


# ---- the choice --------------------------------------------------------------------------------------------------


def test_one_check_for_each_half_precision_and_head_size(gpu):
    assert choose(dtype=torch.float32) == "sdpa"
    same = (
        {},
        {"tokens": 33, "batch": 8, "heads": 1, "terms": False},
        {"mask": torch.ones(2, 20).bool(), "causal": True},
        {"mask": torch.ones(2, 20, 20).bool()},
        {"batch": 1, "cu_seqlens": torch.tensor([0, 5, 20])},
        {"training": True, "dropout_p": 0.1},
    )
    for options in (*same, {"dtype": torch.float16}, {"size": 16}):
        assert choose(**options) == choose(**options) == "triton"
    plain = KernelVariant(CPU, torch.bfloat16, 8)
    assert gpu.checked == [plain, plain._replace(dtype=torch.float16), plain._replace(head_size=16)]


def test_unsupported_calls_use_sdpa_silently(gpu, sdpa_warnings):
    """test_attention_triton has the other limits."""
    for options in ({"query_positions": torch.arange(20).expand(2, -1)}, {"tokens": 0}, {"dropout_p": 1.0}):
        assert choose(**options) == "sdpa"
    assert not gpu.checked and not sdpa_warnings()


def test_function_transforms_use_sdpa(gpu):
    chosen = []
    query, *others = call()

    def function(query):
        chosen.append(checked_backend(query, *others))
        return query.sum()

    assert choose() == choose(training=True) == "triton"  # decided before
    torch.func.grad(function)(query)
    assert chosen == ["sdpa"]


# ---- failed checks -----------------------------------------------------------------------------------------------

FAULTS = {
    "wrong numbers": ({**PASSED, "the gradient of key": 0.53}, "the gradient of key is off by 0.53"),
    "NaN": ({"the context": 0.7, "the gradient of key": float("nan")}, "the gradient of key is off by nan"),
    "OutOfResources": (MemoryError("out of resource: shared memory, Required: 135168"), "MemoryError: out of resource"),
    "compilation": (RuntimeError("PassManager::run failed\nmany lines"), "RuntimeError: PassManager::run failed."),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_failed_check_means_sdpa_with_one_warning(gpu, case, sdpa_warnings):
    gpu.errors, message = FAULTS[case]
    for tokens in (20, 20, 100):
        assert choose(tokens=tokens, training=True) == "sdpa"
    assert len(gpu.checked) == 1
    (warning,) = sdpa_warnings()
    assert message in warning and "bfloat16, heads of 8" in warning and "many lines" not in warning
    assert "HF_DEBERTA_ATTENTION" in warning and "'triton'" in warning


def test_without_memory_for_the_check_the_next_call_checks_again(gpu, sdpa_warnings):
    gpu.errors = torch.OutOfMemoryError("CUDA out of memory")
    assert choose() == "sdpa"
    (warning,) = sdpa_warnings()
    assert "OutOfMemoryError: CUDA out of memory" in warning
    gpu.errors = PASSED
    assert choose() == "triton" and len(gpu.checked) == 2


def test_the_tolerance_depends_on_the_dtype(gpu):
    gpu.errors = {"the context": 0.01}
    assert choose(dtype=torch.bfloat16) == "triton"
    assert choose(dtype=torch.float16) == "sdpa"


# ---- what the user sets ------------------------------------------------------------------------------------------


def test_the_environment_variable_fixes_the_choice(gpu, monkeypatch):
    for value, expected in (("sdpa", "sdpa"), ("triton", "triton"), ("", "auto"), ("flash", "flash")):
        monkeypatch.setenv("HF_DEBERTA_ATTENTION", value)
        setting = import_again(attention_auto).FORCED_BACKEND
        assert setting == expected
    for setting in ("sdpa", "triton"):
        monkeypatch.setattr(attention_auto, "FORCED_BACKEND", setting)
        assert choose() == setting and not gpu.checked
    monkeypatch.setattr(attention_auto, "FORCED_BACKEND", "flash")
    with pytest.raises(ValueError, match="HF_DEBERTA_ATTENTION must be auto, sdpa, triton, not 'flash'"):
        choose()


# ---- captured graphs, distributed runs, and the state of the caller ----------------------------------------------


def test_nothing_is_checked_while_a_graph_is_captured(gpu, monkeypatch):
    choose()
    monkeypatch.setattr(attention_auto, "is_capturing", lambda device: True)
    assert choose(training=True) == "triton"  # checked before
    assert choose(size=16) == "sdpa" and len(gpu.checked) == 1
    monkeypatch.setattr(attention_auto, "is_capturing", lambda device: False)
    assert choose(size=16) == "triton" and len(gpu.checked) == 2


def test_a_capture_is_looked_for_on_the_device_of_the_call(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device.index)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 1)
    assert attention_auto.is_capturing(torch.device("cuda", 1))
    assert not attention_auto.is_capturing(torch.device("cuda", 0))


def doubled_value(query, key, value, *rest):
    return 2 * value, None


@pytest.fixture
def doubling_triton(gpu, monkeypatch):
    """A backend "triton" that is recognized by its numbers."""
    monkeypatch.setitem(BACKENDS, "triton", replace(BACKENDS["triton"], attend=doubled_value))


def uses_triton(function):
    states = torch.randn(1, 2, 6, 8, dtype=torch.bfloat16)
    return torch.equal(function(states), 2 * states)


def attend_to_itself(states):
    return disentangled_attention(states, states, states, backend="auto")[0]


def compiled(**options):
    torch._dynamo.reset()
    return torch.compile(attend_to_itself, fullgraph=True, backend="eager", **options)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.usefixtures("doubling_triton")
@graphs_may_have_operators
def test_a_compiled_graph_has_checked_kernels(gpu, dynamic):
    function = compiled(dynamic=dynamic)
    assert uses_triton(function) and len(gpu.checked) == 1
    function(torch.randn(1, 2, 600, 8, dtype=torch.bfloat16))
    assert len(gpu.checked) == 1


@pytest.mark.usefixtures("doubling_triton")
@graphs_may_have_operators
def test_a_compiled_graph_has_sdpa_if_the_check_fails(gpu, sdpa_warnings):
    gpu.errors = {"the context": 1.0}
    assert not uses_triton(compiled())
    assert len(sdpa_warnings()) == 1


@pytest.mark.usefixtures("doubling_triton")
def test_exported_graphs_have_sdpa(gpu):
    class Attention(torch.nn.Module):
        def forward(self, states):
            return attend_to_itself(states)

    states = torch.randn(1, 2, 6, 8, dtype=torch.bfloat16)
    assert uses_triton(attend_to_itself)
    for strict in (False, True):
        exported = torch.export.export(Attention(), (states,), strict=strict)
        assert not uses_triton(exported.module())
    assert not uses_triton(torch.jit.trace(Attention(), (states,), check_trace=False))


def real_work(gpu, monkeypatch):
    """Let checks compute and save tensors, as on a GPU."""

    def check(kernel):
        gpu.checked.append(kernel)
        states = torch.ones(1, 2, 6, 8, requires_grad=True)
        (states @ states.mT).softmax(-1).sum().backward()
        assert not torch.is_autocast_enabled("cpu") and (states @ states.mT).dtype == torch.float32
        return PASSED

    monkeypatch.setattr(attention_auto, "triton_errors", check)
    monkeypatch.setitem(BACKENDS, "triton", replace(BACKENDS["triton"], attend=reference_attention))


STATES = {
    "none": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "a FLOP counter": lambda: FlopCounterMode(display=False),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(forbidden, forbidden),
}


def forbidden(tensor):
    raise AssertionError("a hook of the caller saw a tensor of the check")


@pytest.mark.parametrize("state", STATES)
def test_the_state_of_the_caller_is_neither_used_nor_changed(gpu, monkeypatch, state):
    real_work(gpu, monkeypatch)
    arguments = call(training=state == "saved tensors", dropout_p=0.3)
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    with STATES[state]() as mode:
        enabled = torch.is_grad_enabled()
        assert checked_backend(*arguments) == "triton"
        assert torch.is_grad_enabled() == enabled
    assert len(gpu.checked) == 1 and torch.equal(torch.randn(3), expected)
    assert not isinstance(mode, FlopCounterMode) or mode.get_total_flops() == 0
    assert all(tensor.grad is None for tensor in arguments[:3])


def test_random_numbers_of_other_threads_are_not_drawn_again(gpu, monkeypatch):
    """The numbers that a check draws stand for those of another thread, which draws them meanwhile."""
    arguments, drawn = call(), []
    monkeypatch.setattr(attention_auto, "triton_errors", lambda kernel: drawn.append(torch.randn(3)) or PASSED)
    torch.manual_seed(0)
    expected = torch.randn(6)
    torch.manual_seed(0)
    checked_backend(*arguments)
    assert drawn and torch.equal(torch.cat([*drawn, torch.randn(3)]), expected)


def test_the_random_state_of_the_gpu_is_restored(monkeypatch):
    device, states = torch.device("cuda", 1), {}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"state of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    with pytest.raises(RuntimeError, match="no kernel"), attention_auto.own_random_state(device):
        raise RuntimeError("no kernel")
    assert states == {device: "state of cuda:1"}


def test_one_thread_at_a_time_checks(gpu, monkeypatch):
    threads, chosen = [], []

    def check(kernel):
        gpu.checked.append(kernel)
        if not threads:
            threads.append(threading.Thread(target=lambda: chosen.append(choose())))
            threads[0].start()
            threads[0].join(0.2)  # waits, because it must not check
        return PASSED

    monkeypatch.setattr(attention_auto, "triton_errors", check)
    chosen.append(choose())
    threads[0].join()
    assert chosen == ["triton", "triton"] and len(gpu.checked) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(gpu, monkeypatch, reentrant):
    """The first choice is made inside of it."""
    real_work(gpu, monkeypatch)
    states = torch.randn(1, 2, 6, 8, dtype=torch.bfloat16, requires_grad=True)
    expected = torch.autograd.grad(attend_to_itself(states).sum(), states)[0]
    attention_auto._faults.clear()
    checkpoint(attend_to_itself, states, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(states.grad, expected)


# ---- models ------------------------------------------------------------------------------------------------------


def test_auto_is_the_default_and_survives_copies_and_folders(tmp_path):
    model = tiny_model(HfDebertaForSequenceClassification).eval()
    inputs = tiny_inputs()
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert other.config._attn_implementation == "auto"
        assert torch.equal(other.eval()(**inputs).logits, expected)
    for name in ("auto", "sdpa", "eager", "triton"):
        again = AutoModel.from_pretrained(tmp_path, attn_implementation=name)
        assert again.config._attn_implementation == name
        again.set_attn_implementation("auto")
        assert again.config._attn_implementation == "auto"


# ---- the check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_size", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_correct_kernels_pass(monkeypatch, dtype, head_size):
    """The reference, which rounds probabilities to the type as the kernels do."""
    monkeypatch.setitem(BACKENDS, "triton", Backend(reference_attention))
    kernel = KernelVariant(CPU, dtype, head_size)
    errors = attention_check.triton_errors(kernel)
    assert len(errors) == 6 * len(CALLS)
    assert all(0 < error < kernel.tolerance / 2 for error in errors.values()), errors


def changed(**changes):
    """The reference, with some of its inputs changed by functions."""

    def attend(query, key, value, positions, fields, dropout_p, scale):
        tables = (positions.position_key, positions.position_query)
        given = dict(zip(attention_check.INPUTS, (query, key, value, *tables), strict=True))
        given |= {"rows": positions.window.rows_of_distance, "mask": fields.mask}
        query, key, value, *tables, rows, mask = [changes.get(name, torch.clone)(given[name]) for name in given]
        positions = RelativePositions.from_tables(*tables, rows)
        mask = AttentionMask(mask, fields.documents)
        return reference_attention(query, key, value, positions, mask, 0.0, scale)

    return attend


def saturated_too_early(rows):
    return rows.index_fill(0, torch.tensor(len(rows) // 2 + saturation_of(rows) - 1), int(rows[-1]))


def at(mask):
    return torch.arange(mask.shape[1])


def without_terms(query_tile, key_tile):
    def attend(query, key, value, positions, mask, dropout_p, scale):
        tile = torch.arange(query.shape[2]) // 16
        wrong = (tile[:, None] == query_tile) & (tile == key_tile)
        visible = mask.visible(query.shape[2], query.device)
        context = reference_attention(query, key, value, positions, mask, 0.0, scale)[0]
        at = torch.arange(len(tile))
        row = rows_at(at[None, :, None] - at, positions.window.rows_of_distance)
        content = query.float() * scale @ key.float().mT
        terms = position_terms(query.float() * scale, key.float(), positions.scaled(scale, torch.float32), row)
        scores = torch.where(wrong, content, sum(terms.values(), start=content))
        other = visible_softmax(scores, visible).to(value.dtype) @ value
        return torch.where(wrong.any(1)[:, None], other, context), None

    return attend


def with_nan(*call):
    context, _ = reference_attention(*call)
    return context.index_fill(2, torch.tensor([40]), float("nan")), None


WRONG = {
    "tables shifted by a row": changed(rows=lambda rows: (rows + 1).clamp(max=int(rows.max()))),
    "one distance saturated too early": changed(rows=saturated_too_early),
    "hole in the mask ignored": changed(mask=lambda mask: mask | (at(mask) < 10)),
    "padding begins too late": changed(mask=lambda mask: mask | (at(mask) == mask[1].sum() + 1)),
    "last token of the row missing": changed(mask=lambda mask: mask & (at(mask) < mask.shape[1] - 1)),
    "near tile without position terms": without_terms(1, 2),
    "far tile without position terms": without_terms(1, 4),
    "NaN": with_nan,
}
WRONG_GRADIENTS = {
    f"gradient of {name} doubled": changed(**{name: lambda tensor: 2 * tensor - tensor.detach()})
    for name in attention_check.INPUTS
}


@pytest.mark.parametrize("case", {**WRONG, **WRONG_GRADIENTS})
def test_wrong_kernels_are_detected(monkeypatch, case):
    """In the call without dropout, whose errors name what is wrong."""
    monkeypatch.setitem(BACKENDS, "triton", Backend({**WRONG, **WRONG_GRADIENTS}[case]))
    errors = attention_check.errors_in_call(BFLOAT16, CALLS[0])
    wrong = {name for name, error in errors.items() if not error <= BFLOAT16.tolerance}
    assert wrong == {f"the {case.rpartition(' ')[0]}"} if case in WRONG_GRADIENTS else wrong > {"the context"}


def with_other_draws_backward(probabilities, dropout_p):
    """As a kernel with a wrong counter would."""
    backward = functional.dropout(probabilities, dropout_p)
    return backward + (functional.dropout(probabilities, dropout_p) - backward).detach()


WRONG_DROPOUT = {
    "none": lambda probabilities, dropout_p: probabilities,
    "too much": lambda probabilities, dropout_p: functional.dropout(probabilities, dropout_p + 0.05),
    "kept ones not scaled": lambda probabilities, dropout_p: functional.dropout(probabilities, dropout_p) * 0.75,
    "others in the backward pass": with_other_draws_backward,
}


@pytest.mark.parametrize("wrong", WRONG_DROPOUT)
def test_wrong_dropout_is_detected(monkeypatch, wrong):
    def attend(query, key, value, positions, mask, dropout_p, scale):
        _, probabilities = reference_attention(query, key, value, positions, mask, 0.0, scale)
        return (WRONG_DROPOUT[wrong](probabilities, dropout_p) if dropout_p else probabilities) @ value, None

    monkeypatch.setitem(BACKENDS, "triton", Backend(attend))
    for call, has_fault in zip(CALLS, (False, True, True), strict=True):
        errors = attention_check.errors_in_call(BFLOAT16, call)
        assert (max(errors.values()) > BFLOAT16.tolerance) == has_fault


FORGOTTEN = {"documents": "documents", "cu_seqlens": "packed", "mask": "pairs", "causal": "pairs"}


@pytest.mark.parametrize("field", FORGOTTEN)
def test_each_kind_of_mask_is_checked(monkeypatch, field):
    """By kernels that forget it; those of padding are among `WRONG`."""

    def forgetful(query, key, value, positions, mask, dropout_p, scale):
        if field != "mask" or (mask.mask is not None and mask.mask.dim() == 3):
            mask = replace(mask, **{field: False if field == "causal" else None})
        return reference_attention(query, key, value, positions, mask, dropout_p, scale)

    monkeypatch.setitem(BACKENDS, "triton", Backend(forgetful))
    for call in CALLS:
        errors = attention_check.errors_in_call(BFLOAT16, call)
        assert (max(errors.values()) > BFLOAT16.tolerance) == (call.mask == FORGOTTEN[field])
    assert attention_auto.find_fault(BFLOAT16) is not None


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@on_gpu
def test_this_gpu_is_checked_once_and_not_in_a_captured_graph():
    states = torch.randn(2, 4, 200, 64, dtype=torch.bfloat16, device="cuda")
    known = len(attention_auto._faults)
    found, again = attend_to_itself(states), attend_to_itself(states)
    assert torch.equal(found, again) and len(attention_auto._faults) <= known + 1
    other = torch.randn(2, 4, 500, 64, dtype=torch.bfloat16, device="cuda")
    expected = disentangled_attention(other, other, other, backend="eager")[0]
    known = len(attention_auto._faults)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_to_itself(other)
    graph.replay()
    assert len(attention_auto._faults) == known
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
