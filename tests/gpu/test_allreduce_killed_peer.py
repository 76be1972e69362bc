"""A peer that dies ends the run within the time-out, with a message that says who is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from allreduce_cases import needs_gpus

pytestmark = needs_gpus

TIMEOUT_S = 3

SCRIPT = """
import json, os, runpy, signal, sys
sys.path[:0] = json.loads(sys.argv[1])
runpy.run_path(sys.argv[2])
rank, ranks, store = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
strategy, mode = sys.argv[6], sys.argv[7]
import torch
import torch.distributed as dist
from allreduce_cases import make_problem, open_workspace, run_norm
torch.cuda.set_device(rank)
dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
workspace = open_workspace(rank, ranks, tokens=64, hidden=2880, dtype=torch.bfloat16)
problem = make_problem(ranks, 12, 2880, torch.bfloat16, 1)
call = lambda: run_norm(workspace, problem, problem.inputs[rank], strategy, pdl=True)
for _ in range(50):
    call()
torch.cuda.synchronize()
dist.barrier()
print("marker: calls went well", flush=True)
if rank == ranks - 1:
    # Dies with calls in flight, or leaves, or hangs.
    if mode == "killed":
        for _ in range(20):
            call()
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "left":
        os._exit(0)
    import time
    time.sleep(60)
try:
    for _ in range(2000):
        call()
    torch.cuda.synchronize()
except Exception as error:
    print("marker: raised", type(error).__name__, flush=True)
    raise
"""


class Rank:
    """A process whose output is read as it comes."""

    def __init__(self, arguments: list[str]) -> None:
        environment = os.environ | {"FLASHINFER_MNNVL_TIMEOUT_S": str(TIMEOUT_S)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.text = ""
        self.began = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if "marker: calls went well" in line:
                self.began.set()


CASES = (("killed", "TWOSHOT"), ("left", "ONESHOT"), ("hangs", "TWOSHOT"))


def test_survivors_end_in_time_and_say_why(tmp_path: Path) -> None:
    """All cases at once, each in processes of its own."""
    ranks = torch.cuda.device_count()
    lost = ranks - 1
    here = Path(__file__).resolve().parent
    paths = json.dumps([str(here), *[path for path in sys.path if path]])
    conftest = str(here.parent / "conftest.py")
    started = {
        (mode, rank): Rank(
            [paths, conftest, str(rank), str(ranks), str(tmp_path / mode), strategy, mode]
        )
        for mode, strategy in CASES
        for rank in range(ranks)
    }
    survivors = {key: one for key, one in started.items() if key[1] != lost}
    try:
        for one in started.values():
            assert one.began.wait(90), one.text
        begin = time.monotonic()
        # The time-out, and what a process takes to print and to go.
        for one in survivors.values():
            one.process.wait(TIMEOUT_S + 20)
        seconds = time.monotonic() - begin
        for one in survivors.values():
            one.reader.join(10)
    finally:
        for one in started.values():
            one.process.kill()
            one.process.wait()

    waited = re.compile(
        r"rank (\d+) waited (\d+) ms for (the contribution|the sum) of rank (\d+), token (\d+)"
    )
    blamed: dict[str, set[int]] = {mode: set() for mode, _ in CASES}
    for (mode, rank), one in survivors.items():
        assert one.process.returncode != 0, one.text
        assert "marker: raised" in one.text, one.text
        messages = waited.findall(one.text)
        assert messages, one.text
        for who, milliseconds, _, peer, token in messages:
            assert int(who) == rank
            assert TIMEOUT_S * 1000 <= int(milliseconds) < (TIMEOUT_S + 5) * 1000
            assert int(token) < 12
            blamed[mode].add(int(peer))
    # A survivor may have waited for another one that was held up itself; some waited for the dead.
    assert all(lost in peers for peers in blamed.values()), blamed
    print(f"{len(survivors)} survivors ended {seconds:.1f} s after the loss: {blamed}")
