"""Load libcudart from the nvidia-cuda-runtime package.

FlashInfer 0.6.x's ``flashinfer.comm`` looks for a loaded libcudart when it is imported. A torch
that is built for CUDA has loaded one by then; one that is built for the CPU has not.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def load() -> None:
    """Load the library if the package is there; without it, upstream's own error says more."""
    for entry in sys.path:
        for library in Path(entry).glob("nvidia/*/lib/libcudart.so.*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return
