"""Make this folder's helpers, and those of the GPU tests, importable in the tests; no multicast."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

sys.path[:0] = [str(HERE), str(HERE.parent / "gpu")]

# As in the GPU tests: tried only where it is asked for, in this process and those it starts.
os.environ.setdefault("FLASHINFER_MNNVL_MULTICAST", "0")
