"""The driver and the GPUs, through cuda-bindings and nvidia-ml-py.

Only asks: no context, no memory, no multicast object is made, so it may run beside a server. What
cannot be asked is listed with the reason.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from flashinfer.elastic.allreduce import topology
from flashinfer.elastic.allreduce.driver import Driver, load_driver
from flashinfer.elastic.allreduce.identity import Identity

from .facts import Gpu, Machine, Pair
from .nvml import Nvml

P = ParamSpec("P")
T = TypeVar("T")


def gather(
    make_driver: Callable[[], Driver] = load_driver, load_nvml: Callable[[], Any] | None = None
) -> Machine:
    """Find out what GPUs there are and what joins them.

    Parameters
    ----------
    make_driver : callable
        Gives the driver; the installed cuda-bindings' by default.
    load_nvml : callable, optional
        Gives ``pynvml`` or what stands in for it.
    """
    unknown: list[str] = []
    nvml = _open_nvml(load_nvml or (lambda: importlib.import_module("pynvml")), unknown)
    try:
        return _survey(make_driver, nvml, unknown)
    finally:
        if nvml is not None:
            nvml.close()


def _open_nvml(load: Callable[[], Any], unknown: list[str]) -> Nvml | None:
    try:
        return Nvml(load())
    except ImportError as error:
        unknown.append(f"driver version, NVLink and fabric: nvidia-ml-py is missing ({error})")
    except Exception as error:
        # NVMLError, whose class is not known without the module.
        unknown.append(f"driver version, NVLink and fabric: NVML does not work ({error})")
    return None


def _survey(make_driver: Callable[[], Driver], nvml: Nvml | None, unknown: list[str]) -> Machine:
    driver, devices = _open_driver(make_driver, unknown)
    if driver is not None:
        identities = [_identity(driver, device) for device in devices]
    else:
        identities = nvml.all_gpus() if nvml else []
        if identities:
            unknown.append("which GPUs this process may use: all that NVML knows are listed")
    gpus = tuple(
        _gpu(index, identity, driver, devices[index] if driver else None, nvml)
        for index, identity in enumerate(identities)
    )
    return Machine(
        driver=nvml.driver_version() if nvml else None,
        driver_cuda=nvml.cuda_version() if nvml else None,
        gpus=gpus,
        pairs=tuple(_pairs(identities, driver, devices, nvml)),
        unknown=tuple(unknown),
    )


def _open_driver(make: Callable[[], Driver], unknown: list[str]) -> tuple[Driver | None, list[int]]:
    """Return the driver and the devices that this process may use."""
    try:
        driver = make()
        first = driver.device(0)  # initialises
        count = driver.device_count()
        return driver, [first, *(driver.device(index) for index in range(1, count))]
    except Exception as error:
        # DriverError where there is a driver and no GPU; what cuda-bindings raises without libcuda.
        unknown.append(f"GPUs, multicast and peer access: no answer from the CUDA driver ({error})")
        return None, []


def _identity(driver: Driver, device: int) -> Identity:
    """Return who a GPU is, of which only its names count here."""
    return Identity("", driver.device_uuid(device), driver.pci_bus_id(device), False, False, 1)


def _gpu(
    index: int, identity: Identity, driver: Driver | None, device: int | None, nvml: Nvml | None
) -> Gpu:
    arch = multicast = shareable = granularity = None
    if driver is not None and device is not None:

        def attribute(name: str) -> int | None:
            return _or_none(driver.attribute, device, name)

        major = attribute("COMPUTE_CAPABILITY_MAJOR")
        minor = attribute("COMPUTE_CAPABILITY_MINOR")
        arch = 10 * major + minor if major is not None and minor is not None else None
        multicast = _as_bool(attribute("MULTICAST_SUPPORTED"))
        by_file = attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
        by_fabric = attribute("HANDLE_TYPE_FABRIC_SUPPORTED")
        virtual = attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")
        if virtual is not None and not (by_file is None and by_fabric is None):
            shareable = bool(virtual and (by_file or by_fabric))
        if shareable:
            granularity = _or_none(driver.granularity, device, fabric=not by_file)
    described = nvml.describe(identity) if nvml else {}
    return Gpu(
        index=index,
        uuid=identity.gpu,
        pci=identity.pci_bus_id,
        name=described.get("name"),
        arch=arch if arch is not None else described.get("arch"),
        memory_bytes=described.get("memory_bytes"),
        free_bytes=described.get("free_bytes"),
        links=described.get("links"),
        multicast_attribute=multicast,
        shareable=shareable,
        granularity=granularity,
        fabric=described.get("fabric"),
        fabric_error=described.get("fabric_error", ""),
    )


def _pairs(
    identities: list[Identity], driver: Driver | None, devices: list[int], nvml: Nvml | None
) -> list[Pair]:
    api = nvml.api if nvml else None
    seen = [topology.query_links(api, identity, identities) for identity in identities]
    lacking = set(topology.pairs_without_nvlink(seen))
    pairs = []
    for a, b in itertools.combinations(range(len(identities)), 2):
        joined = topology.NVLINK in (seen[a][b], seen[b][a])
        nvlink = topology.NO_NVLINK if (a, b) in lacking else topology.UNKNOWN
        access = None
        if driver is not None:
            there = _or_none(driver.can_access_peer, devices[a], devices[b])
            back = _or_none(driver.can_access_peer, devices[b], devices[a])
            access = None if there is None or back is None else there and back
        pairs.append(
            Pair(
                a,
                b,
                topology.NVLINK if joined else nvlink,
                nvml.links_between(identities[a], identities[b]) if nvml and joined else None,
                nvml.path_between(identities[a], identities[b]) if nvml else None,
                access,
            )
        )
    return pairs


def _or_none(ask: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Return an answer, or None where the driver or the installed cuda-bindings has none."""
    try:
        return ask(*args, **kwargs)
    except Exception:
        return None


def _as_bool(value: int | None) -> bool | None:
    return None if value is None else bool(value)
