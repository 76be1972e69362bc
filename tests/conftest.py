"""Make the repository's ``flashinfer/elastic`` importable in tests of its pure modules.

The distribution is merged into an installed FlashInfer; the repository's ``flashinfer/`` has no
``__init__.py`` and is never put on ``sys.path``. Where FlashInfer is installed with our wheel,
that is what the tests import. Where it is not, a bare ``flashinfer`` package stands in whose path
is the repository's directory: enough for the modules that need neither FlashInfer nor a GPU.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def _stand_in() -> None:
    """Register a bare ``flashinfer`` package made of the repository's directory."""
    spec = importlib.machinery.ModuleSpec("flashinfer", None, is_package=True)
    spec.submodule_search_locations = [str(REPOSITORY / "flashinfer")]
    sys.modules["flashinfer"] = importlib.util.module_from_spec(spec)


if importlib.util.find_spec("flashinfer") is None:
    _stand_in()
