"""The benchmark with a progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .bench import cli
from .bench.results import Row, Skip

PROGRAM = "flashinfer-doctor bench"


def bench(arguments: Sequence[str]) -> int:
    """Run the benchmark; return its exit code.

    What it finds scrolls by above the bar. Where the output is no terminal there is no bar.
    """
    options = cli.parse(arguments, PROGRAM)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )
    # The host's cost alone has no rows to count.
    if options.host_cost or options.recorded or not bar.console.is_terminal:
        return cli.main(arguments, PROGRAM)
    problems, modes = len(options.hidden) * len(options.tokens), len(options.modes)
    return cli.main(
        arguments, PROGRAM, _counting(bar, problems, modes, methods=len(options.methods))
    )


@contextlib.contextmanager
def _counting(
    bar: Progress, problems: int, modes: int, methods: int
) -> Iterator[Callable[[Row | Skip], None]]:
    """Show a bar; give what prints a row or a skip above it and counts it."""
    task = bar.add_task("measured", total=problems * modes * methods)

    def found(result: Row | Skip) -> None:
        cli.show(result)
        bar.advance(task, _share(result, problems, modes))

    with bar:
        yield found


def _share(result: Row | Skip, problems: int, modes: int) -> int:
    """Return how many measurements a result stands for."""
    if isinstance(result, Row):
        return 1
    return modes if result.tokens is not None else problems * modes
