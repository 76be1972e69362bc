"""A check as people read it in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashinfer.elastic.allreduce import topology

from ..look import mebibytes, table
from .facts import Facts, Machine, Pair
from .findings import Finding, Level, engine, healthy

_MARKS = {
    Level.OK: ("ok", "green"),
    Level.NOTE: ("note", "cyan"),
    Level.UNKNOWN: ("unknown", "yellow"),
    Level.PROBLEM: ("PROBLEM", "bold red"),
}


def show(console: Console, facts: Facts, findings: Sequence[Finding]) -> None:
    """Print the findings, the GPUs and what joins them."""
    console.print(_findings(findings))
    if facts.machine.gpus:
        console.print(_gpus(facts))
    if facts.machine.pairs:
        console.print(_matrix(facts.machine))
        console.print(
            Text("NVn: n NVLink links. Else the way over PCIe, as nvidia-smi topo has it.", "dim")
        )
        console.print("")
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    unknown = sum(finding.level is Level.UNKNOWN for finding in findings)
    rest = f" {unknown} could not be told here." if unknown else ""
    if healthy(findings):
        console.print(Text(f"No problem found.{rest}", "bold green"))
    else:
        plural = "problem" if problems == 1 else "problems"
        console.print(Text(f"{problems} {plural}.{rest}", "bold red"))


def _findings(findings: Sequence[Finding]) -> Table:
    shown = Table.grid(padding=(0, 2))
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column()
    topic = ""
    for finding in findings:
        mark, style = _MARKS[finding.level]
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", "bold")
        shown.add_row(
            Text(finding.topic if finding.topic != topic else "", "bold"), Text(mark, style), text
        )
        topic = finding.topic
    return shown


def _gpus(facts: Facts) -> Table:
    columns = ("GPU", "name", "arch", ">free", ">of", ">links", "multicast*", "fabric", "engine")
    shown = table("What there is", *columns)
    shown.caption = "* the attribute, which does not prove that multicast works"
    shown.caption_justify = "left"
    for gpu in facts.machine.gpus:
        shown.add_row(
            str(gpu.index),
            _known(gpu.name),
            f"sm{gpu.arch}" if gpu.arch else "?",
            _size(gpu.free_bytes),
            _size(gpu.memory_bytes),
            _known(gpu.links),
            {True: "yes", False: "no", None: "?"}[gpu.multicast_attribute],
            gpu.fabric_error or _known(gpu.fabric),
            _known(engine(facts, gpu)),
        )
    return shown


def _matrix(machine: Machine) -> Table:
    """Return what joins each GPU with each other."""
    count = len(machine.gpus)
    shown = table("What joins the GPUs", "", *(f">{index}" for index in range(count)))
    pairs = {(pair.a, pair.b): pair for pair in machine.pairs}
    for row in range(count):
        cells = [
            Text("-") if row == column else _join(pairs[min(row, column), max(row, column)])
            for column in range(count)
        ]
        shown.add_row(str(row), *cells)
    return shown


def _join(pair: Pair) -> Text:
    if pair.nvlink == topology.NVLINK:
        text, style = f"NV{pair.links or '?'}", "green"
    elif pair.nvlink == topology.NO_NVLINK:
        text, style = pair.path or "none", "red"
    else:
        text, style = "?", "yellow"
    if pair.peer_access is False:
        text, style = f"{text} no peer access", "bold red"
    return Text(text, style)


def _known(value: object) -> str:
    return "?" if value is None else str(value)


def _size(size: int | None) -> str:
    return "?" if size is None else mebibytes(size)
