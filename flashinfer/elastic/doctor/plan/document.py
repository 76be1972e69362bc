"""What ``plan --json`` prints; docs/doctor.md explains the fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flashinfer.elastic import __version__

from .callers import Problem
from .outcomes import Case, Range

FORMAT = 1
"""Raised when a field changes its meaning or goes away."""


def to_json(problem: Problem, arch: int, max_tokens: int, dtype: str, cases: Sequence[Case]) -> str:
    """Return the text that ``plan --json`` prints."""
    document = {
        "format": FORMAT,
        "doctor": __version__,
        "group": {
            "ranks": problem.ranks,
            "hidden": problem.hidden,
            "dtype": dtype,
            "max_tokens": max_tokens,
            "arch": arch,
        },
        "callers": [_caller(case) for case in cases],
    }
    return json.dumps(document, indent=2)


def _caller(case: Case) -> dict[str, Any]:
    return {
        "name": case.caller.name,
        "reports_tokens": case.caller.reports,
        "buffer_bytes": {"upstream": case.upstream_buffer, "ours": case.our_buffer},
        "gpu_bytes": {"upstream": case.upstream_memory, "ours": case.our_memory},
        "raises_from_tokens": case.raises_from,
        "calls": [_calls(part) for part in case.ranges],
    }


def _calls(part: Range) -> dict[str, Any]:
    result = part.outcome
    return {
        "tokens": [part.first, part.last],
        "asks": result.ask.value,
        "upstream": {
            "strategy": result.upstream_strategy.name.lower(),
            "most_bytes": result.upstream_bytes,
            "raises": result.raises,
        },
        "ours": {"strategy": result.ours.strategy.name.lower(), "launches": result.ours.launches},
    }
