"""Recorded machines and installations, for the doctor to look at."""

# The fakes have the names of what they stand for.
# ruff: noqa: N801, N802

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from flashinfer.elastic.doctor.check import installation
from flashinfer.elastic.doctor.check.facts import Distribution, Installation, Kernels, Requirement

SITE = "/site-packages"


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A machine.

    Attributes
    ----------
    joined : tuple of str
        As ``nvidia-smi topo -m``, one letter a pair: X itself, N NVLink, P PCIe, ? not said.
    switched : bool
        Whether links lead to NVSwitches; else to the other GPU.
    fabric : tuple of int
        State, status and health mask of the NVLink fabric.
    """

    joined: tuple[str, ...] = ()
    arch: tuple[int, int] = (9, 0)
    name: str = "NVIDIA H200"
    links: int = 18
    switched: bool = True
    multicast: int = 1
    fabric: tuple[int, int, int] | None = (3, 0, 0)
    peer_access: bool = True
    free_bytes: int = 140 * 2**30
    nvml_fails: bool = False
    driver_fails: bool = False
    shareable: int = 1


NOTHING = Recorded(nvml_fails=True, driver_fails=True)
ONE = Recorded(("X",))
TWO_NV18 = Recorded(("XN", "NX"), multicast=1, fabric=(0, 0, 0))
EIGHT_SWITCHED = Recorded(tuple("N" * i + "X" + "N" * (7 - i) for i in range(8)))
BRIDGED = Recorded(
    ("XNPP", "NXPP", "PPXN", "PPNX"),
    name="NVIDIA H100 NVL",
    links=12,
    switched=False,
    multicast=0,
    fabric=(0, 0, 0),
)
PCIE = Recorded(("XP", "PX"), name="NVIDIA L40S", arch=(8, 9), links=0, multicast=0, fabric=None)
BROKEN_FABRIC = Recorded(("XN", "NX"), fabric=(3, 999, 0b01_00_00))
FABRIC_STARTING = Recorded(("XN", "NX"), fabric=(2, 0, 0))
BLACKWELL_ULTRA = Recorded(("XN", "NX"), name="NVIDIA B300", arch=(10, 3))


class FakeNvml:
    """The part of pynvml that is used."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_STATUS_UNKNOWN = 6
    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    class NVMLError(Exception):
        def __str__(self) -> str:
            return f"NVML says {self.args[0]}"

    class c_nvmlGpuFabricInfo_v2_t(ctypes.Structure):
        _fields_ = (
            ("state", ctypes.c_uint),
            ("status", ctypes.c_uint),
            ("healthMask", ctypes.c_uint),
        )

    class Memory:
        def __init__(self, free: int) -> None:
            self.total = 141 * 2**30
            self.free = free

    class Pci:
        def __init__(self, index: int) -> None:
            self.busId = f"00000000:{index:02X}:00.0".encode()

    def __init__(self, machine: Recorded) -> None:
        self.machine = machine
        self.open = 0

    def nvmlInit(self) -> None:
        if self.machine.nvml_fails:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.machine.joined)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        assert self.open > 0
        return int(name[-12:], 16)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-00000000-0000-0000-0000-{handle:012x}"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Pci:
        return self.Pci(handle)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.machine.name

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Memory:
        return self.Memory(self.machine.free_bytes)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.machine.arch

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.machine.links:
            raise self.NVMLError("not supported")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Pci:
        if self.machine.switched:
            return self.Pci(0xF0 + link)
        return self.Pci(self.machine.joined[handle].index("N"))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self.machine.switched else 0

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 50

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> int:
        return {"N": 0, "P": 5, "?": 6}[self.machine.joined[one][other]]

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, reference: Any) -> int:
        if self.machine.fabric is None:
            raise self.NVMLError("not supported")
        info = reference._obj
        info.state, info.status, info.healthMask = self.machine.fabric
        return 0


class FakeDriver:
    """The part of the driver that is asked; it has nothing that would make anything."""

    def __init__(self, machine: Recorded) -> None:
        self.machine = machine
        if machine.driver_fails:
            raise RuntimeError("libcuda.so.1 is not there")

    def device(self, index: int) -> int:
        if not self.machine.joined:
            raise RuntimeError("CUDA_ERROR_NO_DEVICE")
        return index

    def device_count(self) -> int:
        return len(self.machine.joined)

    def device_uuid(self, device: int) -> str:
        return f"{device:032x}"

    def pci_bus_id(self, device: int) -> str:
        return f"0000:{device:02x}:00.0"

    def attribute(self, device: int, name: str) -> int:
        return {
            "COMPUTE_CAPABILITY_MAJOR": self.machine.arch[0],
            "COMPUTE_CAPABILITY_MINOR": self.machine.arch[1],
            "MULTICAST_SUPPORTED": self.machine.multicast,
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": self.machine.shareable,
            "HANDLE_TYPE_FABRIC_SUPPORTED": 0,
        }[name]

    def granularity(self, device: int, *, fabric: bool) -> int:
        return 2 << 20

    def can_access_peer(self, device: int, peer: int) -> bool:
        return self.machine.peer_access


def probed(**changes: Any) -> dict[str, Any]:
    """What the probe writes where all is well, with changes."""
    return {
        "at": "",
        "flashinfer_file": f"{SITE}/flashinfer/__init__.py",
        "imports": dict.fromkeys(["flashinfer", *installation.SHADOWED]),
        "registry": {name: {"patched": True, "reason": ""} for name in installation.SHADOWED},
        "torch": "2.11.0",
        "torch_cuda": "13.0",
        "library": {"archs": [90, 100], "cuda": "13.0"},
    } | changes


def failing(error: str, missing: str | None) -> dict[str, Any]:
    """What the probe writes of imports that all fail."""
    return {
        name: {"text": error, "missing": missing} for name in ["flashinfer", *installation.SHADOWED]
    }


def installed(
    *,
    upstream: str | None = "0.6.13",
    directory: str = SITE,
    requirements: tuple[Requirement, ...] = (),
    kernels: Kernels | None = None,
    **changes: Any,
) -> Installation:
    """An installation in which all is well, with changes."""
    result = probed(**changes)
    return Installation(
        python="3.12.1",
        upstream=Distribution("flashinfer-python", upstream, SITE if upstream else None),
        ours=Distribution("flashinfer", "0.1.0+cu130.sm90.sm100", directory),
        our_directory=directory,
        requirements=requirements,
        flashinfer_file=result["flashinfer_file"],
        modules=tuple(installation.module(name, result) for name in installation.SHADOWED),
        kernels=kernels or Kernels("libflashinfer_elastic.so", True, "", (90, 100), "13.0"),
        torch=result["torch"],
        torch_cuda=result["torch_cuda"],
        crashed=result.get("crashed", ""),
    )
