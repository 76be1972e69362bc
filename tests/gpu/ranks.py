"""Run a function on several ranks, one process each, and never wait for ever."""

from __future__ import annotations

import multiprocessing as mp
import queue
import runpy
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if mp.parent_process() is not None:
    # A spawned rank has no pytest that would make the package under test importable. The rank's
    # entry point is in this module, so this runs before the module of the function is imported.
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))

# After the first failure the other ranks get this long to say how it went for them.
_GRACE_S = 10.0


class RankFailure(AssertionError):
    """At least one rank raised, died or did not finish; the message has every rank's story."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int | None = None,
    *args: Any,
    timeout_s: float = 120.0,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in one new process per rank; return results by rank.

    Each rank has the default process group initialised, ``cpu:gloo,cuda:nccl`` with
    ``torch.cuda.set_device(rank)`` where there are GPUs for all ranks, else gloo only. The group is
    not destroyed for ``fn`` when it raises.

    Parameters
    ----------
    fn : callable
        Importable by name in another process: a function at module level.
    world_size : int, optional
        Number of ranks; by default one per GPU, and the test is skipped with fewer than two.
    *args
        Picklable arguments passed on.
    timeout_s : float
        All ranks are killed when they have not finished in this many seconds.

    Raises
    ------
    RankFailure
        With the traceback, exit code or silence of each rank that failed.
    """
    if world_size is None:
        world_size = torch.cuda.device_count()
        if world_size < 2:
            pytest.skip(f"needs two GPUs or more, found {world_size}")

    context = mp.get_context("spawn")
    reports: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = str(Path(folder) / "store")
        processes: list[BaseProcess] = [
            context.Process(
                target=_rank_main,
                args=(fn, rank, world_size, args, store, timeout_s, reports),
                name=f"rank {rank}",
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            results, failures = _collect(processes, reports, timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                if process.pid is not None:
                    process.join()
            reports.close()
    if failures:
        raise RankFailure("\n".join(f"rank {r}: {failures[r]}" for r in sorted(failures)))
    return [results[rank] for rank in range(world_size)]


def _collect(
    processes: list[BaseProcess], reports: Any, timeout_s: float
) -> tuple[dict[int, Any], dict[int, str]]:
    """Wait until every rank has reported and exited, one has failed and grace is over, or time is.

    A rank that exits without a report, or with a non-zero code after one (a crash at exit), failed.
    """
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        exited = {r for r, process in enumerate(processes) if process.exitcode is not None}
        try:
            while True:
                rank, ok, value = reports.get(timeout=0.05)
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
        except queue.Empty:
            pass
        # The codes were read before the queue was drained: these ranks have said all they will.
        for rank in exited:
            code = processes[rank].exitcode
            if rank not in failures and (code != 0 or rank not in results):
                failures[rank] = f"exited with code {code}" + (
                    " after it returned" if rank in results else " without a result"
                )
        if len(exited) == len(processes):
            return results, failures
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            for rank in set(range(len(processes))) - exited - set(failures):
                what = "returned but did not exit" if rank in results else "did not finish"
                failures[rank] = f"{what} in time; killed"
            return results, failures


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    store: str,
    timeout_s: float,
    reports: Any,
) -> None:
    """Initialise one rank, call ``fn`` and report."""
    try:
        use_gpus = torch.cuda.device_count() >= world_size
        if use_gpus:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_gpus else "gloo",
            store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = fn(rank, world_size, *args)
        # A test may have destroyed the group itself. No barrier here: a peer may be gone.
        if dist.is_initialized():
            dist.destroy_process_group()
        reports.put((rank, True, result))
    except BaseException:
        reports.put((rank, False, traceback.format_exc()))
        reports.close()
        reports.join_thread()
        raise SystemExit(1) from None
