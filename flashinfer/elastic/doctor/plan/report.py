"""The plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from flashinfer.elastic import __version__
from flashinfer.elastic.allreduce.strategy import Strategy

from ..look import mebibytes, table
from . import chart
from .callers import Ask, Problem
from .outcomes import Case, Outcome, Range, Served, samples

STRATEGIES = {Strategy.ONESHOT: "one-shot", Strategy.TWOSHOT: "two-shot"}


def show(
    console: Console,
    problem: Problem,
    arch: int,
    max_tokens: int,
    dtype: str,
    cases: Sequence[Case],
) -> None:
    """Print all of the plan."""
    console.print(
        f"Rows of {problem.hidden} {dtype} elements, {problem.ranks} GPUs (SM{arch}), "
        f"at most {max_tokens} tokens a pass.\n"
        "Upstream: FlashInfer 0.6.x, 3 buffers. "
        f"Ours: flashinfer {__version__}, native engine, 2 buffers.\n"
    )
    console.print(_workspaces(cases), "")
    console.print(_calls(cases))
    for note in _notes(cases):
        console.print(note)
    console.print("")
    for line in chart.draw(chart_of(problem, cases), console):
        console.print(line)


def chart_of(problem: Problem, cases: Sequence[Case]) -> chart.Chart:
    """Return the plot of a plan: of the first caller for whom upstream raises, or of the first."""
    used = [one for one in cases if one.ranges]
    shown = next((one for one in used if one.raises_from is not None), used[0])
    return chart.make(problem, shown, samples(shown))


def _workspaces(cases: Sequence[Case]) -> Table:
    shown = table(
        "What they report, and what is allocated for it",
        "who",
        ">reports tokens",
        ">upstream's buffer",
        ">ours",
        ">a GPU: upstream",
        ">ours",
    )
    for one in cases:
        if not one.ranges:
            continue
        shown.add_row(
            one.caller.name,
            f"{one.caller.reports:,}",
            f"{one.upstream_buffer:,}",
            f"{one.our_buffer:,}",
            mebibytes(one.upstream_memory),
            mebibytes(one.our_memory),
        )
    return shown


def _calls(cases: Sequence[Case]) -> Table:
    shown = table(
        "What they ask, and what becomes of it",
        "who",
        ">tokens",
        "asks",
        ">bytes, at most",
        "upstream",
        "ours",
    )
    for one in cases:
        for number, part in enumerate(one.ranges):
            result = part.outcome
            last = number == len(one.ranges) - 1
            shown.add_row(
                one.caller.name if number == 0 else "",
                _tokens(part),
                result.ask.value,
                f"{result.upstream_bytes:,}",
                _theirs(result),
                _ours(result.ours),
                end_section=last,
            )
    return shown


def _tokens(part: Range) -> str:
    return f"{part.first:,}" if part.first == part.last else f"{part.first:,}-{part.last:,}"


def _theirs(result: Outcome) -> RenderableType:
    if result.raises:
        return Text("ValueError", style="bold red")
    return STRATEGIES[result.upstream_strategy]


def _ours(served: Served) -> RenderableType:
    text = STRATEGIES[served.strategy]
    if served.launches > 1:
        text += f", {served.launches} chunks"
    return Text(text, style="green")


def _notes(cases: Sequence[Case]) -> Iterator[Text]:
    """Give what the tables do not say."""
    short = [one for one in cases if one.raises_from is not None]
    for one in short:
        part = next(part for part in one.ranges if part.outcome.raises)
        yield Text(
            f"{one.caller.name}: from {part.first:,} tokens on, upstream raises. At {part.last:,} "
            f"it needs {part.outcome.upstream_bytes:,} bytes of a buffer of "
            f"{one.upstream_buffer:,}. Ours serves the call.",
        )
    unused = [one.caller.name for one in cases if not one.ranges]
    if unused:
        yield Text(f"Not used by this group: {'; '.join(unused)}.", style="dim")
    if not short:
        yield Text("Upstream raises for none of these calls.")
    if any(Ask.ONESHOT in {part.outcome.ask for part in one.ranges} for one in cases):
        yield Text(
            "Forced one-shot reaches upstream's check from FlashInfer 0.6.13 on; 0.6.12 drops "
            "use_oneshot on this backend. A caller that also passes force_oneshot_support gets a "
            "buffer for one-shot, and no error.",
            style="dim",
        )
