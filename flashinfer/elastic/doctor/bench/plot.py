"""The picture: latency against size, a line for each method."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .problem import ELEMENT_BYTES
from .results import Row
from .session import LIMIT

STYLES: dict[str, tuple[str, str, float]] = {
    "native_auto": ("#2a7f3f", "-", 2.6),
    "native_oneshot": ("#2a7f3f", "--", 1.0),
    "native_twoshot": ("#2a7f3f", ":", 1.2),
    "trtllm_oneshot": ("#c0392b", "--", 1.4),
    "trtllm_twoshot": ("#c0392b", ":", 1.4),
    "vllm_custom_ar": ("#8e44ad", "-", 1.4),
    "symm_mem_oneshot": ("#2471a3", "--", 1.4),
    "symm_mem_twoshot": ("#2471a3", ":", 1.4),
    "nccl": ("#ca8a04", "-", 1.4),
    "nccl_symm": ("#ca8a04", "--", 1.4),
    LIMIT: ("#555555", "-", 1.0),
}
"""Colour, dashes and width by method, in the order of the legend."""


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    """Draw the graph replays of some rows, a panel for each length of row.

    Parameters
    ----------
    rows : sequence of Row
    title : str
    file : pathlib.Path
        Its suffix says the format, such as ``.svg``. The same rows give the same bytes.

    Raises
    ------
    ImportError
        If Matplotlib is not installed.
    ValueError
        If there is no graph replay among the rows.
    """
    rows = [row for row in rows if row.mode == "graph"]
    if not rows:
        raise ValueError("there is nothing to draw: no graph replays")
    matplotlib: Any = importlib.import_module("matplotlib")
    figures: Any = importlib.import_module("matplotlib.figure")
    widths = sorted({row.hidden for row in rows}, reverse=True)
    style = {"svg.hashsalt": "flashinfer", "svg.fonttype": "path"}
    with matplotlib.rc_context(style):
        figure = figures.Figure(figsize=(6.2 * len(widths), 4.8), layout="constrained")
        panels = figure.subplots(1, len(widths), squeeze=False, sharey=True)[0]
        for panel, hidden in zip(panels, widths, strict=True):
            _panel(panel, [row for row in rows if row.hidden == hidden], hidden)
        panels[0].set_ylabel("microseconds a call")
        panels[0].legend(fontsize=8, frameon=False)
        figure.suptitle(title, fontsize=11)
        file.parent.mkdir(parents=True, exist_ok=True)
        # An SVG would otherwise carry today's date.
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(file, metadata=metadata, dpi=144)


def _panel(panel: Any, rows: Sequence[Row], hidden: int) -> None:
    present = {row.method for row in rows}
    for method, (colour, dashes, width) in STYLES.items():
        if method not in present:
            continue
        line = sorted((row.tokens, row.median_us) for row in rows if row.method == method)
        panel.plot(
            [tokens * hidden * ELEMENT_BYTES / 1024 for tokens, _ in line],
            [time for _, time in line],
            color=colour,
            linestyle=dashes,
            linewidth=width,
            label=method,
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel(f"KiB a rank (rows of {hidden} bf16 elements)")
    panel.grid(visible=True, which="major", linewidth=0.4, color="#dddddd")
