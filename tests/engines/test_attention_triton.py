"""The Triton backend against the reference: output and every gradient, in Triton's interpreter or on a GPU.

The interpreter must be enabled before Triton is imported, so `test_in_the_interpreter` runs this file in a process of
its own. Tiles have 16 tokens there, and inputs are tiny, because the interpreter is slow.
"""

import io
import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from numerics import (
    assert_same_by_name,
    assert_within_budget,
    attend,
    lengths_mask,
    relative_positions,
    tiny_inputs,
    tiny_model,
    whole_window,
)
from torch._dynamo.testing import CompileCounterWithBackend

from hf_deberta import HfDebertaForSequenceClassification
from hf_deberta.engines import attention_auto, attention_triton, attention_triton_operator
from hf_deberta.engines.attention_check import KernelVariant
from hf_deberta.engines.attention_triton import INTERPRETING, triton_attention
from hf_deberta.engines.attention_triton_operator import CHIPS, LAUNCHES, tile_spans, tiled_attention
from hf_deberta.export.hub_kernel import write_hub_kernel
from hf_deberta.model.attention import attention_scale, disentangled_attention
from hf_deberta.model.batch_layout import AttentionMask
from hf_deberta.model.relative_position import (
    RelativePositions,
    TableWindow,
    rows_of_distances,
    saturation_of,
)

CLIPPED, BUCKETS, V3 = (12, 0), (24, 8), (512, 256)  # k, buckets
BOTH = ("c2p", "p2c")
CPU = torch.device("cpu")
TRITON = find_spec("triton") and tuple(int(part) for part in version("triton").split(".")[:2])
installed = pytest.mark.skipif(TRITON is None, reason="triton is not installed (pip install triton)")
loops = pytest.mark.skipif(
    TRITON is not None and TRITON < (3, 7), reason="triton < 3.7 interprets no loops on numpy 2.4"
)
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in the process of test_in_the_interpreter")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETING, reason="needs a CUDA device")


@pytest.mark.slow
@installed
@loops
@pytest.mark.skipif(INTERPRETING, reason="is this process")
def test_in_the_interpreter():
    files = [__file__, str(Path(__file__).with_name("test_vocabulary_triton.py"))]
    command = [sys.executable, "-m", "pytest", *files, "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(re.search(r"(\d+) passed", ran.stdout)[1]) > len(CASES)


@pytest.fixture(autouse=True)
def poison():
    """Fill new memory with NaN, so that numbers that were never written show up."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs_of(table, length, batch=1, heads=1, size=20, dtype=torch.float32, device="cpu", pruned=False):
    """Inputs with gradients by name, the rows of distances, and the first row in use."""
    torch.manual_seed(0)
    rows = rows_of_distances(*table)
    window = whole_window(rows).for_length(length) if pruned else whole_window(rows)
    shapes = dict.fromkeys(("query", "key", "value"), (batch, heads, length, size))
    shapes |= dict.fromkeys(("position_key", "position_query"), (heads, window.end - window.first, size))
    leaves = {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, rows.to(device), window.first


def results(call, leaves):
    """The context, and gradients by name of a weighted sum of it."""
    context = call(**leaves)
    weight = torch.randn(context.shape, generator=torch.Generator().manual_seed(1)).to(context)
    tensors = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    found = torch.autograd.grad((context * weight).sum(), list(tensors.values()))
    return {"context": context.detach()} | dict(zip(tensors, found, strict=True))


def in_both(leaves, rows, first, terms, dtype=torch.float64, scale=None, **mask):
    """Results of this backend, and of the reference in `dtype`."""
    scale = attention_scale(1 + len(terms), leaves["query"].shape[-1]) if scale is None else scale
    given = {"position_key": "c2p" in terms, "position_query": "p2c" in terms}
    leaves = {name: leaf if given.get(name, True) else None for name, leaf in leaves.items()}

    def ours(query, key, value, position_key, position_query):
        positions = relative_positions(position_key, position_query, rows, terms, first) if terms else None
        return triton_attention(query, key, value, positions, AttentionMask(**mask), 0.0, scale)[0]

    def reference(**tensors):
        return attend(**tensors, rows_of_distance=rows, first_row=first, terms=terms, scale=scale, **mask)[0]

    exact = {name: None if leaf is None else leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}
    return results(ours, leaves), results(reference, exact)


def some_pairs(length):
    torch.manual_seed(3)
    pairs = torch.rand(1, length, length) < 0.4
    pairs[:, 5] = False  # a query that sees nothing
    return pairs


def with_holes(length):
    torch.manual_seed(4)
    return torch.rand(1, length) < 0.7


def numbers(*rows):
    """The number of each token's document, from the lengths of the documents of each row."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


BOUNDS = torch.tensor([0, 3, 3, 19])  # the remaining tokens are one more document
# name: (table, terms, arguments of inputs_of, fields of AttentionMask)
# fmt: off
CASES = {
    "far on both sides": (CLIPPED, BOTH, {"length": 40}, {}),
    "rows and heads, rows in use": (BUCKETS, BOTH, {"length": 20, "batch": 2, "heads": 2, "pruned": True}, {}),
    "one token": (BUCKETS, BOTH, {"length": 1, "size": 32}, {}),
    "c2p, pairs, far": (CLIPPED, ("c2p",), {"length": 40}, {"mask": some_pairs(40)}),
    "p2c, causal, holes": (CLIPPED, ("p2c",), {"length": 40, "size": 16}, {"mask": with_holes(40), "causal": True}),
    "scale of 0": (CLIPPED, BOTH, {"length": 20}, {"scale": 0.0}),
    "negative scale": (CLIPPED, BOTH, {"length": 20}, {"scale": -0.7}),
    "no terms, padding": (CLIPPED, (), {"length": 20, "batch": 2}, {"mask": lengths_mask(20, 3)}),
    "packed": (CLIPPED, BOTH, {"length": 56}, {"cu_seqlens": BOUNDS}),
    "packed, with lengths": (
        CLIPPED, BOTH, {"length": 56}, {"cu_seqlens": torch.tensor([0, 9, 25, 40]), "lengths": (9, 16, 15)},
    ),
    "packed, beyond the row": (CLIPPED, BOTH, {"length": 40}, {"cu_seqlens": torch.tensor([5, 20, 90])}),
    "packed, holes": (BUCKETS, BOTH, {"length": 22}, {"cu_seqlens": torch.tensor([0, 5, 22]), "mask": with_holes(22)}),
    "packed, causal": (CLIPPED, BOTH, {"length": 45}, {"cu_seqlens": torch.tensor([0, 5, 45]), "causal": True}),
    "packed, longest": (CLIPPED, BOTH, {"length": 50}, {"cu_seqlens": torch.tensor([0, 9, 50]), "longest": 41}),
    "a row of padding": (CLIPPED, ("c2p",), {"length": 19, "batch": 2}, {"mask": lengths_mask(19, 0)}),
    "documents": (CLIPPED, BOTH, {"length": 53, "batch": 2}, {"documents": numbers((3, 1, 40, 9), (16, 37))}),
    "documents, far": (CLIPPED, BOTH, {"length": 71, "size": 16}, {"documents": numbers((6, 65))}),
    "documents of all rows": (BUCKETS, BOTH, {"length": 23, "batch": 2}, {"documents": 5 + numbers((4, 19))}),
    "documents, padding": (
        CLIPPED, BOTH, {"length": 41, "batch": 2},
        {"documents": numbers((20, 5, 16), (7, 9, 25)), "mask": lengths_mask(41, 30)},
    ),
    "documents, padding, causal": (
        BUCKETS, ("p2c",), {"length": 35, "batch": 2, "heads": 2},
        {"documents": numbers((18, 17), (1, 34)), "mask": lengths_mask(35, 29), "causal": True},
    ),
    "documents, pairs": (CLIPPED, BOTH, {"length": 21}, {"documents": numbers((8, 13)), "mask": some_pairs(21)}),
    "no terms, packed, causal": (
        CLIPPED, (), {"length": 60}, {"cu_seqlens": torch.tensor([0, 7, 60]), "longest": 53, "causal": True},
    ),
    "no terms, documents": (CLIPPED, (), {"length": 53, "batch": 2}, {"documents": numbers((3, 1, 40, 9), (16, 37))}),
    "pairs, causal": (CLIPPED, BOTH, {"length": 35}, {"mask": some_pairs(35), "causal": True}),
}
# fmt: on


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_equal_the_reference(case):
    table, terms, shape, mask = CASES[case]
    found, expected = in_both(*inputs_of(table, **shape), terms, **mask)
    assert_same_by_name(found, expected)
    if mask.get("mask") is not None and mask["mask"].dim() == 3:
        assert not found["context"][:, :, 5].any() and not found["query"][:, :, 5].any()


@interpreted
@pytest.mark.parametrize("spread", [1, 8, 15])
def test_half_precision_is_no_worse_than_the_reference_in_it(spread):
    """In float16: the interpreter multiplies the bits of bfloat16 numbers as if they were integers.

    Scores are up to 150 and 500, which a rounding of scaled queries to half precision would change by 0.1 and 0.5.
    """
    leaves, rows, first = inputs_of(CLIPPED, 36, dtype=torch.float16)
    with torch.no_grad():
        for name in ("query", "key", "position_key", "position_query"):
            leaves[name].mul_(spread)
    found, exact = in_both(leaves, rows, first, BOTH)
    _, plain = in_both(leaves, rows, first, BOTH, dtype=torch.float16)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float16
        assert_within_budget(tensor, plain[name], exact[name], name)


@interpreted
def test_the_largest_float16_queries_do_not_overflow():
    """Keys are one-hot, so scores are single numbers; twice 60000 is more than float16 can represent."""
    leaves, rows, first = inputs_of(CLIPPED, 20, dtype=torch.float16)
    with torch.no_grad():
        leaves["query"].sign_().mul_(60000)
        leaves["key"].copy_(torch.eye(20))
    found, exact = in_both(leaves, rows, first, (), scale=2.0)
    torch.testing.assert_close(found["context"].double(), exact["context"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tile", [4, 16])
def test_spans_hold_the_blocks_that_a_tile_sees(tile):
    documents, mask = numbers((1, 14, 1, 3, 10), (6, 23, 0, 0, 0)), lengths_mask(29, 22)
    visible = AttentionMask(mask=mask, documents=documents).visible(29, torch.device("cpu"))[:, 0]
    blocks = torch.nn.functional.pad(visible, (0, -29 % tile, 0, -29 % tile))
    sees = blocks.unflatten(2, (-1, tile)).unflatten(1, (-1, tile)).any(4).any(2)  # [B, blocks, blocks]
    spans = tile_spans(documents, mask, tile)
    at = torch.arange(sees.shape[1])
    assert torch.equal((spans[..., :1] <= at) & (at < spans[..., 1:]), sees)


def test_tiles_with_holes_see_each_other_or_not():
    torch.manual_seed(0)
    for documents in (numbers((21, 30)), numbers((5, 14, 4, 16, 12)), numbers((51,))):
        spans, at = tile_spans(documents, torch.rand(1, 51) < 0.2, 4), torch.arange(13)
        held = (spans[..., :1] <= at) & (at < spans[..., 1:])
        assert held.any() and torch.equal(held, held.mT)


@interpreted
def test_tiles_between_documents_are_skipped():
    """Otherwise infinite values of one document times probabilities of 0 would be NaN in the other."""
    leaves, rows, _ = inputs_of(CLIPPED, 48)
    with torch.no_grad():
        leaves["value"][:, :, 16:] = float("inf")

    def first_document(**tensors):
        context = attend(**tensors, rows_of_distance=rows, documents=numbers((16, 32)), backend="triton")[0]
        return context[:, :, :16]

    found = results(first_document, leaves)
    assert found["context"].isfinite().all()
    for name in ("query", "key", "value"):
        assert found[name][:, :, :16].isfinite().all(), name


MASKS_BY_LENGTH = {
    "padding": lambda length: {"mask": lengths_mask(length, length - 3)},
    "packed": lambda length: {"cu_seqlens": torch.tensor([0, 5, length - 2])},
    "documents, padding, causal": lambda length: {
        "documents": numbers((7, length - 7)), "mask": lengths_mask(length, length - 1)[1:], "causal": True,
    },
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("kind", MASKS_BY_LENGTH)
def test_compiles_to_one_graph_for_all_lengths(kind):
    def attention(query, key, value, position_key, position_query):
        positions = RelativePositions(
            position_key, position_query, TableWindow(0, 24, rows, 12, can_shrink=False), BOTH
        )
        return disentangled_attention(query, key, value, positions, AttentionMask(**fields), backend="triton")[0]

    torch.compiler.reset()
    counter, counts = CompileCounterWithBackend("aot_eager"), set()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    for length in (18, 21, 37):
        fields, (leaves, rows, _) = MASKS_BY_LENGTH[kind](length), inputs_of(CLIPPED, length, 1 + (kind == "padding"))
        found, expected = results(compiled, leaves), results(attention, leaves)
        for name in expected:
            assert torch.equal(found[name], expected[name]), name
        counts.add(counter.frame_count)
    assert len(counts) == 1  # nothing is compiled after the first length


@interpreted
def test_graphs_and_transforms_have_the_operator():
    """Outside of them its autograd function, which nothing can record, save or map."""
    leaves, rows, _ = inputs_of(CLIPPED, 18)
    states = tuple(leaves.values())

    def attention(query, *others):
        return attention_triton_operator.tiled_attention(query, *others, rows)

    expected = attention(*states)
    assert type(expected.grad_fn).__name__ == "AttentionInTilesBackward"
    saved = io.BytesIO()
    torch.jit.save(torch.jit.trace(attention, states, check_trace=False), saved)
    saved.seek(0)
    with torch.no_grad():
        assert torch.equal(torch.jit.load(saved)(*states), expected)
        queries = torch.stack([states[0], 2 * states[0]])
        mapped = torch.vmap(attention, in_dims=(0, *[None] * 4))(queries, *states[1:])
        torch.testing.assert_close(mapped, torch.stack([attention(query, *states[1:]) for query in queries]))


@interpreted
def test_what_gradients_cannot_be_is_an_error():
    """Gradients of gradients, and gradients with a mask that was written to after the forward pass."""
    leaves, rows, _ = inputs_of(CLIPPED, 18)
    visible = torch.ones(1, 18, 18, dtype=torch.bool)
    context = attention_triton_operator.tiled_attention(**leaves, rows_of_distance=rows, visible=visible)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(context.sum(), leaves["query"], create_graph=True)
    context = attention_triton_operator.tiled_attention(**leaves, rows_of_distance=rows, visible=visible)
    visible[:] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        context.sum().backward()


@interpreted
def test_the_operators_agree_with_their_shape_rules():
    """Shapes, strides and gradients, with and without gradients of the tables."""
    leaves, rows, _ = inputs_of(CLIPPED, 40, heads=2)
    near, furthest = 1, 2
    rows = attention_triton_operator.rows_by_distance(rows, (near + 1) * 16)
    ranges = attention_triton_operator.ranges_of_rows(rows, leaves["position_key"].shape[1])
    names = ("position_key", "position_query")
    states = [leaves[name] for name in ("query", "key", "value")]
    by_distance = [leaves[name].detach().transpose(0, 1).index_select(0, rows) for name in names]
    for trained in (True, False):
        tables = [leaves[name].detach().requires_grad_(trained) for name in names]
        plan = (rows, ranges, *[None] * 3, 0.1, 0.0, False, near, furthest, tables[0].shape[1] * trained)
        arguments = (*tables, *states, *by_distance, None, *plan)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        torch.library.opcheck(attention_triton_operator.attention_in_tiles, arguments, test_utils=checks)


@interpreted
def test_documents_of_known_length_may_begin_anywhere_in_a_tile():
    leaves, rows, _ = inputs_of(CLIPPED, 53)
    documents = numbers((10, 12, 12, 12, 7))

    def attention(longest, **tensors):
        return tiled_attention(**tensors, rows_of_distance=rows, documents=documents, longest=longest)

    known, unknown = (results(partial(attention, longest), leaves) for longest in (12, None))
    for name, tensor in unknown.items():
        torch.testing.assert_close(known[name], tensor, rtol=1e-5, atol=1e-5)


@interpreted
def test_the_kernel_for_the_hub_loads_and_computes_the_same(tmp_path):
    kernels = pytest.importorskip("kernels")
    build = write_hub_kernel(tmp_path / "kernel")
    for file in build.glob("*.py"):
        imported = set(re.findall(r"^\s*(?:from|import) ([\w.]+)", file.read_text(), re.MULTILINE))
        assert {name.partition(".")[0] for name in imported} <= {"", "torch", "triton"} | sys.stdlib_module_names
    kernel = kernels.get_local_kernel(build.parents[1])
    leaves, rows, _ = inputs_of(BUCKETS, 37, batch=2)
    with pytest.raises(ValueError, match="rows_of_distance"):
        kernel.tiled_attention(**leaves)
    visible = lengths_mask(37, 21)
    options = {"rows_of_distance": rows, "saturation": saturation_of(rows), "visible": visible}
    found = results(lambda **tensors: kernel.tiled_attention(**tensors, **options), leaves)
    expected, _ = in_both(leaves, rows, 0, BOTH, scale=1.0, mask=visible)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@interpreted
def test_products_have_the_precision_that_is_set_in_pytorch(monkeypatch):
    """Whichever of PyTorch's two settings was used: after mixing them, one of its getters raises an error."""
    call = (inputs_of(CLIPPED, 5)[0]["query"], *[None] * 5, 1.0, 0.0, False, 0, 0, 0)
    assert attention_triton_operator.Plan(*call).constants["PRECISION"] == "ieee"
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert attention_triton_operator.Plan(*call).constants["PRECISION"] == "tf32"


@interpreted
@pytest.mark.usefixtures("unpadded_or_padded")
def test_a_model_uses_the_kernels(sdpa_warnings):
    model = tiny_model(HfDebertaForSequenceClassification, dtype=torch.float32, num_hidden_layers=3).eval()
    inputs = tiny_inputs((9, 5))
    calls = []
    expected = model(**inputs).logits
    model.set_attn_implementation("triton")
    original = attention_triton_operator.launch_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_triton_operator, "launch_forward", lambda *args: calls.append(args) or original(*args))
        found = model(**inputs).logits
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    first, second = calls  # the last layer has one query per sequence, which sdpa computes without a warning
    assert not sdpa_warnings()
    assert first[0] is second[0]  # the plan, with rows, and places or numbers and spans


@interpreted
def test_dropout_has_no_pattern():
    """In sums along an axis, and between neighbours: of keys, queries, heads and rows."""
    states, unit, rate = torch.zeros(2, 4, 48, 48), torch.eye(48).expand(2, 4, 48, 48), 0.4
    kept, others = (triton_attention(states, states, unit, None, AttentionMask(), rate)[0] != 0 for _ in range(2))
    assert not torch.equal(kept, others)
    drawn = ((~kept).double() - rate) / (rate * (1 - rate)) ** 0.5  # mean 0, variance 1
    for axis in range(4):
        sums = drawn.sum(axis) / drawn.shape[axis] ** 0.5
        assert abs(sums.square().mean() - 1) < 5 * (2 / sums.numel()) ** 0.5
        for distance in range(1, min(17, drawn.shape[axis])):
            others = drawn.shape[axis] - distance
            products = drawn.narrow(axis, 0, others) * drawn.narrow(axis, distance, others)
            assert abs(products.sum()) < 5 * products.numel() ** 0.5


@interpreted
def test_auto_passes_the_kernels_forward_and_backward():
    """Dropout too. In float16: the interpreter multiplies the bits of bfloat16 numbers as if they were integers."""
    assert attention_auto.find_fault(KernelVariant(CPU, torch.float16, 24)) is None


@interpreted
def test_one_mask_serves_calls_of_other_sizes_and_tables():
    shared = AttentionMask(documents=(torch.arange(40) // 15)[None])
    for batch, table in ((1, CLIPPED), (2, CLIPPED), (1, BUCKETS)):
        leaves, rows, _ = inputs_of(table, 40, batch)
        positions = RelativePositions.from_tables(leaves["position_key"], leaves["position_query"], rows)
        states = [leaves[name] for name in ("query", "key", "value")]
        own = AttentionMask(documents=shared.documents)
        found, expected = (triton_attention(*states, positions, mask, 0.0, 0.2)[0] for mask in (shared, own))
        assert torch.equal(found, expected)


class CompiledStub:
    """Stands for a kernel of Triton before and after it is compiled; notes what is compiled and launched."""

    arg_names = ("states", "out", "tokens", "T", "D", "KEYS")

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.compiled.append((grid, args, options))
            return {grid: lambda *args, stream: self.launched.append((grid, args, stream))}

        return launch


@installed
def test_compiled_kernels_are_kept_by_all_that_triton_compiles_for(monkeypatch):
    from hf_deberta.engines import attention_triton_forward

    kernel, stub = attention_triton_operator.Kernel("attention_triton_forward", "forward_kernel"), CompiledStub()
    monkeypatch.setattr(attention_triton_forward, "forward_kernel", stub)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    memory, out = torch.zeros(64), torch.zeros(8)
    aligned = memory[(-memory.data_ptr() // 4) % 4 :]

    def launch(states=aligned, key=(0, 64, True, False), tile=32, warps=4, **constants):
        plan = SimpleNamespace(key=(*key, tile), constants={"T": tile, "D": 64, "FAR": True}, device_index=3)
        kernel.launch(plan, (1, 2, 1), (states, out), (5,), {"num_warps": warps}, KEYS=False, **constants)

    launch()
    launch(aligned + 1)
    [(_, (_, _, *numbers), options)] = stub.compiled
    assert (numbers, options) == ([5, 32, 64, False], {"num_warps": 4, "enable_fp_fusion": True})
    [(grid, (_, _, *again), stream)] = stub.launched
    assert (grid, again, stream) == ((1, 2, 1), numbers, 103)  # constants in the order of the kernel's arguments
    launch(aligned.half())
    launch(aligned[1:])  # from an address that 16 does not divide
    launch(key=(0, 64, False, False))
    launch(tile=16)
    launch(warps=8)
    launch(OWN=True)
    assert len(stub.compiled) == 7


KINDS = {  # of arguments that do not have the type of the states
    "i32": ("batch", "heads", "tokens", "head_size", "blocks", "NEAR", "programs", "slots"),
    "*i32": ("spans", "places"),
    "*fp32": ("far_query", "far_key", "far_own", "far_other", "log_sum", "delta", "far_gradient", "gradient"),
    "*i64": ("seed",),
    "*u8": ("mask",),
    "fp32": ("scale", "dropout_p"),
}


@pytest.mark.slow
@installed
@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize(
    "name, launch, keys",
    [
        ("forward_kernel", 0, False),
        ("own_gradients_kernel", 1, False),
        ("own_gradients_kernel", 1, True),
        ("table_gradients_kernel", 2, False),
        ("table_gradients_kernel", 2, True),
    ],
)
def test_kernels_compile_for_gpus_of_amd(name, launch, keys):
    """For gfx942 as they would be launched there: with its matrix instructions, and no register spilled."""
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_deberta.engines import attention_triton_backward, attention_triton_forward

    kernel = getattr(attention_triton_forward, name, None) or getattr(attention_triton_backward, name)
    tile, launches = LAUNCHES["AMD"]
    warps, stages = launches[launch]
    flags = dict.fromkeys(("C2P", "P2C", "FAR", "OWN", "OTHER"), True)
    flags |= {"KEYS": keys, "CAUSAL": False, "PACKED": False, "DROPOUT": False, "MASK": "none", "PRECISION": "ieee"}
    constants = {name: value for name, value in {**flags, "T": tile, "D": 64}.items() if name in kernel.arg_names}
    signature = dict.fromkeys(kernel.arg_names, "*bf16") | dict.fromkeys(constants, "constexpr")
    signature |= {name: kind for kind, names in KINDS.items() for name in names if name in kernel.arg_names}
    aligned = [name for name, kind in signature.items() if kind[0] == "*" or name in ("head_size", "tokens")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    code = compile_source(source, target=GPUTarget("hip", "gfx942", 64), options=options).asm["amdgcn"]
    assert "v_mfma" in code
    assert re.search(r"\.vgpr_spill_count: *0$", code, re.MULTILINE)
    assert re.search(r"\.private_segment_fixed_size: *0$", code, re.MULTILINE)


# arguments of inputs_of, arguments of the call, constants of the module, what the warning says
LIMITS = {
    "float64": ({"dtype": torch.float64}, {}, {}, "float16, bfloat16 and float32, not torch.float64"),
    "wide heads": ({"size": 132}, {}, {}, "heads of 132 channels are larger than 128"),
    "long rows": ({}, {}, {"LARGEST_ROW": 10}, "larger than 10"),
    "p2p": ({}, {"terms": ("c2p", "p2p")}, {}, "p2p"),
    "dropout of all": ({}, {"dropout_p": 1.0}, {}, "a dropout of 1"),
    "no triton": ({}, {}, {"IS_INSTALLED": False}, "triton is not installed"),
    "a CPU": ({}, {}, {"INTERPRETING": False}, "runs on GPUs, not on cpu"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_unsupported_calls_fall_back_to_sdpa_with_one_warning(limit, sdpa_warnings, monkeypatch):
    shape, arguments, environment, message = LIMITS[limit]
    for name, value in {"INTERPRETING": True, "IS_INSTALLED": True, **environment}.items():
        monkeypatch.setattr(attention_triton, name, value)
    leaves, rows, _ = inputs_of(BUCKETS, 7, **shape)
    for _ in range(2):
        found, _ = attend(**leaves, rows_of_distance=rows, backend="triton", **arguments)
    expected, _ = attend(**leaves, rows_of_distance=rows, backend="sdpa", **arguments)
    assert torch.equal(found, expected)
    (warning,) = sdpa_warnings()
    assert "'triton' falls back to 'sdpa'" in warning and message in warning


# ---- on a GPU, at real sizes -------------------------------------------------------------------------------------

REAL = {
    "long": (BOTH, {"length": 2111, "heads": 3}, {}),
    "c2p": (("c2p",), {"length": 700, "batch": 2, "heads": 2, "size": 96}, {}),
    "p2c": (("p2c",), {"length": 1300, "size": 128}, {}),
    "none": ((), {"length": 700, "size": 32}, {}),
    "causal": (BOTH, {"length": 1500, "heads": 2}, {"causal": True}),
    "holes": (BOTH, {"length": 900}, {"mask": with_holes(900)}),
    "pairs": (BOTH, {"length": 700}, {"mask": some_pairs(700)}),
    "packed": (BOTH, {"length": 1700, "heads": 2}, {"cu_seqlens": torch.tensor([0, 3, 40, 40, 300, 1700])}),
    "documents, padding, causal": (
        BOTH,
        {"length": 1300},
        {"documents": numbers((100, 77, 900, 223)), "mask": lengths_mask(1300, 1000)[1:], "causal": True},
    ),
    "packed, holes": (BOTH, {"length": 900}, {"cu_seqlens": torch.tensor([0, 77, 900]), "mask": with_holes(900)}),
}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", REAL)
@pytest.mark.parametrize("chip", ["its own", "others"])
def test_real_sizes(case, dtype, chip, monkeypatch):
    if chip == "others":  # tiles, warps and stages of other GPUs
        monkeypatch.setattr(
            attention_triton_operator, "LAUNCHES", {**LAUNCHES, **dict.fromkeys(CHIPS.values(), LAUNCHES[chip])}
        )
    terms, shape, mask = REAL[case]
    mask = {name: value.cuda() if torch.is_tensor(value) else value for name, value in mask.items()}
    leaves, rows, first = inputs_of(V3, **{"size": 64, **shape}, dtype=dtype, device="cuda")
    found, exact = in_both(leaves, rows, first, terms, **mask)
    again, plain = in_both(leaves, rows, first, terms, dtype=dtype, **mask)
    for name, tensor in found.items():
        assert_within_budget(tensor, plain[name], exact[name], name)
        assert torch.equal(tensor, again[name]), f"{name} differs from one run to the next"
