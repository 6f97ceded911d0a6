"""Compile guard.cpp, which lets FakeTensorMode run on device "cuda" in a PyTorch without CUDA.

The library must be loaded before torch is imported, because PyTorch asks for CUDA hooks only once. It changes the whole
process: autograd and `torch.accelerator` then take "cuda" for an available accelerator. So only processes of their own
load it, by importing load_guard.py before torch.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

GUARD = Path(__file__).with_name("guard.cpp")
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "fake_cuda"


class GuardError(Exception):
    """Why there is no simulated CUDA device here."""


def build_library(source: Path = GUARD) -> Path:
    """Return the compiled source, from the cache if it was compiled for this release of PyTorch; imports no torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise GuardError("torch is not installed")
    torch_folder = Path(spec.origin).parent
    if sys.platform != "linux":
        raise GuardError(f"{source.name} is compiled on Linux only, not on {sys.platform}")
    if (torch_folder / "lib" / "libtorch_cuda.so").exists():
        raise GuardError("this PyTorch has CUDA, with a guard of its own")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    library = CACHE / f"{source.stem}-{version('torch')}-{digest}.so"
    if not library.exists():
        compile_library(source, torch_folder, library)
    return library


def compile_library(source: Path, torch_folder: Path, library: Path) -> None:
    """Compile into a temporary file and rename it, so that other processes never see half a library."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise GuardError("neither g++ nor clang++ is installed")
    library.parent.mkdir(parents=True, exist_ok=True)
    temporary = library.with_name(f"{library.name}.{os.getpid()}.tmp")
    includes, libraries = torch_folder / "include", torch_folder / "lib"
    command = [compiler, "-shared", "-fPIC", "-O1", "-std=c++20", f"-I{includes}", str(source), "-o", str(temporary)]
    command += [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise GuardError(f"{compiler} cannot compile {source.name}: {ran.stderr.strip()[:1000]}")
    temporary.replace(library)
