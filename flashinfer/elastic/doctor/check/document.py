"""What ``check --json`` prints, and its JSON schema.

The schema is derived from the records, so that it cannot fall behind them; docs/doctor.md explains
the fields.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Sequence
from typing import Any

from flashinfer.elastic import __version__

from .facts import Facts, Group
from .findings import Finding, engine, healthy

FORMAT = 1
"""Raised when a field changes its meaning or goes away."""


@dataclasses.dataclass(frozen=True)
class Document:
    """All that a check says.

    Attributes
    ----------
    format : int
        ``FORMAT``.
    doctor : str
        Version of this wheel's code.
    ok : bool
        Whether there is no problem; the exit code says the same.
    engines : tuple of str or None
        For each GPU: native, upstream or none; null where it is not known.
    group : Group or None
        The workspace that was asked about.
    """

    format: int
    doctor: str
    ok: bool
    findings: tuple[Finding, ...]
    engines: tuple[str | None, ...]
    group: Group | None
    facts: Facts


def make(facts: Facts, findings: Sequence[Finding], group: Group | None) -> Document:
    """Return the document of a check."""
    engines = tuple(engine(facts, gpu) for gpu in facts.machine.gpus)
    return Document(FORMAT, __version__, healthy(findings), tuple(findings), engines, group, facts)


def to_json(document: Document) -> str:
    """Return the text that ``check --json`` prints."""
    return json.dumps(dataclasses.asdict(document), indent=2, default=_plain)


def schema() -> dict[str, Any]:
    """Return the JSON schema of :func:`to_json`, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "flashinfer-doctor check",
        **_schema_of(Document),
    }


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"{value!r} has no place in JSON")


_SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def _schema_of(kind: Any) -> dict[str, Any]:
    """Return the schema of a type that records use."""
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {
            "type": "object",
            "properties": {name: _schema_of(hint) for name, hint in hints.items()},
            "required": list(hints),
            "additionalProperties": False,
        }
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"type": "string", "enum": [member.value for member in kind]}
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and arguments[1:] == (...,):
        return {"type": "array", "items": _schema_of(arguments[0])}
    if isinstance(kind, types.UnionType):
        return {"anyOf": [_schema_of(argument) for argument in arguments]}
    raise TypeError(f"no schema for {kind}")
