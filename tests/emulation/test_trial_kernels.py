"""The trial of multicast that a workspace makes, on the emulated kernels.

Each rank is a thread, as it is a process with a GPU of its own; when all have launched, the
emulated machine runs the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from rank_threads import run_threads

torch = pytest.importorskip("torch")

from flashinfer.elastic.allreduce import trial  # noqa: E402 (needs torch)
from flashinfer.elastic.allreduce.agreement import Agreement  # noqa: E402
from flashinfer.elastic.allreduce.size_classes import SizeClasses  # noqa: E402
from flashinfer.elastic.allreduce.strategy import Strategy  # noqa: E402

BUFFER = 2**15


class Machine:
    """A group of threads and the emulated machine that runs their calls."""

    def __init__(self, module: ModuleType, ranks: int) -> None:
        self.ranks = ranks
        self.group = module.Group(ranks, BUFFER, gives_up=True, timeout_s=0.5)
        self._module = module
        self._gathered: list[Any] = [None] * ranks
        self._calls: list[Any] = [None] * ranks
        self._talk = threading.Barrier(ranks)
        self._launch = threading.Barrier(ranks, action=self._run)

    def allgather(self, rank: int, data: bytes) -> list[Any]:
        self._gathered[rank] = data
        self._talk.wait(60)
        gathered = list(self._gathered)
        self._talk.wait(60)
        return gathered

    def launch(self, rank: int, call: Any, strategy: Strategy, multicast: bool) -> None:
        self._calls[rank] = (call, strategy, multicast)
        self._launch.wait(60)

    def _run(self) -> None:
        calls = [call for call, _, _ in self._calls]
        ((strategy, multicast),) = {(strategy, way) for _, strategy, way in self._calls}
        name = str(calls[0].input.dtype).removeprefix("torch.").upper()
        one = self._module.Call(
            getattr(self._module.Strategy, strategy.name),
            getattr(self._module.ElementType, name),
            input=[_array(call.input) for call in calls],
            output=[_array(call.output) for call in calls],
            multicast=multicast,
        )
        self.group.run([one])

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        return run_threads(self.ranks, work)


def _array(rows: Any) -> Any:
    integers = {2: torch.int16, 4: torch.int32}[rows.dtype.itemsize]
    return rows.view(integers).numpy()


class Engine:
    """One rank's."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self._machine = machine
        self._rank = rank

    def launch(self, call: Any, first: int, count: int, strategy: Strategy) -> None:
        self._machine.launch(self._rank, call, strategy, multicast=False)

    def launch_trial(self, call: Any, first: int, count: int, strategy: Strategy) -> None:
        self._machine.launch(self._rank, call, strategy, multicast=True)

    def expired_waits(self) -> int:
        return int(self._machine.group.expired(self._rank))


class Backend:
    """One rank's communicator."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self._machine = machine
        self._rank = rank

    def allgather(self, data: Any, /) -> list[Any]:
        return self._machine.allgather(self._rank, data)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches have finished when they return, and take multicast half the time."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def stopwatch(launch: Any, _: int) -> Callable[[], float]:
        launch()
        return lambda: {"launch": 2.0, "launch_trial": 1.0}[launch.func.__name__]

    monkeypatch.setattr(trial, "stopwatch", stopwatch)


def try_it(machine: Machine) -> list[Any]:
    def one(rank: int) -> SizeClasses:
        agreement = Agreement(Backend(machine, rank), rank, machine.ranks)
        return trial.run(agreement, Engine(machine, rank), torch.device("cpu"), BUFFER)

    return machine.run(one)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_kernels_pass_their_trial(machine: ModuleType, ranks: int) -> None:
    results = try_it(Machine(machine, ranks))
    assert not any(isinstance(result, BaseException) for result in results), results
    assert len(set(results)) == 1
    # What fits the buffer was timed, and chosen.
    strategies = {strategy for strategy, _ in trial.timed_classes(BUFFER, ranks)}
    assert [bool(bits) for bits in results[0]] == [each in strategies for each in Strategy]
