"""How a call is timed: the same procedure for every method.

The ranks start a repetition together *on the GPU*: an all-reduce of one element, then a few calls
of the method itself, none of them timed, come before the first event. What the hosts differ by is
therefore not in the numbers.

Inputs are used again and again, so they lie in the L2 cache where they fit, as they do in a server,
where the kernel before has just written them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .group import Group, attempt
from .problem import Problem

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Effort:
    """How often a method is called.

    Attributes
    ----------
    calls : int
        Back to back between two events.
    lead : int
        Before the first event, untimed.
    repetitions : int
        Times taken; a few more are made first and thrown away.
    """

    calls: int
    lead: int
    repetitions: int

    @classmethod
    def for_problem(cls, problem: Problem, *, quick: bool) -> Effort:
        """Return an effort that takes milliseconds for every size.

        What a graph itself takes to start is shared by its calls: the shorter, the more of them.
        """
        calls = next(calls for most, calls in _CALLS if problem.payload_bytes <= most)
        return cls(calls, lead=4, repetitions=9 if quick else 31)


_CALLS = ((2**18, 100), (2**21, 50), (2**24, 20), (math.inf, 10))
"""Up to so many bytes a rank, so many calls back to back."""


class Stopwatch(Protocol):
    """Times calls; both methods are collective and return microseconds a call, by repetition."""

    def graph(self, call: Call, effort: Effort, after_capture: Callable[[], None]) -> list[float]:
        """Time replays of a CUDA graph of back-to-back calls.

        ``after_capture`` runs between the capture and the first replay.
        """
        ...

    def eager(self, call: Call, effort: Effort) -> list[float]:
        """Time back-to-back calls as the host makes them, its own time included."""
        ...


_WARM_UP = 3
_HEAD_START_CYCLES = 300_000
"""Some 150 us for which the GPU waits while the host puts a whole repetition in its queue."""


class CudaStopwatch:
    """Times with CUDA events on the current stream."""

    def __init__(self, group: Group) -> None:
        import torch.distributed as dist

        self._group = group
        self._stream = _cuda.Stream()
        self._token = torch.zeros(1, device=group.device)
        self._align: Call = lambda: dist.all_reduce(self._token)
        # Once outside of any capture, for NCCL to connect.
        self._align()
        torch.cuda.synchronize()

    def graph(self, call: Call, effort: Effort, after_capture: Callable[[], None]) -> list[float]:
        lead, timed = attempt(self._group, lambda: self._capture(call, effort))
        attempt(self._group, after_capture)
        events = [_pair() for _ in range(_WARM_UP + effort.repetitions)]
        for start, end in events:
            _cuda._sleep(_HEAD_START_CYCLES)
            lead.replay()
            start.record()
            timed.replay()
            end.record()
        torch.cuda.synchronize()
        return _microseconds(events, effort)

    def eager(self, call: Call, effort: Effort) -> list[float]:
        events = [_pair() for _ in range(_WARM_UP + effort.repetitions)]
        for start, end in events:
            self._group.barrier()
            self._align()
            for _ in range(effort.lead):
                call()
            start.record()
            for _ in range(effort.calls):
                call()
            end.record()
            torch.cuda.synchronize()
        return _microseconds(events, effort)

    def _capture(
        self, call: Call, effort: Effort
    ) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        def lead() -> None:
            self._align()
            for _ in range(effort.lead):
                call()

        def timed() -> None:
            for _ in range(effort.calls):
                call()

        return self._record(lead), self._record(timed)

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture work into a graph, without the garbage collection of ``torch.cuda.graph``."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # Thread-local: NCCL's watchdog thread queries events while we capture.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph


Events = tuple[torch.cuda.Event, torch.cuda.Event]

# Partly untyped, and more or less so in each release.
_cuda: Any = torch.cuda


def _pair() -> Events:
    return _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)


def _microseconds(events: list[Events], effort: Effort) -> list[float]:
    return [start.elapsed_time(end) * 1e3 / effort.calls for start, end in events[_WARM_UP:]]
