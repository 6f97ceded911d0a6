"""Fast paths are skipped where they would be wrong, input checks never are; `reference_mode` skips all fast paths."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from numerics import at_real_tokens, import_again, tiny_inputs, tiny_model
from test_parity_with_transformers import in_tree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hf_deberta
from hf_deberta import HfDebertaForMaskedLM, HfDebertaModel
from hf_deberta.engines import onednn, weight_cache
from hf_deberta.engines.guards import (
    EXPORTS_SET_FLAG,
    has_global_hooks_or_modes,
    is_tracing_or_exporting,
    is_unmodified_module,
)
from hf_deberta.model import attention, slots
from hf_deberta.model.input_checks import can_read_values, in_captured_graph, in_transform
from hf_deberta.model.slots import in_reference_mode, reference_mode

INPUTS = tiny_inputs((9, 5, 7))


class PassThroughMode(TorchDispatchMode):
    """Sees every operation and changes none, like a logger."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def global_hook(kind="forward"):
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


OBSERVERS = {
    "global hook": global_hook,
    "dispatch mode": PassThroughMode,
    "FLOP counter": lambda: FlopCounterMode(display=False),
}


pytestmark = pytest.mark.usefixtures("unpad_tiny_models")


# ---- input checks and unpadding depend on no observer


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_outputs_unpadding_and_errors_are_the_same_under_observers(observer, with_gradients, onednn_products):
    model, shapes = tiny_model(HfDebertaModel, dtype=torch.float32).eval(), []
    model.encoder.layer[0].register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape[:2])))
    with torch.set_grad_enabled(with_gradients):
        expected = model(**INPUTS).last_hidden_state
        with OBSERVERS[observer]():
            actual = model(**INPUTS).last_hidden_state
    torch.testing.assert_close(actual, expected)
    assert shapes == [(1, 21), (1, 21)]
    with OBSERVERS[observer](), pytest.raises(ValueError, match="128"):
        model(torch.tensor([[1, 128, 2]]))
    with OBSERVERS[observer](), pytest.raises(ValueError, match="-10000"):
        model(torch.tensor([[1, 2]]), attention_mask=torch.tensor([[0.0, -1e4]]))


# ---- one test for each guard


def in_fake_mode(function, tensor):
    with FakeTensorMode() as mode:
        function(mode.from_tensor(tensor))


def inside(context):
    def call(function, tensor):
        with context():
            function(tensor)

    return call


def export(function, tensor):
    module = nn.Module()
    module.forward = lambda tensor: function(tensor)
    torch.export.export(module, (tensor,))


# how a function is called: the guards that are true inside
SITUATIONS = {
    "plain": (lambda function, tensor: function(tensor), {"can_read_values"}),
    "meta device": (lambda function, tensor: function(tensor.to("meta")), set()),
    "jit.trace": (partial(torch.jit.trace, check_trace=False), {"in_captured_graph", "is_tracing_or_exporting"}),
    "compile": (
        lambda function, tensor: torch.compile(function, backend="eager", fullgraph=True)(tensor),
        {"in_captured_graph", *([] if EXPORTS_SET_FLAG else ["is_tracing_or_exporting"])},
    ),
    "export": (export, {"in_captured_graph", "is_tracing_or_exporting"}),
    "make_fx": (lambda function, tensor: make_fx(function)(tensor), {"has_global_hooks_or_modes"}),
    "fake mode": (in_fake_mode, {"has_global_hooks_or_modes"}),
    "fake tensor": (lambda function, tensor: function(FakeTensorMode().from_tensor(tensor)), set()),
    "vmap": (lambda function, tensor: torch.func.vmap(function)(tensor), {"in_transform"}),
    "func.grad": (
        lambda function, tensor: torch.func.grad(lambda x: function(x).sum())(tensor),
        {"in_transform"},
    ),
    "dual level": (inside(forward_ad.dual_level), {"in_transform"}),
    **{
        f"global {kind} hook": (inside(partial(global_hook, kind)), {"has_global_hooks_or_modes", "can_read_values"})
        for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")
    },
    "dispatch mode": (inside(PassThroughMode), {"has_global_hooks_or_modes", "can_read_values"}),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_guards(situation):
    call, expected = SITUATIONS[situation]
    results = {}

    def function(tensor):
        results["can_read_values"] = can_read_values(tensor)
        results["in_captured_graph"] = in_captured_graph()
        results["is_tracing_or_exporting"] = is_tracing_or_exporting()
        if not in_captured_graph():  # which is tested first everywhere: compilers cannot follow the others
            results["in_transform"] = in_transform()
            results["has_global_hooks_or_modes"] = has_global_hooks_or_modes()
        return tensor * 2

    call(function, torch.ones(3))
    assert {name for name, is_true in results.items() if is_true} == expected


def hooked(register):
    def modify(layer):
        getattr(layer, register)(lambda *_: None)
        return layer

    return modify


def patched(layer):
    layer.forward = lambda states: nn.Linear.forward(layer, states)
    return layer


def replica(layer):
    """As DataParallel makes them: weights are attributes."""
    weight = layer._parameters.pop("weight")
    layer.weight = weight.detach()
    return layer


def with_fake_weight(layer):
    layer.weight = nn.Parameter(FakeTensorMode().from_tensor(layer.weight.detach()))
    return layer


MODIFICATIONS = {
    "forward hook": hooked("register_forward_hook"),
    "forward pre-hook": hooked("register_forward_pre_hook"),
    "backward hook": hooked("register_full_backward_hook"),
    "backward pre-hook": hooked("register_full_backward_pre_hook"),
    "patched forward": patched,
    "subclass": lambda layer: type("Adapter", (nn.Linear,), {})(6, 3),
    "parametrization": parametrizations.weight_norm,
    "replica": replica,
    "tensor subclass": with_fake_weight,
}


@pytest.mark.parametrize("modification", MODIFICATIONS)
def test_modified_modules_are_recognised(modification):
    assert not is_unmodified_module(MODIFICATIONS[modification](nn.Linear(6, 3)))


def test_unmodified_modules_are_recognised():
    for module in (nn.Linear(6, 3), nn.Linear(6, 3, bias=False), nn.Embedding(4, 3), nn.LayerNorm(3)):
        assert is_unmodified_module(module)
    assert not is_unmodified_module(nn.GELU())


def test_torch_func_gives_the_gradients_of_autograd(onednn_products):
    """Also of the masked-LM loss, although transforms cannot enter our autograd functions."""
    model = tiny_model(HfDebertaForMaskedLM, dtype=torch.float32)
    labels = INPUTS["input_ids"].where(INPUTS["attention_mask"].bool(), -100)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loss = lambda values: torch.func.functional_call(model, values, kwargs={**INPUTS, "labels": labels}).loss  # noqa: E731
    actual = torch.func.grad(loss)(parameters)
    model(**INPUTS, labels=labels).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, msg=name)


# ---- reference mode


@pytest.fixture
def no_fast_path(monkeypatch):
    """Return a function that makes every fast path but eager attention an error."""

    def forbid(*args, **kwargs):
        raise AssertionError("a fast path was used")

    def apply():
        monkeypatch.delitem(attention.BACKENDS, "sdpa")
        monkeypatch.setattr(onednn, "onednn_linear", forbid)
        monkeypatch.setattr("hf_deberta.engines.weight_cache.CacheEntry", forbid)
        monkeypatch.setattr("hf_deberta.engines.unpadding.unpad", forbid)

    return apply


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_reference_mode_gives_the_same_output(with_gradients, packed, no_fast_path, onednn_products):
    model = tiny_model(HfDebertaModel, dtype=torch.float32).eval()
    inputs = INPUTS
    if packed:
        positions = torch.cat([torch.arange(n) for n in (4, 3, 2)])[None].expand(3, -1)
        inputs = {"input_ids": INPUTS["input_ids"].clamp(min=1), "position_ids": positions}
    with torch.set_grad_enabled(with_gradients):
        expected = model(**inputs).last_hidden_state
        weight_cache._entries.clear()
        assert onednn_products
        no_fast_path()
        with reference_mode():
            actual = model(**inputs).last_hidden_state
    if not packed:  # states of padding are zeros only without padding
        actual, expected = (at_real_tokens(states, INPUTS["attention_mask"]) for states in (actual, expected))
    torch.testing.assert_close(actual, expected)


def test_reference_mode_holds_for_enabled_models(no_fast_path, onednn_products):
    model = in_tree("v3", "Model", vocab_size=128)
    with torch.no_grad():
        expected = model(**INPUTS).last_hidden_state
        no_fast_path()
        with hf_deberta.enable(), hf_deberta.reference_mode():
            actual = model(**INPUTS).last_hidden_state
    is_real = INPUTS["attention_mask"].bool()
    torch.testing.assert_close(actual[is_real], expected[is_real], atol=1e-5, rtol=1e-5)


def test_reference_mode_ends_with_its_last_block():
    assert not in_reference_mode()
    with reference_mode():
        with pytest.raises(KeyError), reference_mode():
            raise KeyError
        assert in_reference_mode()
    assert not in_reference_mode()


@pytest.mark.parametrize("value, expected", [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_variable_turns_on_reference_mode(value, expected, monkeypatch):
    """When `slots` is imported, here once more; a saved folder imports its own copy of the file."""
    monkeypatch.delenv("HF_DEBERTA_REFERENCE", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_DEBERTA_REFERENCE", value)
    assert import_again(slots).in_reference_mode() == expected
