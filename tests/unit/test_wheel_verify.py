"""What verify_wheel.py accepts, and that each of its checks can say no."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from build_tools import naming, upstream

LIBRARY = "flashinfer/elastic/lib/libflashinfer_elastic.so"

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def verify_wheel() -> ModuleType:
    """The script as a module."""
    file = naming.REPOSITORY / "scripts" / "verify_wheel.py"
    spec = importlib.util.spec_from_file_location("verify_wheel", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel that was built last."""
    found = sorted((naming.REPOSITORY / "dist").glob("flashinfer-*.whl"))
    if not found:
        pytest.skip("there is no wheel in dist/: run scripts/build.sh --wheel-only")
    return found[-1]


@pytest.fixture
def failures(
    verify_wheel: ModuleType, wheel: Path, tmp_path: Path
) -> Callable[..., dict[str, str]]:
    """Return a function that alters the wheel and gives the checks that fail, with their words."""

    def alter(
        change: Callable[[Files], None] = lambda files: None,
        *,
        name: str = wheel.name,
        honest_record: bool = True,
    ) -> dict[str, str]:
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        change(files)
        record = next(name for name in files if name.endswith(".dist-info/RECORD"))
        if honest_record:
            files[record] = _record(files, record)
        altered = tmp_path / name
        with zipfile.ZipFile(altered, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, content in files.items():
                archive.writestr(path, content)
        return {check: wrong for check, wrong, _ in verify_wheel.verify(altered) if wrong}

    return alter


def _record(files: Files, record: str) -> bytes:
    lines = [f"{record},,"]
    for path, content in files.items():
        if path != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            lines.append(f"{path},sha256={digest.decode()},{len(content)}")
    return "\n".join(lines).encode()


def _metadata(files: Files, name: str) -> str:
    return next(path for path in files if path.endswith(f".dist-info/{name}"))


def test_the_wheel_is_fit(failures: Callable[..., dict[str, str]]) -> None:
    assert failures() == {}


def test_a_name_that_says_nothing_is_refused(failures: Callable[..., dict[str, str]]) -> None:
    assert set(failures(name="flashinfer-0.1.0-py3-none-any.whl")) == {"name"}


@pytest.mark.parametrize("content", [None, b"", b"PK, and nothing that an archive has"])
def test_what_is_no_archive_is_refused(
    verify_wheel: ModuleType, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "flashinfer-0.1.0+cu130.sm90-py3-none-linux_x86_64.whl"
    if content is not None:
        file.write_bytes(content)
    ((_, wrong, _),) = verify_wheel.verify(file)
    assert str(file) in wrong


def test_a_tool_that_is_missing_is_no_fault_of_the_wheel(
    verify_wheel: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "auditwheel", None)  # importing it would fail
    assert verify_wheel.main([str(tmp_path / "any.whl")]) == 1
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == "" and "pip install auditwheel" in line and "CUDA_HOME" in line


def test_an_architecture_the_name_claims_must_be_in_the_library(
    failures: Callable[..., dict[str, str]], wheel: Path
) -> None:
    found = failures(name=re.sub(r"\+cu(\d+)\.[sm\d.]+-", r"+cu\1.sm90.sm120-", wheel.name))
    assert "sm_120" in found["device_code"]
    assert "120" in found["loads"]


def test_a_library_that_does_not_load_is_refused(failures: Callable[..., dict[str, str]]) -> None:
    def truncate(files: Files) -> None:
        # The device code stays readable; a symbol that must be there to load is gone.
        files[LIBRARY] = files[LIBRARY].replace(b"TVMFFIErrorSetRaised", b"TVMFFIErrorSetRaisee")

    found = failures(truncate)
    assert set(found) == {"loads"}
    assert "TVMFFIErrorSetRaisee" in found["loads"]


def test_another_platform_than_the_symbols_allow_is_refused(
    failures: Callable[..., dict[str, str]], wheel: Path
) -> None:
    promised = re.sub(r"manylinux_\d+_\d+", "manylinux_2_5", wheel.name)

    def tag(files: Files) -> None:
        file = _metadata(files, "WHEEL")
        files[file] = re.sub(rb"manylinux_\d+_\d+", b"manylinux_2_5", files[file])

    actual = wheel.stem.rpartition("-")[2]
    assert failures(tag, name=promised) == {"platform": f"auditwheel says {actual}"}


@pytest.mark.parametrize("release", upstream.RELEASES)
def test_a_file_that_a_release_owns_is_refused(
    failures: Callable[..., dict[str, str]], release: str
) -> None:
    owned = "flashinfer/comm/trtllm_mnnvl_ar.py"
    found = failures(lambda files: files.update({owned: b""}))
    assert set(found) == {"contents", "upstream"}
    assert owned in found["upstream"]
    assert owned in upstream.owned_paths(upstream.wheel(release))


def test_a_file_that_is_not_in_the_source_tree_is_refused(
    failures: Callable[..., dict[str, str]],
) -> None:
    stray = "flashinfer/elastic/left_over.py"
    found = failures(lambda files: files.update({stray: b""}))
    assert set(found) == {"contents"}
    assert stray in found["contents"]


def test_a_missing_licence_is_refused(failures: Callable[..., dict[str, str]]) -> None:
    found = failures(lambda files: files.pop(_metadata(files, "licenses/LICENSE")))
    assert set(found) == {"licence"}
    assert found["licence"].endswith("licenses/LICENSE is missing")


def test_an_installation_into_platlib_is_refused(failures: Callable[..., dict[str, str]]) -> None:
    def platlib(files: Files) -> None:
        file = _metadata(files, "WHEEL")
        files[file] = files[file].replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")

    assert "Root-Is-Purelib" in failures(platlib)["metadata"]


def test_a_dependency_too_few_or_too_many_is_refused(
    failures: Callable[..., dict[str, str]],
) -> None:
    def drop(files: Files) -> None:
        file = _metadata(files, "METADATA")
        files[file] = files[file].replace(b"Requires-Dist: torch\n", b"")

    assert "torch" in failures(drop)["metadata"]


def test_a_file_that_differs_from_the_record_is_refused(
    failures: Callable[..., dict[str, str]],
) -> None:
    def touch(files: Files) -> None:
        files["flashinfer/elastic/py.typed"] = b"\n"

    found = failures(touch, honest_record=False)
    assert found == {"record": "flashinfer/elastic/py.typed does not have the hash in RECORD"}


def test_too_large_a_wheel_is_refused(
    failures: Callable[..., dict[str, str]],
    verify_wheel: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify_wheel, "MOST_BYTES", 1000)
    assert "1,000 are too many" in failures()["size"]


def test_a_heavy_or_broken_import_is_refused(failures: Callable[..., dict[str, str]]) -> None:
    package = "flashinfer/elastic/__init__.py"
    broken = failures(lambda files: files.update({package: b"import no_such_module\n"}))
    assert "no_such_module" in broken["imports"]
    newer = failures(lambda files: files.update({package: b"__version__ = '9.9'\n"}))
    assert newer == {"imports": "flashinfer.elastic is 9.9"}


def test_the_exit_code_counts(
    verify_wheel: ModuleType, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_wheel.main([str(wheel)]) == 0
    assert "FAIL" not in capsys.readouterr().out
    assert verify_wheel.main([str(wheel), str(tmp_path / "other.whl")]) == 1
    assert "FAIL name" in capsys.readouterr().out


def test_the_releases_checked_are_those_the_shadow_is_tested_with() -> None:
    from flashinfer.elastic.shadow import TESTED_VERSIONS

    assert upstream.RELEASES == TESTED_VERSIONS
