"""Load the library of guard.py into this process. Import this module before torch, see there."""

import ctypes
import sys

from guard import build_library

if "torch" in sys.modules:
    raise ImportError("import load_guard before torch, which asks for CUDA hooks only once")
ctypes.CDLL(str(build_library()), ctypes.RTLD_GLOBAL)
