"""What a run has found, and the file it is kept in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .figures import Figures
from .problem import DTYPE_NAME, PATTERN


@dataclasses.dataclass(frozen=True)
class Row:
    """One method's time for one problem. The fields are those of the file."""

    world_size: int
    hidden: int
    tokens: int
    mode: str
    method: str
    median_us: float
    p10_us: float
    p90_us: float
    dtype: str = DTYPE_NAME
    pattern: str = PATTERN

    @classmethod
    def of(
        cls, world_size: int, hidden: int, tokens: int, mode: str, method: str, figures: Figures
    ) -> Row:
        """Return a row with figures rounded to a nanosecond."""
        median, p10, p90 = (round(value, 3) for value in figures)
        return cls(world_size, hidden, tokens, mode, method, median, p10, p90)


@dataclasses.dataclass(frozen=True)
class Skip:
    """A method that was not measured, and why; ``hidden`` and ``tokens`` are None for all."""

    method: str
    reason: str
    hidden: int | None = None
    tokens: int | None = None


@dataclasses.dataclass
class Results:
    """All of a run.

    Attributes
    ----------
    machine, command : str
        Where and how it was measured.
    versions : dict
        Of software, by name.
    rows : list of Row
    skipped : list of Skip
    components : list of dict
        What rows are made of: variants of a method of which the row is the best, the parts of the
        limit, the norm alone.
    host_cost : list of dict
        Host microseconds of an eager call, by layer.
    notes : dict
        Choices that were made on this machine.
    """

    machine: str
    command: str
    versions: dict[str, str]
    rows: list[Row] = dataclasses.field(default_factory=list)
    skipped: list[Skip] = dataclasses.field(default_factory=list)
    components: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    host_cost: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """Return the file's text: one line a row, so that two runs can be compared."""
        parts = {
            "machine": self.machine,
            "versions": self.versions,
            "command": self.command,
            "notes": self.notes,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "skipped": merge(self.skipped),
            "components": self.components,
            "host_cost": self.host_cost,
        }
        body = ",\n".join(f" {json.dumps(name)}: {_lines(value)}" for name, value in parts.items())
        return f"{{\n{body}\n}}\n"

    def write(self, file: Path) -> None:
        """Write the file, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(file.name + ".part")
        aside.write_text(self.to_json())
        aside.replace(file)


def read(file: Path) -> tuple[str, list[Row]]:
    """Return the machine and the rows of a file that :meth:`Results.write` has written."""
    content = json.loads(file.read_text())
    return str(content["machine"]), [Row(**row) for row in content["rows"]]


def merge(skips: list[Skip]) -> list[dict[str, Any]]:
    """Return skips as they go into the file: problems that share a reason in one entry."""
    entries: dict[tuple[str, str, int | None], list[int]] = {}
    for skip in skips:
        tokens = entries.setdefault((skip.method, skip.reason, skip.hidden), [])
        if skip.tokens is not None:
            tokens.append(skip.tokens)
    return [
        {"method": method, "hidden": hidden, "tokens": tokens or "all", "reason": reason}
        for (method, reason, hidden), tokens in entries.items()
    ]


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
