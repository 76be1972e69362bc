"""Upstream's all-reduce module and our patch of it, on a machine without a GPU.

The module is upstream's own file, executed under its own name. What it imports from the rest of
FlashInfer are its own files too where they need no GPU; the others are replaced: symmetric memory
is addresses that nothing reads, and the launcher of the kernels records its arguments.
"""

from __future__ import annotations

import enum
import importlib.util
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import run_threads

from flashinfer.elastic.allreduce import ops
from flashinfer.elastic.allreduce import workspace as our_workspace
from flashinfer.elastic.allreduce.engines import library, native

PACKAGE = "flashinfer.comm"
GRANULARITY = 2 << 20

WRITTEN = 5.0
"""What a launch of upstream's kernels writes to its output; one more to the residual stream."""


class CpuTorch(types.ModuleType):
    """Torch, as a module sees it whose every device is the CPU."""

    def __init__(self, major: int = 9, minor: int = 0) -> None:
        super().__init__("torch")
        properties = types.SimpleNamespace(major=major, minor=minor, multi_processor_count=132)
        self.cuda = types.SimpleNamespace(
            current_device=lambda: 0,
            synchronize=lambda *_: None,
            is_available=lambda: False,
            get_device_properties=lambda _: properties,
        )

    def device(self, *_: object) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Loaded:
    """An upstream module.

    Attributes
    ----------
    module : types.ModuleType
        As executed; ``flashinfer.elastic.allreduce.install`` may patch it.
    launches : list of tuple
        The arguments of every launch of upstream's kernels.
    multicast : int
        What the next memory has as its multicast pointer.
    broken : str
        If set, allocating the next memory fails with this text.
    """

    def __init__(self, tree: Path) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.multicast = 0x5000
        self.broken = ""
        files = tree / "flashinfer" / "comm"
        with _modules(self._stubs()):
            for name in ("mapping", "workspace_base"):
                _execute(f"{PACKAGE}.{name}", files / f"{name}.py")
            self.module = _execute(f"{PACKAGE}.trtllm_mnnvl_ar", files / "trtllm_mnnvl_ar.py")
        setattr(self.module, "torch", CpuTorch())  # noqa: B010 (a module has no such attribute)

    def mapping(self, rank: int, ranks: int) -> Any:
        """Return upstream's mapping of a tensor-parallel rank."""
        return self.module.Mapping(world_size=ranks, rank=rank, gpus_per_node=ranks, tp_size=ranks)

    def torch_backend(self, backend: Any) -> Any:
        """Return a backend as an instance of upstream's class over torch.distributed."""

        class Backend(self._torch_backend):  # type: ignore[misc, name-defined]
            allgather = staticmethod(backend.allgather)
            barrier = staticmethod(backend.barrier)

        return Backend()

    def _stubs(self) -> dict[str, types.ModuleType]:
        owner = self

        class Kernels:
            def build_and_load(self) -> Any:
                def launch(*arguments: Any) -> None:
                    owner.launches.append(arguments)
                    for tensor, value in zip(arguments[10:12], (WRITTEN, WRITTEN + 1), strict=True):
                        if tensor is not None:
                            tensor.fill_(value)

                return types.SimpleNamespace(trtllm_mnnvl_allreduce_fusion=launch)

        class TorchDistBackend:
            def __init__(self, group: Any = None) -> None:
                self._group = types.SimpleNamespace(group_name="group")

        self._torch_backend = TorchDistBackend

        class MPIBackend:
            def __init__(self) -> None:
                raise RuntimeError("no MPI here")

        class McastGPUBuffer:
            def __init__(self, buf_size: int, group_size: int, **_: Any) -> None:
                self.buf_size, self.pointers, self.multicast = owner._allocate(buf_size, group_size)
                self.mcast_device_memory = types.SimpleNamespace(
                    get_buffer_ptrs_host=lambda: self.pointers
                )

            def lamport_initialize(self, *_: object) -> None: ...

            def get_buffer_ptrs_dev(self) -> int:
                return id(self)

            def get_unicast_ptr(self, rank: int) -> int:
                return self.pointers[rank]

            def get_multicast_ptr(self) -> int:
                return self.multicast

        def allocate(size: int, ranks: int, *_: object) -> tuple[list[int], torch.Tensor, Any]:
            size, pointers, multicast = owner._allocate(size, ranks)
            handle = types.SimpleNamespace(
                buffer_size=size,
                buffer_ptrs=pointers,
                multicast_ptr=multicast,
            )
            handle.buffer_ptrs_dev = id(handle)
            return pointers, torch.empty(4), handle

        def unchanged(*arguments: Any, **_: Any) -> Any:
            if len(arguments) == 1 and callable(arguments[0]):
                return arguments[0]
            return lambda function: function

        layouts = enum.IntEnum("layouts", ["SWIZZLED_128x4", "SWIZZLED_8x4", "LINEAR"], start=0)
        contents: dict[str, dict[str, Any]] = {
            "flashinfer.jit": {"gen_trtllm_mnnvl_comm_module": Kernels},
            "flashinfer.utils": {
                "register_custom_op": unchanged,
                "round_up": lambda value, multiple: -(-value // multiple) * multiple,
            },
            "flashinfer.api_logging": {"flashinfer_api": unchanged},
            "flashinfer.fp4_quantization": {"_compute_swizzled_layout_sf_size": lambda *_: 0},
            PACKAGE: {"__path__": []},
            f"{PACKAGE}.mnnvl": {
                "CommBackend": object,
                "TorchDistBackend": TorchDistBackend,
                "MPIBackend": MPIBackend,
                "McastGPUBuffer": McastGPUBuffer,
                "SymmDeviceMemory": type("SymmDeviceMemory", (), {}),
            },
            f"{PACKAGE}.trtllm_ar": {"QuantizationSFLayout": layouts},
            f"{PACKAGE}.torch_symmetric_memory": {"_alloc_symm_buffer_bytes": allocate},
        }
        stubs = {}
        for name, attributes in contents.items():
            stubs[name] = types.ModuleType(name)
            vars(stubs[name]).update(attributes)
        return stubs

    def _allocate(self, size: int, ranks: int) -> tuple[int, list[int], int]:
        if self.broken:
            raise RuntimeError(self.broken)
        size = -(-size // GRANULARITY) * GRANULARITY
        return size, [0x100000 * (1 + rank) for rank in range(ranks)], self.multicast


@contextmanager
def _modules(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    """Let imports of FlashInfer's modules give these, and put back what was there."""
    before = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith(("flashinfer.", PACKAGE)) and not name.startswith("flashinfer.elastic")
    }
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in list(sys.modules):
            if name in modules or name.startswith(f"{PACKAGE}."):
                del sys.modules[name]
        sys.modules.update(before)


def _execute(name: str, file: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Groups in one process


class Echo:
    """A backend of a group whose other ranks say what this one says."""

    _HEADER = struct.Struct("<4sI")  # what every frame begins with: magic and rank

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.gathers = 0

    def allgather(self, data: bytes) -> list[bytes]:
        self.gathers += 1
        magic, _ = self._HEADER.unpack_from(data)
        rest = data[self._HEADER.size :]
        return [self._HEADER.pack(magic, rank) + rest for rank in range(self.ranks)]

    def barrier(self) -> None: ...


class Threads:
    """Backends of a group whose ranks are threads."""

    def __init__(self, ranks: int) -> None:
        self._cells: list[Any] = [None] * ranks
        self._gate = threading.Barrier(ranks)
        self.ranks = ranks

    def backend(self, rank: int) -> Any:
        outer = self

        class Backend:
            def allgather(self, data: bytes) -> list[Any]:
                outer._cells[rank] = data
                outer._gate.wait(20)
                gathered = list(outer._cells)
                outer._gate.wait(20)
                return gathered

            def barrier(self) -> None:
                self.allgather(b"")

        return Backend()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call ``work(rank)`` on all ranks; return results, or what was raised, by rank."""
        return run_threads(self.ranks, work)


# Our engine


class FakeMemory:
    """Symmetric memory that is nowhere."""

    live = 0
    multicast_address = 0
    detachable = True

    def __init__(self, agreement: Any, size_bytes: int) -> None:
        self.rank = agreement.rank
        self.addresses = tuple(0x7000000 + 0x10000 * rank for rank in range(agreement.world_size))
        self.size_bytes = size_bytes
        self.mapped = True
        FakeMemory.live += 1

    @classmethod
    def create(cls, agreement: Any, device_index: int | None, size_bytes: int) -> FakeMemory:
        return agreement.attempt("creating memory", lambda: cls(agreement, size_bytes))

    def close(self) -> None:
        if self.addresses:
            FakeMemory.live -= 1
        self.addresses = ()
        self.mapped = False

    def detach(self) -> None:
        self.mapped = False

    def attach(self, agreement: Any) -> None:
        agreement.same("memory to attach", self.mapped)
        self.mapped = True


class FakeLibrary:
    """The compiled functions, recorded."""

    def __init__(self, archs: tuple[int, ...] = (90, 100)) -> None:
        self.created: list[tuple[Any, ...]] = []
        self.destroyed: list[int] = []
        self.chosen: list[tuple[int, int, int]] = []
        self.expired: dict[int, int] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.functions = library.Library(
            self._create,
            self.destroyed.append,
            lambda *choice: self.chosen.append(choice),
            lambda context: self.expired.get(context, 0),
            lambda *call: self.calls.append(call),
            lambda *call: self.calls.append(call),
            archs,
        )

    def _create(self, *arguments: Any) -> int:
        self.created.append(arguments)
        return len(self.created)


def without_gpu(
    patch: pytest.MonkeyPatch, *, arch: tuple[int, int] = (9, 0), built: tuple[int, ...] = (90, 100)
) -> FakeLibrary:
    """Let our own workspaces be created without a GPU; return the compiled functions' record."""
    fake = FakeLibrary(built)
    FakeMemory.live = 0
    patch.setattr(our_workspace, "torch", CpuTorch(*arch))
    patch.setattr(ops, "torch", CpuTorch(*arch))
    patch.setattr(our_workspace.topology, "require_nvlink", lambda *_: [])
    patch.setattr(library, "load", lambda: fake.functions)
    patch.setattr(native, "SymmetricMemory", FakeMemory)
    patch.setattr(native.NativeEngine, "initialize", lambda _: None)
    patch.setattr(native.NativeEngine, "buffers", lambda _: torch.empty(0))
    return fake
