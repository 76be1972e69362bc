#!/usr/bin/env python3
"""Compare fused all-reduce with the other ways to compute it, on this machine's GPUs.

    scripts/bench.py                          everything, into benchmarks/results/<gpu>x<ranks>.json
    scripts/bench.py --quick                  a few sizes
    scripts/bench.py --host-cost              only the host's time of an eager call
    scripts/bench.py --from FILE              judge and draw a file again

``--help`` has the rest. Exits with 0 only if every rank finished in time.
"""

from __future__ import annotations

import sys

try:
    from flashinfer.elastic.doctor.bench.cli import main
except ModuleNotFoundError as error:
    sys.exit(f"{error}. Install the wheel beside FlashInfer; scripts/build.sh does, in .venv.")

if __name__ == "__main__":
    sys.exit(main())
