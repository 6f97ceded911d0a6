"""Count what a computation on a simulated CUDA device would do on a GPU.

    with simulated_cuda():
        with torch.device("cuda"):
            model, input_ids = HfDebertaModel(config), torch.ones(8, 128, dtype=torch.long)
        with counting() as counter:
            model(input_ids).last_hidden_state.sum().backward()
    print(counter.launches, counter.bytes, counter.flops, counter.syncs)

Three simplifications, the same for every model: an operator is one launch; it reads each of its inputs and writes each
of its outputs once, so caches are neither too small nor of any use between operators, and a transposed read costs no
more than another; and FLOPs are those of matrix products and attention, by PyTorch's own formulas.
"""

import traceback
from collections import Counter as Multiset
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attention_kernels  # noqa: F401  # registers the fused kernels
import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from triton_kernels import stubbed_kernels

from hf_deberta.engines import guards, linear_cross_entropy

OUR_OPERATORS = "hf_deberta"
TESTS = Path(__file__).parent
# operators that read values on the host, which waits for the device
SYNCS = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_dim",
}
# operators that launch nothing, beside views
FREE = {"_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "detach", "lift_fresh", "set_data"}
FREE |= {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# operators that read no tensor, only its shape
FILLS = {"fill", "full", "ones", "zero", "zeros", "full_like", "ones_like", "zeros_like"}
FILLS |= {"exponential", "new_full", "new_ones", "new_zeros"}
LOOKUPS = {"embedding", "gather", "index", "index_select"}  # read the index, and no more elements than they write
SCATTERS = {"index_add", "index_copy", "index_put", "scatter_add"}  # in place: read, add and write some elements
SCATTERS |= {"scatter_"}  # out of place it copies all elements first
# a zero fill, then a copy
TWO_LAUNCHES = {"constant_pad_nd", "select_backward", "slice_backward", "embedding_dense_backward"}


class Counter(TorchDispatchMode):
    """Counts the launches, bytes and FLOPs of operators, and lists what makes the host wait; see `counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0  # of PyTorch's operators
        self.triton_launches = 0
        self.bytes = 0
        self.flops = 0
        self.launches_by_operator: Multiset[str] = Multiset()
        self.syncs: list[str] = []  # operators that wait for the device, and their callers
        self.copies: list[str] = []  # from the host to the device
        self.on_host: list[str] = []  # operators on tensors in the host's memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace.startswith(OUR_OPERATORS):
            return self.run_custom_operator(func, args, kwargs)
        read = {key: value for key, value in kwargs.items() if key != "out"}
        name, inputs = func._schema.name, tensors_in((args, read))
        on_device = any(tensor.device.type == "cuda" for tensor in inputs)
        if on_device and is_sync(func, args):
            self.syncs.append(f"{name} {caller()}")
            return answer(name, args[0])
        self.note_copies(name, inputs, kwargs)
        output = func(*args, **kwargs)
        outputs = tensors_in(output)
        if on_device or any(tensor.device.type == "cuda" for tensor in outputs):
            self.count(func, args, kwargs, inputs, outputs, output)
        elif name != "aten::lift_fresh" and any(tensor.dim() > 0 for tensor in outputs):
            self.on_host.append(f"{name} {caller()}")
        return output

    def run_custom_operator(self, func, args, kwargs):
        """Run the Python code of an operator of this package, whose kernels are stubs, as a GPU would."""
        with self:
            output = OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        for real, fake in zip(tensors_in(output), tensors_in(func(*args, **kwargs)), strict=True):
            layout, expected = ((each.shape, each.stride(), each.dtype, each.device) for each in (real, fake))
            assert layout == expected, f"{func}: the fake implementation returns {expected}, not {layout}"
        return output

    def note_copies(self, name: str, inputs: list[torch.Tensor], kwargs: dict[str, Any]) -> None:
        """List copies between host and device."""
        if name not in ("aten::_to_copy", "aten::copy_") or not inputs:
            return
        target = inputs[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or inputs[0].device)
        source = inputs[-1].device
        if source.type != target.type:
            (self.copies if target.type == "cuda" else self.syncs).append(f"{name} to {target} {caller()}")

    def count(self, func, args, kwargs, inputs, outputs, output) -> None:
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in FREE or func.namespace == "prim":
            return
        launches = 2 if name in TWO_LAUNCHES else 1
        self.launches += launches
        self.launches_by_operator[name] += launches
        self.bytes += bytes_of_operator(name, inputs, outputs)
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=output)

    def count_kernel(self, name: str, tensors: tuple[torch.Tensor, ...]) -> None:
        """Count the launch of a Triton kernel, whose FLOPs are not known here."""
        assert all(tensor.device.type == "cuda" for tensor in tensors), f"{name} gets tensors on the host"
        self.triton_launches += 1
        self.launches_by_operator[name] += 1
        self.bytes += sum(map(bytes_of, tensors))

    def count_list(self, tensor: torch.Tensor) -> list:
        """`tensor.tolist()`: one sync. The test says what the values are, see `with_values`."""
        if tensor.device.type == "cuda":
            self.syncs.append(f"tolist {caller()}")
        return tensor.known_values


@contextmanager
def simulated_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Make new tensors fake, on any device, and answer what models and autocast ask about CUDA."""
    answers = {
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.cuda.get_device_capability": lambda *_: capability,
        "torch.cuda.device_of": lambda _: nullcontext(),
        "transformers.utils.import_utils.is_fake_tensor": lambda _: False,  # Transformers must not take a shortcut
    }
    with ExitStack() as stack:
        for path, replacement in answers.items():
            stack.enter_context(patch(path, replacement))
        for module in (guards, linear_cross_entropy):  # fake weights stand for ordinary ones
            stack.enter_context(patch.object(module, "PLAIN_TENSORS", (*guards.PLAIN_TENSORS, FakeTensor)))
        stack.enter_context(patch.object(linear_cross_entropy, "kernel_fault", lambda *_: None))
        stack.enter_context(patch.object(linear_cross_entropy, "_kernel_faults", {}))
        stack.enter_context(FakeTensorMode())
        yield


@contextmanager
def counting() -> Iterator[Counter]:
    """Count the operators inside; stubs stand for Triton's kernels."""
    counter = Counter()
    tolist = patch.object(FakeTensor, "tolist", lambda tensor: counter.count_list(tensor))
    with stubbed_kernels(counter.count_kernel), tolist, counter:
        yield counter


def with_values(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A vector on the device of which `tolist()` gives these values, at the price of a sync."""
    tensor = torch.empty(len(values), dtype=dtype, device="cuda")
    tensor.known_values = values
    return tensor


def tensors_in(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_sync(func, args) -> bool:
    """True for operators that read values on the host: to return them, or to know the size of their output."""
    name = func._schema.name
    if name == "aten::repeat_interleave":
        return len(args) < 2 or not isinstance(args[1], int)
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in SYNCS


def answer(name: str, tensor: torch.Tensor) -> bool | int | float:
    """Return what an operator could say of a tensor."""
    if name == "aten::_local_scalar_dense":
        return False if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
    if name in ("aten::equal", "aten::is_nonzero"):
        return True
    raise AssertionError(f"{name} waits for the device {caller()}")


def bytes_of_operator(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Return the bytes that an operator reads and writes."""
    if name != "scatter_":
        name = name.removesuffix("_")
    written = sum(map(bytes_of, outputs))
    if name in FILLS:
        return written
    if name in LOOKUPS:
        return written + min(written, bytes_of(inputs[0])) + sum(map(bytes_of, inputs[1:]))
    if name in SCATTERS:
        return 3 * bytes_of(inputs[-1]) + sum(map(bytes_of, inputs[1:-1]))
    if name == "copy":
        return written + bytes_of(inputs[-1])
    if name in TWO_LAUNCHES:
        return written + 2 * sum(map(bytes_of, inputs))
    return written + sum(map(bytes_of, inputs))


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor: those that `expand` repeats, or views overlap in, count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride != 0 else min(size, 1)
    return min(elements * tensor.element_size(), tensor.untyped_storage().nbytes())


def caller() -> str:
    """Return the innermost lines of this package or of Transformers that are being run."""
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if Path(frame.filename).parent != TESTS and ("hf_deberta" in frame.filename or "transformers" in frame.filename)
    ]
    return " < ".join(reversed(frames[-3:]))
