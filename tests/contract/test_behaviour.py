"""The patch applies to every supported upstream and behaves there like upstream's own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashinfer.elastic.allreduce import ENTRY_POINTS, OPTIONAL, WORKSPACE


@pytest.fixture
def behaviour(
    version: str, merged_tree: Callable[[str], Path], probe: Callable[..., Any]
) -> dict[str, Any]:
    return dict(probe("behaviour.py", merged_tree(version)))


def test_the_patched_module(
    version: str, behaviour: dict[str, Any], merged_tree: Callable[[str], Path]
) -> None:
    assert behaviour["version"] == version
    assert behaviour["reason"] == ""
    assert behaviour["patched"]
    assert behaviour["in_place"]
    expected_file = merged_tree(version) / "flashinfer" / "comm" / "trtllm_mnnvl_ar.py"
    assert Path(behaviour["file"]) == expected_file

    replaced = set(behaviour["replaced"])
    assert replaced | OPTIONAL == {WORKSPACE, *ENTRY_POINTS}
    assert (replaced >= OPTIONAL) == (version != "0.6.12")
    for property_ in ("differ", "pickles", "getmodule", "same_signature"):
        assert set(behaviour[property_]) == replaced, property_


def test_upstreams_dispatch_reaches_the_replacements(behaviour: dict[str, Any]) -> None:
    assert behaviour["is_a_subclass"]
    assert behaviour["dispatches"]
    used = {WORKSPACE, "trtllm_mnnvl_allreduce", "trtllm_mnnvl_fused_allreduce_add_rmsnorm"}
    assert used <= set(behaviour["seen_by_allreduce"])


def test_monkeypatching_the_module_reaches_upstreams_functions(behaviour: dict[str, Any]) -> None:
    assert behaviour["strategy_moved"] == "TWOSHOT"


def test_importing_initialises_nothing_of_cuda(behaviour: dict[str, Any]) -> None:
    assert not behaviour["cuda_initialized"]
