"""What becomes of each call of a caller: with upstream's workspace, and with ours.

Plain integer arithmetic. Upstream is FlashInfer 0.6.x: later versions apply the same rule, round
the result up to the granularity of the memory, and take a machine with multicast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from flashinfer.elastic.allreduce import sizing, strategy
from flashinfer.elastic.allreduce.strategy import Strategy

from .callers import Ask, Caller, Problem

UPSTREAM_BUFFERS = 3
UPSTREAM_ONESHOT_BYTES = 2**20
"""Upstream chooses one-shot up to this many ``tokens * hidden * element_bytes * ranks``."""

_UPSTREAM_ALIGNMENT = 16

GRANULARITY = 2 * 2**20
"""Device memory that peers can map comes in multiples of this, on all GPUs so far."""

_NATIVE_STATE_BYTES = sizing.ALIGNMENT


class Served(NamedTuple):
    """How this wheel serves a call: ``launches`` of ``strategy``."""

    strategy: Strategy
    launches: int


class Outcome(NamedTuple):
    """What becomes of one call.

    Attributes
    ----------
    ask : Ask
        What the caller asks.
    upstream_strategy : Strategy
        What upstream takes that for.
    upstream_bytes : int
        What upstream needs for it, of one buffer.
    raises : bool
        Whether upstream's buffer is smaller, so that it raises its ValueError.
    ours : Served
    """

    ask: Ask
    upstream_strategy: Strategy
    upstream_bytes: int
    raises: bool
    ours: Served

    @property
    def kind(self) -> tuple[object, ...]:
        """What two calls share that meet the same fate."""
        return self.ask, self.upstream_strategy, self.raises, self.ours


class Range(NamedTuple):
    """Consecutive numbers of tokens that meet the same fate: ``outcome``, that of the last."""

    first: int
    last: int
    outcome: Outcome


class Case(NamedTuple):
    """A caller, the workspaces it gets, and its calls.

    Attributes
    ----------
    caller : Caller
    upstream_buffer, our_buffer : int
        Bytes of each buffer.
    upstream_memory, our_memory : int
        Bytes of a GPU, in multiples of its granularity.
    ranges : tuple of Range
        From one token to what the caller reports; empty where it makes no calls.
    """

    caller: Caller
    upstream_buffer: int
    our_buffer: int
    upstream_memory: int
    our_memory: int
    ranges: tuple[Range, ...]

    @property
    def raises_from(self) -> int | None:
        """The fewest tokens for which upstream raises, or None."""
        return next((part.first for part in self.ranges if part.outcome.raises), None)


def upstream_buffer_bytes(problem: Problem, reported: int) -> int:
    """Return the size of the buffers that FlashInfer 0.6.x allocates for a reported maximum.

    Two-shot for the maximum, one-shot as far as upstream's own choice goes, and what that makes
    rounded *down* to 16 bytes.
    """
    shape = (problem.hidden, problem.element_bytes, problem.ranks)
    most = UPSTREAM_ONESHOT_BYTES // sizing.oneshot_bytes(1, *shape)
    wanted = max(
        sizing.oneshot_bytes(min(most, reported), *shape), sizing.twoshot_bytes(reported, *shape)
    )
    return wanted // _UPSTREAM_ALIGNMENT * _UPSTREAM_ALIGNMENT


def upstream_strategy(problem: Problem, tokens: int, ask: Ask) -> Strategy:
    """Return the strategy that upstream takes a call for."""
    if ask is not Ask.AUTO:
        return Strategy[ask.name]
    total = sizing.oneshot_bytes(tokens, problem.hidden, problem.element_bytes, problem.ranks)
    return Strategy.ONESHOT if total <= UPSTREAM_ONESHOT_BYTES else Strategy.TWOSHOT


def memory_bytes(buffer_bytes: int, buffers: int, state_bytes: int = 0) -> int:
    """Return what a workspace takes of a GPU, rounded up to the usual granularity."""
    return sizing.round_up(buffers * buffer_bytes + state_bytes, GRANULARITY)


def our_memory_bytes(buffer_bytes: int) -> int:
    """Return what a workspace of the native engine takes of a GPU."""
    return memory_bytes(buffer_bytes, sizing.LAMPORT_BUFFERS_NATIVE, _NATIVE_STATE_BYTES)


def outcome(
    problem: Problem, arch: int, ask: Ask, tokens: int, upstream_buffer: int, our_buffer: int
) -> Outcome:
    """Return what becomes of a call of ``tokens`` rows on buffers of two sizes.

    Raises
    ------
    ValueError
        If our buffer does not hold a single row for each rank.
    """
    shape = (problem.hidden, problem.element_bytes, problem.ranks)
    theirs = upstream_strategy(problem, tokens, ask)
    size = sizing.oneshot_bytes if theirs == Strategy.ONESHOT else sizing.twoshot_bytes
    needed = size(tokens, *shape)
    requested = strategy.auto(tokens, *shape, arch) if ask is Ask.AUTO else Strategy[ask.name]
    steps = strategy.resolve(requested, tokens, *shape, our_buffer)
    served = Served(steps[0].strategy, len(steps))
    return Outcome(ask, theirs, needed, needed > upstream_buffer, served)


def case(problem: Problem, arch: int, caller: Caller, oneshot_max_bytes: int) -> Case:
    """Return what becomes of all calls of a caller.

    Parameters
    ----------
    problem : Problem
    arch : int
        Compute capability as ``10 * major + minor``.
    caller : Caller
    oneshot_max_bytes : int
        As the environment sets it; see ``sizing.buffer_bytes``.
    """
    if not caller.reports:
        return Case(caller, 0, 0, 0, 0, ())
    theirs = upstream_buffer_bytes(problem, caller.reports)
    ours = sizing.buffer_bytes(
        caller.reports,
        problem.hidden,
        problem.element_bytes,
        problem.ranks,
        oneshot_max_bytes=oneshot_max_bytes,
    )

    def at(tokens: int) -> Outcome:
        return outcome(problem, arch, caller.ask(tokens), tokens, theirs, ours)

    return Case(
        caller,
        theirs,
        ours,
        memory_bytes(theirs, UPSTREAM_BUFFERS),
        our_memory_bytes(ours),
        tuple(_ranges(at, caller.reports)),
    )


def _ranges(at: Callable[[int], Outcome], last: int) -> Iterator[Range]:
    """Split 1..last into the longest ranges of the same kind.

    Asks, choices and shortages change at some number of tokens and never change back, and chunks
    only become more. So a kind holds for one range only, and its end is found by bisection.
    """
    first = 1
    while first <= last:
        kind = at(first).kind
        low, high = first, last
        while low < high:
            middle = (low + high + 1) // 2
            if at(middle).kind == kind:
                low = middle
            else:
                high = middle - 1
        yield Range(first, low, at(low))
        first = low + 1


def samples(case: Case) -> list[int]:
    """Return numbers of tokens worth showing: powers of two, and the last of each fate."""
    powers = {1 << power for power in range(case.caller.reports.bit_length())}
    return sorted(powers | {part.last for part in case.ranges})
