"""The CUDA driver calls that symmetric memory is made of, checked, through cuda-bindings.

Handles and addresses are plain ints on this side. Every failure is a :class:`DriverError` that
names the call and the driver's error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

# Values of the CUDA driver API; numbers, because their Python spelling moved between releases.
_HANDLE_POSIX_FD = 1
_HANDLE_FABRIC = 8
_ALLOCATION_PINNED = 1
_LOCATION_DEVICE = 1
_ACCESS_READ_WRITE = 3
_GRANULARITY_RECOMMENDED = 1

FABRIC_HANDLE_BYTES = 64


class DriverError(RuntimeError):
    """A CUDA driver call failed.

    Attributes
    ----------
    call : str
        The driver function.
    name : str
        The driver's name of the error, such as ``CUDA_ERROR_OUT_OF_MEMORY``.
    """

    def __init__(self, call: str, name: str, meaning: str) -> None:
        super().__init__(f"{call} failed: {name}" + (f" ({meaning})" if meaning else ""))
        self.call = call
        self.name = name


class Driver:
    """Checked calls on a driver module.

    Parameters
    ----------
    api : module
        ``cuda.bindings.driver``, or anything with its functions and types.
    """

    def __init__(self, api: Any) -> None:
        self._api = api

    # Devices

    def device(self, index: int) -> int:
        """Return the driver's handle of a visible device; initialises the driver."""
        self._call("cuInit", 0)
        return int(self._call("cuDeviceGet", index))

    def device_count(self) -> int:
        """Return how many devices this process sees."""
        return int(self._call("cuDeviceGetCount"))

    def device_uuid(self, device: int) -> str:
        """Return the device's UUID as 32 hexadecimal digits."""
        # _v2, where it has a name of its own, tells the parts of a split GPU from each other.
        name = (
            "cuDeviceGetUuid_v2" if hasattr(self._api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        )
        return bytes(self._call(name, device).bytes).hex()

    def pci_bus_id(self, device: int) -> str:
        """Return the device's PCI address, ``domain:bus:device.function``."""
        return bytes(self._call("cuDeviceGetPCIBusId", 32, device)).split(b"\0")[0].decode()

    def attribute(self, device: int, name: str) -> int:
        """Return the device attribute ``CU_DEVICE_ATTRIBUTE_<name>``."""
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, device))

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Return whether ``device`` can reach memory of ``peer``."""
        return bool(self._call("cuDeviceCanAccessPeer", device, peer))

    # Contexts

    def retain_primary_context(self, device: int) -> Any:
        """Take a reference to the context that torch uses on this device."""
        return self._call("cuDevicePrimaryCtxRetain", device)

    def release_primary_context(self, device: int) -> None:
        """Give that reference back."""
        self._call("cuDevicePrimaryCtxRelease", device)

    @contextlib.contextmanager
    def current(self, context: Any) -> Iterator[None]:
        """Make ``context`` this thread's current one within a block, then the former again."""
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def synchronize(self) -> None:
        """Wait for all work of the current context."""
        self._call("cuCtxSynchronize")

    # Memory

    def granularity(self, device: int, *, fabric: bool) -> int:
        """Return the number of bytes that sizes of shareable memory are multiples of."""
        flag = self._api.CUmemAllocationGranularity_flags(_GRANULARITY_RECOMMENDED)
        return int(
            self._call("cuMemGetAllocationGranularity", self._properties(device, fabric), flag)
        )

    def create_memory(self, device: int, size: int, *, fabric: bool) -> int:
        """Allocate shareable device memory; return its handle."""
        return int(self._call("cuMemCreate", size, self._properties(device, fabric), 0))

    def release_memory(self, handle: int) -> None:
        """Give a handle back; the memory lives on while it is mapped anywhere."""
        self._call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        """Return a new file descriptor of the memory; the caller closes it."""
        kind = self._api.CUmemAllocationHandleType(_HANDLE_POSIX_FD)
        return int(self._call("cuMemExportToShareableHandle", handle, kind, 0))

    def import_fd(self, descriptor: int) -> int:
        """Return a handle of memory that another process exported; the descriptor stays open."""
        kind = self._api.CUmemAllocationHandleType(_HANDLE_POSIX_FD)
        return int(self._call("cuMemImportFromShareableHandle", descriptor, kind))

    def export_fabric(self, handle: int) -> bytes:
        """Return the bytes by which another host on the NVLink fabric finds the memory."""
        kind = self._api.CUmemAllocationHandleType(_HANDLE_FABRIC)
        return bytes(self._call("cuMemExportToShareableHandle", handle, kind, 0).data)

    def import_fabric(self, exported: bytes) -> int:
        """Return a handle of memory that another process exported as fabric bytes."""
        kind = self._api.CUmemAllocationHandleType(_HANDLE_FABRIC)
        fabric = self._api.CUmemFabricHandle()
        fabric.data = exported
        return int(self._call("cuMemImportFromShareableHandle", fabric.getPtr(), kind))

    def reserve(self, size: int, alignment: int) -> int:
        """Reserve addresses; return the first."""
        return int(self._call("cuMemAddressReserve", size, alignment, 0, 0))

    def free_reservation(self, address: int, size: int) -> None:
        """Give reserved addresses back; nothing may be mapped there."""
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int, handle: int) -> None:
        """Map memory at reserved addresses; :meth:`allow_access` makes it usable."""
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        """Undo :meth:`map`."""
        self._call("cuMemUnmap", address, size)

    def allow_access(self, address: int, size: int, device: int) -> None:
        """Let kernels of ``device`` read and write mapped memory."""
        access = self._api.CUmemAccessDesc()
        access.location.type = self._api.CUmemLocationType(_LOCATION_DEVICE)
        access.location.id = device
        access.flags = self._api.CUmemAccess_flags(_ACCESS_READ_WRITE)
        self._call("cuMemSetAccess", address, size, [access], 1)

    def _properties(self, device: int, fabric: bool) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType(_ALLOCATION_PINNED)
        properties.requestedHandleTypes = self._api.CUmemAllocationHandleType(
            _HANDLE_FABRIC if fabric else _HANDLE_POSIX_FD
        )
        properties.location.type = self._api.CUmemLocationType(_LOCATION_DEVICE)
        properties.location.id = device
        return properties

    def _call(self, name: str, *args: Any) -> Any:
        """Call one driver function; return its value, or None when it has none."""
        status, *values = getattr(self._api, name)(*args)
        if int(status) != 0:
            raise DriverError(
                name, getattr(status, "name", str(int(status))), self._meaning(status)
            )
        return values[0] if values else None

    def _meaning(self, status: Any) -> str:
        _, text = self._api.cuGetErrorString(status)
        return bytes(text).decode() if text else ""


@functools.lru_cache(maxsize=1)
def load_driver() -> Driver:
    """Return the installed cuda-bindings' driver.

    Raises
    ------
    RuntimeError
        cuda-bindings is missing. A missing libcuda shows at the first call only.
    """
    try:
        return Driver(importlib.import_module("cuda.bindings.driver"))
    except ImportError:
        raise RuntimeError("cuda-bindings is not installed: pip install cuda-bindings") from None
