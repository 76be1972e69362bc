"""The ``flashinfer-doctor`` command.

Exit codes: 0 all is well, 1 there is a problem, 2 the command was not understood.

Nothing is imported before a command needs it, and torch not at all: ``reproduce`` and ``bench`` run
in processes of their own, where ``import flashinfer`` is upstream's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from flashinfer.elastic import __version__

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MOST_RANKS = 64

_ranks = click.IntRange(2, _MOST_RANKS)
_count = click.IntRange(1, 2**24)
_dtype = click.option(
    "--dtype",
    type=click.Choice(list(_ELEMENT_BYTES)),
    default="bfloat16",
    show_default=True,
    help="Of the rows.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="flashinfer-doctor")
def main() -> None:
    """Say whether FlashInfer's elastic workspaces are at work here, and what they do."""


@main.command()
@click.option("--tp", type=_ranks, help="GPUs of a group whose workspace to size.")
@click.option("--hidden", type=_count, help="Elements of its rows.")
@click.option("--max-tokens", type=_count, help="Rows that its caller reports as the maximum.")
@_dtype
@click.option("--json", "as_json", is_flag=True, help="Print JSON; see --schema.")
@click.option(
    "--schema", "print_schema", is_flag=True, help="Print the JSON schema, check nothing."
)
def check(
    tp: int | None,
    hidden: int | None,
    max_tokens: int | None,
    dtype: str,
    as_json: bool,
    print_schema: bool,
) -> None:
    """Check this installation and this machine.

    Imports FlashInfer in a process of its own and looks at the GPUs without using them. What
    cannot be found out here, without a GPU for instance, is said and is no problem.

    Exits with 1 if there is a problem.
    """
    from .check import document, environment, findings, installation, machine, report
    from .check.facts import Facts, Group

    if print_schema:
        import json

        click.echo(json.dumps(document.schema(), indent=2))
        return
    if None in (tp, hidden, max_tokens) and (tp, hidden, max_tokens) != (None,) * 3:
        raise click.UsageError("--tp, --hidden and --max-tokens go together.")
    group = None
    if tp is not None and hidden is not None and max_tokens is not None:
        group = Group(tp, hidden, _ELEMENT_BYTES[dtype], max_tokens)
    facts = Facts(installation.gather(), machine.gather(), environment.gather())
    found = findings.judge(facts, group)
    if as_json:
        click.echo(document.to_json(document.make(facts, found, group)))
    else:
        from . import look

        report.show(look.console(), facts, found)
    sys.exit(0 if findings.healthy(found) else 1)


@main.command()
@click.option("--tp", type=_ranks, required=True, help="GPUs of the group.")
@click.option("--hidden", type=_count, required=True, help="Elements of a row.")
@click.option(
    "--max-tokens",
    type=_count,
    required=True,
    help="Most rows of a forward pass, such as vLLM's max_num_batched_tokens.",
)
@_dtype
@click.option(
    "--sm",
    type=click.Choice(["90", "100", "103"]),
    default="90",
    show_default=True,
    help="Architecture, by which vLLM's tables and the choice of strategy differ.",
)
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Also write the plot.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    tp: int, hidden: int, max_tokens: int, dtype: str, sm: str, svg: Path | None, as_json: bool
) -> None:
    """Show what workspaces cost, who asks what of them, and what becomes of it.

    Arithmetic only: needs no GPU and no FlashInfer. Obeys FLASHINFER_MNNVL_ONESHOT_MAX_MB.
    """
    from flashinfer.elastic.allreduce import settings

    from . import look
    from .plan import document, outcomes, report
    from .plan import svg as drawing
    from .plan.callers import Problem, callers

    name = settings.ONESHOT_MAX_MB
    try:
        oneshot_max_bytes = settings.read({name: os.environ.get(name, "")}).oneshot_max_bytes
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    problem = Problem(tp, hidden, _ELEMENT_BYTES[dtype])
    try:
        cases = tuple(
            outcomes.case(problem, int(sm), caller, oneshot_max_bytes)
            for caller in callers(problem, max_tokens, int(sm))
        )
    except ValueError as error:  # not even one row fits in the largest buffer there is
        raise click.UsageError(f"--hidden {hidden}: {error}") from None
    if svg is not None:
        try:
            svg.write_text(drawing.draw(report.chart_of(problem, cases)))
        except OSError as error:
            raise click.ClickException(f"--svg {svg}: {error.strerror}") from None
    if as_json:
        click.echo(document.to_json(problem, int(sm), max_tokens, dtype, cases))
    else:
        report.show(look.console(), problem, int(sm), max_tokens, dtype, cases)
    if svg is not None:
        click.echo(f"written: {svg}", err=as_json)


@main.command()
def reproduce() -> None:
    """Show the reported failure in FlashInfer's own code, and the same call with this wheel.

    Makes the call on this machine's GPUs, one process each. Without two of them it shows the
    failure only and exits with 1; scripts/reproduce.py of the source repository brings along an
    emulation of the kernels.
    """
    _run("reproduce.report", "reproduce()")


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Time fused all-reduce against the other ways to compute it; `bench --help` has the options.

    Needs two GPUs or more, and writes a JSON file and a plot.
    """
    _run("progress", f"bench({list(arguments)!r})")


_PROGRAM = """\
import sys
def fail(error):
    missing = (getattr(error, "name", None) or "flashinfer").partition(".")[0]
    more = "flashinfer-doctor check says more."
    if missing != "flashinfer" and isinstance(error, ModuleNotFoundError):
        more = f"pip install {{missing}}, or what brings it along, may help; " + more
    sys.exit(f"{{type(error).__name__}}: {{error}}\\n{{more}}")
try:
    from flashinfer.elastic.doctor.{module} import {name}
except Exception as error:
    fail(error)
try:
    sys.exit({call})
except ImportError as error:
    fail(error)
"""


def _run(module: str, call: str) -> None:
    """Make a call in a process of its own, where FlashInfer is imported, and exit as it does."""
    name = call.partition("(")[0]
    source = _PROGRAM.format(module=module, name=name, call=call)
    try:
        sys.exit(subprocess.run([sys.executable, "-c", source]).returncode)
    except KeyboardInterrupt:
        sys.exit(130)  # the process was interrupted too, and has said so
