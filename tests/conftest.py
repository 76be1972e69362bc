"""What the tests share: the package under test, and the upstream wheels they compare it with.

The distribution is merged into an installed FlashInfer; the repository's ``flashinfer/`` has no
``__init__.py`` and is never put on ``sys.path``. Where FlashInfer is installed with our wheel,
that is what the tests import. Where it is not, a bare ``flashinfer`` package stands in whose path
is the repository's directory: enough for the modules that need neither FlashInfer nor a GPU.

The wheels are downloaded once into ``build/upstreams``. Set ``FLASHINFER_UPSTREAM_WHEELS`` to a
directory that holds them already, for machines without a network.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / "build" / "upstreams"


def _stand_in() -> None:
    """Register a bare ``flashinfer`` package made of the repository's directory."""
    spec = importlib.machinery.ModuleSpec("flashinfer", None, is_package=True)
    spec.submodule_search_locations = [str(REPOSITORY / "flashinfer")]
    sys.modules["flashinfer"] = importlib.util.module_from_spec(spec)


if importlib.util.find_spec("flashinfer") is None:
    _stand_in()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def upstream_wheel() -> Callable[[str], Path]:
    """Return a function that gives the wheel of an upstream version."""
    return _wheel


@pytest.fixture(scope="session")
def upstream_tree() -> Callable[[str], Path]:
    """Return a function that gives a directory with the Python files of an upstream version.

    The directory is what ``sys.path`` would hold: ``flashinfer/`` and its metadata are in it. It
    is shared, and to be read only.
    """
    return _tree


@pytest.fixture(scope="session")
def upstream_wheels() -> dict[str, Path]:
    """The wheels of all tested upstream versions, by version."""
    from flashinfer.elastic.shadow import TESTED_VERSIONS

    with ThreadPoolExecutor() as pool:
        return dict(zip(TESTED_VERSIONS, pool.map(_wheel, TESTED_VERSIONS), strict=True))


def _wheel(version: str) -> Path:
    """Return the wheel of an upstream version, downloaded if need be."""
    given = os.environ.get("FLASHINFER_UPSTREAM_WHEELS")
    directory = Path(given) if given else CACHE
    pattern = f"flashinfer_python-{version}-*.whl"
    found = sorted(directory.glob(pattern))
    if found:
        return found[0]
    if given:
        raise FileNotFoundError(f"FLASHINFER_UPSTREAM_WHEELS={given} has no {pattern}")
    directory.mkdir(parents=True, exist_ok=True)
    # Downloaded aside and renamed, so that an interrupted download leaves nothing that looks whole.
    with tempfile.TemporaryDirectory(dir=directory) as aside:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        what = ["--only-binary=:all:", "--dest", aside, f"flashinfer-python=={version}"]
        subprocess.run([*pip, *what], check=True)
        (downloaded,) = Path(aside).glob("*.whl")
        return downloaded.rename(directory / downloaded.name)


def _tree(version: str) -> Path:
    """Return the unpacked Python files of an upstream version."""
    wheel = _wheel(version)
    tree = CACHE / wheel.stem
    if not tree.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=CACHE))
        with zipfile.ZipFile(wheel) as archive:
            wanted = (".py", ".dist-info/METADATA", ".dist-info/RECORD")
            archive.extractall(
                aside, [name for name in archive.namelist() if name.endswith(wanted)]
            )
        try:
            aside.rename(tree)
        except OSError:  # Another process was faster.
            shutil.rmtree(aside)
    return tree
