"""What upstream's module offers is still there, and what a version lacks is not added."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Surface = dict[str, Any]
WORKSPACE = "MNNVLAllReduceFusionWorkspace"


@pytest.fixture
def before(
    version: str, upstream_tree: Callable[[str], Path], probe: Callable[..., Any]
) -> Surface:
    """The surface of upstream alone."""
    return dict(probe("surface.py", upstream_tree(version)))


@pytest.fixture
def after(version: str, merged_tree: Callable[[str], Path], probe: Callable[..., Any]) -> Surface:
    """The surface of upstream with our files beside it."""
    return dict(probe("surface.py", merged_tree(version)))


def test_every_name_and_signature_is_as_it_was(before: Surface, after: Surface) -> None:
    assert after["module"] == before["module"]
    assert after["names"].keys() == before["names"].keys()
    for name, described in before["names"].items():
        if name == WORKSPACE:  # Its text may say what is new; the rest may not differ.
            described = described | {"doc": after["names"][name]["doc"]}
        assert after["names"][name] == described, name


def test_every_attribute_of_every_class_is_as_it_was(before: Surface, after: Surface) -> None:
    assert after["classes"].keys() == before["classes"].keys()
    for owner, attributes in before["classes"].items():
        for name, described in attributes.items():
            ours = after["classes"][owner].get(name)
            assert ours is not None, f"{owner}.{name} is gone"
            for aspect in ("kind", "signature", "value"):
                assert ours[aspect] == described[aspect], f"{owner}.{name}: {aspect}"


def test_no_class_gains_a_public_attribute(before: Surface, after: Surface) -> None:
    """Callers ask with ``hasattr`` what a version can do."""
    for owner, attributes in after["classes"].items():
        gained = attributes.keys() - before["classes"][owner].keys()
        assert not {name for name in gained if not name.startswith("_")}, owner


def test_the_surface_is_what_the_source_says(
    version: str, before: Surface, upstream_tree: Callable[[str], Path]
) -> None:
    """The probe misses nothing: its names are compared with the syntax tree of upstream's file."""
    file = upstream_tree(version) / "flashinfer" / "comm" / "trtllm_mnnvl_ar.py"
    tree = ast.parse(file.read_text())
    defined = {
        node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    assert defined.keys() <= before["names"].keys()
    for name, node in defined.items():
        if isinstance(node, ast.ClassDef):
            members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            assert members <= before["classes"][name].keys()


def test_importing_flashinfer_loads_only_our_own_modules_in_addition(
    before: Surface, after: Surface
) -> None:
    """What costs time at import is modules: nothing of third parties comes with ours."""
    added = set(after["loaded"]) - set(before["loaded"])
    assert not set(before["loaded"]) - set(after["loaded"])
    assert {name for name in added if not name.startswith("flashinfer.elastic")} == set()
    assert not after["cuda_initialized"]
