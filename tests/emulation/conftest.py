"""The emulated machine, built before the tests that run on it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
for directory in (HERE.parent.parent / "emulation", HERE.parent / "unit", HERE):
    sys.path.insert(0, str(directory))


@pytest.fixture(scope="session")
def machine() -> ModuleType:
    """The Python module of the emulated machine."""
    import emulator

    return emulator.load()
