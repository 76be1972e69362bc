"""The plot of a plan as an SVG file, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

from .chart import Chart

_WIDTH, _HEIGHT = 820, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 190, 48, 56
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 15px; font-weight: 600 }
  .grid { stroke: #d0d7de }
  .series { fill: none; stroke-width: 2.5 }
  .buffer { stroke-width: 2; stroke-dasharray: 7 4 }
  .oneshot { stroke: #0969da } .twoshot { stroke: #8250df }
  .upstream { stroke: #cf222e } .ours { stroke: #1a7f37 }
  .raises { fill: #cf222e; fill-opacity: 0.1 }
"""


def draw(chart: Chart) -> str:
    """Return the file's text."""
    return "\n".join(_Drawing(chart).lines()) + "\n"


class _Drawing:
    """Where things are on the page, in pixels."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        tokens = [point.tokens for point in chart.points]
        self._tokens = _span(tokens)
        self._bytes = _span([chart.smallest, chart.largest])

    def lines(self) -> Iterator[str]:
        chart = self._chart
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'width="{_WIDTH}" height="{_HEIGHT}" role="img">'
        )
        yield f"<title>{escape(chart.title)}</title>"
        yield f"<style>{_STYLE}</style>"
        yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
        yield _text(_LEFT, 26, chart.title, "start", "title")
        yield from self._refused()
        yield from self._axes()
        last = chart.points[-1]
        yield self._series("oneshot", [(p.tokens, p.oneshot) for p in chart.points])
        yield self._series("twoshot", [(p.tokens, p.twoshot) for p in chart.points])
        yield from self._buffer("upstream", chart.upstream_buffer)
        yield from self._buffer("ours", chart.our_buffer)
        yield from self._labels(
            {
                "one-shot": last.oneshot,
                "two-shot": last.twoshot,
                f"upstream {chart.upstream_buffer:,}": chart.upstream_buffer,
                f"ours {chart.our_buffer:,}": chart.our_buffer,
            }
        )
        yield "</svg>"

    def _x(self, tokens: float) -> float:
        low, high = self._tokens
        return _LEFT + (math.log(tokens) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, size: float) -> float:
        low, high = self._bytes
        share = (math.log(size) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def _axes(self) -> Iterator[str]:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        for tokens in _powers(self._tokens, most=9):
            x = self._x(tokens)
            yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>'
            yield _text(x, bottom + 18, f"{tokens:,}", "middle")
        for size in _powers(self._bytes, most=8):
            y = self._y(size)
            yield f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
            yield _text(_LEFT - 8, y + 4, _short(size), "end")
        yield _text((_LEFT + right) / 2, bottom + 40, "tokens", "middle")

    def _refused(self) -> Iterator[str]:
        """Shade where upstream raises, from the first such point to the last."""
        tokens = [point.tokens for point in self._chart.points if point.raises]
        if not tokens:
            return
        left, right = self._x(min(tokens)), self._x(max(tokens))
        yield (
            f'<rect class="raises" x="{left:.1f}" y="{_TOP}" width="{max(right - left, 2):.1f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}"/>'
        )
        yield _text((left + right) / 2, _TOP + 14, "upstream raises", "middle")

    def _series(self, name: str, values: Iterable[tuple[int, int]]) -> str:
        places = " ".join(f"{self._x(tokens):.1f},{self._y(size):.1f}" for tokens, size in values)
        return f'<polyline class="series {name}" points="{places}"/>'

    def _buffer(self, name: str, size: int) -> Iterator[str]:
        y = self._y(size)
        yield (
            f'<line class="buffer {name}" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" '
            f'y2="{y:.1f}"/>'
        )

    def _labels(self, sizes: dict[str, int]) -> Iterator[str]:
        """Write what each line is at its right end, from the top down, and none on another."""
        free = float(_TOP)
        for name, size in sorted(sizes.items(), key=lambda entry: -entry[1]):
            y = max(self._y(size) + 4, free)
            yield _text(_WIDTH - _RIGHT + 8, y, name, "start")
            free = y + 16


def _text(x: float, y: float, text: str, anchor: str, style: str = "label") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{style}" {place}>{escape(text)}</text>'


def _span(values: Iterable[int]) -> tuple[float, float]:
    """Return the logarithms of the least and the largest value, apart in any case."""
    values = list(values)
    low, high = math.log(min(values)), math.log(max(values))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _powers(span: tuple[float, float], *, most: int) -> list[int]:
    """Return powers of two within a span, evenly spaced, ``most`` at most."""
    first = math.ceil(span[0] / math.log(2) - 1e-9)
    last = math.floor(span[1] / math.log(2) + 1e-9)
    step = max(-(-(last - first + 1) // most), 1)
    return [1 << power for power in range(first, last + 1, step)]


def _short(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
