"""Agreement between ranks: over threads with a bare backend, and over real gloo groups."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.elastic.allreduce.agreement import (
    FRAME_BYTES,
    Agreement,
    CollectiveError,
    describe,
    format_ranks,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
from ranks import run_ranks

TIMEOUT_S = 20.0


class Board:
    """A bare backend for threads: ``allgather`` of bytes of one size, and nothing else."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cells: list[Any] = [None] * size
        self.gate = threading.Barrier(size)
        self.calls = [0] * size

    def backend(self, place: int) -> Backend:
        return Backend(self, place)


class Backend:
    def __init__(self, board: Board, place: int) -> None:
        self.board = board
        self.place = place

    def allgather(self, data: bytes) -> list[Any]:
        assert type(data) is bytes
        assert len(data) == FRAME_BYTES
        board = self.board
        board.calls[self.place] += 1
        board.cells[self.place] = data
        board.gate.wait(TIMEOUT_S)
        gathered = list(board.cells)
        board.gate.wait(TIMEOUT_S)
        return gathered


def on_threads(
    size: int, work: Callable[[Agreement], Any], board: Board | None = None
) -> list[Any]:
    """Run ``work`` on every rank; return results or the exceptions raised, by rank."""
    board = board or Board(size)

    def one(rank: int) -> Any:
        try:
            return work(Agreement(board.backend(rank), rank, size))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=5 * FRAME_BYTES), min_size=1, max_size=5))
def test_exchange_returns_every_payload_by_rank(payloads: list[bytes]) -> None:
    size = len(payloads)
    assert on_threads(size, lambda a: a.exchange(payloads[a.rank])) == [payloads] * size


@pytest.mark.parametrize("length", [0, FRAME_BYTES - 20, FRAME_BYTES - 19, 3 * FRAME_BYTES])
def test_exchange_of_one_long_payload_among_short_ones(length: int) -> None:
    payloads = [b"", b"x" * length, b"y"]
    board = Board(3)
    assert on_threads(3, lambda a: a.exchange(payloads[a.rank]), board) == [payloads] * 3
    assert len(set(board.calls)) == 1


def test_order_of_the_backend_does_not_matter() -> None:
    board = Board(4)
    places = [2, 0, 3, 1]

    def one(rank: int) -> list[bytes]:
        return Agreement(board.backend(places[rank]), rank, 4).exchange(b"%d" % rank)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [[b"0", b"1", b"2", b"3"]] * 4


def test_a_group_of_one_needs_no_backend() -> None:
    alone = Agreement(None, 0, 1)  # type: ignore[arg-type]
    assert alone.exchange(b"x") == [b"x"]
    assert alone.gather("name", [1]) == [[1]]
    alone.same("name", b"value")
    alone.barrier()
    assert alone.attempt("step", lambda: 5) == 5
    with pytest.raises(CollectiveError, match="step: rank 0: ValueError: no"):
        alone.agree("step", ValueError("no"))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_group_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="outside a group of 2"):
        Agreement(None, rank, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", [(0,), (2,), (0, 1, 3), (0, 1, 2, 3)])
def test_one_failure_is_everyones(failing: tuple[int, ...]) -> None:
    board = Board(4)
    errors = {rank: ValueError(f"bad {rank}") for rank in failing}

    def work(agreement: Agreement) -> str:
        def step() -> int:
            if agreement.rank in errors:
                raise errors[agreement.rank]
            return agreement.rank

        with pytest.raises(CollectiveError) as caught:
            agreement.attempt("mapping", step)
        assert caught.value.stage == "mapping"
        assert caught.value.failures == {r: f"ValueError: bad {r}" for r in failing}
        assert caught.value.__cause__ is errors.get(agreement.rank)
        # The group stays usable.
        assert agreement.attempt("again", lambda: "fine") == "fine"
        return str(caught.value)

    texts = on_threads(4, work, board)
    assert len(set(texts)) == 1
    assert all(f"rank {rank}: ValueError: bad {rank}" in texts[0] for rank in failing)
    assert board.calls == [2] * 4


def test_equal_failures_are_told_once() -> None:
    def work(agreement: Agreement) -> None:
        agreement.agree("step", OSError("full") if agreement.rank != 1 else None)

    assert [str(error) for error in on_threads(4, work)] == [
        "step: ranks 0, 2-3: OSError: full"
    ] * 4


def test_an_interrupt_stays_one_where_it_happened() -> None:
    def work(agreement: Agreement) -> None:
        def step() -> None:
            if agreement.rank == 1:
                raise KeyboardInterrupt

        agreement.attempt("step", step)

    first, second = on_threads(2, work)
    assert type(first) is CollectiveError
    assert str(first) == "step: rank 1: KeyboardInterrupt"
    assert type(second) is KeyboardInterrupt


def test_long_messages_are_cut_and_odd_ones_survive() -> None:
    text = "\ud800 é " + "x" * 100_000

    def work(agreement: Agreement) -> None:
        agreement.agree("step", RuntimeError(text) if agreement.rank == 0 else None)

    for error in on_threads(2, work):
        assert isinstance(error, CollectiveError)
        assert "\ud800 é xxx" in str(error)
        assert len(str(error)) < 3000
    assert describe(RuntimeError()) == "RuntimeError"
    assert describe(CollectiveError("a stage", "what went wrong")) == "a stage: what went wrong"


@pytest.mark.parametrize("value", [b"\x00\xff", 7, "text", None, [1, 2.5], {"b": 1, "a": [True]}])
def test_same_values_pass(value: object) -> None:
    assert on_threads(3, lambda a: a.same("size", value)) == [None] * 3


def test_different_values_are_named_with_their_ranks() -> None:
    def work(agreement: Agreement) -> None:
        agreement.same("engine", "upstream" if agreement.rank == 2 else "native")

    assert [str(error) for error in on_threads(4, work)] == [
        'engine: ranks disagree: ranks 0-1, 3: "native"; rank 2: "upstream"'
    ] * 4


@pytest.mark.parametrize(("one", "other"), [(1, "1"), (b"a", "a"), (b"a", b"b"), (0, None)])
def test_values_that_look_alike_differ(one: object, other: object) -> None:
    errors = on_threads(2, lambda a: a.same("x", [one, other][a.rank]))
    assert all(isinstance(error, CollectiveError) for error in errors)


def test_a_value_that_is_not_json_fails_everywhere() -> None:
    errors = on_threads(3, lambda a: a.same("size", object() if a.rank == 1 else 1))
    assert all("rank 1: Object of type object is not JSON" in str(error) for error in errors)
    circular: list[Any] = []
    circular.append(circular)
    errors = on_threads(3, lambda a: a.same("size", circular if a.rank == 1 else 1))
    assert all("rank 1: Circular reference" in str(error) for error in errors), errors


def test_ranks_at_different_steps_are_told_so() -> None:
    def work(agreement: Agreement) -> None:
        if agreement.rank == 0:
            agreement.agree("map", None)
        else:
            agreement.same("size", 1)

    first, second = on_threads(2, work)
    assert str(first) == "map: ranks are at different steps: rank 0: map; rank 1: size"
    assert str(second) == "size: ranks are at different steps: rank 0: map; rank 1: size"


def test_ranks_that_lost_step_are_told_so() -> None:
    board = Board(2)

    def one(rank: int) -> None:
        agreement = Agreement(board.backend(rank), rank, 2)
        if rank == 0:
            Agreement(board.backend(rank), rank, 2).barrier()
        else:
            agreement.barrier()
        with pytest.raises(CollectiveError, match=r"lost step: rounds by rank \[0, 1\]"):
            agreement.barrier()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


def test_a_backend_of_another_group_is_refused_everywhere() -> None:
    """Four ranks gather, two of which believe in a group of two."""
    board = Board(4)

    def one(place: int) -> str:
        size = 2 if place < 2 else 4
        with pytest.raises(CollectiveError) as caught:
            Agreement(board.backend(place), place, size).barrier()
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(one, range(4)))
    assert all("gathers from 4 ranks, the group has 2 or 4" in text for text in texts)


def test_one_rank_twice_is_refused_everywhere() -> None:
    board = Board(2)

    def one(place: int) -> str:
        with pytest.raises(CollectiveError) as caught:
            Agreement(board.backend(place), 0, 2).barrier()
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert all("not 0 to 1, each once: (0, 0)" in text for text in pool.map(one, range(2)))


class Liar:
    def __init__(self, answer: Callable[[bytes], Any]) -> None:
        self.answer = answer

    def allgather(self, data: bytes) -> Any:
        return self.answer(data)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda data: [1, 2], "returned int where bytes were given"),
        (lambda data: [data, data[:-1]], "bytes that no rank sent"),
        (lambda data: [data, b"z" * FRAME_BYTES], "bytes that no rank sent"),
        (lambda data: [data], "gathers from 1 ranks, the group has 2"),
        (lambda data: [], "gathers from 0 ranks"),
        (lambda data: [data, data], "each once"),
    ],
)
def test_what_came_back_is_checked(answer: Callable[[bytes], Any], message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        Agreement(Liar(answer), 0, 2).exchange(b"payload")


def test_other_containers_of_bytes_are_taken() -> None:
    board = Board(2)

    class Views(Backend):
        def allgather(self, data: bytes) -> Any:
            return tuple(memoryview(bytearray(item)) for item in super().allgather(data))

    def one(rank: int) -> list[bytes]:
        return Agreement(Views(board, rank), rank, 2).exchange(b"%d" % rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [[b"0", b"1"]] * 2


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([7, 0], "ranks 0, 7")]
)
def test_ranks_as_text(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


class GroupBackend:
    """A torch.distributed group as a backend, the way upstream wraps it."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def allgather(self, data: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, data, group=self.group)
        return gathered


def agree_over_gloo(rank: int, world_size: int) -> str:
    agreement = Agreement(GroupBackend(), rank, world_size)
    assert agreement.exchange(b"%d" % rank * 2000) == [b"%d" % r * 2000 for r in range(world_size)]

    def step() -> None:
        if rank == world_size - 1:
            raise MemoryError("none left")

    with pytest.raises(CollectiveError) as caught:
        agreement.attempt("allocation", step)
    agreement.barrier()
    return str(caught.value)


def test_over_gloo() -> None:
    texts = run_ranks(agree_over_gloo, 2)
    assert texts == ["allocation: rank 1: MemoryError: none left"] * 2


def agree_in_subgroups(rank: int, world_size: int) -> tuple[Any, str, str]:
    """Ranks 0, 2 and 1, 3 form groups of two; only the second one has a failure."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    place = rank // 2
    # The world in place of the group: noticed by all.
    with pytest.raises(CollectiveError) as caught:
        Agreement(GroupBackend(), place, 2).barrier()

    agreement = Agreement(GroupBackend(groups[rank % 2]), place, 2)
    gathered = agreement.gather("world rank", rank)
    try:
        agreement.agree("step", ValueError("no") if rank == 3 else None)
    except CollectiveError as error:
        return gathered, str(error), str(caught.value)
    return gathered, "fine", str(caught.value)


def test_in_subgroups_of_gloo() -> None:
    results = run_ranks(agree_in_subgroups, 4)
    good, bad = ([0, 2], "fine"), ([1, 3], "step: rank 1: ValueError: no")
    assert [result[:2] for result in results] == [good, bad, good, bad]
    assert all("gathers from 4 ranks, the group has 2" in result[2] for result in results)
