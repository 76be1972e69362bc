"""The scripts refuse what they do not understand before they do anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "command",
    [
        "build.sh --wheel-onyl",
        "build.sh --wheel-only extra",
        "build_matrix.sh sm90",
        "lint.sh --fxi",
        "lint.sh --fix extra",
        "test.sh --wheel no-such-file.whl",
    ],
)
def test_arguments_that_are_not_understood(command: str, tmp_path: Path) -> None:
    # Of a copy, which has nothing to build or install.
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    name, *arguments = command.split()
    run = subprocess.run(
        ["bash", str(tmp_path / "scripts" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ") and arguments[-1] in line
    assert {path.name for path in tmp_path.iterdir()} == {"scripts"}
