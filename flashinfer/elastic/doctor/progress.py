"""The benchmark with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .bench import cli, launch
from .bench.results import Row, Skip

PROGRAM = "flashinfer-doctor bench"


def bench(arguments: Sequence[str]) -> int:
    """Run the benchmark; return its exit code.

    What it finds scrolls by above the bar. Where the output is no terminal there is no bar.
    """
    options = cli.parse(arguments)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )
    if options.source or options.host_cost or not bar.console.is_terminal:
        return cli.main(arguments, PROGRAM)
    problems, modes = len(options.hidden) * len(options.tokens), len(options.modes)
    task = bar.add_task("measured", total=problems * modes * len(options.methods))
    run: Callable[..., Any] = launch.run

    def with_bar(job: Any, work: Any, command: str, show: Callable[[Row | Skip], None]) -> Any:
        def found(result: Row | Skip) -> None:
            show(result)
            bar.advance(task, _share(result, problems, modes))

        with bar:
            return run(job, work, command, found)

    with mock.patch.object(launch, "run", with_bar):
        return cli.main(arguments, PROGRAM)


def _share(result: Row | Skip, problems: int, modes: int) -> int:
    """Return how many measurements a result stands for."""
    if isinstance(result, Row):
        return 1
    return modes if result.tokens is not None else problems * modes
