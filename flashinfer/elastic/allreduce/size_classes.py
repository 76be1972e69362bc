"""Which launches go by multicast: a table of size classes, chosen from times that all ranks share.

A launch's class is the number of binary digits of its payload, the bytes of its rows on each rank:
class ``c`` holds 2**(c-1) to 2**c - 1 bytes. ``csrc/launch.h`` reads the same table.

Pure functions of values that all ranks share. The choice shows in the time a launch takes and in
nothing else: both transports put the same words into the same places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LAST_CLASS = 62
"""No launch is larger, and the classes are bits of a signed 64-bit number."""

WORTHWHILE = 0.95
"""Multicast is taken where it needs at most this part of the time of unicast.

Within a few per cent the two are as good as each other, and what is measured is noise.
"""


class SizeClasses(NamedTuple):
    """Sets of size classes by strategy, as bits: bit ``c`` for class ``c``."""

    oneshot: int = 0
    twoshot: int = 0


def size_class(payload_bytes: int) -> int:
    """Return the class of a payload.

    Examples
    --------
    >>> [size_class(payload) for payload in (0, 1, 2, 3, 4, 6144, 8192)]
    [0, 1, 2, 2, 3, 13, 14]
    """
    return payload_bytes.bit_length()


def choose(unicast: Mapping[int, float], multicast: Mapping[int, float]) -> int:
    """Choose the classes of one strategy that go by multicast.

    Parameters
    ----------
    unicast, multicast : mapping of int to float
        Time by size class, over either transport; of the same classes.

    Returns
    -------
    int
        Bits of the classes. A class that was not timed goes as the next smaller one that was, or
        as the smallest.

    Examples
    --------
    >>> bin(choose({3: 1.0, 5: 1.0}, {3: 0.5, 5: 2.0}))
    '0b11111'
    """
    if set(unicast) != set(multicast):
        raise ValueError(f"times of different classes: {sorted(unicast)} and {sorted(multicast)}")
    bits = 0
    timed = sorted(unicast)
    for index, first in enumerate(timed):
        if multicast[first] > WORTHWHILE * unicast[first]:
            continue
        low = 0 if index == 0 else first
        high = timed[index + 1] if index + 1 < len(timed) else LAST_CLASS + 1
        bits |= (1 << high) - (1 << low)
    return bits


def describe(bits: int) -> str:
    """Say which payloads a set of classes holds.

    Examples
    --------
    >>> describe(0), describe(0b110000), describe(choose({3: 1.0}, {3: 0.5}))
    ('none', '8 to 31 bytes', 'all')
    >>> describe(0b1011), describe((1 << LAST_CLASS + 1) - 64)
    ('0 to 1 bytes, 4 to 7 bytes', '32 bytes and more')
    """
    if bits == (1 << LAST_CLASS + 1) - 1:
        return "all"
    runs: list[str] = []
    index = 0
    while bits >> index:
        if not bits >> index & 1:
            index += 1
            continue
        first = index
        while bits >> index & 1:
            index += 1
        low = 1 << first >> 1
        runs.append(
            f"{low} bytes and more"
            if index > LAST_CLASS
            else f"{low} to {(1 << index >> 1) - 1} bytes"
        )
    return ", ".join(runs) or "none"
