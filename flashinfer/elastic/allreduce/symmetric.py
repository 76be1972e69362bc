"""Symmetric memory: memory of the same size on every GPU of a group, mapped by every rank.

Built on the driver's virtual memory calls, so that each step can be agreed on by all ranks, every
byte is given back the moment it should be, and memory can be taken away and brought back at the
same addresses. Other allocators and their settings play no part. No multicast object is ever made.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import interrupts
from .agreement import Agreement, CollectiveError, format_ranks
from .driver import Driver, DriverError, load_driver
from .fd_exchange import peer_descriptors
from .identity import Identity, exchange_identities, identify

T = TypeVar("T")

logger = logging.getLogger(__name__)

# The context went away before the memory, and the memory with it: at interpreter exit, or after
# a reset of the device.
_CONTEXT_GONE = frozenset(
    {
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_NOT_INITIALIZED",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_INVALID_CONTEXT",
    }
)

# Memory whose last reference went away during a capture; freed at the next call out of one.
_postponed: list[SymmetricMemory] = []

_warned: set[str] = set()


class SymmetricMemory:
    """The memory of one group. Made by :meth:`create`.

    Memory is not initialised. A peer's memory stays valid here until it is unmapped here, even
    when the peer closes first.

    Attributes
    ----------
    rank, world_size : int
        This rank's place in the group.
    device_index : int
        The GPU of this rank, as torch counts.
    size_bytes : int
        Bytes asked for on each rank.
    allocated_bytes : int
        Bytes taken on each GPU: ``size_bytes`` rounded up to the driver's granularity.
    addresses : tuple[int, ...]
        Where each rank's memory is mapped in this process, by rank; ``addresses[rank]`` is this
        GPU's own. Unchanged by :meth:`detach` and :meth:`attach`; empty once closed.
    mapped : bool
        Whether there is memory behind the addresses.
    multicast_address : int
        0: there is none.
    detachable : bool
        True.
    """

    multicast_address = 0
    detachable = True

    def __init__(self, rank: int, world_size: int, device_index: int, size_bytes: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device_index = device_index
        self.size_bytes = size_bytes
        self.allocated_bytes = 0
        self.addresses: tuple[int, ...] = ()
        self.mapped = False
        self._closed = False
        self._driver: Driver | None = None
        self._device = -1
        self._context: Any = None
        # What is held, in the order taken: the context and the addresses; and what is mapped there.
        self._foundation = contextlib.ExitStack()
        self._mappings = contextlib.ExitStack()

    @classmethod
    def create(
        cls,
        agreement: Agreement,
        device_index: int,
        size_bytes: int,
        *,
        driver: Driver | None = None,
    ) -> SymmetricMemory:
        """Create memory on the GPUs of a group; collective.

        Parameters
        ----------
        agreement : Agreement
            The ranks of the group.
        device_index : int
            This rank's GPU, as torch counts.
        size_bytes : int
            Bytes on each rank, the same on all.
        driver : Driver, optional
            The installed cuda-bindings' by default.

        Returns
        -------
        SymmetricMemory
            Mapped on all ranks when this returns on any.

        Raises
        ------
        RuntimeError
            At once and without a collective, when this thread's stream is capturing a CUDA graph.
        CollectiveError
            On every rank, when any step failed on any. All that was taken has been given back.
        """
        refuse_capture("create symmetric memory")
        _close_postponed()
        memory = cls(agreement.rank, agreement.world_size, device_index, size_bytes)
        try:
            with interrupts.held():
                agreement.attempt("request for symmetric memory", lambda: _check_size(size_bytes))
                agreement.same("size of symmetric memory", size_bytes)
                agreement.attempt("opening the GPU", lambda: memory._open(driver or load_driver()))
                identities = memory._survey(agreement)
                granularity = max(identity.granularity for identity in identities)
                memory._attempt(
                    agreement, "reservation of addresses", lambda: memory._reserve(granularity)
                )
                memory._map_all(agreement, fabric=choose_fabric(identities))
        except BaseException:
            memory.close()
            raise
        return memory

    def detach(self) -> None:
        """Give the memory back but keep the addresses, for a checkpoint; local.

        Waits for this device first. The memory of a GPU is free when all ranks have detached.
        Does nothing when already detached.

        Raises
        ------
        RuntimeError
            The memory is closed, or a CUDA graph is being captured.
        DriverError
            Work on this device failed.
        """
        refuse_capture("detach symmetric memory")
        self._require_open()
        if not self.mapped:
            return
        assert self._driver is not None
        with interrupts.held(), self._driver.current(self._context):
            self._driver.synchronize()
            self._unmap()

    def attach(self, agreement: Agreement) -> None:
        """Bring memory back at the same addresses, not initialised; collective.

        Does nothing when no rank is detached.

        Raises
        ------
        RuntimeError
            At once and without a collective, when this thread's stream is capturing a CUDA graph.
        CollectiveError
            On every rank, when any step failed on any; then the memory is detached as before.
        """
        refuse_capture("attach symmetric memory")
        with interrupts.held():
            agreement.attempt("attaching symmetric memory", lambda: self._check_attach(agreement))
            agreement.same(
                "symmetric memory to attach", {"mapped": self.mapped, "bytes": self.allocated_bytes}
            )
            if self.mapped:
                return
            self._map_all(agreement, fabric=choose_fabric(self._survey(agreement)))

    def close(self) -> None:
        """Give everything back; local, without a collective.

        Waits for this device first. May be called twice, on half-made memory and at interpreter
        exit; what a destroyed context has already taken along is no error.

        Raises
        ------
        RuntimeError
            A CUDA graph is being captured; nothing was given back.
        """
        if self._closed:
            return
        refuse_capture("close symmetric memory")
        # A device may take long to be waited for; the rest is still done when a user is impatient.
        with interrupts.held():
            self._give_back()

    def _give_back(self) -> None:
        self._closed = True
        self.addresses = ()
        if self._driver is not None and self._context is not None:
            try:
                with self._driver.current(self._context):
                    if self.mapped:
                        _forgive(self._driver.synchronize)
                    self._unmap()
            except DriverError as error:  # the context cannot be made current any more
                _log_failure(error)
                self._unmap()
        self._foundation.close()
        _close_postponed()

    def __del__(self) -> None:
        """Give everything back, unless the process is about to do so anyway."""
        if sys.is_finalizing() or getattr(self, "_closed", True):
            return
        if _capturing():
            _postponed.append(self)
        else:
            self.close()

    # Steps of creation

    def _open(self, driver: Driver) -> None:
        """Take a reference to the context that torch uses on this device."""
        device = driver.device(self.device_index)
        context = driver.retain_primary_context(device)
        self._foundation.callback(_forgive, driver.release_primary_context, device)
        self._driver, self._device, self._context = driver, device, context

    def _survey(self, agreement: Agreement) -> list[Identity]:
        """Learn who and where all ranks are, and check that this GPU reaches the others."""
        driver = self._opened
        own = self._attempt(
            agreement, "identifying the GPU", lambda: identify(driver, self._device)
        )
        identities = exchange_identities(agreement, own)
        self._attempt(agreement, "peer access", lambda: self._check_peer_access(identities))
        return identities

    def _check_peer_access(self, identities: Sequence[Identity]) -> None:
        driver = self._opened
        visible = {}
        for index in range(driver.device_count()):
            device = driver.device(index)
            visible[driver.device_uuid(device)] = device
        # GPUs hidden from this process or on other hosts cannot be asked about. Mapping their
        # memory tells.
        unreachable = [
            rank
            for rank, identity in enumerate(identities)
            if identity.gpu in visible
            and visible[identity.gpu] != self._device
            and not driver.can_access_peer(self._device, visible[identity.gpu])
        ]
        if unreachable:
            raise RuntimeError(
                f"GPU {identities[self.rank].pci_bus_id} has no peer access to the GPUs of "
                f"{format_ranks(unreachable)}, so they can share no memory, unicast or multicast"
            )

    def _reserve(self, granularity: int) -> None:
        driver = self._opened
        self.allocated_bytes = -(-self.size_bytes // granularity) * granularity
        total = self.allocated_bytes * self.world_size
        base = driver.reserve(total, granularity)
        self._foundation.callback(_forgive, driver.free_reservation, base, total)
        self.addresses = tuple(base + r * self.allocated_bytes for r in range(self.world_size))

    def _map_all(self, agreement: Agreement, *, fabric: bool) -> None:
        """Allocate, exchange and map the memory of all ranks."""
        driver = self._opened
        # Handles and descriptors are needed until the memory is mapped, and no longer: a mapping
        # keeps its memory.
        with contextlib.ExitStack() as handles:

            def keep(handle: int) -> int:
                handles.callback(_forgive, driver.release_memory, handle)
                return handle

            own = self._attempt(
                agreement,
                f"allocation of {self.allocated_bytes} bytes",
                lambda: keep(
                    driver.create_memory(self._device, self.allocated_bytes, fabric=fabric)
                ),
            )
            exchange = self._exchange_by_fabric if fabric else self._exchange_by_descriptor
            memory = exchange(agreement, own, keep)
            with contextlib.ExitStack() as mappings:
                self._attempt(agreement, "mapping of memory", lambda: self._map(memory, mappings))
                self._mappings = mappings.pop_all()
            self.mapped = True

    def _exchange_by_descriptor(
        self, agreement: Agreement, own: int, keep: Callable[[int], int]
    ) -> list[int]:
        driver = self._opened
        with contextlib.ExitStack() as descriptors:

            def export() -> int:
                descriptor = driver.export_fd(own)
                descriptors.callback(os.close, descriptor)
                return descriptor

            exported = self._attempt(agreement, "export of the memory handle", export)
            peers = descriptors.enter_context(peer_descriptors(agreement, exported))
            return self._attempt(
                agreement,
                "import of the peers' memory",
                lambda: [
                    own if rank == self.rank else keep(driver.import_fd(peers[rank]))
                    for rank in range(self.world_size)
                ],
            )

    def _exchange_by_fabric(
        self, agreement: Agreement, own: int, keep: Callable[[int], int]
    ) -> list[int]:
        driver = self._opened
        exported = self._attempt(
            agreement, "export of the memory handle", lambda: driver.export_fabric(own)
        )
        peers = [
            bytes.fromhex(answer) for answer in agreement.gather("memory handles", exported.hex())
        ]
        return self._attempt(
            agreement,
            "import of the peers' memory",
            lambda: [
                own if rank == self.rank else keep(driver.import_fabric(peer))
                for rank, peer in enumerate(peers)
            ],
        )

    def _map(self, memory: Sequence[int], mappings: contextlib.ExitStack) -> None:
        driver = self._opened
        for address, handle in zip(self.addresses, memory, strict=True):
            driver.map(address, self.allocated_bytes, handle)
            mappings.callback(_forgive, driver.unmap, address, self.allocated_bytes)
            driver.allow_access(address, self.allocated_bytes, self._device)

    def _unmap(self) -> None:
        self.mapped = False
        self._mappings.close()

    # Small things

    @property
    def _opened(self) -> Driver:
        assert self._driver is not None
        return self._driver

    def _attempt(self, agreement: Agreement, stage: str, work: Callable[[], T]) -> T:
        """Do local work in this device's context, and agree on how it went."""

        # The context is current during the work only: the agreement may run on another device.
        def in_context() -> T:
            with self._opened.current(self._context):
                return work()

        return agreement.attempt(stage, in_context)

    def _check_attach(self, agreement: Agreement) -> None:
        self._require_open()
        if (agreement.rank, agreement.world_size) != (self.rank, self.world_size):
            raise ValueError(
                f"rank {agreement.rank} of {agreement.world_size} attaches memory that was "
                f"created for rank {self.rank} of {self.world_size}"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("symmetric memory is closed")


def choose_fabric(identities: Sequence[Identity]) -> bool:
    """Return whether memory is shared by fabric handles rather than by file descriptors.

    A function of exchanged values only, so all ranks choose alike, or all raise.

    Raises
    ------
    CollectiveError
        The ranks have no way in common.
    """
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity.host, []).append(rank)
    without_fd = [r for r, identity in enumerate(identities) if not identity.posix_fd]
    without_fabric = [r for r, identity in enumerate(identities) if not identity.fabric]
    if len(hosts) == 1 and not without_fd:
        return False
    if not without_fabric:
        return True

    stage = "choice of a way to share memory"
    if len(hosts) == 1:
        raise CollectiveError(
            stage,
            f"GPUs of {format_ranks(without_fd)} share memory neither by file descriptor nor "
            "over an NVLink fabric",
        )
    places = "; ".join(f"{format_ranks(ranks)} on {host}" for host, ranks in hosts.items())
    raise CollectiveError(
        stage,
        "ranks are on several hosts, or in containers with networks of their own, and GPUs of "
        f"{format_ranks(without_fabric)} have no multi-node NVLink fabric, which unicast and "
        f"multicast memory would need there: {places} (host name/boot id/network namespace)",
    )


def _check_size(size_bytes: int) -> None:
    if size_bytes <= 0:
        raise ValueError(f"size must be positive, got {size_bytes} bytes")


def _capturing() -> bool:
    """Return whether torch is capturing a CUDA graph on this thread's stream."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def refuse_capture(what: str) -> None:
    """Raise RuntimeError where torch is capturing a CUDA graph on this thread's stream."""
    if _capturing():
        raise RuntimeError(f"cannot {what} while a CUDA graph is being captured")


def _close_postponed() -> None:
    while _postponed:
        _postponed.pop().close()


def _forgive(release: Callable[..., None], *args: Any) -> None:
    """Give something back; a failure is logged, for the rest must be given back too."""
    try:
        release(*args)
    except DriverError as error:
        _log_failure(error)


def _log_failure(error: DriverError) -> None:
    """Warn about the first failure of a kind: a context that failed fails every call after it."""
    expected = error.name in _CONTEXT_GONE or error.name in _warned
    _warned.add(error.name)
    level = logging.DEBUG if expected else logging.WARNING
    logger.log(level, "Giving back symmetric memory: %s", error)
