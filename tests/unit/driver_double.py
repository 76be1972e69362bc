"""A CUDA driver without a GPU: it counts what is alive, and fails where it is told to."""

# The fakes have the names of what they stand for.
# ruff: noqa: N801, N802

from __future__ import annotations

import enum
import itertools
import os
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

GRANULARITY = 2 << 20


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_LAUNCH_FAILED = 719


class Machine:
    """Memory that the drivers of all ranks share; it lives while a handle or a mapping does.

    Ranks in processes of their own have one each, and peers' memory is not asked for its life.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared
        self.lock = threading.Lock()
        self.ids = itertools.count(1)
        self.references: Counter[int] = Counter()

    @property
    def live(self) -> int:
        return sum(count > 0 for count in self.references.values())


class FakeApi:
    """The driver of one process, as cuda-bindings shows it. Misuse of handles is a KeyError."""

    CUmemAllocationProp = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))
    CUmemAccessDesc = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))
    CUmemAllocationHandleType = CUmemAllocationType = CUmemLocationType = int
    CUmemAccess_flags = CUmemAllocationGranularity_flags = int

    class CUmemFabricHandle:
        data = b""

        def getPtr(self) -> bytes:
            return self.data

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = "virtual"
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = "posix_fd"
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = "fabric"

    def __init__(self, machine: Machine, devices: int) -> None:
        self.machine = machine
        self.devices = devices
        self.supports = {"virtual": 1, "posix_fd": 1, "fabric": 0}
        self.peer_access = True
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.fail_all: Status | None = None
        self.failure = Status.CUDA_ERROR_OUT_OF_MEMORY
        self.contexts = 0
        self.stack: list[int] = []
        self.handles: dict[int, int] = {}
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, tuple[int, int, bool]] = {}
        self.next_id = itertools.count(1)

    @property
    def live(self) -> tuple[int, ...]:
        return (
            self.contexts,
            len(self.stack),
            len(self.handles),
            len(self.reservations),
            len(self.mappings),
        )

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cu") or name == "cuGetErrorString":
            return value

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if self.fail_all is not None:
                return (self.fail_all,)
            if len(self.calls) - 1 == self.fail_at:
                return (self.failure,)
            result = value(*args)
            if isinstance(result, Status):
                return (result,)
            return (Status.CUDA_SUCCESS,) if result is None else (Status.CUDA_SUCCESS, result)

        return call

    def cuGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return Status.CUDA_SUCCESS, status.name.lower().encode()

    def cuInit(self, flags: int) -> None:
        pass

    def cuDeviceGet(self, index: int) -> int:
        assert 0 <= index < self.devices
        return index

    def cuDeviceGetCount(self) -> int:
        return self.devices

    def cuDeviceGetUuid(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(bytes=device.to_bytes(16, "big"))

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> bytes:
        return f"0000:{device:02x}:00.0".encode().ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> int:
        return self.supports[attribute]

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> int:
        assert device != peer
        return int(self.peer_access)

    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        self.contexts += 1
        return 1000 + device

    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.contexts -= 1

    def cuCtxPushCurrent(self, context: int) -> None:
        self.stack.append(context)

    def cuCtxPopCurrent(self) -> int:
        return self.stack.pop()

    def cuCtxSynchronize(self) -> None:
        assert self.stack

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> int:
        return GRANULARITY

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> int:
        assert size % GRANULARITY == 0
        assert properties.location.type == 1
        kind = "posix_fd" if properties.requestedHandleTypes == 1 else "fabric"
        assert self.supports[kind]
        with self.machine.lock:
            return self._handle(next(self.machine.ids))

    def _handle(self, memory: int) -> int:
        handle = next(self.next_id)
        self.handles[handle] = memory
        self.machine.references[memory] += 1
        return handle

    def cuMemRelease(self, handle: int) -> None:
        with self.machine.lock:
            self.machine.references[self.handles.pop(handle)] -= 1

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> Any:
        memory = self.handles[handle]
        if kind == 8:
            return SimpleNamespace(data=memory.to_bytes(64, "big"))
        descriptor = os.memfd_create("memory")
        os.write(descriptor, memory.to_bytes(8, "big"))
        return descriptor

    def cuMemImportFromShareableHandle(self, exported: Any, kind: int) -> int:
        memory = int.from_bytes(exported if kind == 8 else os.pread(exported, 8, 0), "big")
        with self.machine.lock:
            assert self.machine.references[memory] > 0 or not self.machine.shared
            return self._handle(memory)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        start = next(self.next_id) << 40
        self.reservations[start] = size
        return start

    def cuMemAddressFree(self, address: int, size: int) -> Status:
        if any(address <= mapped < address + size for mapped in self.mappings):
            return Status.CUDA_ERROR_INVALID_VALUE
        assert self.reservations.pop(address) == size
        return Status.CUDA_SUCCESS

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert any(s <= address and address + size <= s + n for s, n in self.reservations.items())
        assert address not in self.mappings
        memory = self.handles[handle]
        self.mappings[address] = (memory, size, False)
        with self.machine.lock:
            self.machine.references[memory] += 1

    def cuMemUnmap(self, address: int, size: int) -> None:
        memory, mapped, _ = self.mappings.pop(address)
        assert mapped == size
        with self.machine.lock:
            self.machine.references[memory] -= 1

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> None:
        memory, mapped, _ = self.mappings[address]
        assert (mapped, count, access[0].flags) == (size, 1, 3)
        self.mappings[address] = (memory, mapped, True)
