"""Make ``ranks`` importable in GPU tests, and in the processes that it spawns."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
