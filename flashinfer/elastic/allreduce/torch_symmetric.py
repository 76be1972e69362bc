"""Symmetric memory of torch's, for its multicast address.

A multicast object can take a machine's NVLink out of service where the fabric is not fit for it, so
none is ever made here. Torch makes one with its own symmetric memory where it finds that it can;
this is that memory, with the interface of ours.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from typing import Any

import torch

from .agreement import Agreement
from .symmetric import refuse_capture

logger = logging.getLogger(__name__)

# Memory that must not be given back where its last reference went away: torch waits for the device
# when it frees, which a capture forbids and a failed device makes fatal for the process.
_kept: list[Any] = []


class TorchSymmetricMemory:
    """The memory of one group, with a multicast address. Made by :meth:`create`.

    Attributes
    ----------
    rank, world_size : int
        This rank's place in the group.
    size_bytes : int
        Bytes on each rank.
    addresses : tuple[int, ...]
        Where each rank's memory is mapped in this process, by rank; empty once closed.
    multicast_address : int
        Where a multimem store reaches the memory of all ranks; 0 once closed.
    mapped : bool
        Whether there is memory behind the addresses.
    detachable : bool
        False.
    """

    detachable = False

    def __init__(self, rank: int, world_size: int, device: torch.device, size_bytes: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.size_bytes = size_bytes
        self.addresses: tuple[int, ...] = ()
        self.multicast_address = 0
        self.mapped = False
        self._device = device
        self._tensor: torch.Tensor | None = None
        self._handle: Any = None

    @classmethod
    def create(
        cls, agreement: Agreement, device: torch.device, size_bytes: int, group_name: str
    ) -> TorchSymmetricMemory:
        """Create memory on the GPUs of a group; collective.

        Torch's rendezvous has collectives of its own: a rank that fails inside it leaves the others
        waiting there until the time-out of the group's store. All steps around it are agreed on.

        Parameters
        ----------
        agreement : Agreement
            The ranks of the group.
        device : torch.device
            This rank's GPU.
        size_bytes : int
            Bytes on each rank, the same on all.
        group_name : str
            By which torch knows the group.

        Raises
        ------
        RuntimeError
            At once and without a collective, when this thread's stream is capturing a CUDA graph.
        CollectiveError
            On every rank, when any step failed on any, or torch's handle has no multicast address
            on any. All that was taken has been given back.
        """
        refuse_capture("create symmetric memory")
        memory = cls(agreement.rank, agreement.world_size, device, size_bytes)
        try:
            agreement.attempt("allocation of torch's symmetric memory", memory._allocate)
            agreement.attempt(
                "rendezvous of torch's symmetric memory", lambda: memory._rendezvous(group_name)
            )
            agreement.attempt("multicast address of torch's symmetric memory", memory._adopt)
        except BaseException as error:
            memory.close()
            _forget_locals(error)
            raise
        return memory

    def detach(self) -> None:
        """Refuse: torch cannot take memory away and bring it back at the same addresses."""
        raise NotImplementedError("torch's symmetric memory cannot be detached")

    def attach(self, agreement: Agreement) -> None:
        """Do nothing: the memory is never detached."""

    def close(self) -> None:
        """Give everything back; local, without a collective.

        Waits for this device first. May be called twice, on half-made memory and at interpreter
        exit. Where the device has failed, the memory goes with its context.

        Raises
        ------
        RuntimeError
            A CUDA graph is being captured; nothing was given back.
        """
        if self._tensor is None:
            return
        refuse_capture("close symmetric memory")
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            logger.warning("Symmetric memory is left to the end of the process: %s", error)
            _kept.append((self._tensor, self._handle))
        self.addresses = ()
        self.multicast_address = 0
        self.mapped = False
        self._handle = None
        self._tensor = None

    def __del__(self) -> None:
        """Give everything back, unless the process is about to do so anyway."""
        if getattr(self, "_tensor", None) is None:
            return
        if sys.is_finalizing():
            _kept.append((self._tensor, self._handle))
            return
        try:
            self.close()
        except RuntimeError:  # a capture
            _kept.append((self._tensor, self._handle))

    # Steps of creation

    def _allocate(self) -> None:
        # Not `empty` of the module around it, which takes memory from a pool that keeps it.
        self._tensor = symmetric_memory().empty_strided_p2p(
            (self.size_bytes,), (1,), torch.uint8, self._device
        )

    def _rendezvous(self, group_name: str) -> None:
        if _before(2, 11):
            module = importlib.import_module("torch.distributed._symmetric_memory")
            module.enable_symm_mem_for_group(group_name)
        self._handle = symmetric_memory().rendezvous(self._tensor, group_name)

    def _adopt(self) -> None:
        """Take the addresses from the handle."""
        handle, tensor = self._handle, self._tensor
        assert tensor is not None
        if (handle.rank, handle.world_size) != (self.rank, self.world_size):
            raise RuntimeError(
                f"rank {self.rank} of {self.world_size} is rank {handle.rank} of "
                f"{handle.world_size} to torch"
            )
        addresses = tuple(int(address) for address in handle.buffer_ptrs)
        if addresses[self.rank] != tensor.data_ptr() or handle.buffer_size < self.size_bytes:
            raise RuntimeError("torch's handle is not of the memory that was asked for")
        multicast = int(handle.multicast_ptr or 0)
        if multicast == 0:
            raise RuntimeError("torch's handle has no multicast address")
        self.addresses = addresses
        self.multicast_address = multicast
        self.mapped = True


def symmetric_memory() -> Any:
    """Return torch's class of symmetric memory.

    From its extension: the module around it takes long to import.

    Raises
    ------
    ImportError
        This torch has none.
    """
    return importlib.import_module("torch._C._distributed_c10d")._SymmetricMemory


def _forget_locals(error: BaseException | None) -> None:
    """Let go of what the functions that raised an error held, torch's memory among it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _before(major: int, minor: int) -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < (major, minor)
