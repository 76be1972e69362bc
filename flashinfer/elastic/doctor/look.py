"""How the commands look: one kind of table, one way to write bytes."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Return a console on standard output: as wide as the terminal, coloured only on one."""
    return Console(highlight=False)


def table(title: str, *columns: str) -> Table:
    """Return an empty table; a column whose name starts with ``>`` is of numbers."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for number, column in enumerate(columns):
        name = column.removeprefix(">")
        made.add_column(name, justify="right" if name != column else "left", no_wrap=number == 0)
    return made


def mebibytes(size: int) -> str:
    """Return a size in MiB, in as many digits as it takes for the small ones to differ."""
    value = size / 2**20
    return f"{value:,.0f} MiB" if value >= 100 or value == int(value) else f"{value:,.2f} MiB"
