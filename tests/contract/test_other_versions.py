"""Versions that were not tested: patched where the contract holds, left alone where it does not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BASE = "0.6.13"


@pytest.fixture
def other_version(merged_tree: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tree that says it is a version which does not exist."""
    tree = tmp_path / "other"
    shutil.copytree(merged_tree(BASE), tree, copy_function=os.link)
    (metadata,) = tree.glob("flashinfer_python-*.dist-info/METADATA")
    rewrite(metadata, f"Version: {BASE}", "Version: 0.7.99")
    return tree


def rewrite(file: Path, old: str, new: str) -> None:
    """Replace a text in a file of the tree, leaving the file that it is linked to as it is."""
    text = file.read_text()
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new))


def test_it_is_patched_where_the_contract_holds(
    other_version: Path, probe: Callable[..., Any]
) -> None:
    outcome = probe("outcome.py", other_version)
    assert outcome["version"] == "0.7.99"
    assert outcome["patched"]
    assert not outcome["upstreams_own"]
    assert outcome["dispatch"]
    assert outcome["logged"] == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("    weight_bias: float = 0.0,\n)", "    weight_bias: float = 1.0,\n)", "weight_bias=1.0"),
        ("    launch_with_pdl: bool,\n    output:", "    pdl: bool,\n    output:", "pdl"),
        ("def trtllm_mnnvl_all_reduce(", "def renamed(", "has no trtllm_mnnvl_all_reduce"),
        ("def is_buffer_size_sufficient(", "def fits(", "sufficient takes (self"),
        ("    ONESHOT = 0", "    ONE_SHOT = 0", "has no ONESHOT"),
    ],
    ids=["default", "parameter", "function", "method", "strategy"],
)
def test_it_is_left_alone_where_the_contract_does_not(
    other_version: Path, probe: Callable[..., Any], old: str, new: str, reason: str
) -> None:
    module = other_version / "flashinfer" / "comm" / "trtllm_mnnvl_ar.py"
    rewrite(module, old, new)
    if "ONESHOT" in old:
        rewrite(module, "Strategy.ONESHOT", "Strategy.ONE_SHOT")
    outcome = probe("outcome.py", other_version)
    assert not outcome["patched"]
    assert reason in outcome["reason"]
    assert outcome["upstreams_own"]
    assert outcome["dispatch"]
    (line,) = outcome["logged"]
    assert line.startswith("WARNING flashinfer.comm.trtllm_mnnvl_ar is left as FlashInfer ships it")
