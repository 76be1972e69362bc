"""The files of the two distributions: none in common, and upstream's as they were after ours."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from flashinfer.elastic.shadow import TESTED_VERSIONS

LAUNCHER = "flashinfer_doctor.py"
"""Of the doctor; the one file of ours that is not below ``flashinfer/``."""


def recorded(wheel: Path) -> set[str]:
    """Return the paths in a wheel's RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        text = archive.read(record).decode()
    return {row[0] for row in csv.reader(io.StringIO(text)) if row}


def own_files(repository: Path) -> dict[str, bytes]:
    """Return the files that the repository merges into FlashInfer, by their path in the wheel."""
    return {
        path.relative_to(repository).as_posix(): path.read_bytes()
        for path in sorted((repository / "flashinfer").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def assembled_wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the repository's files as they are now, which takes no compiler to build."""
    info = "flashinfer-0+contract.dist-info"
    files = own_files(repository) | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: flashinfer\nVersion: 0+contract\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{info}/RECORD,,"]
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(content)}")
    files[f"{info}/RECORD"] = "\n".join(record).encode()
    wheel = tmp_path_factory.mktemp("wheel") / "flashinfer-0+contract-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return wheel


@pytest.fixture(params=["assembled", "built"])
def our_wheel(request: pytest.FixtureRequest, repository: Path, assembled_wheel: Path) -> Path:
    """The sources as a wheel, and the one that was built of them, if one was."""
    if request.param == "assembled":
        return assembled_wheel
    built = sorted((repository / "dist").glob("flashinfer-*.whl"), key=os.path.getmtime)
    if not built:
        pytest.skip("no wheel in dist/; scripts/build.sh builds one")
    return built[-1]


def test_no_path_is_shipped_by_both(our_wheel: Path, upstream_wheels: dict[str, Path]) -> None:
    ours = {path for path in recorded(our_wheel) if ".dist-info/" not in path}
    assert "flashinfer/elastic/shadow.py" in ours
    assert {PurePosixPath(path).parts[0] for path in ours} - {LAUNCHER} == {"flashinfer"}
    for version, wheel in upstream_wheels.items():
        theirs = recorded(wheel)
        assert "flashinfer/comm/trtllm_mnnvl_ar.py" in theirs
        # Compared as a file system that ignores case would.
        folded = {path.lower() for path in theirs}
        assert not {path for path in ours if path.lower() in folded}, version


def test_what_shadows_a_module_is_a_shadow(
    repository: Path, upstream_wheels: dict[str, Path]
) -> None:
    """A package of ours that has the name of a module of upstream's loads that module."""
    packages = {
        str(PurePosixPath(path).parent): content
        for path, content in own_files(repository).items()
        if path.endswith("/__init__.py")
    }
    shadows = {name for name, content in packages.items() if b"shadow.load(" in content}
    assert "flashinfer/comm/trtllm_mnnvl_ar" in shadows
    shadowed = set()
    for wheel in upstream_wheels.values():
        theirs = recorded(wheel)
        shadowed |= {name for name in packages if f"{name}.py" in theirs}
    assert shadowed == shadows


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_upstream_is_as_it_was_after_install_and_uninstall(
    version: str,
    our_wheel: Path,
    upstream_wheel: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)

    def pip(*arguments: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
        options = ["--quiet", "--no-input", "--disable-pip-version-check"]
        subprocess.run([*command, *options, *arguments], check=True)

    def files() -> dict[str, str]:
        (site,) = environment.glob("lib/python*/site-packages")
        return {
            path.relative_to(site).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in site.rglob("*")
            if path.is_file()
        }

    install = ("install", "--no-deps", "--no-index", "--no-compile")
    pip(*install, upstream_wheel(version))
    before = files()
    pip(*install, our_wheel)
    during = files()
    assert before.items() <= during.items()
    assert "flashinfer/comm/trtllm_mnnvl_ar/__init__.py" in during.keys() - before.keys()
    pip("uninstall", "--yes", "flashinfer")
    assert files() == before
