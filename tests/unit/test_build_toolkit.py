"""Which CUDA toolkit a build takes, and what it says when there is none that will do."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from build_tools import requirements, toolkit

NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
  --dryrun) echo '#$ TOP={top}' >&2 ;;
esac
"""


def make_toolkit(
    root: Path, version: str, *, library: str = "lib64", include: str = "include"
) -> Path:
    """Make a directory that answers as a toolkit does; give its nvcc."""
    nvcc = root / "bin" / "nvcc"
    for file in (nvcc, root / library / "libcudart_static.a", root / include / "cuda_runtime.h"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    nvcc.write_text(NVCC.format(version=version, top=f"{root}/bin/.."))
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any toolkit: no CUDA_HOME, an empty PATH, no package of pip's."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: None)
    return empty


def test_without_a_toolkit_the_error_says_what_to_do(nowhere: Path) -> None:
    with pytest.raises(toolkit.ToolkitError, match=r"CUDA_HOME.*PATH.*build_tools\.requirements"):
        toolkit.find()


def test_without_a_toolkit_the_build_requires_one(nowhere: Path) -> None:
    assert set(requirements.CUDA) < set(requirements.needed())


def test_with_a_toolkit_the_build_requires_none(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_toolkit(tmp_path / "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert requirements.needed() == list(requirements.BUILD)


def test_cuda_home_goes_before_path(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_toolkit(tmp_path / "home", "13.0")
    on_path = make_toolkit(tmp_path / "path", "12.9")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert toolkit.find().version == (12, 9)
    monkeypatch.setenv("CUDA_HOME", str(home.parent.parent))
    assert toolkit.find().version == (13, 0)


def test_cuda_home_without_nvcc_is_an_error_and_not_overlooked(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(make_toolkit(tmp_path / "path", "13.0").parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    with pytest.raises(toolkit.ToolkitError, match=r"gone, which has no bin/nvcc"):
        toolkit.find()


def test_a_wrapper_on_path_leads_to_the_toolkit_behind_it(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbsa = "targets/sbsa-linux/include"
    real = make_toolkit(tmp_path / "cuda", "13.0", library="lib", include=sbsa)
    wrapper = nowhere / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    found = toolkit.find()
    assert found.nvcc == wrapper
    assert found.library == tmp_path / "cuda" / "lib"
    assert found.include == tmp_path / "cuda" / sbsa
    assert found.label == "cu130"


def test_a_toolkit_that_cannot_compile_for_sm100_is_refused(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(make_toolkit(tmp_path / "old", "12.6").parent))
    with pytest.raises(toolkit.ToolkitError, match=r"CUDA 12\.6; 12\.8 or later"):
        toolkit.find()


def test_a_missing_runtime_is_named(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = make_toolkit(tmp_path / "cuda", "13.0")
    os.unlink(tmp_path / "cuda" / "lib64" / "libcudart_static.a")
    monkeypatch.setenv("PATH", str(nvcc.parent))
    with pytest.raises(toolkit.ToolkitError, match=r"no libcudart_static\.a"):
        toolkit.find()


def test_the_toolkit_pip_installed_is_the_last_resort(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cu12", "cu13"):
        make_toolkit(tmp_path / "nvidia" / name, f"{name[2:]}.9", library="lib")

    class Spec:
        submodule_search_locations = (str(tmp_path / "nvidia"),)

    monkeypatch.setattr(toolkit.importlib.util, "find_spec", {"nvidia": Spec}.get)
    assert toolkit.find().version == (13, 9)
    monkeypatch.setenv("PATH", str(make_toolkit(tmp_path / "path", "13.0").parent))
    assert toolkit.find().version == (13, 0)


def test_the_wheel_requires_the_tvm_ffi_it_was_compiled_against(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.12")
    assert requirements.tvm_ffi_at_run_time() == "apache-tvm-ffi>=0.1.12,<0.2"


def test_a_source_distribution_requires_the_oldest_tvm_ffi(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert requirements.tvm_ffi_at_run_time() == "apache-tvm-ffi>=0.1.9,<0.2"
