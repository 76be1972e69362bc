"""From times of repetitions on all ranks to the three numbers of a row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Figures(NamedTuple):
    """Microseconds a call: median, and the 10th and 90th percentile over the repetitions."""

    median_us: float
    p10_us: float
    p90_us: float

    def plus(self, microseconds: float) -> Figures:
        """Return the figures of the same calls, each longer by a constant."""
        return Figures(*(value + microseconds for value in self))


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Return the slowest rank's time of each repetition.

    Parameters
    ----------
    times : sequence of sequence of float
        By rank, then by repetition; equally many for every rank.
    """
    return [max(repetition) for repetition in zip(*times, strict=True)]


def summarise(times: Sequence[float]) -> Figures:
    """Return the figures of repetitions; percentiles are interpolated linearly.

    Raises
    ------
    ValueError
        If there are no times.
    """
    if not times:
        raise ValueError("there is no time to summarise")
    return Figures(statistics.median(times), _percentile(times, 0.1), _percentile(times, 0.9))


def _percentile(times: Sequence[float], fraction: float) -> float:
    ordered = sorted(times)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
