"""Print the case, upstream's failure and what this wheel makes of it."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from flashinfer.elastic import __version__

from . import gpus, upstream
from .case import Case, Run, Runner, make_data
from .judge import Verdict, judge

_SEED = 42
_INDENT = "  "


def reproduce(emulate: Runner | None = None, *, on: str = "auto") -> int:
    """Reproduce the failure and its repair, and print both.

    Parameters
    ----------
    emulate : Runner, optional
        Makes the call on emulated ranks; for machines whose GPUs cannot.
    on : str
        ``gpus``, ``emulation``, or ``auto``: the GPUs where they can.

    Returns
    -------
    int
        0 if upstream failed as reported and the call was served with the right result; else 1.
    """
    reported = Case()
    print(
        f"The reported case: {reported.ranks} ranks, rows of {reported.hidden} bf16 elements, a "
        f"workspace for {reported.reported}\ntokens, and one-shot forced for {reported.asked}.\n"
    )
    refused = upstream.refusal(reported)
    for line in _compare(reported, refused):
        print(line)

    obstacle = "it was asked for" if on == "emulation" else gpus.why_not()
    if obstacle and (on == "gpus" or emulate is None):
        remedy = "" if emulate else " The CPU emulation comes with the source repository."
        print(f"\nFAILED: not run on GPUs: {obstacle}.{remedy}")
        return 1
    case, runner, where = reported, emulate, f"the CPU emulation of the kernels ({obstacle})"
    if not obstacle:
        case = dataclasses.replace(reported, ranks=gpus.count())
        runner, where = gpus.run, gpus.describe()
    assert runner is not None

    data = make_data(case, _SEED)
    print(f"\nAll-reduce + residual + RMSNorm, one-shot forced, {case.ranks} ranks,\non {where}:\n")
    runs = runner(case, data, case.buffers())
    verdicts = judge(data, runs)
    for line in _table(case, runs, verdicts):
        print(_INDENT + line)

    wrong = [] if refused.as_reported else ["upstream did not fail as reported"]
    wrong += [] if all(verdict.right for verdict in verdicts) else ["the result is wrong"]
    print("\n" + (f"FAILED: {', and '.join(wrong)}." if wrong else _success(refused)))
    return 1 if wrong else 0


def _compare(case: Case, refused: upstream.Refusal) -> list[str]:
    """Return the case as upstream and this wheel have it, side by side."""
    size = case.buffer_bytes
    needs = f"{refused.required_bytes:,}"
    ours = _steps(case, size)
    theirs = "ValueError" if refused.error else ("launched" if refused.ran else "not run here")
    rows = [
        ("", f"flashinfer-python {refused.version}", f"with flashinfer {__version__}"),
        ("bytes of a buffer", f"{refused.buffer_bytes:,}", f"{size:,}"),
        (f"one-shot of {case.asked} needs", needs, needs),
        ("outcome", theirs, ours),
    ]
    lines = [f"{_INDENT}{a:22} {b:>30}   {c:>26}" for a, b, c in rows]
    if refused.error:
        text = f"ValueError: {refused.error}"
        lines += ["", *textwrap.wrap(text, 96, initial_indent=_INDENT, subsequent_indent=_INDENT)]
    lines += [""] + [_INDENT + line for line in _origin(refused)]
    return lines


def _origin(refused: upstream.Refusal) -> list[str]:
    if refused.ran:
        return [
            "Upstream's column is upstream's installed code: its constructor, check and message.",
            "Only device memory and the kernel launcher, which it never reaches, are stood in.",
        ]
    return [
        "Upstream's column is upstream's installed arithmetic. Its failure is shown with 0.6.x",
        "only: later constructors round sizes up, and raise on machines without multicast.",
    ]


def _table(case: Case, runs: Sequence[Run], verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each run: buffer, how it was served, and the verdict."""
    head = ("bytes of a buffer", "served as", "sum+residual", "norm", "ranks equal", "same bits")
    rows = [
        (
            f"{run.buffer_bytes:,}",
            _steps(case, run.buffer_bytes),
            f"{verdict.residual_ulp:.2f} ulp",
            f"{verdict.norm_ulp:.2f} ulp",
            "yes" if verdict.ranks_equal else "NO",
            "yes" if verdict.same_bits else "NO",
        )
        for run, verdict in zip(runs, verdicts, strict=True)
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in [head, *rows]
    ]


def _steps(case: Case, buffer_bytes: int) -> str:
    steps = case.steps(buffer_bytes)
    strategy = steps[0].strategy.name.lower().replace("shot", "-shot")
    return f"{strategy}, {len(steps)} launch{'es' if len(steps) > 1 else ''}"


def _success(refused: upstream.Refusal) -> str:
    shown = "raises" if refused.ran else "falls short"
    return (
        f"OK: upstream {shown}; this wheel serves the call, with the same bits whichever way it\n"
        "runs. Errors are the largest of any element against float64."
    )
