"""What a build installs beside setuptools; ``python -m build_tools.requirements`` lists it."""

from __future__ import annotations

import importlib.metadata

from build_tools import toolkit

#: The library loads under this version of TVM FFI and later ones, hence the oldest we support.
OLDEST_TVM_FFI = "0.1.9"

BUILD = (f"apache-tvm-ffi=={OLDEST_TVM_FFI}", "auditwheel>=6.8", "ninja>=1.11")

#: A CUDA 13.0 toolkit: compiler, device headers, runtime, CUDA C++ core libraries, back end.
CUDA = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-nvvm==13.0.88",
)


def needed() -> list[str]:
    """Give the requirements of a build on this machine, with a toolkit only where it has none."""
    return [*BUILD, *(() if toolkit.find_nvcc() else CUDA)]


def tvm_ffi_at_run_time() -> str:
    """Require what the library was compiled against, or something later."""
    try:
        compiled_against = importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:  # a source distribution compiles nothing
        compiled_against = OLDEST_TVM_FFI
    return f"apache-tvm-ffi>={compiled_against},<0.2"


if __name__ == "__main__":
    print("\n".join(needed()))
