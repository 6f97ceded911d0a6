import gc
import os
import sys
from logging import Logger, getLogger
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it when it is imported

import pytest
import torch
from transformers.utils import logging

from hf_deberta.engines import unpadding
from hf_deberta.model import batch_layout, enhanced_mask_decoder

getLogger("hf_deberta").setLevel("INFO")  # as scripts do
torch.set_num_threads(1)  # tiny tensors, and the tests already run in several processes

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def pytest_collection_finish():
    """Leave imported modules out of garbage collections: each run of a script forces two."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def leave_older_objects_out_of_garbage_collections():
    """Compilers and libraries that other files have used keep hundreds of thousands of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def keep_verbosity():
    """Benchmarks silence Transformers."""
    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)


def pytest_sessionfinish():
    gc.unfreeze()  # nanobind calls what is left at exit a leak


@pytest.fixture(scope="session", autouse=True)
def patch_triton_once():
    """Triton's interpreter wraps the modules of its language at each call of a function; wrap those that are not."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang"):  # another version of Triton
        yield
        return

    def patch_unpatched(function):
        modules = [value for value in function.__globals__.values() if value is language or value is language.core]
        if any(language.core.is_builtin(module.load) for module in modules):
            return patch_all(function)
        return interpreter._LangPatchScope()

    patch_all = interpreter._patch_lang
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_unpatched)
        yield


@pytest.fixture
def load(monkeypatch):
    """Import a benchmark by its name: they are scripts, which import each other from their folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield lambda name: __import__(name)
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture
def unpad_tiny_models(monkeypatch):
    """Unpad batches of tiny models too: these are too narrow for unpadding to save time."""
    monkeypatch.setattr(unpadding, "COST_OF_EXTRA_CALLS", 0)
    monkeypatch.setattr(unpadding, "COST_OF_EXTRA_LAUNCHES", 0)


@pytest.fixture
def warnings_so_far(caplog):
    """Return a function that returns the warnings so far; those given once in a process are given again."""
    logging.enable_propagation()
    Logger.warning_once.cache_clear()
    caplog.set_level("WARNING")
    return lambda: [record.message for record in caplog.records]


@pytest.fixture
def values_are_not_read(monkeypatch):
    """Compute as on a GPU, where reading a tensor would wait for the device."""
    for module in (batch_layout, enhanced_mask_decoder, unpadding):
        monkeypatch.setattr(module, "can_read_values", lambda tensor: False)


@pytest.fixture(params=[True, False], ids=["unpadded", "padded"])
def unpadded_or_padded(request, monkeypatch):
    """Run a test of tiny models with unpadding and without."""
    if request.param:
        monkeypatch.setattr(unpadding, "COST_OF_EXTRA_CALLS", 0)
