"""The FlashInfer releases the wheel works beside, and the files each of them owns."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: The releases that are tested, the oldest and the newest supported series among them.
RELEASES = ("0.6.12", "0.6.13", "0.7.2.post1", "0.7.4")

#: A directory that holds the wheels already, for machines without a network.
VARIABLE = "FLASHINFER_UPSTREAM_WHEELS"

CACHE = Path(__file__).resolve().parent.parent / "build" / "upstreams"


def wheel(release: str) -> Path:
    """Give a release's wheel, downloading it into ``build/upstreams`` where it is not there yet.

    Raises
    ------
    FileNotFoundError
        Where ``FLASHINFER_UPSTREAM_WHEELS`` names a directory without it.
    subprocess.CalledProcessError
        Where pip cannot download it.
    """
    name = f"flashinfer_python-{release}-py3-none-any.whl"
    given = os.environ.get(VARIABLE)
    file = Path(given, name) if given else CACHE / name
    if file.exists():
        return file
    if given:
        raise FileNotFoundError(f"{VARIABLE}={given} has no {name}")
    CACHE.mkdir(parents=True, exist_ok=True)
    # Downloaded aside and renamed: an interrupted download leaves nothing that looks whole.
    with tempfile.TemporaryDirectory(dir=CACHE) as aside:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", aside, f"flashinfer-python=={release}"]
        subprocess.run(command, check=True)
        return Path(aside, name).rename(file)


def owned_paths(wheel: Path) -> frozenset[str]:
    """Give the paths below site-packages that a release installs."""
    with zipfile.ZipFile(wheel) as archive:
        return frozenset(name for name in archive.namelist() if not name.endswith("/"))
