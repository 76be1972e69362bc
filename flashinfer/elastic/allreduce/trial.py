"""Trying multicast before it is used: are its results those of unicast, and where is it faster?

A trial runs on the workspace's own buffers with kernels whose waits over multicast end without a
trap, so that multicast that does not work costs this process nothing but the attempt.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from . import size_classes, sizing
from .agreement import Agreement
from .engines import Call
from .size_classes import SizeClasses
from .strategy import Strategy

TIMEOUT_S = 2.0
"""How long a kernel of a trial waits for a word. All ranks start it together."""

_CHECKED_TYPES = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
}
_CHECKED_TOKENS = 64
_CHECKED_HIDDEN = 2048

_TIMED_TYPE = torch.bfloat16
_TIMED_ROW_BYTES = 6144
_FIRST_CLASS = 13
"""One row of 6144 bytes; below, a launch takes as long as with one."""
_LAST_CLASS = 24
"""Payloads of 12 MiB; above, both transports go at their full rates."""
_ROUNDS = 5
_MOST_LAUNCHES = 20
_ROUND_BYTES = 2**24


class Subject(Protocol):
    """The engine that is tried."""

    def launch(self, call: Call, first: int, count: int, strategy: Strategy) -> None:
        """Launch a call over unicast."""
        ...

    def launch_trial(self, call: Call, first: int, count: int, strategy: Strategy) -> None:
        """Launch a call over multicast, with waits that do not trap."""
        ...

    def expired_waits(self) -> int:
        """Return how many waits have timed out on this rank, once its device has finished."""
        ...


class Shape(NamedTuple):
    """Rows of a call."""

    tokens: int
    hidden: int


def run(
    agreement: Agreement, subject: Subject, device: torch.device, buffer_bytes: int
) -> SizeClasses:
    """Try multicast and choose the launches that go by it; collective.

    Parameters
    ----------
    agreement : Agreement
        The ranks of the group.
    subject : Subject
        With empty buffers, and nothing under way on any rank. After an error the buffers hold
        anything.
    device : torch.device
        This rank's GPU.
    buffer_bytes : int
        Of each Lamport buffer.

    Returns
    -------
    SizeClasses
        The same on all ranks.

    Raises
    ------
    CollectiveError
        On every rank, where words do not arrive by multicast on any, or results are not those of
        unicast.
    """
    _check(agreement, subject, device, buffer_bytes)
    own = _time(agreement, subject, device, buffer_bytes)
    # A call is as slow as its slowest rank; and so all ranks choose by the same numbers.
    everywhere = agreement.gather("times over multicast and unicast", own)
    slowest = [
        [max(times) for times in zip(*rows, strict=True)] for rows in zip(*everywhere, strict=True)
    ]
    return table(buffer_bytes, agreement.world_size, slowest)


def table(buffer_bytes: int, ranks: int, times: list[list[float]]) -> SizeClasses:
    """Choose by the times of a trial; a pure function of values that all ranks share.

    Parameters
    ----------
    times : list of list of float
        Over unicast and over multicast, for each of :func:`timed_classes` in order.
    """
    unicast: dict[Strategy, dict[int, float]] = {strategy: {} for strategy in Strategy}
    multicast: dict[Strategy, dict[int, float]] = {strategy: {} for strategy in Strategy}
    timed = timed_classes(buffer_bytes, ranks)
    for (strategy, one), (over_unicast, over_multicast) in zip(timed, times, strict=True):
        unicast[strategy][one] = over_unicast
        multicast[strategy][one] = over_multicast
    return SizeClasses(
        *(size_classes.choose(unicast[strategy], multicast[strategy]) for strategy in Strategy)
    )


def timed_classes(buffer_bytes: int, ranks: int) -> list[tuple[Strategy, int]]:
    """Return the strategies and size classes that are timed: those that fit the buffer whole."""
    return [
        (strategy, one)
        for strategy in Strategy
        for one in range(_FIRST_CLASS, _LAST_CLASS + 1)
        if _fits(strategy, _timed_shape(one), _TIMED_TYPE, ranks, buffer_bytes)
    ]


def checked_shape(ranks: int, element_bytes: int, buffer_bytes: int) -> Shape | None:
    """Return the largest problem, up to some size, that fits the buffer with either strategy.

    Of more tokens than ranks where that is possible, so that each rank owns some. None where the
    buffer does not hold a row of 8 elements for each rank.
    """
    tokens, hidden = max(_CHECKED_TOKENS, 2 * ranks), _CHECKED_HIDDEN
    while max(
        sizing.native_oneshot_bytes(tokens, hidden, element_bytes, ranks),
        sizing.native_twoshot_bytes(tokens, hidden, element_bytes, ranks),
    ) > buffer_bytes:  # fmt: skip
        if hidden > 8:
            hidden //= 2
        elif tokens > 1:
            tokens //= 2
        else:
            return None
    return Shape(tokens, hidden)


def _check(agreement: Agreement, subject: Subject, device: torch.device, buffer_bytes: int) -> None:
    """Compare multicast with unicast on bits of every kind; both buffers, all types."""
    problems = agreement.attempt(
        "preparing a trial of multicast",
        lambda: list(_problems(agreement, device, buffer_bytes)),
    )

    def over_multicast() -> None:
        for problem in problems:
            subject.launch_trial(problem.multicast_call, 0, problem.tokens, problem.strategy)
        torch.cuda.synchronize(device)
        _require_no_expired_wait(subject)

    def over_unicast() -> None:
        for problem in problems:
            subject.launch(problem.unicast_call, 0, problem.tokens, problem.strategy)
        torch.cuda.synchronize(device)
        for problem in problems:
            problem.require_same_bits()

    # Unicast waits do trap, so that none is begun on buffers that multicast has left in disorder.
    agreement.attempt("trial of multicast", over_multicast)
    agreement.attempt("comparing multicast with unicast", over_unicast)


class _Problem(NamedTuple):
    """The same call for both transports."""

    strategy: Strategy
    multicast_call: Call
    unicast_call: Call

    @property
    def tokens(self) -> int:
        return int(self.unicast_call.input.shape[0])

    def require_same_bits(self) -> None:
        one, other = self.multicast_call.output, self.unicast_call.output
        assert one is not None
        assert other is not None
        integers = _CHECKED_TYPES[one.dtype]
        wrong = int((one.view(integers) != other.view(integers)).sum())
        if wrong:
            raise RuntimeError(
                f"{wrong} of {one.numel()} {one.dtype} elements differ from those of unicast, "
                f"{self.strategy.name.lower()}"
            )


def _problems(agreement: Agreement, device: torch.device, buffer_bytes: int) -> Iterator[_Problem]:
    generator = torch.Generator().manual_seed(agreement.rank)
    for dtype, integers in _CHECKED_TYPES.items():
        shape = checked_shape(agreement.world_size, dtype.itemsize, buffer_bytes)
        if shape is None:
            raise RuntimeError(f"buffers of {buffer_bytes} bytes are too small for a trial")
        for strategy in Strategy:
            # Bits of every kind: infinities, NaNs, subnormals and zeros of both signs among them.
            limit = torch.iinfo(integers)
            bits = torch.randint(limit.min, limit.max, shape, dtype=integers, generator=generator)
            rows = bits.view(dtype).to(device)
            yield _Problem(
                strategy, Call(rows, torch.empty_like(rows)), Call(rows, torch.empty_like(rows))
            )


def _time(
    agreement: Agreement, subject: Subject, device: torch.device, buffer_bytes: int
) -> list[list[float]]:
    """Return this rank's median times of a launch: unicast and multicast, by timed class."""
    timed = timed_classes(buffer_bytes, agreement.world_size)
    if not timed:
        return []

    def prepare() -> _Stopwatches:
        shape = (max(_timed_shape(one).tokens for _, one in timed), _timed_hidden())
        rows = torch.zeros(shape, dtype=_TIMED_TYPE, device=device)
        sums = torch.empty_like(rows)
        pairs = []
        for strategy, one in timed:
            tokens = _timed_shape(one).tokens
            call = Call(rows[:tokens], sums[:tokens], dependent_launch=True)
            launches = max(1, min(_MOST_LAUNCHES, _ROUND_BYTES >> one))
            pairs.append(
                [
                    stopwatch(functools.partial(launch, call, 0, tokens, strategy), launches)
                    for launch in (subject.launch, subject.launch_trial)
                ]
            )
        return _Stopwatches(rows, sums, pairs)

    # All that one rank may lack the memory for comes before any rank waits for it: unicast waits
    # are long, and trap.
    watches = agreement.attempt("preparing to time multicast", prepare)

    def measure() -> list[list[float]]:
        times = []
        for pair in watches.pairs:
            for replay in pair:
                replay()
            rounds = [[replay() for replay in pair] for _ in range(_ROUNDS)]
            times.append([statistics.median(column) for column in zip(*rounds, strict=True)])
        _require_no_expired_wait(subject)
        return times

    return agreement.attempt("timing multicast", measure)


class _Stopwatches(NamedTuple):
    """What times unicast and multicast, for each timed class, and the tensors of their graphs."""

    rows: torch.Tensor
    sums: torch.Tensor
    pairs: list[list[Callable[[], float]]]


def stopwatch(launch: Callable[[], None], launches: int) -> Callable[[], float]:
    """Return what times launches, in a graph, so that it is the device's time and not the host's.

    Launches nothing yet.

    Returns
    -------
    callable
        Runs the graph and returns the milliseconds of one launch.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads of this process may do what a capture forbids in its own thread only.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(launches):
            launch()
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / launches

    return replay


def _require_no_expired_wait(subject: Subject) -> None:
    if expired := subject.expired_waits():
        raise RuntimeError(f"{expired} words did not arrive by multicast in {TIMEOUT_S:g} s")


def _timed_shape(one: int) -> Shape:
    """Return rows in the middle of a size class."""
    return Shape(1 << one - _FIRST_CLASS, _timed_hidden())


def _timed_hidden() -> int:
    return _TIMED_ROW_BYTES // _TIMED_TYPE.itemsize


def _fits(
    strategy: Strategy, shape: Shape, dtype: torch.dtype, ranks: int, buffer_bytes: int
) -> bool:
    size = (
        sizing.native_oneshot_bytes if strategy == Strategy.ONESHOT else sizing.native_twoshot_bytes
    )
    return size(*shape, dtype.itemsize, ranks) <= buffer_bytes
