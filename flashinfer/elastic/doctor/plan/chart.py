"""The plot of a plan: bytes of one-shot and two-shot against tokens, and the buffers' sizes.

A :class:`Chart` is what is shown, in bytes and tokens; :func:`draw` is how a terminal shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from flashinfer.elastic.allreduce import sizing

from .callers import Problem
from .outcomes import Case


class Point(NamedTuple):
    """Bytes that each strategy takes for a number of tokens; ``raises``: upstream does."""

    tokens: int
    oneshot: int
    twoshot: int
    raises: bool


class Chart(NamedTuple):
    """What is shown.

    Attributes
    ----------
    title : str
    points : tuple of Point
        By tokens.
    upstream_buffer, our_buffer : int
        Bytes of each buffer.
    """

    title: str
    points: tuple[Point, ...]
    upstream_buffer: int
    our_buffer: int

    @property
    def smallest(self) -> int:
        """The least number of bytes that is shown."""
        return min(min(point.oneshot, point.twoshot) for point in self.points)

    @property
    def largest(self) -> int:
        """The most bytes that are shown."""
        most = max(max(point.oneshot, point.twoshot) for point in self.points)
        return max(most, self.upstream_buffer, self.our_buffer)


def make(problem: Problem, case: Case, tokens: Sequence[int]) -> Chart:
    """Return the plot of a caller's workspace at some numbers of tokens."""
    shape = (problem.hidden, problem.element_bytes, problem.ranks)

    def raises(count: int) -> bool:
        return any(part.first <= count <= part.last and part.outcome.raises for part in case.ranges)

    points = tuple(
        Point(
            count,
            sizing.oneshot_bytes(count, *shape),
            sizing.twoshot_bytes(count, *shape),
            raises(count),
        )
        for count in tokens
    )
    title = f"{case.caller.name}: bytes of a buffer (logarithmic), by tokens"
    return Chart(title, points, case.upstream_buffer, case.our_buffer)


_GLYPHS = ("█", "▒", "│", "┃")
_PLAIN_GLYPHS = ("#", "=", "|", "!")


def draw(chart: Chart, console: Console) -> Iterator[Text]:
    """Give the lines of the plot, within the width of a console."""
    solid, shaded, theirs, ours = _PLAIN_GLYPHS if console.options.ascii_only else _GLYPHS
    label = max(len(f"{point.tokens:,}") for point in chart.points)
    number = max(len(f"{chart.largest:,}"), len("bytes"))
    width = max(console.width - label - number - len("  one  "), 10)
    marks = ((chart.upstream_buffer, theirs, "yellow"), (chart.our_buffer, ours, "green"))
    columns = {_column(chart, size, width): (glyph, style) for size, glyph, style in marks}

    def bar(size: int, glyph: str, style: str) -> Text:
        end = _column(chart, size, width)
        line = Text()
        for column in range(width):
            if column in columns:
                line.append(*columns[column])
            else:
                line.append(glyph if column <= end else " ", style)
        return line

    yield Text(chart.title, style="bold")
    for point in chart.points:
        style = "red" if point.raises else "cyan"
        for count, name, size, glyph in (
            (f"{point.tokens:,}", "one", point.oneshot, solid),
            ("", "two", point.twoshot, shaded),
        ):
            yield Text.assemble(
                f"{count:>{label}} {name} ", bar(size, glyph, style), f" {size:>{number},}"
            )
    yield Text(
        f"{solid} one-shot   {shaded} two-shot   {theirs} upstream's buffer, "
        f"{chart.upstream_buffer:,}   {ours} ours, {chart.our_buffer:,}"
    )


def _column(chart: Chart, size: int, width: int) -> int:
    """Return the last column of a bar. The shortest bar has an eighth of the width."""
    least, most = math.log(chart.smallest), math.log(chart.largest)
    share = (math.log(max(size, chart.smallest)) - least) / (most - least) if most > least else 1.0
    return round((width - 1) * (1 + 7 * share) / 8)
