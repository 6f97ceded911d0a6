"""Write the Triton kernels as a kernel for the Hub, to use without this package:

    python -m hf_deberta.export.hub_kernel FOLDER

The folder is a repository of the type "kernel", and loads from disk too:

    >>> from kernels import get_kernel, get_local_kernel
    >>> kernel = get_local_kernel(Path(folder))  # or get_kernel("USER/NAME", version=1, trust_remote_code=True)
    >>> context = kernel.tiled_attention(query, key, value, position_key, position_query, rows_of_distance)
"""

import argparse
import json
from pathlib import Path

from hf_deberta.engines import attention_triton_operator

VERSION = 1  # of the function's arguments and results; users of the kernel name it
FILES = ("attention_triton_operator.py", "attention_triton_forward.py", "attention_triton_backward.py")


def write_hub_kernel(folder: Path) -> Path:
    """Write the kernel to `folder`, which must be new or empty; return the folder of its files.

    Its operators have names of their own, so that kernel and package can be loaded into one process.
    """
    build = folder / "build" / "torch-universal"
    build.mkdir(parents=True)
    name = f"hf_deberta_kernel_{VERSION}"
    for file in FILES:
        source = Path(attention_triton_operator.__file__).with_name(file).read_text(encoding="utf-8")
        (build / file).write_text(source.replace('"hf_deberta::', f'"{name}::'), encoding="utf-8")
    exported = 'from .attention_triton_operator import tiled_attention\n\n__all__ = ["tiled_attention"]\n'
    (build / "__init__.py").write_text(exported, encoding="utf-8")
    metadata = {"id": f"_{name}", "name": "disentangled-attention", "version": VERSION, "license": "MIT"}
    metadata["python-depends"] = []
    metadata["backend"] = {"type": "cuda"}  # required; "torch-universal" loads on any
    (build / "metadata.json").write_text(json.dumps(metadata, indent=2), encoding="utf-8")
    return build


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_deberta.export.hub_kernel", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to make")
    try:
        print(f"Wrote {write_hub_kernel(parser.parse_args().folder)}")
    except OSError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
