"""A peer that dies ends the run within the time-out, with a message that says who is missing."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from allreduce_cases import needs_gpus
from watched import Watched

pytestmark = needs_gpus

TIMEOUT_S = 3
LIMIT_S = TIMEOUT_S + 20
"""The time-out, and what a process takes to print and to go."""

SCRIPT = """
import atexit, json, os, runpy, signal, sys
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
atexit.register(print, "marker: the interpreter exits", flush=True)
try:
    for _ in range(2000):
        call()
    torch.cuda.synchronize()
except Exception as error:
    print("marker: raised", type(error).__name__, flush=True)
    raise
"""


@pytest.mark.parametrize(
    ("mode", "strategy"), [("killed", "TWOSHOT"), ("left", "ONESHOT"), ("hangs", "TWOSHOT")]
)
def test_survivors_end_in_time_and_say_why(tmp_path: Path, mode: str, strategy: str) -> None:
    ranks = torch.cuda.device_count()
    lost = ranks - 1
    here = Path(__file__).resolve().parent
    paths = json.dumps([str(here), *[path for path in sys.path if path]])
    conftest = str(here.parent / "conftest.py")
    started: list[Watched] = []
    try:
        for rank in range(ranks):
            store = str(tmp_path / "store")
            arguments = [paths, conftest, str(rank), str(ranks), store, strategy, mode]
            environment = {"FLASHINFER_MNNVL_TIMEOUT_S": str(TIMEOUT_S)}
            started.append(Watched(SCRIPT, arguments, environment))
        survivors = started[:lost]
        for one in started:
            one.expect("marker: calls went well", 90)
        begin = time.monotonic()
        # Each is waited for, so that one which overstays hides nothing about the others.
        codes: list[int] = []
        overstayed: list[str] = []
        for rank, one in enumerate(survivors):
            try:
                codes.append(one.expect_end(max(begin + LIMIT_S - time.monotonic(), 0)))
            except AssertionError as error:
                overstayed.append(f"rank {rank}: {error}")
        assert not overstayed, "\n".join(overstayed)
        seconds = time.monotonic() - begin
    finally:
        for one in started:
            one.kill()

    waited = re.compile(
        r"rank (\d+) waited (\d+) ms for (the contribution|the sum) of rank (\d+), token (\d+)"
    )
    blamed: set[int] = set()
    for rank, (one, code) in enumerate(zip(survivors, codes, strict=True)):
        assert code != 0, one.text
        assert "marker: raised" in one.text, one.text
        messages = waited.findall(one.text)
        assert messages, one.text
        for who, milliseconds, _, peer, token in messages:
            assert int(who) == rank
            assert TIMEOUT_S * 1000 <= int(milliseconds) < (TIMEOUT_S + 5) * 1000
            assert int(token) < 12
            blamed.add(int(peer))
    # A survivor may have waited for another one that was held up itself; some waited for the dead.
    assert lost in blamed, blamed
    print(f"{len(survivors)} survivors ended {seconds:.1f} s after the loss, and blame {blamed}")
