"""Which strategy a call runs, in how many steps.

A caller asks for one-shot or two-shot (or lets us choose). Where the workspace does not hold what
is asked, the call is served another way instead of being refused. All ways give the same bits, so
the choice shows in the time a call takes and in nothing else.

Pure functions of values that all ranks share: ranks can never disagree on a step.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

from .sizing import native_oneshot_bytes, native_twoshot_bytes, round_up


class Strategy(enum.IntEnum):
    """How the ranks exchange rows. The values are those of upstream's enumeration."""

    ONESHOT = 0
    """Every rank sends its rows to all ranks, and every rank reduces all of them."""

    TWOSHOT = 1
    """Every token has an owner that reduces it and sends the sum to all ranks."""


class Step(NamedTuple):
    """One launch: ``count`` tokens from ``first`` on, with ``strategy``."""

    first: int
    count: int  # type: ignore[assignment]  # a row count, in place of tuple.count
    strategy: Strategy


@functools.lru_cache(maxsize=4096)
def resolve(
    requested: Strategy,
    tokens: int,
    hidden: int,
    element_bytes: int,
    ranks: int,
    buffer_bytes: int,
) -> tuple[Step, ...]:
    """Plan a call so that it fits the buffer.

    The requested strategy is taken if all tokens fit; else two-shot; else the tokens are split
    into the fewest chunks that fit. Chunks are of even size (a last chunk of one row would cost as
    much as a full one), and two-shot chunks other than the last hold a multiple of ``ranks``
    tokens, so that every rank owns as many as any other.

    Parameters
    ----------
    requested : Strategy
        What the caller asks for. It also decides between strategies that need equally many chunks.
    tokens : int
        Rows of the call, 0 or more.
    hidden : int
        Elements of a row.
    element_bytes : int
        Bytes of an element.
    ranks : int
        Size of the group.
    buffer_bytes : int
        Bytes of one Lamport buffer of the workspace.

    Returns
    -------
    tuple of Step
        Steps that cover ``[0, tokens)`` in order; empty for 0 tokens.

    Raises
    ------
    ValueError
        If a single row does not fit, with upstream's text, the bytes and the remedy.
    """
    if tokens < 0 or buffer_bytes < 0 or min(hidden, element_bytes, ranks) < 1:
        raise ValueError(
            "A call needs tokens >= 0, hidden >= 1, element_bytes >= 1, ranks >= 1 and "
            f"buffer_bytes >= 0, got {tokens}, {hidden}, {element_bytes}, {ranks} and "
            f"{buffer_bytes}."
        )
    if tokens == 0:
        return ()
    oneshot = _oneshot_capacity(hidden, element_bytes, ranks, buffer_bytes)
    twoshot = _twoshot_capacity(hidden, element_bytes, ranks, buffer_bytes)
    if oneshot == 0:
        raise ValueError(_one_row_text(hidden, element_bytes, ranks, buffer_bytes))

    requested_capacity = oneshot if requested == Strategy.ONESHOT else twoshot
    if tokens <= requested_capacity:
        return (Step(0, tokens, Strategy(requested)),)
    if tokens <= twoshot:
        return (Step(0, tokens, Strategy.TWOSHOT),)

    fewest = -(-tokens // max(oneshot, twoshot))
    if requested_capacity * fewest >= tokens:
        strategy = Strategy(requested)
    else:
        strategy = Strategy.TWOSHOT if twoshot > oneshot else Strategy.ONESHOT
    # Rounding up keeps within the capacity of two-shot, itself a multiple of the group size.
    multiple = ranks if strategy == Strategy.TWOSHOT else 1
    size = round_up(-(-tokens // fewest), multiple)
    return tuple(
        Step(first, min(size, tokens - first), strategy) for first in range(0, tokens, size)
    )


def _oneshot_capacity(hidden: int, element_bytes: int, ranks: int, buffer_bytes: int) -> int:
    """Return how many tokens of one-shot a buffer holds."""
    return buffer_bytes // native_oneshot_bytes(1, hidden, element_bytes, ranks)


def _twoshot_capacity(hidden: int, element_bytes: int, ranks: int, buffer_bytes: int) -> int:
    """Return how many tokens of two-shot a buffer holds: a multiple of the group size."""
    return buffer_bytes // native_twoshot_bytes(ranks, hidden, element_bytes, ranks) * ranks


def _one_row_text(hidden: int, element_bytes: int, ranks: int, buffer_bytes: int) -> str:
    """Return the text of the one error that is left: upstream's, and what to do about it."""
    required = native_oneshot_bytes(1, hidden, element_bytes, ranks)
    return (
        "The buffer size in the given workspace is insufficient for the given problem size. "
        f"Buffer: {buffer_bytes} bytes, Required: {required} bytes. "
        f"Not even one row of {hidden} elements of {element_bytes} bytes fits for {ranks} ranks. "
        f"Create the workspace with hidden_dim={hidden} (the widest row that will use it), or "
        f"with buffer_size_in_bytes of at least {required}."
    )


_MIB = 2**20

_ONESHOT_UP_TO: dict[int, dict[int, int]] = {
    90: {4: 2 * _MIB, 8: _MIB // 2},
    100: {4: 4 * _MIB, 8: _MIB},
    103: {4: 4 * _MIB, 8: 2 * _MIB},
}
"""Per arch and group size, the largest payload of a rank (N * H * e bytes) at which one-shot wins.

The points up to which vLLM 0.24 and 0.33 force one-shot. A group size between two entries takes
the larger one's. Moving a point changes no result, only the time a call takes.
"""

_LARGE_GROUP_TOTAL = _MIB
"""For larger groups, the N * H * e * P bytes up to which upstream's own heuristic is one-shot."""


def auto(tokens: int, hidden: int, element_bytes: int, ranks: int, arch: int) -> Strategy:
    """Choose the strategy that is expected to be faster.

    One-shot takes one hop and sends each row to every rank; two-shot takes two hops and sends
    ``2 / ranks`` as much. In a group of two that is the same amount, and one-shot is the faster
    or within 3% (``docs/performance.md``).

    Parameters
    ----------
    tokens, hidden, element_bytes, ranks : int
        The problem, as in :func:`resolve`.
    arch : int
        Compute capability as ``10 * major + minor``, such as 90, 100 or 103. An arch that is not
        in the table takes the nearest older one's points, and one older than all the oldest's.

    Returns
    -------
    Strategy
        A pure function of values that all ranks share.
    """
    if ranks <= 2:
        return Strategy.ONESHOT
    payload = tokens * hidden * element_bytes
    return Strategy.ONESHOT if payload <= _oneshot_up_to(ranks, arch) else Strategy.TWOSHOT


@functools.lru_cache(maxsize=64)
def _oneshot_up_to(ranks: int, arch: int) -> int:
    """Return the crossover of a group of ``ranks`` in bytes of payload a rank."""
    known = [entry for entry in _ONESHOT_UP_TO if entry <= arch] or [min(_ONESHOT_UP_TO)]
    points = _ONESHOT_UP_TO[max(known)]
    covering = [size for size in points if size >= ranks]
    return points[min(covering)] if covering else _LARGE_GROUP_TOTAL // ranks
