"""Start ``flashinfer-doctor`` without importing FlashInfer.

An ``import flashinfer.elastic`` first runs FlashInfer's own ``__init__.py``, which imports torch
and takes seconds, or fails, or is that of another directory: what a doctor is asked about. So a
bare package stands in for ``flashinfer`` in this process, made of the directory beside this file.
This is a module of its own because anything below ``flashinfer`` would run too late.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Run the command line."""
    if "flashinfer" not in sys.modules:
        _stand_in()
    try:
        from flashinfer.elastic.doctor.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"{error}. flashinfer-doctor needs it: pip install click rich")
    run(prog_name="flashinfer-doctor")


def _stand_in() -> None:
    """Register a bare ``flashinfer``; processes that are started import the real one."""
    spec = importlib.machinery.ModuleSpec("flashinfer", None, is_package=True)
    spec.submodule_search_locations = [str(Path(__file__).resolve().parent / "flashinfer")]
    sys.modules["flashinfer"] = importlib.util.module_from_spec(spec)


if __name__ == "__main__":
    main()
