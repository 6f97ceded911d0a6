"""`attn_implementation="auto"`: what is checked and timed, how often, and which backend follows.

Devices, checks and times are replaced: the CPU stands for a GPU, and a check or a time is what a test says.
`test_attention_triton` has the real check of the real kernels.
"""

import copy
import pickle
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from numerics import graphs_may_have_operators, import_again, tiny_inputs, tiny_model
from test_attention_triton import on_gpu
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForSequenceClassification

from hf_deberta import HfDebertaForSequenceClassification, HfDebertaModel
from hf_deberta.engines import attention_auto, attention_check, attention_triton
from hf_deberta.engines.attention_auto import Workload, measured_backend
from hf_deberta.engines.attention_check import KernelVariant
from hf_deberta.engines.attention_sdpa import sdpa_attention
from hf_deberta.model.attention import BACKENDS, Backend, disentangled_attention
from hf_deberta.model.attention_reference import reference_attention, score_terms, visible_softmax
from hf_deberta.model.batch_layout import AttentionMask
from hf_deberta.model.relative_position import RelativePositions, rows_between, rows_of_distances, saturation_of

CPU = torch.device("cpu")
PASSED = {"the context": 0.0, "the gradient of query": 1e-7}


class Gpu:
    """The CPU as a GPU with Triton; counts checks and timings, which give `errors` and `times` or raise them."""

    def __init__(self):
        self.errors, self.times = PASSED, {"sdpa": 2.0, "triton": 1.0}
        self.checked, self.timed = [], []  # kernels, names of backends

    def install(self, monkeypatch):
        for name in ("INTERPRETING", "IS_INSTALLED"):
            monkeypatch.setattr(attention_triton, name, True)
        monkeypatch.setattr(attention_auto, "may_use_triton", lambda query: type(query) is torch.Tensor)
        monkeypatch.setattr(attention_auto, "triton_errors", self.check)
        monkeypatch.setattr(attention_auto, "median_milliseconds", self.time)
        for name in ("_faults", "_choices"):
            monkeypatch.setattr(attention_auto, name, {})

    def check(self, kernel):
        self.checked.append(kernel)
        if isinstance(self.errors, Exception):
            raise self.errors
        return self.errors

    def time(self, run, device):
        run()
        self.timed.append(self.called)
        time = self.times[self.called]
        if isinstance(time, Exception):
            raise time
        return time

    def timed_backend(self, name, attend=lambda query, *rest: (query * 1, None)):
        """The backend of this name, with another computation, that tells when it is called."""

        def record(*call):
            self.called = name
            return attend(*call)

        return replace(BACKENDS[name], attend=record)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    gpu.install(monkeypatch)
    for name in gpu.times:
        monkeypatch.setitem(BACKENDS, name, gpu.timed_backend(name))
    return gpu


def call(batch=2, heads=3, tokens=20, size=8, dtype=torch.float32, training=False, dropout_p=0.0, terms=True, **mask):
    """Arguments of a backend."""
    states = [torch.randn(batch, heads, tokens, size, dtype=dtype, requires_grad=training) for _ in range(3)]
    tables = [torch.randn(heads, 32, size, dtype=dtype, requires_grad=training) for _ in range(2)]
    positions = RelativePositions.from_tables(*tables, rows_of_distances(16)) if terms else None
    return *states, positions, AttentionMask(**mask), dropout_p, size**-0.5


def choose(**options):
    return measured_backend(*call(**options))


# ---- without a GPU -----------------------------------------------------------------------------------------------


def test_the_cpu_uses_sdpa_and_looks_at_nothing(monkeypatch):
    def fail(*arguments):
        raise AssertionError("the Triton backend was looked at")

    monkeypatch.setattr(attention_auto, "triton_errors", fail)
    monkeypatch.setattr(attention_triton, "unsupported_reason", fail)
    assert choose() == choose(training=True) == "sdpa"


# ---- the choice --------------------------------------------------------------------------------------------------


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
CRASH = RuntimeError("Triton Error [CUDA]: invalid argument")
# times of sdpa and Triton in milliseconds, or what they raise -> the choice, number of warnings; the timed call stands
# beside the caller's, so that without memory for either there may be memory for Triton, which needs less
TIMES = {
    "sdpa is faster": (1.0, 2.0, "sdpa", 0),
    "Triton is faster": (2.0, 1.0, "triton", 0),
    "no memory for sdpa": (OUT_OF_MEMORY, 5.0, "triton", 0),
    "no memory for either": (OUT_OF_MEMORY, OUT_OF_MEMORY, "triton", 0),
    "Triton crashes": (5.0, CRASH, "sdpa", 1),
    "no memory for sdpa, Triton crashes": (OUT_OF_MEMORY, CRASH, "sdpa", 1),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", TIMES)
def test_the_faster_backend_is_used(gpu, case, training, sdpa_warnings):
    *times, expected, number_of_warnings = TIMES[case]
    gpu.times = dict(zip(("sdpa", "triton"), times, strict=True))
    assert choose(training=training) == expected
    gpu.times = dict(zip(("triton", "sdpa"), times, strict=True))
    assert choose(training=training) == expected  # decided before
    messages = sdpa_warnings()
    assert len(messages) == number_of_warnings
    assert all("RuntimeError: Triton Error [CUDA]: invalid argument" in message for message in messages)


def test_one_check_per_kernel_and_one_timing_per_workload(gpu):
    for tokens in (17, 32, 20, 17):  # up to 32
        for batch, heads in ((2, 3), (8, 1)):  # up to 8
            choose(tokens=tokens, batch=batch, heads=heads)
    assert gpu.checked == [KernelVariant(CPU, torch.float32, False, 8, False)]
    assert gpu.timed == ["sdpa", "triton"]
    others = {
        "tokens": {"tokens": 33},
        "heads": {"batch": 3},
        "terms": {"terms": False},
        "mask": {"mask": torch.ones(2, 20, dtype=torch.bool)},
        "pairs": {"mask": torch.ones(2, 20, 20, dtype=torch.bool)},
        "causal": {"causal": True},
        "documents": {"documents": torch.zeros(2, 20, dtype=torch.long)},
        "packed": {"batch": 1, "heads": 6, "cu_seqlens": torch.tensor([0, 5, 20]), "lengths": (5, 15)},
        "packed, short": {"batch": 1, "heads": 6, "cu_seqlens": torch.tensor([0, 7, 13, 20]), "longest": 7},
    }
    for count, options in enumerate(others.values(), 2):
        choose(**options)
        choose(**options)
        assert len(gpu.timed) == 2 * count
    assert len(gpu.checked) == 1
    for count, options in enumerate(({"training": True}, {"dtype": torch.float16}, {"size": 16}), 2):
        choose(**options)
        choose(**options)
        assert len(gpu.checked) == count


def test_what_is_training(gpu):
    """Dropout is, with and without gradients: both passes of a reentrant checkpoint must drop the same."""
    choose(training=False)
    with torch.no_grad():
        choose(training=True)
    assert [kernel.training for kernel in gpu.checked] == [False]
    with torch.no_grad():
        choose(dropout_p=0.1, training=True)
    choose(dropout_p=0.1, training=True)
    assert [kernel.training for kernel in gpu.checked] == [False, True] and len(gpu.timed) == 4


def test_tf32_is_checked_on_its_own(gpu, monkeypatch):
    choose()
    monkeypatch.setattr(attention_auto, "uses_tf32", lambda dtype: dtype == torch.float32)
    choose()
    choose(dtype=torch.float16)
    assert [kernel.precision for kernel in gpu.checked] == ["float32", "tf32", "float16"]


UNSUPPORTED = {
    "queries at some positions": {"query_positions": torch.arange(20).expand(2, -1)},
    "float64": {"dtype": torch.float64},
    "wide heads": {"size": 132},
    "no tokens": {"tokens": 0},
    "dropout of all": {"dropout_p": 1.0},
    "dropout of all, packed": {"dropout_p": 1.0, "batch": 1, "cu_seqlens": torch.tensor([0, 20])},
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_calls_use_sdpa_silently(gpu, case, sdpa_warnings):
    choose(tokens=2)  # of the same class as no tokens
    count = len(gpu.timed)
    assert choose(**UNSUPPORTED[case]) == "sdpa"
    assert len(gpu.timed) == count and not sdpa_warnings()


def test_function_transforms_use_sdpa(gpu):
    chosen = []
    query, *others = call()

    def function(query):
        chosen.append(measured_backend(query, *others))
        return query.sum()

    torch.func.grad(function)(query)
    assert chosen == ["sdpa"] and not gpu.checked


# ---- failed checks and slow kernels ------------------------------------------------------------------------------

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
    assert len(gpu.checked) == 1 and not gpu.timed
    (warning,) = sdpa_warnings()
    assert message in warning and "float32, heads of 8, training" in warning and "many lines" not in warning
    assert "HF_DEBERTA_ATTENTION" in warning and "'triton'" in warning


def test_without_memory_for_the_check_the_next_call_checks_again(gpu, sdpa_warnings):
    gpu.errors = OUT_OF_MEMORY
    assert choose() == "sdpa" and not gpu.timed
    (warning,) = sdpa_warnings()
    assert "OutOfMemoryError: CUDA out of memory" in warning
    gpu.errors = PASSED
    assert choose() == "triton" and len(gpu.checked) == 2


def test_the_tolerance_depends_on_the_dtype(gpu):
    gpu.errors = {"the context": 0.01}
    assert choose(dtype=torch.bfloat16) == "triton"
    assert choose(dtype=torch.float16) == choose() == "sdpa"


# ---- deterministic algorithms ------------------------------------------------------------------------------------


def test_deterministic_choices_do_not_depend_on_times(gpu, monkeypatch):
    deterministic = True
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    gpu.times = {"sdpa": 1.0, "triton": 2.0}
    assert choose() == choose(tokens=100) == "triton" and not gpu.timed
    assert attention_auto.choice_in_graph(CPU, torch.float32, 8, training=False) == "triton"
    gpu.errors = {"the context": 1.0}
    assert choose(training=True) == "sdpa" and not gpu.timed
    deterministic = False
    assert choose() == "sdpa" and len(gpu.timed) == 2
    assert attention_auto.choice_in_graph(CPU, torch.float32, 8, training=False) == "sdpa"


# ---- what the user sets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["sdpa", "triton"])
def test_the_environment_variable_fixes_the_choice(gpu, monkeypatch, setting):
    monkeypatch.setattr(attention_auto, "FORCED_BACKEND", setting)
    gpu.errors = {"the context": 1.0}
    assert choose() == setting and not gpu.checked and not gpu.timed


@pytest.mark.parametrize(("value", "expected"), [("triton", "triton"), ("", "auto")])
def test_the_environment_variable_is_read(monkeypatch, value, expected):
    monkeypatch.setenv("HF_DEBERTA_ATTENTION", value)
    setting = import_again(attention_auto).FORCED_BACKEND
    assert setting == expected


def test_an_unknown_setting_is_an_error(monkeypatch):
    monkeypatch.setattr(attention_auto, "FORCED_BACKEND", "flash")
    with pytest.raises(ValueError, match="HF_DEBERTA_ATTENTION must be auto, sdpa, triton, not 'flash'"):
        choose()


# ---- captured graphs, distributed runs, and the state of the caller ----------------------------------------------


def test_nothing_is_measured_while_a_graph_is_captured(gpu, monkeypatch):
    choose(tokens=20)
    gpu.times = {"sdpa": 1.0, "triton": 2.0}
    choose(tokens=100)
    counts = len(gpu.checked), len(gpu.timed)
    monkeypatch.setattr(attention_auto, "is_capturing", lambda device: True)
    assert [choose(tokens=20), choose(tokens=100)] == ["triton", "sdpa"]  # as decided before
    assert choose(tokens=1000) == "triton"  # checked
    assert choose(training=True) == "sdpa"  # not checked
    assert (len(gpu.checked), len(gpu.timed)) == counts
    monkeypatch.setattr(attention_auto, "is_capturing", lambda device: False)
    choose(tokens=1000)
    assert len(gpu.timed) > counts[1]


def test_a_capture_is_looked_for_on_the_device_of_the_call(monkeypatch):
    captured, current = torch.device("cuda", 1), [torch.device("cuda", 0)]

    @contextmanager
    def make_current(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", make_current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == captured)
    assert attention_auto.is_capturing(captured)
    assert not attention_auto.is_capturing(torch.device("cuda", 0))


def doubled_value(query, key, value, *rest):
    return 2 * value, None


@pytest.fixture
def doubling_triton(gpu, monkeypatch):
    """A backend "triton" that is recognized by its numbers, and the usual sdpa."""
    monkeypatch.setitem(BACKENDS, "sdpa", gpu.timed_backend("sdpa", sdpa_attention))
    monkeypatch.setitem(BACKENDS, "triton", gpu.timed_backend("triton", doubled_value))


def uses_triton(function):
    states = torch.randn(1, 2, 6, 8)
    return torch.equal(function(states), 2 * states)


def attend_to_itself(states):
    return disentangled_attention(states, states, states, backend="auto")[0]


def compiled(**options):
    torch._dynamo.reset()
    return torch.compile(attend_to_itself, fullgraph=True, backend="eager", **options)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.usefixtures("doubling_triton")
@graphs_may_have_operators
def test_a_compiled_graph_has_checked_kernels_and_measures_no_time(gpu, dynamic):
    function = compiled(dynamic=dynamic)
    assert uses_triton(function) and len(gpu.checked) == 1 and not gpu.timed
    function(torch.randn(1, 2, 600, 8))
    assert len(gpu.checked) == 1 and not gpu.timed


@pytest.mark.usefixtures("doubling_triton")
@graphs_may_have_operators
def test_a_compiled_graph_has_sdpa_if_the_check_fails_or_all_times_say_so(gpu, sdpa_warnings):
    gpu.errors = {"the context": 1.0}
    assert not uses_triton(compiled())
    assert len(sdpa_warnings()) == 1
    gpu.errors, gpu.times = PASSED, {"sdpa": 1.0, "triton": 2.0}
    attention_auto._faults.clear()
    choose(batch=1, heads=2)
    assert not uses_triton(compiled())
    gpu.times = {"sdpa": 2.0, "triton": 1.0}
    choose(batch=1, heads=2, tokens=100)
    assert uses_triton(compiled())


def test_other_threads_may_decide_while_a_graph_is_traced(gpu):
    class DecidingWorkload(Workload):
        @property
        def kernel(self):
            attention_auto._choices["of another thread"] = None
            return self[0]

    choose()
    (workload,) = attention_auto._choices
    attention_auto._choices = {DecidingWorkload(*workload): "sdpa", workload: "sdpa"}
    assert attention_auto.choice_in_graph(CPU, torch.float32, 8, training=False) == "sdpa"
    assert "of another thread" in attention_auto._choices


@pytest.mark.usefixtures("doubling_triton")
def test_exported_graphs_have_sdpa(gpu):
    class Attention(torch.nn.Module):
        def forward(self, states):
            return attend_to_itself(states)

    states = torch.randn(1, 2, 6, 8)
    assert uses_triton(attend_to_itself)
    for strict in (False, True):
        exported = torch.export.export(Attention(), (states,), strict=strict)
        assert not uses_triton(exported.module())
    assert not uses_triton(torch.jit.trace(Attention(), (states,), check_trace=False))


def real_work(gpu, monkeypatch):
    """Let checks and timings compute and save tensors, as on a GPU; dropout would use the CPU's generator here."""

    def attend(query, key, value, positions, mask, dropout_p, scale):
        return reference_attention(query, key, value, positions, mask, 0.0, scale)

    def check(kernel):
        gpu.checked.append(kernel)
        states = torch.ones(1, 2, 6, 8, requires_grad=True)
        (states @ states.mT).softmax(-1).sum().backward()
        assert not torch.is_autocast_enabled("cpu") and (states @ states.mT).dtype == torch.float32
        return PASSED

    monkeypatch.setattr(attention_auto, "triton_errors", check)
    for name in gpu.times:
        monkeypatch.setitem(BACKENDS, name, gpu.timed_backend(name, attend))
    gpu.times = {"sdpa": 1.0, "triton": 2.0}


STATES = {
    "none": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "a FLOP counter": lambda: FlopCounterMode(display=False),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(forbidden, forbidden),
}


def forbidden(tensor):
    raise AssertionError("a hook of the caller saw a tensor of the check")


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("state", STATES)
def test_the_state_of_the_caller_is_neither_used_nor_changed(gpu, monkeypatch, state, dropout_p):
    real_work(gpu, monkeypatch)
    arguments = call(training=state == "saved tensors", dropout_p=dropout_p)
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    with STATES[state]() as mode:
        enabled = torch.is_grad_enabled()
        assert measured_backend(*arguments) == "sdpa"
        assert torch.is_grad_enabled() == enabled
    assert gpu.timed == ["sdpa", "triton"]
    assert torch.equal(torch.randn(3), expected)
    assert not isinstance(mode, FlopCounterMode) or mode.get_total_flops() == 0
    assert all(tensor.grad is None for tensor in attention_auto.floats(arguments))


def test_random_numbers_of_other_threads_are_not_drawn_again(gpu, monkeypatch):
    """The numbers that a check draws stand for those of another thread, which draws them meanwhile."""
    arguments, drawn = call(), []
    monkeypatch.setattr(attention_auto, "triton_errors", lambda kernel: drawn.append(torch.randn(3)) or PASSED)
    torch.manual_seed(0)
    expected = torch.randn(6)
    torch.manual_seed(0)
    measured_backend(*arguments)
    assert gpu.timed and torch.equal(torch.cat([*drawn, torch.randn(3)]), expected)


def test_the_random_state_of_the_gpu_is_restored(monkeypatch):
    device, states = torch.device("cuda", 1), {}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"state of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    with pytest.raises(RuntimeError, match="no kernel"), attention_auto.own_random_state(device):
        raise RuntimeError("no kernel")
    assert states == {device: "state of cuda:1"}


def test_one_thread_at_a_time_checks_and_measures(gpu, monkeypatch):
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
    assert chosen == ["triton", "triton"] and len(gpu.checked) == 1 and gpu.timed == ["sdpa", "triton"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(gpu, monkeypatch, reentrant):
    """The first choice is made inside of it; with reentrant ones, training is first seen in the backward pass."""
    real_work(gpu, monkeypatch)
    states = torch.randn(1, 2, 6, 8, requires_grad=True)
    attend_to_itself(states.detach().requires_grad_()).sum()  # decides
    expected = torch.autograd.grad(attend_to_itself(states).sum(), states)[0]
    attention_auto._choices.clear()
    checkpoint(attend_to_itself, states, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(states.grad, expected)
    assert {workload.kernel.training for workload in attention_auto._choices} == (
        {False, True} if reentrant else {True}
    )


# ---- models ------------------------------------------------------------------------------------------------------


def test_auto_is_the_default_and_survives_copies_and_folders(tmp_path):
    model = tiny_model(HfDebertaForSequenceClassification).eval()
    inputs = tiny_inputs()
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()
    copies = [
        model,
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        HfDebertaForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64),
        AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="auto"),
    ]
    for other in copies:
        assert other.config._attn_implementation == "auto"
        assert torch.equal(other.eval()(**inputs).logits, expected)
    for name in ("auto", "sdpa", "eager", "triton"):
        assert AutoModel.from_config(model.config, attn_implementation=name).config._attn_implementation == name
        again = HfDebertaModel.from_pretrained(tmp_path, attn_implementation=name)
        assert again.config._attn_implementation == name
        again.set_attn_implementation("auto")
        assert again.config._attn_implementation == "auto"


# ---- the check ---------------------------------------------------------------------------------------------------


def use_as_triton(monkeypatch, attend):
    monkeypatch.setitem(BACKENDS, "triton", Backend(attend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_size", [32, 64])
def test_correct_kernels_pass(monkeypatch, dtype, head_size):
    use_as_triton(monkeypatch, reference_attention)  # which rounds what the kernels round
    for training in (False, True):
        kernel = KernelVariant(CPU, dtype, False, head_size, training)
        errors = attention_check.triton_errors(kernel)
        assert len(errors) == (6 if training else 1)
        assert all(0 < error < kernel.tolerance / 2 for error in errors.values()), errors


def with_rows(change):
    def attend(query, key, value, positions, mask, dropout_p, scale):
        rows = change(positions.rows_of_distance.clone(), saturation_of(positions.rows_of_distance))
        return reference_attention(query, key, value, replace(positions, rows_of_distance=rows), mask, 0.0, scale)

    return attend


def shifted(rows, saturation):
    return (rows + 1).clamp(max=int(rows.max()))


def saturated_too_early(rows, saturation):
    rows[len(rows) // 2 + saturation - 1] = rows[-1]
    return rows


def with_mask(change):
    def attend(query, key, value, positions, mask, dropout_p, scale):
        return reference_attention(query, key, value, positions, AttentionMask(change(mask.mask.clone())), 0.0, scale)

    return attend


def without_holes(mask):
    mask[:, :10] = True
    return mask


def one_token_too_many(mask):
    mask[1, int(mask[1].sum()) + 1] = True  # after the hole and the tokens
    return mask


def one_token_too_few(mask):
    mask[0, -1] = False
    return mask


def without_terms(query_tile, key_tile):
    def attend(query, key, value, positions, mask, dropout_p, scale):
        tile = torch.arange(query.shape[2]) // 16
        wrong = (tile[:, None] == query_tile) & (tile == key_tile)
        visible = mask.visible(query.shape[2], query.device)
        context = reference_attention(query, key, value, positions, mask, 0.0, scale)[0]
        row = rows_between(torch.arange(len(tile))[None], torch.arange(len(tile)), positions.rows_of_distance)
        scaled = positions.with_scaled_queries(scale, torch.float32).to(torch.float32)
        terms = score_terms(query.float() * scale, key.float(), scaled, row)
        scores = torch.where(wrong, terms["c2c"], sum(terms.values()))
        other = visible_softmax(scores, visible).to(value.dtype) @ value
        return torch.where(wrong.any(1)[:, None], other, context), None

    return attend


def with_gradient(name, factor):
    def attend(query, key, value, positions, mask, dropout_p, scale):
        tables = (positions.position_key, positions.position_query)
        tensors = dict(zip(attention_check.INPUTS, (query, key, value, *tables), strict=True))
        tensors[name] = tensors[name].detach() * (1 - factor) + tensors[name] * factor
        query, key, value, position_key, position_query = tensors.values()
        positions = replace(positions, position_key=position_key, position_query=position_query)
        return reference_attention(query, key, value, positions, mask, 0.0, scale)

    return attend


def with_nan(*call):
    context, _ = reference_attention(*call)
    return context.index_fill(2, torch.tensor([40]), float("nan")), None


WRONG = {
    "tables shifted by a row": with_rows(shifted),
    "one distance saturated too early": with_rows(saturated_too_early),
    "hole in the mask ignored": with_mask(without_holes),
    "padding begins too late": with_mask(one_token_too_many),
    "last token of the row missing": with_mask(one_token_too_few),
    "near tile without position terms": without_terms(1, 2),
    "far tile without position terms": without_terms(0, 3),
    "NaN": with_nan,
}
WRONG_GRADIENTS = {f"gradient of {name} doubled": with_gradient(name, 2.0) for name in attention_check.INPUTS}


@pytest.mark.parametrize("case", {**WRONG, **WRONG_GRADIENTS})
def test_wrong_kernels_are_detected(monkeypatch, case):
    use_as_triton(monkeypatch, {**WRONG, **WRONG_GRADIENTS}[case])
    kernel = KernelVariant(CPU, torch.bfloat16, False, 64, True)
    errors = attention_check.triton_errors(kernel)
    wrong = {name for name, error in errors.items() if not error <= kernel.tolerance}
    assert wrong == {f"the {case.rpartition(' ')[0]}"} if case in WRONG_GRADIENTS else wrong > {"the context"}
    assert attention_auto.find_fault(kernel) is not None


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("head_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_this_gpu_passes_the_check(dtype, head_size, training):
    query = torch.empty(1, 1, 1, head_size, dtype=dtype, device="cuda")
    reason = attention_triton.unsupported_reason(query, query, query, None, AttentionMask())
    if reason is not None:
        pytest.skip(reason)
    assert attention_auto.find_fault(KernelVariant(query.device, dtype, False, head_size, training)) is None


@pytest.mark.gpu
@on_gpu
def test_this_gpu_times_both_backends_once_and_not_in_a_captured_graph():
    states = torch.randn(2, 4, 200, 64, dtype=torch.bfloat16, device="cuda")
    known = len(attention_auto._choices)
    found, again = attend_to_itself(states), attend_to_itself(states)
    assert torch.equal(found, again) and len(attention_auto._choices) == known + 1
    other = torch.randn(2, 4, 500, 64, dtype=torch.bfloat16, device="cuda")
    expected = disentangled_attention(other, other, other, backend="eager")[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_to_itself(other)
    graph.replay()
    assert len(attention_auto._choices) == known + 1
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
