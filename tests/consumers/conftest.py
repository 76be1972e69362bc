"""Make this folder's helpers, and those of the GPU tests, importable in the tests."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

sys.path[:0] = [str(HERE), str(HERE.parent / "gpu")]
