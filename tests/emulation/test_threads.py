"""The kernels under ThreadSanitizer: threads of a block, blocks of a cluster, calls, ranks.

Each emulated thread is a thread to the sanitizer; barriers, mailboxes and the end of a predecessor
order them, and nothing else does: not that fibers take turns, and not the relaxed accesses to other
ranks' memory.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

WORKLOAD = Path(__file__).resolve().parent / "tsan_workload.py"
RACE = 66

Run = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def under_tsan() -> Run:
    """Return a function that runs a part of the workload and gives the finished process."""
    import build

    library = build.build(tsan=True)
    runtime = build.tsan_runtime()
    # The sanitizer wants the address space where it knows it.
    setarch = shutil.which("setarch")
    fixed = [setarch, platform.machine(), "--addr-no-randomize"] if setarch else []

    def run(what: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*fixed, sys.executable, str(WORKLOAD), str(library), what],
            env=os.environ
            | {
                "LD_PRELOAD": str(runtime),
                "TSAN_OPTIONS": f"halt_on_error=1:exitcode={RACE}:history_size=4",
                "OPENBLAS_NUM_THREADS": "1",
            },
            text=True,
            capture_output=True,
            timeout=300,
        )

    return run


def test_kernels_have_no_race(under_tsan: Run) -> None:
    done = under_tsan("kernels")
    assert done.returncode == 0, done.stderr[-6000:]
    assert "ThreadSanitizer" not in done.stderr, done.stderr[-6000:]
    assert int(done.stdout.split()[-1]) > 600


def test_a_planted_race_is_found(under_tsan: Run) -> None:
    done = under_tsan("race")
    assert done.returncode == RACE, done.stderr[-6000:]
    assert "data race" in done.stderr
    assert "pass_a_number" in done.stderr


def test_with_its_barrier_there_is_none(under_tsan: Run) -> None:
    done = under_tsan("barrier")
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.split() == ["got:", str(0x3F800000)]
