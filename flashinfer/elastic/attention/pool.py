"""The larger buffers that stand in for callers' workspaces.

A *slot* belongs to one buffer of a caller's and holds its replacement. A buffer is recognised by
its address and its storage: everybody who passes the same buffer, under whatever view of its
start, gets the same replacement, while two halves of one allocation stay apart. (Storage alone
would not do: ``BatchPODWithPagedKVCacheWrapper`` gives one half of its workspace to prefill and
the other to decode, in one kernel.)

Lifetime
--------
* A replacement lives as long as the caller's buffer. When that is gone, the next growth returns
  the replacement's memory to torch.
* Growing again makes a new *generation*. An earlier one that was used while a graph was being
  captured is kept for good, even beyond the caller's buffer: the graph holds its address.
* Nothing is ever moved or resized in place.

The table of addresses is read without a lock: a lookup is one ``dict.get``, and while nothing has
grown, one test of an empty dictionary. Everything that changes it holds the lock.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import allocation, settings, sizing

_logger = logging.getLogger("flashinfer.elastic")


class WorkspaceError(RuntimeError):
    """A workspace had to grow and could not: the cap or the memory of the device forbids it."""


@dataclass(frozen=True)
class Usage:
    """What became of one workspace, for people to read.

    Attributes
    ----------
    device : str
        Where it is.
    kind : str
        ``float``, ``integer`` or ``counters``.
    given, needed, held : int
        Bytes of the caller's buffer, the most bytes a call needed of it, and bytes of the
        replacement.
    kept : int
        Bytes of earlier replacements that captured graphs may still use.
    call, allocation : str
        The call that needed most, and what it wanted to put there.
    growths : int
        How often it grew.
    captured : bool
        Whether a graph captured the replacement.
    """

    device: str
    kind: str
    given: int
    needed: int
    held: int
    kept: int
    call: str
    allocation: str
    growths: int
    captured: bool


@dataclass(eq=False)  # compared by identity: tensors do not compare to a bool
class Generation:
    """One replacement: its memory, and whether a captured graph may hold its address."""

    data: torch.Tensor
    captured: bool = False
    views: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory as a one-dimensional tensor of a dtype, the same object every time."""
        view = self.views.get(dtype)
        if view is None:
            with torch.inference_mode(False):
                view = self.views[dtype] = self.data.view(dtype)
        return view


class Twin:
    """The page-locked memory in which a wrapper plans, once its own is too small.

    Each page-locked buffer has one of its own, also where wrappers share an integer workspace:
    ``plan`` returns while its copy to the device may still be reading.

    Parameters
    ----------
    page_locked : torch.Tensor
        The wrapper's.
    size : int
        Bytes to have.
    """

    def __init__(self, page_locked: torch.Tensor, size: int) -> None:
        self.identity = _identity(page_locked)
        self._given = StorageWeakRef(page_locked.untyped_storage())  # type: ignore[no-untyped-call]
        self.memory = Generation(allocation.page_locked(size, page_locked))

    @property
    def orphaned(self) -> bool:
        """Whether the wrapper's buffer is gone."""
        return bool(self._given.expired())  # type: ignore[no-untyped-call]


class Slot:
    """The replacement of one buffer.

    Parameters
    ----------
    buffer : torch.Tensor
        The caller's.
    kind : str
        ``float``, ``integer`` or ``counters``.
    """

    def __init__(self, buffer: torch.Tensor, kind: str) -> None:
        self.kind = kind
        self.device = buffer.device
        self.given = nbytes(buffer)
        self._caller = StorageWeakRef(buffer.untyped_storage())  # type: ignore[no-untyped-call]
        self.original = weakref.ref(buffer)
        self.generations: list[Generation] = []
        self.twins: list[Twin] = []
        self.needed = 0
        self.call = ""
        self.allocation = ""
        self.growths = 0

    @property
    def orphaned(self) -> bool:
        """Whether the caller's buffer is gone."""
        return bool(self._caller.expired())  # type: ignore[no-untyped-call]

    @property
    def newest(self) -> Generation:
        """The replacement in use."""
        return self.generations[-1]

    @property
    def held(self) -> int:
        """Bytes of all generations."""
        return sum(generation.data.numel() for generation in self.generations)

    @property
    def to_keep(self) -> int:
        """Bytes of the generations that stay when it grows again."""
        return sum(
            generation.data.numel()
            for generation in self.generations
            if generation.captured or self.kind == "integer"
        )

    @property
    def captured(self) -> bool:
        """Whether a captured graph may hold an address of this slot."""
        return any(generation.captured for generation in self.generations)

    def earlier(self) -> list[torch.Tensor]:
        """Return the buffers of before the newest generation that still exist, as bytes."""
        buffers = [generation.data for generation in self.generations[:-1]]
        original = self.original()
        if original is not None:
            buffers.insert(0, original.view(torch.uint8))
        return buffers

    def usage(self) -> Usage:
        """Return what became of this workspace."""
        return Usage(
            device=str(self.device),
            kind=self.kind,
            given=self.given,
            needed=self.needed,
            held=self.newest.data.numel(),
            kept=self.held - self.newest.data.numel(),
            call=self.call,
            allocation=self.allocation,
            growths=self.growths,
            captured=self.captured,
        )


class Grown(NamedTuple):
    """What a growth gave.

    Attributes
    ----------
    data : torch.Tensor
        The replacement, one-dimensional, of the caller's dtype.
    twin : torch.Tensor or None
        Its page-locked twin, for an integer workspace.
    """

    data: torch.Tensor
    twin: torch.Tensor | None


_lock = threading.RLock()
_slots: dict[torch.device, list[Slot]] = {}
# Address of a caller's buffer or of a generation -> (identity of its storage, its slot).
_by_address: dict[int, tuple[int, Slot]] = {}

grown = _by_address
"""Empty as long as nothing has grown: what a call that fits tests, and all that it does."""


def nbytes(buffer: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return buffer.numel() * buffer.element_size()


def find(buffer: torch.Tensor) -> Slot | None:
    """Return the slot that a buffer belongs to, as the caller's or as a generation, if any."""
    entry = _by_address.get(buffer.data_ptr())
    # The address alone may since have gone to another allocation. The identity of a storage is
    # not reused while the slot has its weak reference.
    if entry is None or entry[0] != _identity(buffer):
        return None
    return entry[1]


def replacement(buffer: torch.Tensor) -> torch.Tensor:
    """Return the replacement of a buffer, or the buffer itself if it has none that is larger.

    To be called for every use, since it also notes whether a graph is being captured.
    """
    slot = find(buffer)
    if slot is None:
        return buffer
    generation = slot.newest
    if not generation.captured and allocation.is_capturing(slot.device):
        generation.captured = True
    if generation.data.numel() <= nbytes(buffer):
        return buffer
    return generation.view(buffer.dtype)


def twin(buffer: torch.Tensor, page_locked: torch.Tensor) -> torch.Tensor:
    """Return the page-locked twin that goes with the replacement of an integer workspace.

    It is as large as the replacement, whatever that grew for: upstream knows only the size of the
    integer workspace, and writes a plan to the same offsets of both.
    """
    slot = find(buffer)
    if slot is None:
        return page_locked
    with _lock:
        slot.kind = "integer"  # it may have grown as the scratch of a trtllm-gen call
        # A wrapper may show the replacement already, because another one let it grow.
        size = max(slot.newest.data.numel(), nbytes(buffer))
        if size <= nbytes(page_locked):
            return page_locked
        # Smaller twins of the same buffer stay: the copy of an earlier plan may be reading them.
        slot.twins = [known for known in slot.twins if not known.orphaned]
        for known in slot.twins:
            if known.identity == _identity(page_locked) and known.memory.data.numel() >= size:
                return known.memory.view(page_locked.dtype)
        slot.twins.append(Twin(page_locked, size))
        return slot.twins[-1].memory.view(page_locked.dtype)


def mirror(written: torch.Tensor) -> None:
    """Copy a plan from a grown integer workspace to those that captured graphs may read.

    A graph that was captured before the workspace grew reads the plan at the old address, and
    every ``plan`` since then writes to the new one.
    """
    slot = find(written)
    if slot is None or slot.kind != "integer":
        return
    data = slot.newest.data
    if data.data_ptr() != written.data_ptr():
        return
    # Servers run in inference mode, and what they allocated there may only be written there.
    with torch.inference_mode():
        for earlier in slot.earlier():
            earlier.copy_(data[: earlier.numel()], non_blocking=True)


def grow(
    buffer: torch.Tensor,
    needed: int,
    *,
    kind: str,
    call: str,
    allocation_name: str,
    comfortable: int = 0,
    page_locked: torch.Tensor | None = None,
) -> Grown:
    """Make the replacement of a buffer hold a number of bytes.

    Parameters
    ----------
    buffer : torch.Tensor
        The caller's buffer, or a replacement of it.
    needed : int
        Bytes that the call needs.
    kind : str
        ``float``, ``integer`` or ``counters``.
    call, allocation_name : str
        Which call asks, and for what, for the log and for errors.
    comfortable : int, optional
        Bytes that the call would do well to have, if more than it needs.
    page_locked : torch.Tensor, optional
        The page-locked twin of an integer workspace, which grows along.

    Returns
    -------
    Grown
        The replacement, zeroed when it was made, of ``needed`` bytes at least.

    Raises
    ------
    WorkspaceError
        If the cap or the free memory does not allow it. Nothing has changed then.
    """
    with _lock:
        slot = find(buffer)
        if slot is None:
            slot = Slot(buffer, kind)
        if slot.needed < needed:
            slot.needed, slot.call, slot.allocation = needed, call, allocation_name
        # Another thread may have been faster.
        if not slot.generations or slot.newest.data.numel() < needed:
            _release_the_dead(slot.device, but=slot)
            wanted = sizing.grown_bytes(max(needed, comfortable))
            _extend(slot, buffer, needed, wanted)
        locked = None if page_locked is None else twin(buffer, page_locked)
        return Grown(replacement(buffer), locked)


def report() -> list[Usage]:
    """Return what became of every workspace that grew, the largest first."""
    with _lock:
        usages = [slot.usage() for slots in _slots.values() for slot in slots]
    return sorted(usages, key=lambda usage: usage.held, reverse=True)


def _extend(slot: Slot, buffer: torch.Tensor, needed: int, wanted: int) -> None:
    """Add a generation to a slot, and the slot to the pool if it is new."""
    data = _allocate(slot, needed, wanted)
    if not slot.generations:
        _slots.setdefault(slot.device, []).append(slot)
        _by_address[buffer.data_ptr()] = (_identity(buffer), slot)
    before = slot.newest.data.numel() if slot.generations else slot.given
    slot.generations.append(Generation(data))
    slot.growths += 1
    _by_address[data.data_ptr()] = (_identity(data), slot)
    if slot.kind != "integer":
        # An integer workspace is small, wrappers refer to it, and plans are mirrored to it.
        _drop_unused(slot)
    _logger.warning(
        "%s needs %d bytes of its %s workspace on %s for %s; the caller gave %d. It now uses a "
        "workspace of %d bytes in place of %d. (%s=0 switches this off.)",
        slot.call,
        needed,
        slot.kind,
        slot.device,
        slot.allocation,
        slot.given,
        data.numel(),
        before,
        settings.SWITCH,
    )


def _allocate(slot: Slot, needed: int, wanted: int) -> torch.Tensor:
    """Allocate the size wanted, or as little as is needed if there is not more."""
    held = sum(other.held for other in _slots.get(slot.device, ()) if other is not slot)
    held += slot.to_keep
    cap = settings.cap_bytes()
    allowed = wanted if cap is None else min(wanted, cap - held)
    exact = sizing.round_up(needed, 16)  # whole elements of every dtype
    allowed -= allowed % 16
    if allowed < exact:
        raise _refusal(slot, needed, held, cap)
    for size in dict.fromkeys((allowed, exact)):
        try:
            return allocation.zeros(size, slot.device)
        except (torch.OutOfMemoryError, MemoryError) as error:
            shortage = error
    raise _refusal(slot, needed, held, cap) from shortage


def _refusal(slot: Slot, needed: int, held: int, cap: int | None) -> WorkspaceError:
    free = allocation.free_bytes(slot.device)
    return WorkspaceError(
        f"{slot.call} asked for {needed} bytes of its {slot.kind} workspace on {slot.device} "
        f"(for {slot.allocation}) and was given {slot.given}. It cannot grow: "
        f"{'there is no cap' if cap is None else f'the cap is {cap} bytes'} ({settings.CAP}), "
        f"larger workspaces hold {held} bytes already, and "
        f"{'the free memory is unknown' if free is None else f'{free} bytes are free'}. "
        "Give a larger workspace, raise the cap, or leave more memory free."
    )


def _release_the_dead(device: torch.device, but: Slot) -> None:
    """Drop the slots whose caller's buffer is gone and that no graph has captured.

    Not the one that is about to grow: its replacement may have outlived the caller's buffer, in
    the hands of a wrapper that was given it.
    """
    if allocation.is_capturing(device):
        return
    for slot in list(_slots.get(device, ())):
        if slot is not but and slot.orphaned and not slot.captured:
            _slots[device].remove(slot)
            for address in [key for key, entry in _by_address.items() if entry[1] is slot]:
                del _by_address[address]
            for generation in slot.generations:
                _retire(generation)


def _drop_unused(slot: Slot) -> None:
    """Drop the earlier generations that no captured graph can hold."""
    if allocation.is_capturing(slot.device):
        return
    for generation in slot.generations[:-1]:
        if not generation.captured:
            slot.generations.remove(generation)
            _by_address.pop(generation.data.data_ptr(), None)
            _retire(generation)


def _retire(generation: Generation) -> None:
    """Let torch reuse the memory once what is queued on the current stream is through.

    The caller orders the uses of its workspace, across streams too, so all earlier uses come
    before what the current stream does next.
    """
    if generation.data.is_cuda:
        generation.data.record_stream(torch.cuda.current_stream(generation.data.device))


def _identity(buffer: torch.Tensor) -> int:
    return int(buffer.untyped_storage()._cdata)
