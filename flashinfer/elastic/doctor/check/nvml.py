"""What nvidia-ml-py says of a GPU, in plain values; None where it says nothing."""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from typing import Any

from flashinfer.elastic.allreduce.identity import Identity

_FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
_FABRIC_COMPLETED = 3

# Bits of a fabric's health mask: two each, 1 for true and 2 for false, 0 and 3 for not known.
_FABRIC_HEALTH = {
    0: "degraded bandwidth",
    2: "route recovery under way",
    4: "unhealthy route",
    6: "access timeout recovery under way",
}
_HEALTH_TRUE = 1

_PATHS = {
    0: "same board",
    10: "PIX",
    20: "PXB",
    30: "PHB",
    40: "NODE",
    50: "SYS",
}


class Nvml:
    """An initialised NVML.

    Parameters
    ----------
    api : module
        ``pynvml``, or anything with its functions.

    Raises
    ------
    Exception
        ``api.NVMLError``, if there is no driver.
    """

    def __init__(self, api: Any) -> None:
        self.api = api
        api.nvmlInit()

    def close(self) -> None:
        """Give NVML back; others of this process keep theirs."""
        with contextlib.suppress(self.api.NVMLError):
            self.api.nvmlShutdown()

    def driver_version(self) -> str | None:
        """Return the driver's version."""
        version = self._ask("nvmlSystemGetDriverVersion")
        return None if version is None else _text(version)

    def cuda_version(self) -> str | None:
        """Return the CUDA version that the driver is for."""
        number = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return None if number is None else f"{number // 1000}.{number % 1000 // 10}"

    def all_gpus(self) -> list[Identity]:
        """Return all GPUs, in NVML's order."""
        count = self._ask("nvmlDeviceGetCount") or 0
        found = [self._name(index) for index in range(count)]
        return [identity for identity in found if identity is not None]

    def describe(self, gpu: Identity) -> dict[str, Any]:
        """Return name, memory, links and fabric of a GPU; empty where NVML does not know it."""
        handle = self._handle(gpu)
        if handle is None:
            return {}
        name = self._ask("nvmlDeviceGetName", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        fabric, fabric_error = self._fabric(handle)
        return {
            "name": None if name is None else _text(name),
            "memory_bytes": None if memory is None else int(memory.total),
            "free_bytes": None if memory is None else int(memory.free),
            "arch": None if capability is None else 10 * capability[0] + capability[1],
            "links": len(self._links(handle)),
            "fabric": fabric,
            "fabric_error": fabric_error,
        }

    def links_between(self, one: Identity, other: Identity) -> int | None:
        """Return how many NVLink links join two GPUs, directly or through switches."""
        first, second = self._handle(one), self._handle(other)
        if first is None or second is None:
            return None
        direct = [link for link in self._links(first) if self._leads_to(first, link, other)]
        if direct:
            return len(direct)
        switched = [
            sum(self._leads_to_switch(handle, link) for link in self._links(handle))
            for handle in (first, second)
        ]
        return min(switched) or None

    def path_between(self, one: Identity, other: Identity) -> str | None:
        """Return the way over PCIe, in the words of ``nvidia-smi topo``."""
        first, second = self._handle(one), self._handle(other)
        if first is None or second is None:
            return None
        level = self._ask("nvmlDeviceGetTopologyCommonAncestor", first, second)
        return None if level is None else _PATHS.get(level, str(level))

    def _name(self, index: int) -> Identity | None:
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        name = self._ask("nvmlDeviceGetUUID", handle)
        pci = self._ask("nvmlDeviceGetPciInfo", handle)
        if name is None or pci is None:
            return None
        gpu = uuid.UUID(_text(name).removeprefix("GPU-")).hex
        return Identity("", gpu, _text(pci.busId), False, False, 1)

    def _handle(self, gpu: Identity) -> Any:
        name = f"GPU-{uuid.UUID(hex=gpu.gpu)}"
        return self._ask("nvmlDeviceGetHandleByUUID", name)

    def _links(self, handle: Any) -> list[int]:
        """Return the links of a GPU that are up."""
        up = []
        for link in range(getattr(self.api, "NVML_NVLINK_MAX_LINKS", 18)):
            state = self._ask("nvmlDeviceGetNvLinkState", handle, link)
            if state:
                up.append(link)
        return up

    def _leads_to(self, handle: Any, link: int, other: Identity) -> bool:
        info = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        return info is not None and _same_bus(_text(info.busId), other.pci_bus_id)

    def _leads_to_switch(self, handle: Any, link: int) -> bool:
        kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        return kind is not None and bool(kind == self.api.NVML_NVLINK_DEVICE_TYPE_SWITCH)

    def _fabric(self, handle: Any) -> tuple[str | None, str]:
        """Return the state of the NVLink fabric, and what is wrong with it."""
        record = getattr(self.api, "c_nvmlGpuFabricInfo_v2_t", None)
        if record is None:
            return None, ""
        info = record()
        # NVML's "success" is 0; no answer is None.
        if self._ask("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)) is None:
            return None, ""
        state = _FABRIC_STATES.get(info.state, f"state {info.state}")
        if info.state != _FABRIC_COMPLETED:
            return state, ""
        wrong = []
        if info.status:
            wrong.append(str(self.api.NVMLError(info.status)))
        wrong += [
            name
            for shift, name in _FABRIC_HEALTH.items()
            if info.healthMask >> shift & 3 == _HEALTH_TRUE
        ]
        return state, ", ".join(wrong)

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return an answer, or None where this driver or this nvidia-ml-py has none."""
        try:
            return getattr(self.api, function)(*arguments)
        except (self.api.NVMLError, AttributeError):
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _same_bus(one: str, other: str) -> bool:
    """Compare PCI addresses, whose domain has four digits here and eight there."""

    def normal(address: str) -> tuple[int, str]:
        domain, _, rest = address.lower().partition(":")
        return int(domain or "0", 16), rest

    return normal(one) == normal(other)
