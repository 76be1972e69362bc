"""The helper that runs ranks in processes ends in bounded time, whatever a rank does."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
import ranks
from ranks import RankError, run_ranks


def misbehave(rank: int, world_size: int, what: str) -> int:
    if rank == 1 and what == "raise":
        raise ValueError("no good")
    if rank == 1 and what == "die":
        os._exit(3)
    if what == "hang":
        time.sleep(600)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    return int(total) * 10 + rank


def test_results_come_by_rank() -> None:
    assert run_ranks(misbehave, 2, "nothing") == [30, 31]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "(?s)rank 1: Traceback.*ValueError: no good"),
        ("die", "rank 1: exited with code 3 without a result"),
        ("hang", "(?s)rank 0: did not finish in time; killed.*rank 1: did not finish in time"),
    ],
)
def test_a_rank_that_misbehaves(what: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE_S", 1.0)
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(misbehave, 2, what, timeout_s=8 if what == "hang" else 60)
    assert time.monotonic() - start < 40
