"""What the compiler makes of the Triton kernels, without a GPU: registers, spilled bytes, shared memory, instructions.

    python benchmarks/attention_triton_aot.py                       # the block sizes in use, for sm_80, sm_90 and sm_100
    python benchmarks/attention_triton_aot.py --tile 32 --warps 2 --stages 2

Writes benchmarks/results/attention_triton_aot.csv. Needs triton alone; its own ptxas and cuobjdump are used.
"""

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import sys; sys.path.insert(0, ".")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
def TYPES(dtype):
    return {
    **dict.fromkeys(("far_query", "far_key", "far_own", "far_other", "log_sum", "delta", "far_gradient", "key_gradient", "query_gradient"), "*fp32"),
    "mask": "*u8", **dict.fromkeys(("ends", "documents", "first_block", "bounds"), "*i32"), "seed": "*i64",
    **dict.fromkeys(("blocks", "batch", "heads", "tokens", "head_size", "NEAR", "rows", "row_step"), "i32"),
    **dict.fromkeys(("scale", "natural_scale", "dropout_p"), "fp32"),
    **dict.fromkeys(("far_sums", "own_grads", "other_grads", "for_key_table", "for_query_table"), "*fp32"),
    }
def compiled(kernel, arch, dtype, constants, **options):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES(dtype).get(n, f"*{dtype}") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants and (signature[n][0] == "*" or n in ("head_size", "tokens"))}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)

def report(c):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(c.asm["cubin"]); f.flush()
        usage = subprocess.run([BIN/"cuobjdump", "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
        sass = subprocess.run([BIN/"cuobjdump", "--dump-sass", f.name], capture_output=True, text=True).stdout
    ops = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", sass, flags=re.M))
    regs, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return int(regs), int(stack), c.metadata.shared, sum(ops.values()), {k: ops[k] for k in ("HGMMA","HMMA","LDS","STS","SHFL","LDL","STL","FFMA", "UTCHMMA")}
def main():
    from hf_deberta.attention_triton_forward import forward_kernel
    ap = argparse.ArgumentParser(); ap.add_argument("--tile", type=int, default=64); ap.add_argument("--warps", type=int, default=4); ap.add_argument("--stages", type=int, default=2)
    ap.add_argument("--d", type=int, default=64); ap.add_argument("--dtype", default="bf16"); ap.add_argument("--arch", type=int, nargs="+", default=[80, 90]); ap.add_argument("--precision", default="tf32"); ap.add_argument("--kernels", nargs="+", default=["forward"])
    a = ap.parse_args()
    for arch in a.arch:
        for mask, drop in (("none", False),):
            c = dict(C2P=True, P2C=True, FAR=True, MASK=mask, CAUSAL=False, PACKED=False, DROPOUT=drop, PRECISION=a.precision, T=a.tile, D=a.d)
            if "forward" in a.kernels:
                print(arch, mask, "forward", *report(compiled(forward_kernel, arch, a.dtype, c, num_warps=a.warps, num_stages=a.stages)), flush=True)
            for K in (False, True):
                if "own" in a.kernels:
                    from hf_deberta.attention_triton_backward import own_gradients_kernel
                    print(arch, mask, "own keys" if K else "own queries", *report(compiled(own_gradients_kernel, arch, a.dtype, {**{k: v for k, v in c.items() if k not in ("C2P","P2C")}, "KEYS": K, "OWN": True, "OTHER": True}, num_warps=a.warps, num_stages=a.stages)), flush=True)
            if "table" in a.kernels:
                from hf_deberta.attention_triton_backward import table_gradients_kernel
                c2 = {k: v for k, v in c.items() if k not in ("FAR",)}
                print(arch, mask, "table", *report(compiled(table_gradients_kernel, arch, a.dtype, c2, num_warps=a.warps, num_stages=a.stages)), flush=True)
if __name__ == "__main__":
    main()
