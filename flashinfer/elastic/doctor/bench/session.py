"""One rank's part of a run: measure every method on every problem, and report on the way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from .figures import Figures, slowest, summarise
from .group import Deadline, Group, UnavailableError, attempt
from .limit import Limit, pushes
from .methods import NAMES, Method, Runnable
from .problem import TOLERANCE, Data, Expected, Problem, deviation, expect, make_data
from .results import Row, Skip
from .stopwatch import Call, Effort, Stopwatch

LIMIT = "limit"
MODES = ("graph", "eager")
OUT_OF_TIME = "the time limit was reached"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes
    ----------
    hidden, tokens : tuple of int
        All combinations.
    methods : tuple of str
        Of ``methods.NAMES`` and ``limit``.
    modes : tuple of str
        Of ``MODES``.
    quick : bool
        Fewer repetitions.
    """

    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    methods: tuple[str, ...] = (*NAMES, LIMIT)
    modes: tuple[str, ...] = MODES
    quick: bool = False

    @property
    def largest(self) -> Problem:
        """A problem that bounds all others."""
        return Problem(max(self.hidden), max(self.tokens))

    @property
    def problems(self) -> list[Problem]:
        """All problems, in the order in which they are measured."""
        return [Problem(hidden, tokens) for hidden in self.hidden for tokens in self.tokens]


class Reporter(Protocol):
    """Receives what has been found; called on every rank with the same things."""

    def row(self, row: Row) -> None: ...
    def skip(self, skip: Skip) -> None: ...
    def component(self, component: dict[str, Any]) -> None: ...
    def note(self, name: str, value: object) -> None: ...


class Session:
    """Measures a plan.

    Parameters
    ----------
    group : Group
    stopwatch : Stopwatch
    reporter : Reporter
    plan : Plan
    deadline : Deadline
        After which nothing more is begun; what is left is reported as skipped.
    """

    def __init__(
        self,
        group: Group,
        stopwatch: Stopwatch,
        reporter: Reporter,
        plan: Plan,
        deadline: Deadline,
    ) -> None:
        self._group = group
        self._stopwatch = stopwatch
        self._reporter = reporter
        self._plan = plan
        self._deadline = deadline

    def open(self, name: str, make: Callable[[], Method]) -> Method | None:
        """Return a method, or None where it is not available, which is reported."""
        try:
            return attempt(self._group, make)
        except UnavailableError as error:
            self._give_up(name, str(error))
            return None

    def measure_methods(self, methods: Mapping[str, Method]) -> None:
        """Measure methods on all problems of the plan."""
        for problem in self._plan.problems:
            if self._deadline.passed():
                for name in methods:
                    self._give_up(name, OUT_OF_TIME, problem)
                continue
            data = make_data(problem, self._group.rank, self._group.device)
            expected = expect(problem, self._group.ranks, self._group.device)
            for name, method in methods.items():
                if self._deadline.passed():
                    self._give_up(name, OUT_OF_TIME, problem)
                    continue
                try:
                    self._measure(name, method, problem, data, expected)
                except UnavailableError as error:
                    self._give_up(name, str(error), problem)

    def measure_limit(self, make: Callable[[], Limit]) -> None:
        """Measure the limit of all problems of the plan."""
        try:
            limit = attempt(self._group, make)
            flag = attempt(self._group, limit.flag_us)
        except UnavailableError as error:
            self._give_up(LIMIT, str(error))
            return
        self._reporter.note("flag_one_way_us", round(flag, 3))
        for name, call in limit.launch_calls().items():
            effort = Effort(calls=200, lead=4, repetitions=31)
            figures = summarise(self._time("graph", call, effort))
            self._component("launch interval", name, None, figures)
        for problem in self._plan.problems:
            if self._deadline.passed():
                self._give_up(LIMIT, OUT_OF_TIME, problem)
                continue
            try:
                self._measure_limit(limit, flag, problem)
            except UnavailableError as error:
                self._give_up(LIMIT, str(error), problem)

    def _measure_limit(self, limit: Limit, flag: float, problem: Problem) -> None:
        effort = Effort.for_problem(problem, quick=self._plan.quick)
        totals = []
        for push in pushes(problem, self._group.ranks):
            variants = []
            for name, call in limit.push_calls(push).items():
                attempt(self._group, functools.partial(limit.check, push, call))
                figures = summarise(self._time("graph", call, effort))
                self._component("push", name, problem, figures)
                variants.append(figures)
            totals.append(min(variants).plus(push.hops * flag))
        self._row(LIMIT, problem, "graph", min(totals))

    def _measure(
        self, name: str, method: Method, problem: Problem, data: Data, expected: Expected
    ) -> None:
        group = self._group
        runnable = attempt(group, lambda: method.prepare(problem, data))
        for call in runnable.calls.values():
            self._verify(runnable, call, expected)
        effort = Effort.for_problem(problem, quick=self._plan.quick)
        for mode in self._plan.modes:
            variants = []
            for variant, call in runnable.calls.items():
                # Values that calls in place have summed up must not grow without bound.
                attempt(group, runnable.reset)
                figures = summarise(self._time(mode, call, effort, runnable.after_capture))
                variants.append(figures)
                if len(runnable.calls) > 1:
                    self._component(name, f"{mode}, {variant}", problem, figures)
            self._row(name, problem, mode, min(variants))

    def _verify(self, runnable: Runnable, call: Call, expected: Expected) -> None:
        """Make one call on poisoned outputs and compare its results with float64."""

        def run() -> None:
            runnable.reset()
            self._synchronize()

        def compare() -> None:
            self._synchronize()
            for what in ("norm", "residual"):
                found = deviation(getattr(runnable, what), getattr(expected, what))
                # NaN is not below anything.
                if not found < TOLERANCE:
                    raise ArithmeticError(f"wrong {what}: an element is off by {found:.3g} of it")

        # A rank that still poisons must not receive what a faster one sends.
        attempt(self._group, run)
        attempt(self._group, call)
        attempt(self._group, compare)

    def _time(
        self,
        mode: str,
        call: Call,
        effort: Effort,
        after_capture: Callable[[], None] = lambda: None,
    ) -> list[float]:
        if mode == "graph":
            times = self._stopwatch.graph(call, effort, after_capture)
        else:
            times = self._stopwatch.eager(call, effort)
        return slowest(self._group.gather(times))

    def _synchronize(self) -> None:
        if self._group.device.type == "cuda":
            torch.cuda.synchronize()

    def _row(self, name: str, problem: Problem, mode: str, figures: Figures) -> None:
        ranks = self._group.ranks
        self._reporter.row(Row.of(ranks, problem.hidden, problem.tokens, mode, name, figures))

    def _component(
        self, name: str, variant: str, problem: Problem | None, figures: Figures
    ) -> None:
        where = dataclasses.asdict(problem) if problem else {}
        rounded = {field: round(value, 3) for field, value in figures._asdict().items()}
        self._reporter.component({"name": name, "variant": variant, **where, **rounded})

    def _give_up(self, name: str, reason: str, problem: Problem | None = None) -> None:
        hidden, tokens = (problem.hidden, problem.tokens) if problem else (None, None)
        self._reporter.skip(Skip(name, reason, hidden, tokens))
