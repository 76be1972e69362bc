"""What the rows say about the choice of strategy, and against the others and the limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from .results import Row
from .session import LIMIT

AUTO, ONESHOT, TWOSHOT = "native_auto", "native_oneshot", "native_twoshot"
AUTO_TOLERANCE = 1.03

_NATIVE = (AUTO, ONESHOT, TWOSHOT)


class Choice(NamedTuple):
    """AUTO's time against the two strategies'.

    Attributes
    ----------
    hidden, tokens : int
    one_shot_us, two_shot_us, auto_us : float
    """

    hidden: int
    tokens: int
    one_shot_us: float
    two_shot_us: float
    auto_us: float

    @property
    def better(self) -> str:
        """The faster strategy."""
        return "one-shot" if self.one_shot_us <= self.two_shot_us else "two-shot"

    @property
    def ratio(self) -> float:
        """AUTO's time over the faster strategy's."""
        return self.auto_us / min(self.one_shot_us, self.two_shot_us)

    @property
    def good(self) -> bool:
        """Whether AUTO is as fast as the faster strategy, to 3%."""
        return self.ratio <= AUTO_TOLERANCE


class Standing(NamedTuple):
    """This wheel's time against the best other method's and the limit.

    Attributes
    ----------
    hidden, tokens : int
    auto_us : float
    best : str
        The best other method; empty if none was measured.
    speedup : float
        Its time over ours; NaN if none was measured.
    over_limit : float
        Our time over the limit; NaN if that was not measured.
    """

    hidden: int
    tokens: int
    auto_us: float
    best: str
    speedup: float
    over_limit: float


def choices(rows: Iterable[Row], mode: str = "graph") -> list[Choice]:
    """Return a choice for every problem with times of AUTO and both strategies."""
    return [
        Choice(hidden, tokens, times[ONESHOT], times[TWOSHOT], times[AUTO])
        for (hidden, tokens), times in _tables(rows, mode).items()
        if all(name in times for name in _NATIVE)
    ]


def standings(rows: Iterable[Row], mode: str = "graph") -> list[Standing]:
    """Return a standing for every problem with a time of AUTO."""
    found = []
    for (hidden, tokens), times in _tables(rows, mode).items():
        if AUTO not in times:
            continue
        others = {name: t for name, t in times.items() if name not in (*_NATIVE, LIMIT)}
        best = min(others, key=others.__getitem__, default="")
        speedup = others[best] / times[AUTO] if best else math.nan
        limit = times.get(LIMIT, math.nan)
        found.append(Standing(hidden, tokens, times[AUTO], best, speedup, times[AUTO] / limit))
    return found


def report(rows: list[Row]) -> str:
    """Return both as text, for graph replays."""
    lines = ["", "AUTO against the strategies (graph, median us):"]
    lines.append(f"{'hidden':>7}{'tokens':>7}{'one-shot':>10}{'two-shot':>10}{'AUTO':>8}  better")
    for c in choices(rows):
        verdict = "" if c.good else f"  AUTO loses {100 * (c.ratio - 1):.1f}%"
        lines.append(
            f"{c.hidden:>7}{c.tokens:>7}{c.one_shot_us:>10.2f}{c.two_shot_us:>10.2f}"
            f"{c.auto_us:>8.2f}  {c.better}{verdict}"
        )
    lines += ["", "Against the best other method, and the limit (graph):"]
    lines.append(f"{'hidden':>7}{'tokens':>7}{'AUTO':>9}{'faster':>8}{'x limit':>9}  best other")
    found = standings(rows)
    for s in found:
        lines.append(
            f"{s.hidden:>7}{s.tokens:>7}{s.auto_us:>9.2f}{s.speedup:>8.2f}{s.over_limit:>9.2f}"
            f"  {s.best}"
        )
    speedups = [s.speedup for s in found if s.best]
    if speedups:
        lines.append(
            f"geometric mean {_geometric_mean(speedups):.2f}x, smallest {min(speedups):.2f}x"
        )
    return "\n".join(lines)


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _tables(rows: Iterable[Row], mode: str) -> dict[tuple[int, int], dict[str, float]]:
    tables: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if row.mode == mode:
            tables.setdefault((row.hidden, row.tokens), {})[row.method] = row.median_us
    return dict(sorted(tables.items()))
