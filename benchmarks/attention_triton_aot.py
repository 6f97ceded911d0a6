"""Report what the Triton kernels compile to, without a GPU: registers, spills, shared memory, instructions.

    python benchmarks/attention_triton_aot.py                                  # as launched on sm_80, sm_90 and sm_100
    python benchmarks/attention_triton_aot.py --arch 90 --tile 64 --launch 8 1   # other warps and stages

For one far and one near tile: issue slots (instructions times warps, divided by the four schedulers of a
multiprocessor), cycles of shared memory (128 bytes each, without bank conflicts and copies from global memory), and
cycles of spilled registers, which take the same way. `times_computed` is the largest number of times that the warps
compute a product: more than once where the warps cover more rows than the tile has. With both position terms and far
keys, without mask. Needs triton, whose ptxas and cuobjdump it uses. Writes results/attention_triton_aot.csv.
"""

import argparse
import datetime
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from table import RESULTS
from timing import write_rows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_deberta.engines.attention_triton_backward import own_gradients_kernel, table_gradients_kernel
from hf_deberta.engines.attention_triton_forward import forward_kernel
from hf_deberta.engines.attention_triton_operator import CHIPS, LAUNCHES

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INDICES = ("spans", "places", "kept")
FLOATS = ("far_query", "far_key", "far_own", "far_other", "log_sum", "delta", "far_gradient", "gradient")
INTEGERS = ("batch", "heads", "tokens", "head_size", "blocks", "NEAR", "programs", "slots")
KINDS = dict.fromkeys(INDICES, "*i32") | dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTEGERS, "i32")
KINDS |= {
    "seed": "*i64",
    "scale": "fp32",
    "dropout_p": "fp32",
    "mask": "*u8",
}  # other arguments have the type of the states
CONSTANTS = {"C2P": True, "P2C": True, "FAR": True, "MASK": "none", "CAUSAL": False, "PACKED": False, "DROPOUT": False}


def compile_kernel(kernel: triton.JITFunction, target: GPUTarget, dtype: str, constants: dict, warps: int, stages: int):
    """Compile a kernel for pointers and sizes that are multiples of 16, as in a usual launch."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: KINDS.get(name, f"*{dtype}") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    divide = [name for name, kind in signature.items() if kind[0] == "*" or name in ("head_size", "tokens")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divide}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def statistics(binary) -> dict[str, object]:
    """Return registers and stack of a thread, shared memory of a program, costs of a tile."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[:1]
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?(.*?) *;", code, flags=re.MULTILINE)
    return {
        "registers": int(registers),
        "stack_bytes": int(stack),
        "shared_bytes": binary.metadata.shared,
        "instructions": len(lines),
        **costs_of_tiles(lines, binary.metadata.num_warps),
        "times_computed": times_computed(binary.asm["ttgir"]),
    }


def costs_of_tiles(lines: list[tuple[str, str, str]], warps: int) -> dict[str, int | str]:
    """Return issue slots and cycles of shared memory of a far and a near tile.

    With three loops, the first computes far tiles and the last near tiles; a single loop computes near tiles. A loop
    that contains other loops computes no tile.
    """
    index_of = {int(address, 16): index for index, (address, *_) in enumerate(lines)}
    loops = []
    for end, (_, condition, line) in enumerate(lines):
        if line == "EXIT" and not condition:
            break  # the code after it waits and jumps back
        target = re.match(r"BRA.*?0x([0-9a-f]+)", line)
        begin = index_of[int(target[1], 16)] if target else end
        if any("MMA" in line for *_, line in lines[begin:end]):
            loops.append((begin, end + 1))
    inner = [loop for loop in loops if not any(loop[0] <= other[0] < other[1] < loop[1] for other in loops)]
    costs = {}
    for name, loop in (("far", inner[0] if len(inner) == 3 else None), ("near", inner[-1] if inner else None)):
        body = [line for *_, line in lines[slice(*loop)]] if loop else []
        costs[f"{name}_issue_slots"] = len(body) * warps // 4 or ""
        costs[f"{name}_shared_cycles"] = sum(map(shared_cycles, body)) * warps // 4 or ""
        spilled = sum(cycles_of_words(line, r"(?:LDL|STL)(?:\.LU)?") for line in body)  # the same 128 bytes a cycle
        costs[f"{name}_stack_cycles"] = spilled * warps // 4 if body else ""
    return costs


def shared_cycles(line: str) -> int:
    """Return the cycles of an instruction in four warps; an HGMMA takes four, its first factor may be in registers."""
    if pieces := re.match(r"(?:LDSM|STSM)\.16\.\w+(?:\.(\d))? ", line):
        return 4 * int(pieces[1] or 1)
    if columns := re.match(r"HGMMA\.64x(\d+)x\S+ \w+, (gdesc)?", line):
        return int(columns[1]) // 4 + (16 if columns[2] else 0)
    return cycles_of_words(line, r"(?:LDS|STS)(?:\.U)?")


def cycles_of_words(line: str, instructions: str) -> int:
    """Return the cycles in four warps of reading or writing words of 32, 64 or 128 bits; 0 for other instructions."""
    words = re.match(rf"{instructions}(?:\.(64|128))? ", line)
    return 4 * int(words[1] or 32) // 32 if words else 0


def times_computed(ttgir: str) -> int:
    layouts = re.findall(r"(#mma\d*) = .*?warpsPerCTA = \[(\d+), (\d+)\], instrShape = \[(\d+), (\d+)", ttgir)
    reach = {name: (int(i) * int(rows), int(j) * int(columns)) for name, i, j, rows, columns in layouts}
    products = re.findall(r"dot .*-> tensor<(\d+)x(\d+)xf32, (#mma\d*)>", ttgir)
    times = [-(-reach[name][0] // int(rows)) * -(-reach[name][1] // int(columns)) for rows, columns, name in products]
    return max(times, default=1)


def kernels(constants: dict) -> Iterator[tuple[str, triton.JITFunction, dict, int]]:
    """Yield name, kernel, constants, and index in a row of LAUNCHES."""
    with_dropout = ", dropout" if constants["DROPOUT"] else ""
    yield f"forward{with_dropout}", forward_kernel, constants, 0
    for keys, name in ((False, "own_gradients, dq"), (True, "own_gradients, dk and dv")):
        values = {**constants, "OWN": True, "OTHER": True, "KEYS": keys, "KEEP": True}
        yield f"{name}{with_dropout}", own_gradients_kernel, values, 1
    if not with_dropout:
        yield "table_gradients", table_gradients_kernel, constants, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--head_size", type=int, default=64)
    parser.add_argument("--precision", default="ieee", choices=("ieee", "tf32"))
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--tile", type=int)
    parser.add_argument("--launch", type=int, nargs=2, metavar=("WARPS", "STAGES"))
    args = parser.parse_args()
    for arch in args.arch:
        chip = "float32" if args.dtype == "fp32" else CHIPS.get(arch // 10, "others")
        tile, launches = LAUNCHES[chip]
        sizes = {"T": args.tile or tile, "D": 1 << (args.head_size - 1).bit_length()}
        options = {"PRECISION": args.precision, "DROPOUT": args.dropout}
        for name, kernel, values, column in kernels({**CONSTANTS, **sizes, **options}):
            warps, stages = args.launch or launches[column if sizes["D"] <= 64 else -1]
            case = {"kernel": name, "arch": f"sm_{arch}", "dtype": args.dtype, "head_size": args.head_size}
            case |= {"precision": args.precision, "tile": sizes["T"], "warps": warps, "stages": stages}
            target = GPUTarget("cuda", arch, 32)
            result = statistics(compile_kernel(kernel, target, args.dtype, values, warps, stages))
            versions = {"triton": triton.__version__, "date": datetime.date.today().isoformat()}
            print(f"{name}, sm_{arch}, {warps} warps, {stages} stages: {result}", flush=True)
            write_rows(RESULTS / "attention_triton_aot.csv", [{**case, **result, **versions}], (*case, "triton"))


if __name__ == "__main__":
    main()
