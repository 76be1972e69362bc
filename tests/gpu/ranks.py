"""Run a function on several ranks, one process each, and never wait for ever."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing as mp
import queue
import runpy
import sys
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

# After the first failure the other ranks get this long to say how it went for them.
_GRACE_S = 10.0


class RankError(AssertionError):
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
        A function at module level; its module is loaded again in each process.
    world_size : int, optional
        Number of ranks; by default one per GPU, and the test is skipped with fewer than two.
    *args
        Picklable arguments passed on.
    timeout_s : float
        All ranks are killed when they have not finished in this many seconds.

    Raises
    ------
    RankError
        With the traceback, exit code or silence of each rank that failed.
    """
    if world_size is None:
        world_size = torch.cuda.device_count()
        if world_size < 2:
            pytest.skip(f"needs two GPUs or more, found {world_size}")

    source = inspect.getsourcefile(fn)
    assert source is not None
    origin = (fn.__module__, str(Path(source).resolve()), fn.__qualname__)
    context = mp.get_context("spawn")
    reports: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = str(Path(folder) / "store")
        processes: list[BaseProcess] = [
            context.Process(
                target=_rank_main,
                args=(origin, rank, world_size, args, store, timeout_s, reports),
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
        raise RankError("\n".join(f"rank {r}: {failures[r]}" for r in sorted(failures)))
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


def _load(module_name: str, path: str, name: str) -> Callable[..., Any]:
    """Load a function by file, because pytest may have imported it under a name of its own."""
    if module_name not in sys.modules:
        # A spawned process has no pytest that makes the package under test importable.
        runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    fn: Callable[..., Any] = getattr(sys.modules[module_name], name)
    return fn


def _rank_main(
    origin: tuple[str, str, str],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    store: str,
    timeout_s: float,
    reports: Any,
) -> None:
    """Initialise one rank, call ``fn`` and report."""
    try:
        fn = _load(*origin)
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
