"""The kernel build on a small library of its own: flags, device code, incremental rebuilds."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from build_tools import binary, kernels, toolkit

HEADER = "#pragma once\n#define FACTOR 2.0f\n"
KERNEL = """#include "factor.h"
__global__ void scale(float* x, float y) { *x = *x * FACTOR + y; }
"""
BINDING = """#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>
namespace {
tvm::ffi::String archs() { return FLASHINFER_ELASTIC_ARCHS; }
}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(archs, archs);
"""


@pytest.fixture(scope="module")
def kit() -> toolkit.Toolkit:
    """The toolkit of this machine."""
    return toolkit.find()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one kernel and one binding."""
    for name, text in {
        "csrc/scale.cu": KERNEL,
        "csrc/binding.cc": BINDING,
        "include/factor.h": HEADER,
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(kernels, "REPOSITORY", tmp_path)
    return tmp_path


def built(library: Path) -> dict[str, int]:
    """Give when each file of a build was last written, in nanoseconds."""
    files = [library, *library.parent.glob("*.o")]
    return {file.name: file.stat().st_mtime_ns for file in files}


def test_compiles_what_changed_and_nothing_else(repository: Path, kit: toolkit.Toolkit) -> None:
    library = kernels.build((90, 100), kit)
    first = built(library)
    assert set(first) == {"libflashinfer_elastic.so", "scale.cu.o", "binding.cc.o"}

    assert kernels.build((90, 100), kit) == library
    assert built(library) == first

    (repository / "include" / "factor.h").write_text(HEADER.replace("2", "3"))
    kernels.build((90, 100), kit)
    again = built(library)
    changed = {name for name in first if again[name] != first[name]}
    assert changed == {"libflashinfer_elastic.so", "scale.cu.o"}


def test_holds_machine_code_for_the_architectures_asked_for_and_no_ptx(
    repository: Path, kit: toolkit.Toolkit
) -> None:
    for targets in ((90,), (90, 100)):
        library = kernels.build(targets, kit)
        found = binary.kernels(library)
        assert set(found) == {f"sm_{target}" for target in targets}
        assert all(len(names) == 1 for names in found.values())
        assert binary.ptx(library) == []


def test_lists_of_architectures_do_not_share_a_directory(
    repository: Path, kit: toolkit.Toolkit
) -> None:
    one, both = kernels.build((90,), kit), kernels.build((90, 100), kit)
    before = built(one)
    assert one.parent != both.parent
    kernels.build((90,), kit)
    assert built(one) == before


def test_loads_through_tvm_ffi_without_linking_to_it(
    repository: Path, kit: toolkit.Toolkit
) -> None:
    import tvm_ffi

    library = kernels.build((90,), kit)
    assert tvm_ffi.load_module(str(library))["archs"]() == "90"
    needed = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True)
    assert "libtvm_ffi" not in needed.stdout
    assert "libcudart" not in needed.stdout


def test_keeps_this_machines_paths_out_of_the_library(
    repository: Path, kit: toolkit.Toolkit
) -> None:
    content = kernels.build((90,), kit).read_bytes()
    assert os.fsencode(repository) not in content
    assert os.fsencode(kernels.find_tvm_ffi() or "") not in content


def test_device_code_contracts_nothing(repository: Path, kit: toolkit.Toolkit) -> None:
    def compiled(*flags: str) -> str:
        command = [kit.nvcc, "-ptx", *kernels.COMMON_FLAGS, *flags, "csrc/scale.cu", "-o", "-"]
        run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=repository)
        return run.stdout

    assert "fma.rn" in compiled()  # what the flags are for
    assert "fma.rn" not in compiled(*kernels.DEVICE_FLAGS)


def test_no_command_asks_for_fast_math(kit: toolkit.Toolkit) -> None:
    text = kernels.ninja_file((90,), kit, Path("build"))
    assert not re.search(r"fast.math|ftz=true|-Ofast|prec-(div|sqrt)=false", text)


def test_finds_ptx_where_there_is_some(tmp_path: Path, kit: toolkit.Toolkit) -> None:
    source, library = tmp_path / "scale.cu", tmp_path / "libscale.so"
    source.write_text("__global__ void scale(float* x) { *x *= 2.0f; }\n")
    architecture = "-gencode=arch=compute_90,code=[sm_90,compute_90]"
    command = [kit.nvcc, "-shared", "-Xcompiler=-fPIC", architecture, f"-L{kit.library}"]
    subprocess.run([*command, source, "-o", library], check=True)
    assert len(binary.ptx(library)) >= 1


def test_an_empty_compiler_counts_as_unset(
    kit: toolkit.Toolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    unset = kernels.ninja_file((90,), kit, Path("build"))
    monkeypatch.setenv("CXX", "")
    assert kernels.ninja_file((90,), kit, Path("build")) == unset


def test_a_compiler_error_is_an_error(repository: Path, kit: toolkit.Toolkit) -> None:
    (repository / "csrc" / "scale.cu").write_text("this is no CUDA\n")
    with pytest.raises(subprocess.CalledProcessError):
        kernels.build((90,), kit)
