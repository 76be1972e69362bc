"""Start a process for each GPU, collect what rank 0 reports, and never wait for ever."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .results import Results, Row, Skip
from .session import LIMIT, Plan

_FINISH_S = 10.0
"""Before the time limit, when the ranks begin nothing more."""

_GRACE_S = 15.0
"""For the others, when a rank has failed."""

Message = tuple[str, tuple[Any, ...]]
Worker = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Job:
    """What the ranks have to do.

    Attributes
    ----------
    plan : Plan or None
        None for the host cost alone.
    ranks : int
    time_limit_s : float
        From now until the last process is gone.
    host_cost : tuple of int
        Lengths of rows with which to measure the host's cost.
    """

    plan: Plan | None
    ranks: int
    time_limit_s: float
    host_cost: tuple[int, ...] = ()


class QueueReporter:
    """Sends what a session reports to the parent process."""

    def __init__(self, messages: Any) -> None:
        self._messages = messages

    def row(self, row: Row) -> None:
        self.send("row", row)

    def skip(self, skip: Skip) -> None:
        self.send("skip", skip)

    def component(self, component: dict[str, Any]) -> None:
        self.send("component", component)

    def note(self, name: str, value: object) -> None:
        self.send("note", name, value)

    def send(self, kind: str, *values: Any) -> None:
        """Send a message of :func:`_take`."""
        self._messages.put((kind, values))


class SilentReporter:
    """Keeps nothing: what rank 0 reports is enough."""

    def row(self, row: Row) -> None: ...
    def skip(self, skip: Skip) -> None: ...
    def component(self, component: dict[str, Any]) -> None: ...
    def note(self, name: str, value: object) -> None: ...


def run(
    job: Job, worker: Worker, command: str, *, progress: Callable[[Row | Skip], None]
) -> tuple[Results, str, list[str]]:
    """Run a job.

    Parameters
    ----------
    job : Job
    worker : callable
        ``worker(rank, job, rendezvous, end, messages)`` is one rank; at module level. ``end`` is
        the time of ``time.time()`` at which to begin nothing more.
    command : str
        For the results.
    progress : callable
        Is told of rows and skips as they come.

    Returns
    -------
    Results
        All that was reported, also when ranks failed or the time was up.
    str
        A name for the machine; empty if no rank came as far as to tell it.
    list of str
        What went wrong.
    """
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    results, names = Results("", command, {}), [""]
    limit = time.monotonic() + job.time_limit_s
    end = time.time() + job.time_limit_s - _FINISH_S
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rendezvous = str(Path(folder, "rendezvous"))
        processes: list[BaseProcess] = [
            context.Process(target=worker, args=(rank, job, rendezvous, end, messages))
            for rank in range(job.ranks)
        ]
        take = functools.partial(_take, results, names, progress)
        try:
            for process in processes:
                process.start()
            failures = _collect(processes, messages, limit, take)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                if process.pid is not None:
                    process.join()
    return results, names[0], failures


def guarded(rank: int, messages: Any, work: Callable[[], None]) -> None:
    """Do a rank's work, then end this process; a failure goes to the parent and the exit code.

    Nothing is torn down: half a dozen libraries have mapped memory of other processes, and how well
    they part with it is not what is measured here.
    """
    code = 0
    try:
        work()
    except BaseException:
        code = 1
        messages.put(("failure", (rank, traceback.format_exc())))
    messages.close()
    messages.join_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _collect(
    processes: list[BaseProcess], messages: Any, limit: float, take: Callable[[Message], str]
) -> list[str]:
    """Take messages until all ranks have exited, or one has failed and grace is over, or time is.

    Returns what went wrong.
    """
    failures: list[str] = []
    reported = False
    while True:
        exited = [process.exitcode is not None for process in processes]
        try:
            while True:
                failure = take(messages.get(timeout=0.1))
                if failure:
                    failures.append(failure)
        except queue.Empty:
            pass
        codes = [process.exitcode for process in processes]
        broken = [rank for rank, code in enumerate(codes) if code]
        if (broken or failures) and not reported:
            reported = True
            limit = min(limit, time.monotonic() + _GRACE_S)
        # The codes were read before the queue was drained: there are no more messages.
        if all(exited):
            silent = [rank for rank in broken if not failures]
            return failures + [f"rank {rank} exited with code {codes[rank]}" for rank in silent]
        if time.monotonic() > limit:
            alive = [rank for rank, code in enumerate(codes) if code is None]
            return [*failures, f"ranks {alive} did not finish in time and were killed"]


def _take(
    results: Results, names: list[str], progress: Callable[[Row | Skip], None], message: Message
) -> str:
    """Put a message into the results; return the text of a failure."""
    kind, values = message
    if kind == "row":
        results.rows.append(values[0])
        progress(values[0])
    elif kind == "skip":
        results.skipped.append(values[0])
        progress(values[0])
    elif kind == "component":
        results.components.append(values[0])
    elif kind == "note":
        results.notes[values[0]] = values[1]
    elif kind == "host cost":
        results.host_cost.append(values[0])
    elif kind == "machine":
        names[0], results.machine, results.versions = values
    elif kind == "failure":
        return f"rank {values[0]}: {values[1]}"
    else:
        raise ValueError(f"there is no message {kind!r}")
    return ""


def work(rank: int, job: Job, rendezvous: str, end: float, messages: Any) -> None:
    """Be one rank of a job on GPUs."""
    guarded(rank, messages, functools.partial(_work, rank, job, rendezvous, end, messages))


def _work(rank: int, job: Job, rendezvous: str, end: float, messages: Any) -> None:
    import torch

    from . import hostcost, machine
    from .group import Deadline, TorchGroup
    from .limit import Limit
    from .methods import make
    from .methods.rig import Rig
    from .problem import Problem
    from .session import Session
    from .stopwatch import CudaStopwatch

    group = TorchGroup(rank, job.ranks, rendezvous, job.time_limit_s)
    reporter = QueueReporter(messages) if rank == 0 else SilentReporter()
    if isinstance(reporter, QueueReporter):
        description = machine.describe(job.ranks)
        reporter.send("machine", machine.slug(job.ranks), description, machine.versions())
    deadline = Deadline(group, end - time.time())
    plan = job.plan
    rig = Rig(group, plan.largest if plan else Problem(max(job.host_cost), 1))
    if plan:
        session = Session(group, CudaStopwatch(group), reporter, plan, deadline)
        if LIMIT in plan.methods:
            session.measure_limit(lambda: Limit(group, plan.largest))
        names = [name for name in plan.methods if name != LIMIT]
        opened = {name: session.open(name, functools.partial(make, name, rig)) for name in names}
        session.measure_methods({name: m for name, m in opened.items() if m is not None})
        if "addnorm" in vars(rig):
            reporter.note("norm_of_unfused_methods", rig.addnorm.description)
    for hidden in job.host_cost:
        if deadline.passed():
            break
        found, skipped = hostcost.measure(rig, hidden)
        for skip in skipped:
            reporter.skip(skip)
        if isinstance(reporter, QueueReporter):
            for entry in found:
                reporter.send("host cost", {"hidden": hidden, "tokens": 1, **entry})
    torch.cuda.synchronize()
    # No rank may end while another one's kernels use its memory.
    group.barrier()
