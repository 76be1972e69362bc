"""Whether a group may try NVLink multicast.

Only torch makes multicast objects, together with its symmetric memory, and only where nothing says
that multicast is not wanted: a program that uses it on a machine that is not fit for it can take
the NVLink of all its GPUs out of service. What the driver's attribute says proves nothing; torch's
handle and a trial (``trial.py``) do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import size_classes, trial
from .agreement import Agreement, CollectiveError
from .engines.native import NativeEngine, memory_bytes
from .memory import GroupMemory
from .settings import MULTICAST, NO
from .torch_symmetric import TorchSymmetricMemory, symmetric_memory

logger = logging.getLogger("flashinfer.elastic")

_SWITCHES = {
    # What switches multicast off for others: the variable, and whether that is by a true value.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": True,
    "NCCL_NVLS_ENABLE": False,
    "NVSHMEM_DISABLE_NVLS": True,
}

_MISSING = object()


def find_group(
    agreement: Agreement,
    setting: str,
    backend: Any,
    device: torch.device,
    *,
    detachable: bool,
) -> str | None:
    """Return the group with which torch's symmetric memory may be tried; collective.

    Parameters
    ----------
    agreement : Agreement
        The ranks of the group.
    setting : str
        Of ``FLASHINFER_MNNVL_MULTICAST``, the same on all ranks: ``auto``, ``0`` or ``1``.
    backend : CommBackend
        What the caller gave; one over ``torch.distributed`` has its group as ``_group``.
    device : torch.device
        This rank's GPU.
    detachable : bool
        Whether callers may expect to detach the workspace for a checkpoint. That takes memory which
        can come back at the same addresses, and torch's cannot; so ``auto`` does without multicast
        then.

    Returns
    -------
    str or None
        Torch's name of the group; None on every rank where multicast is not to be tried.

    Raises
    ------
    CollectiveError
        On every rank, with ``1``, where any rank has a reason not to try. The text names ranks and
        reasons.
    """
    if setting == "0":
        return None

    def own_group() -> str:
        _require_wanted(os.environ)
        if setting == "auto" and detachable:
            raise RuntimeError(
                f"the workspace can be detached for a checkpoint, which {MULTICAST}=1 gives up"
            )
        _require_support(device)
        return _group_name(agreement, backend)

    try:
        return agreement.attempt(f"{MULTICAST}={setting}", own_group)
    except CollectiveError as error:
        if setting == "1":
            raise
        logger.debug("All-reduce without multicast: %s", error)
        return None


def open_engine(
    agreement: Agreement,
    device: torch.device,
    buffer_bytes: int,
    make: Callable[[GroupMemory | None], NativeEngine],
    *,
    setting: str,
    group_name: str | None,
) -> NativeEngine:
    """Open an engine, over memory with a multicast address where that is worth it; collective.

    Parameters
    ----------
    agreement, device, buffer_bytes
        As for :class:`NativeEngine`.
    make : callable
        Makes the engine on the memory it is given, or on memory of its own.
    setting : str
        Of ``FLASHINFER_MNNVL_MULTICAST``.
    group_name : str or None
        What :func:`find_group` gave.

    Raises
    ------
    CollectiveError
        On every rank, if creation fails on any; with ``1`` also if multicast does not work. All
        that was taken has been given back.
    """
    if group_name is None:
        return make(None)
    try:
        engine = _open_over_multicast(agreement, device, buffer_bytes, make, group_name)
    except CollectiveError as error:
        if setting == "1":
            raise
        # As text: a record that is kept would keep the error, and with it torch's memory.
        logger.info("All-reduce without NVLink multicast: %s", str(error))
        return make(None)
    if agreement.rank == 0:
        logger.info(
            "All-reduce by NVLink multicast, payload of a rank: one-shot %s; two-shot %s.",
            *map(size_classes.describe, engine.multicast),
        )
    if setting == "auto" and not any(engine.multicast):
        # Nothing is sent that way, so its memory is not worth what ours can do.
        engine.close()
        return make(None)
    return engine


def _open_over_multicast(
    agreement: Agreement,
    device: torch.device,
    buffer_bytes: int,
    make: Callable[[GroupMemory | None], NativeEngine],
    group_name: str,
) -> NativeEngine:
    memory = TorchSymmetricMemory.create(agreement, device, memory_bytes(buffer_bytes), group_name)
    engine = make(memory)
    try:
        with engine.trying_multicast():
            chosen = trial.run(agreement, engine, device, buffer_bytes)
        agreement.attempt("choosing multicast", lambda: engine.choose_multicast(chosen))
    except BaseException:
        engine.close()
        raise
    return engine


def _require_wanted(environment: Mapping[str, str]) -> None:
    """Raise where something in the environment says that multicast is not wanted here."""
    for name, when in _SWITCHES.items():
        text = environment.get(name, "").strip().lower()
        if text and (text not in NO) is when:
            raise RuntimeError(f"{name}={environment[name]} is set")


def _group_name(agreement: Agreement, backend: Any) -> str:
    """Return torch's name of the group behind a backend, if it is just this group."""
    distributed = torch.distributed
    group: Any = getattr(backend, "_group", _MISSING)
    if group is _MISSING or not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError("the communication backend has no group of torch.distributed")
    place = (distributed.get_rank(group), distributed.get_world_size(group))
    if place != (agreement.rank, agreement.world_size):
        raise RuntimeError(
            f"the backend's group has rank {place[0]} of {place[1]} for rank {agreement.rank} of "
            f"{agreement.world_size}"
        )
    if agreement.world_size == 1:
        raise RuntimeError("there are no other ranks")
    if group is None:
        group = distributed.group.WORLD
    return str(group.group_name)


def _require_support(device: torch.device) -> None:
    """Raise where torch would make no memory with a multicast address on this GPU."""
    memory = symmetric_memory()
    if not memory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, device.index):
        raise RuntimeError("torch finds no multicast on this GPU")
    chosen = getattr(memory, "get_backend", lambda _: None)(device)
    if chosen not in (None, "CUDA"):
        raise RuntimeError(f"torch's symmetric memory is set to its backend {chosen}")
