"""Compile a few kernels at run time with NVRTC, and launch them with programmatic dependence."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

_C_TYPES = {"pointer": ctypes.c_void_p, "int": ctypes.c_int, "unsigned": ctypes.c_uint}
_C_TYPES["long long"] = ctypes.c_longlong

Argument = tuple[str, int]
"""A C type, of those in ``_C_TYPES``, and a value."""


def compile_cubin(source: str, arch: int) -> bytes:
    """Compile CUDA C++ to machine code; needs NVRTC, and no GPU.

    Parameters
    ----------
    source : str
        Without ``#include``.
    arch : int
        Compute capability as ``10 * major + minor``.

    Raises
    ------
    RuntimeError
        With the compiler's messages, if the source is wrong.
    """
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"limits.cu", 0, [], []))
    options = [f"--gpu-architecture=sm_{arch}".encode(), b"--std=c++17"]
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode(errors="replace").strip("\0 \n"))
    cubin: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin


class Kernels:
    """The kernels of ``limits.cu`` on the current device."""

    def __init__(self) -> None:
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        major, minor = torch.cuda.get_device_capability()
        source = Path(__file__).with_name("limits.cu").read_text()
        # torch makes the device's context current, into which the driver loads.
        torch.cuda.current_stream().synchronize()
        self._cubin = compile_cubin(source, 10 * major + minor)
        self._module = _checked(self._driver.cuModuleLoadData(self._cubin))
        self._functions: dict[str, Any] = {}

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        arguments: Sequence[Argument] = (),
        *,
        dependent: bool = False,
    ) -> None:
        """Launch on the current stream; ``dependent`` lets it start before its predecessor ends."""
        function = self._functions.get(name)
        if function is None:
            function = _checked(self._driver.cuModuleGetFunction(self._module, name.encode()))
            self._functions[name] = function
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID(_PROGRAMMATIC_SERIALIZATION)
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        values = tuple(value for _, value in arguments)
        types = tuple(_C_TYPES[type_name] for type_name, _ in arguments)
        parameters = (values, types) if arguments else 0
        _checked(driver.cuLaunchKernelEx(config, function, parameters, 0))


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a call gave, after its status."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"{type(status).__name__}.{status.name}")
    return values[0] if values else None
