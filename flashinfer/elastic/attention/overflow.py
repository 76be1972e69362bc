"""Read from upstream's errors which buffer was too small, and by how much.

Upstream carves a workspace with ``AlignedAllocator``, whose error names the allocation that did
not fit, its size and alignment, and the bytes that were left. With the size of the buffer that
gives the bytes that would have sufficed *up to and including* this allocation; what follows it is
not known yet, so a caller retries until nothing overflows.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FLOAT_ALLOCATIONS = frozenset(
    {
        "batch_decode_tmp_s",
        "batch_decode_tmp_v",
        "batch_prefill_tmp_s",
        "batch_prefill_tmp_v",
        "holistic_partial_lse",
        "holistic_partial_o",
        "mla_partial_lse",
        "mla_partial_o",
    }
)
"""What ``plan`` carves from the float workspace; everything else comes from the integer one."""

_OVERFLOW = re.compile(
    r"Buffer overflow when allocating memory for (?P<allocation>.+?) with size (?P<size>\d+) and "
    r"alignment (?P<alignment>\d+), but only (?P<available>\d+) bytes available in "
    r"AlignedAllocator"
)
_COUNTER = re.compile(r"counter[ _]buffer is too small: got \d+ bytes, need (?P<needed>\d+) bytes")
_PREFLIGHT = re.compile(r"MLA needs (?P<needed>\d+) float workspace bytes")


class Overflow(NamedTuple):
    """One allocation that did not fit.

    Attributes
    ----------
    allocation : str
        Upstream's name of it, such as ``batch_prefill_tmp_v``.
    size, alignment, available : int
        Bytes asked for, their alignment, and the bytes that were left in the buffer.
    """

    allocation: str
    size: int
    alignment: int
    available: int

    @property
    def is_float(self) -> bool:
        """Whether ``plan`` carves it from the float workspace."""
        return self.allocation in FLOAT_ALLOCATIONS

    def needed(self, capacity: int) -> int:
        """Return the bytes that hold everything up to this allocation.

        Parameters
        ----------
        capacity : int
            Bytes of the buffer that overflowed.
        """
        return max(capacity - self.available, 0) + self.size + self.alignment


def parse(error: BaseException) -> Overflow | None:
    """Return the overflow that an error of a compiled module reports, or None if it is another."""
    match = _OVERFLOW.search(str(error))
    if match is None:
        return None
    return Overflow(
        match["allocation"], int(match["size"]), int(match["alignment"]), int(match["available"])
    )


def counter_bytes(error: BaseException) -> int | None:
    """Return the bytes that trtllm-gen's separate counter buffer should have had, or None."""
    match = _COUNTER.search(str(error))
    return int(match["needed"]) if match else None


def preflight_bytes(error: BaseException) -> int | None:
    """Return the float workspace that FlashInfer 0.7's MLA asks for before it plans, or None."""
    match = _PREFLIGHT.search(str(error))
    return int(match["needed"]) if match else None
