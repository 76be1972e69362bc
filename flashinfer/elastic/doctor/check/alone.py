"""Modules of this wheel whose packages import torch, loaded without them.

A check has to work where torch is broken or missing, which is one of the things it looks for.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[2]
"""``flashinfer/elastic``, of the installation that this process runs."""


@functools.cache
def load(name: str) -> ModuleType:
    """Load a module that imports nothing but the standard library, under a name of its own.

    Parameters
    ----------
    name : str
        Within ``flashinfer.elastic``, such as ``attention.settings``.
    """
    file = PACKAGE.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"_elastic_{name.replace('.', '_')}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
