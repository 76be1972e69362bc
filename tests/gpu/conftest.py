"""Make ``ranks`` importable in GPU tests, and in the processes that it spawns; no multicast."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

# Multicast on GPUs that are not fit for it can take their NVLink out of service, for others too:
# these tests, and the processes that they start, try it only where it is asked for.
os.environ.setdefault("FLASHINFER_MNNVL_MULTICAST", "0")
