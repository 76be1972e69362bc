"""Who a rank is, in terms that mean the same to every rank: its host and its GPU."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

from .agreement import Agreement
from .driver import Driver


@dataclasses.dataclass(frozen=True)
class Identity:
    """One rank's host and GPU.

    Attributes
    ----------
    host : str
        Equal for two ranks exactly when they can pass file descriptors to each other.
    gpu : str
        UUID of the GPU, 32 hexadecimal digits.
    pci_bus_id : str
        PCI address of the GPU on its host.
    posix_fd, fabric : bool
        Whether the GPU's memory can be shared by file descriptor, and over an NVLink fabric.
    granularity : int
        Sizes of shareable memory are multiples of this many bytes.
    """

    host: str
    gpu: str
    pci_bus_id: str
    posix_fd: bool
    fabric: bool
    granularity: int


def host_key() -> str:
    """Return a name of this host, as far as sharing file descriptors is concerned.

    Containers on one machine share the kernel's boot id, and virtual machines resumed from one
    snapshot do too, hence the host name; descriptors travel over sockets that live in a network
    namespace, hence that.
    """
    boot = _read_or_unknown("/proc/sys/kernel/random/boot_id")
    try:
        network = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        network = "unknown"
    return f"{platform.node()}/{boot}/{network}"


def identify(driver: Driver, device: int) -> Identity:
    """Return who this process is with ``device``; no context is created."""
    virtual = bool(driver.attribute(device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"))
    posix_fd = virtual and bool(
        driver.attribute(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    )
    fabric = virtual and bool(driver.attribute(device, "HANDLE_TYPE_FABRIC_SUPPORTED"))
    # The granularity belongs to the GPU, not to the kind of handle: ask with one it has.
    granularity = driver.granularity(device, fabric=not posix_fd) if posix_fd or fabric else 1
    return Identity(
        host=host_key(),
        gpu=driver.device_uuid(device),
        pci_bus_id=driver.pci_bus_id(device),
        posix_fd=posix_fd,
        fabric=fabric,
        granularity=granularity,
    )


def exchange_identities(agreement: Agreement, own: Identity) -> list[Identity]:
    """Return every rank's identity, by rank; collective."""
    answers: list[dict[str, Any]] = agreement.gather("GPU identity", dataclasses.asdict(own))
    return [Identity(**answer) for answer in answers]


def _read_or_unknown(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"
