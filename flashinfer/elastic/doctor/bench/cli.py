"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import judge, launch, plot
from .methods import NAMES
from .results import Results, Row, Skip, read_rows
from .session import LIMIT, MODES, Plan

HIDDEN = (7168, 4096)
TOKENS = tuple(2**exponent for exponent in range(13))
QUICK_TOKENS = (1, 8, 64, 512, 4096)
RESULTS = Path("benchmarks", "results")

Progress = contextlib.AbstractContextManager[Callable[[Row | Skip], None]]

DESCRIPTION = """\
Time all-reduce + residual + RMSNorm in bf16 on this machine's GPUs: this wheel's kernels, the other
ways to compute it, and the limit of the hardware. Writes a JSON file and a plot.
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; exits where they are wrong."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    positive = _positive
    parser.add_argument("--hidden", type=positive, nargs="+", default=HIDDEN, metavar="H")
    parser.add_argument("--tokens", type=positive, nargs="+", metavar="N")
    methods = (*NAMES, LIMIT)
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, metavar="METHOD")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--ranks", type=positive, help="GPUs to use; all by default")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>x<ranks>.json")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--host-cost", action="store_true", help="measure only the host's time")
    parser.add_argument(
        "--time-limit", type=positive, default=1800, metavar="S", help="seconds, all in all"
    )
    parser.add_argument(
        "--from", type=Path, dest="source", metavar="FILE", help="judge and draw a file, no more"
    )
    options = parser.parse_args(arguments)
    if options.out is not None and options.out.is_dir():
        parser.error(f"argument --out: must name a file, got the folder {options.out}")
    if options.tokens is None:
        options.tokens = QUICK_TOKENS if options.quick else TOKENS
    return options


def show(found: Row | Skip) -> None:
    """Print a row or a skip."""
    if isinstance(found, Row):
        print(
            f"{found.hidden:>6} {found.tokens:>5} {found.mode:<6} {found.method:<17}"
            f"{found.median_us:>9.2f} us  ({found.p10_us:.2f} - {found.p90_us:.2f})",
            flush=True,
        )
    else:
        where = f"{found.hidden} x {found.tokens}" if found.hidden else "all problems"
        print(f"skipped {found.method}, {where}: {found.reason}", flush=True)


def main(
    arguments: Sequence[str] | None = None,
    program: str = "scripts/bench.py",
    progress: Progress | None = None,
) -> int:
    """Do what the command line asks for; return the exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of this process.
    program : str
        What to call it in the result file.
    progress : context manager, optional
        Entered while the ranks measure; gives what is called with rows and skips as they come. By
        default they are printed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.source:
        return _show(options.source)
    ranks = options.ranks or _gpus()
    if ranks < 2:
        print(f"It takes two GPUs or more; found {ranks}.", file=sys.stderr)
        return 1
    command = _command(arguments, program)
    with progress or contextlib.nullcontext(show) as found:
        results, name, failures = launch.run(
            _job(options, ranks), launch.work, command, progress=found
        )
    for failure in failures:
        print(f"\nFAILED: {failure}", file=sys.stderr)
    if not name:
        return 1
    file = options.out or RESULTS / f"{name}.json"
    results.write(file)
    print(f"\nwritten: {file}")
    _summary(results, file)
    return 1 if failures else 0


def _job(options: argparse.Namespace, ranks: int) -> launch.Job:
    plan = None
    if not options.host_cost:
        plan = Plan(
            tuple(options.hidden),
            tuple(options.tokens),
            tuple(options.methods),
            tuple(options.modes),
            options.quick,
        )
    host_cost = tuple(options.hidden[:1]) if options.host_cost or not options.quick else ()
    return launch.Job(plan, ranks, options.time_limit, host_cost)


def _command(arguments: Sequence[str], program: str) -> str:
    """Return the command without where it wrote, which says nothing about the numbers."""
    kept = list(arguments)
    while "--out" in kept:
        place = kept.index("--out")
        del kept[place : place + 2]
    return " ".join([program, *map(shlex.quote, kept)])


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _summary(results: Results, file: Path) -> None:
    if results.rows:
        print(judge.report(results.rows))
        _draw(results.rows, results.machine, file)
    if results.host_cost:
        print("\nHost time of an eager call of one row, us:")
        for entry in results.host_cost:
            print(f"  {entry['backend']:<8}{entry['median_us']:>8.2f}  {entry['layer']}")


def _show(file: Path) -> int:
    rows = read_rows(file)
    print(judge.report(rows))
    _draw(rows, str(json.loads(file.read_text())["machine"]), file)
    return 0


def _draw(rows: list[Row], machine: str, file: Path) -> None:
    picture = file.with_suffix(".svg")
    try:
        plot.draw(rows, f"all-reduce + residual + RMSNorm, {machine}", picture)
    except (ImportError, ValueError) as error:
        print(f"no plot: {error}")
    else:
        print(f"written: {picture}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
