"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import judge, launch, plot
from .methods import NAMES
from .results import Results, Row, Skip, read
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


PROGRAM = "scripts/bench.py"


def parse(arguments: Sequence[str], program: str = PROGRAM) -> argparse.Namespace:
    """Return the options; exits where they are wrong.

    Parameters
    ----------
    arguments : sequence of str
        Of the command line.
    program : str
        What to call it in its usage.
    """
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    positive = _positive
    methods = (*NAMES, LIMIT)
    parser.add_argument(
        "--hidden",
        type=positive,
        nargs="+",
        default=HIDDEN,
        metavar="H",
        help="elements of a row; default: 7168 4096",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        metavar="N",
        help="rows; default: the powers of two up to 4096",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=methods,
        default=methods,
        metavar="METHOD",
        help=f"default: all of {', '.join(methods)}",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="how to launch; default: both"
    )
    parser.add_argument("--ranks", type=positive, metavar="P", help="GPUs to use; default: all")
    parser.add_argument(
        "--out",
        type=_new_file,
        metavar="FILE",
        help="JSON; default: benchmarks/results/<gpu>x<ranks>.json",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--host-cost", action="store_true", help="measure only the host's time")
    parser.add_argument(
        "--time-limit",
        type=positive,
        default=1800,
        metavar="S",
        help="seconds, all in all; default: 1800",
    )
    parser.add_argument(
        "--from",
        type=_recorded,
        dest="recorded",
        metavar="FILE",
        help="judge and draw a file that was written before, no more",
    )
    options = parser.parse_args(arguments)
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
    program: str = PROGRAM,
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
    options = parse(arguments, program)
    if options.recorded is not None:
        return _show(*options.recorded)
    gpus = _gpus()
    ranks = options.ranks or gpus
    if not 2 <= ranks <= gpus:
        print(
            f"It takes two GPUs or more, and one for each of {ranks} rank(s); found {gpus}.",
            file=sys.stderr,
        )
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


def _show(file: Path, machine: str, rows: list[Row]) -> int:
    print(judge.report(rows))
    _draw(rows, machine, file)
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
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def _new_file(text: str) -> Path:
    """Return a path that can be written, as far as that can be told beforehand."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"must name a file, got the folder {file}")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {folder}, where {file} would be")
    return file


def _recorded(text: str) -> tuple[Path, str, list[Row]]:
    """Return a result file, the machine it was made on, and its rows."""
    file = Path(text)
    try:
        return file, *read(file)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{file} is not a result file: {type(error).__name__}: {error}"
        ) from None
