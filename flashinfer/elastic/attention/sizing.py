"""How many bytes a trtllm-gen call takes from its workspace, and how much to grow.

Plain integer arithmetic: no torch, no CUDA, no environment.

A trtllm-gen launcher carves its workspace in this order::

    counters (FlashInfer 0.6.x) | softmax statistics (if LSE is asked for) | scratch

Only the first two are checked. *Scratch is whatever is left*: kernels that split the keys over
several CTAs write their partial results there, as far as they need, without a look at the end of
the buffer. So a workspace that just satisfies the allocator is written past its end, and a short
one without LSE never throws. Hence a call is sized here before it is made.
"""

from __future__ import annotations

MIB = 2**20

COUNTER_SLAB_BYTES = 8 * MIB
"""The fixed counter area at the head of a 0.6.x workspace: 8192 x 256 counters of 4 bytes."""

STATISTICS_GUARD_BYTES = 1 * MIB
"""What upstream adds to the softmax statistics, and pads them with."""

STATISTICS_QUERY_TILE = 256
"""Query positions that the statistics of one head are rounded up to."""

MAX_QUERY_STEP = 128
"""Most query rows that one CTA of a selectable kernel takes (``mStepQ``)."""

SCRATCH_RESERVE_BYTES = 64 * MIB
"""Scratch that a grown workspace has: 50% more than the largest need on 160 SMs."""

SLACK_BYTES = 256
"""Covers the alignment of each part of the layout."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below a value."""
    return -(-value // multiple) * multiple


def statistics_bytes(heads: int, batch: int, max_query: int) -> int:
    """Return the bytes of the softmax statistics, to the byte upstream's allocation.

    Parameters
    ----------
    heads, batch, max_query : int
        Query heads, requests, and query tokens of the longest request.
    """
    slots = heads * batch * round_up(max_query, STATISTICS_QUERY_TILE)
    return 8 * slots + STATISTICS_GUARD_BYTES


def scratch_bytes(multiprocessors: int, head_dim_v: int) -> int:
    """Return the most bytes of scratch that a launch which splits the keys writes.

    At most one CTA a multiprocessor leaves partials: for each of its query rows 8 bytes of
    statistics and a partial output of 2-byte elements, of two CTAs' width where they pair up.
    """
    return multiprocessors * MAX_QUERY_STEP * (8 + 2 * head_dim_v * 2)


def counter_bytes(batch: int, heads: int, multiprocessors: int) -> int:
    """Return the bytes of the separate counter buffer of FlashInfer 0.7.x."""
    return round_up(max(batch * heads, multiprocessors), 8) * 4


def grown_bytes(needed: int) -> int:
    """Return the size to grow to, for a need that may still rise a little.

    A sixteenth is added, so that the small allocation after the large one fits at once (statistics
    take 1/64 of the partial outputs they belong to, or less). The result lies on a geometric grid
    of four steps an octave, 2 MiB at least: a need that rises step by step from 1 MiB to 1 GiB
    grows the buffer some forty times, however small the steps.

    Parameters
    ----------
    needed : int
        Bytes that are known to be needed.
    """
    target = max(needed + needed // 16, 2 * MIB)
    step = max(1 << (target.bit_length() - 3), 1)
    return round_up(target, step)
