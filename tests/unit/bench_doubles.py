"""Stand-ins for the GPUs of a benchmark run: one process that plays a group of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashinfer.elastic.doctor.bench.problem import EPSILON, Problem, make_data
from flashinfer.elastic.doctor.bench.results import Row, Skip
from flashinfer.elastic.doctor.bench.stopwatch import Effort

CPU = torch.device("cpu")
RANKS = 2


class Pair:
    """Rank 0 of two; the other one always says the same, unless it is told otherwise."""

    rank = 0
    ranks = RANKS
    device = CPU

    def __init__(self, other: Callable[[Any], Any] = lambda value: value) -> None:
        self._other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, self._other(value)]

    def barrier(self) -> None:
        pass


class Times:
    """A stopwatch that makes every call once and hands out the times it was given, by call."""

    def __init__(self, times: Callable[[Any], list[float]]) -> None:
        self._times = times
        self.efforts: list[Effort] = []

    def graph(self, call: Any, effort: Effort, after_capture: Callable[[], None]) -> list[float]:
        after_capture()
        return self.eager(call, effort)

    def eager(self, call: Any, effort: Effort) -> list[float]:
        self.efforts.append(effort)
        call()
        return self._times(call)


class Notebook:
    """Keeps what a session reports."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.skips: list[Skip] = []
        self.components: list[dict[str, Any]] = []
        self.notes: dict[str, object] = {}

    def row(self, row: Row) -> None:
        self.rows.append(row)

    def skip(self, skip: Skip) -> None:
        self.skips.append(skip)

    def component(self, component: dict[str, Any]) -> None:
        self.components.append(component)

    def note(self, name: str, value: object) -> None:
        self.notes[name] = value


def peer_contribution(problem: Problem) -> torch.Tensor:
    """What rank 1 contributes."""
    return make_data(problem, 1, CPU).contribution


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, epsilon: float = EPSILON
) -> None:
    """Add and normalise in place, as the kernels do."""
    total = x.float() + residual.float()
    residual.copy_(total)
    scale = torch.rsqrt(total.square().mean(dim=1, keepdim=True) + epsilon)
    x.copy_(total * scale * gamma.float())
