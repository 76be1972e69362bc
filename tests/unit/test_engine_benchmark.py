"""What ``benchmarks/vllm_engine.py`` takes for a failure."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import vllm_engine

PROMPTS = 8


def outcome(mode: str) -> dict[str, Any]:
    """Return the outcome of a mode that did what it should."""
    backend = vllm_engine.MODES[mode]
    worker = {
        "workspace": None if backend is None else {"backend": backend},
        "libraries": [vllm_engine.OUR_LIBRARY] if mode == "mnnvl" else [],
    }
    return {
        "prompts_as_off": PROMPTS,
        "repeats_itself": True,
        "workers": [worker | {"rank": rank} for rank in range(vllm_engine.RANKS)],
    }


def judged(**changes: Any) -> list[str]:
    """Judge a run of all modes in which mode ``mnnvl`` came out otherwise."""
    result = {mode: outcome(mode) for mode in vllm_engine.MODES}
    result["mnnvl"] |= copy.deepcopy(changes)
    return vllm_engine.judge(result, PROMPTS)


def workers(**changes: Any) -> list[dict[str, Any]]:
    first, *others = outcome("mnnvl")["workers"]
    return [first | changes, *others]


def test_nothing_is_wrong_where_all_did_what_they_should() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompts_as_off": PROMPTS - 1}, "mnnvl: 1 of 8 prompts differ from fusion off"),
        ({"repeats_itself": False}, "mnnvl: a later round gave other tokens than the first"),
        ({"workers": []}, "mnnvl: 0 workers answered, not 2"),
        ({"workers": workers(workspace=None)}, "mnnvl, rank 0: the workspace is None, not mnnvl"),
        ({"workers": workers(libraries=[])}, "mnnvl, rank 0: did not load "),
        (
            {"workers": workers(libraries=[vllm_engine.OUR_LIBRARY, "trtllm_comm.so"])},
            "mnnvl, rank 0: loaded upstream's trtllm_comm.so",
        ),
    ],
)
def test_each_departure_is_named(changes: dict[str, Any], text: str) -> None:
    (wrong,) = judged(**changes)
    assert wrong.startswith(text)


def test_a_lost_engine_is_wrong_once() -> None:
    result = {"off": outcome("off"), "mnnvl": {"error": "no answer in time"}}
    assert vllm_engine.judge(result, PROMPTS) == ["mnnvl: no answer in time"]
