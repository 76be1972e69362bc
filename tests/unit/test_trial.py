"""Trying multicast: what is checked, what is timed, and that all ranks decide alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.elastic.allreduce import sizing, trial
from flashinfer.elastic.allreduce.agreement import CollectiveError
from flashinfer.elastic.allreduce.size_classes import SizeClasses, size_class
from flashinfer.elastic.allreduce.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parent))
from multicast_doubles import (
    Machine,
    Subject,
    agreement_of,
    current_rank,
    on_ranks,
    without_gpu,
)
from upstream_on_cpu import Threads

RANKS = 3
BUFFER = 2**20
CPU = torch.device("cpu")


def times_of(way: str, payload: int) -> float:
    """Multicast is twice as fast up to 16 KiB, and half as fast above."""
    if way == "unicast":
        return 10.0
    return 5.0 if payload < 2**14 else 20.0


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Threads:
    group = Threads(RANKS)
    without_gpu(monkeypatch, group)

    def stopwatch(launch: Any, launches: int) -> Callable[[], float]:
        call = launch.args[0]
        way = {"launch": "unicast", "launch_trial": "multicast"}[launch.func.__name__]
        assert launches >= 1
        launch()
        return lambda: times_of(way, call.input.numel() * 2)

    monkeypatch.setattr(trial, "stopwatch", stopwatch)
    return group


def run(
    group: Threads, machine: Machine, buffer_bytes: int = BUFFER
) -> tuple[list[Any], list[Subject]]:
    subjects = [machine.subject(rank) for rank in range(group.ranks)]
    results = on_ranks(
        group,
        lambda rank: trial.run(agreement_of(group, rank), subjects[rank], CPU, buffer_bytes),
    )
    return results, subjects


def test_the_faster_way_is_chosen_for_each_size(group: Threads) -> None:
    results, _ = run(group, Machine(RANKS))
    below, above = 2**14 - 1, 2**14
    for result in results:
        assert isinstance(result, SizeClasses), result
        for bits in result:
            assert bits >> size_class(below) & 1
            assert bits & 1
            assert not bits >> size_class(above) & 1
            assert not bits >> 40 & 1


def test_all_types_and_strategies_are_checked_before_anything_is_timed(group: Threads) -> None:
    results, subjects = run(group, Machine(RANKS))
    assert not any(isinstance(result, BaseException) for result in results), results
    types = (torch.float16, torch.bfloat16, torch.float32)
    wanted = {(strategy, dtype) for strategy in Strategy for dtype in types}
    for subject in subjects:
        checked = subject.launches[: 2 * len(wanted)]
        for way, part in (("multicast", checked[: len(wanted)]), ("unicast", checked[-6:])):
            assert {one[0] for one in part} == {way}
            assert {(one[1], one[3]) for one in part} == wanted
        # An even number of calls over each, so that both buffers have been through both.
        assert len(wanted) % 2 == 0
        for _, strategy, (tokens, hidden), dtype in subject.launches:
            size = (
                sizing.native_oneshot_bytes
                if strategy == Strategy.ONESHOT
                else sizing.native_twoshot_bytes
            )
            assert size(tokens, hidden, dtype.itemsize, RANKS) <= BUFFER


@pytest.mark.parametrize("rank", range(RANKS))
def test_words_that_do_not_arrive_on_one_rank_fail_all(group: Threads, rank: int) -> None:
    machine = Machine(RANKS)
    machine.lost = {rank}
    results, subjects = run(group, machine)
    assert all(isinstance(result, CollectiveError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert f"rank {rank}: RuntimeError: 6 words did not arrive by multicast in 2 s" in str(
        results[0]
    )
    # Unicast, whose waits trap, has not been begun on buffers in disorder.
    assert {one[0] for subject in subjects for one in subject.launches} == {"multicast"}


def test_a_wrong_bit_on_one_rank_fails_all(group: Threads) -> None:
    machine = Machine(RANKS)
    machine.wrong = {1}
    results, _ = run(group, machine)
    assert all(isinstance(result, CollectiveError) for result in results), results
    assert "comparing multicast with unicast: rank 1: RuntimeError: 1 of " in str(results[0])


def test_rows_of_the_wrong_rank_are_noticed(group: Threads) -> None:
    machine = Machine(RANKS)
    machine.mixed_up = True
    results, _ = run(group, machine)
    assert all("comparing multicast with unicast: " in str(result) for result in results), results


def test_words_that_do_not_arrive_while_it_is_timed_fail_all(
    group: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(RANKS)
    stopwatch = trial.stopwatch

    def losing(launch: Any, launches: int) -> Callable[[], float]:
        machine.lost = {1}
        return stopwatch(launch, launches)

    monkeypatch.setattr(trial, "stopwatch", losing)
    results, _ = run(group, machine)
    assert all(isinstance(result, CollectiveError) for result in results), results
    assert "timing multicast: rank 1: RuntimeError: " in str(results[0])
    assert "words did not arrive" in str(results[0])


def test_the_slowest_rank_decides(group: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multicast is fast on two ranks and slow on one."""

    def stopwatch(launch: Any, _: int) -> Callable[[], float]:
        if launch.func.__name__ == "launch":
            return lambda: 10.0
        slow = current_rank() == 2
        return lambda: 11.0 if slow else 1.0

    monkeypatch.setattr(trial, "stopwatch", stopwatch)
    results, _ = run(group, Machine(RANKS))
    assert results == [SizeClasses(0, 0)] * RANKS


def test_the_middle_of_several_times_counts(
    group: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopwatch(launch: Any, _: int) -> Callable[[], float]:
        if launch.func.__name__ == "launch":
            return lambda: 10.0
        noisy = iter((1000.0, 5.0, 1000.0, 5.0, 1000.0, 5.0))  # the first is not counted
        return lambda: next(noisy)

    monkeypatch.setattr(trial, "stopwatch", stopwatch)
    results, _ = run(group, Machine(RANKS))
    assert all(result.oneshot and result.twoshot for result in results)


def test_nothing_is_timed_where_one_rank_cannot_prepare(
    group: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the others would wait for it in unicast kernels, for minutes, and trap."""
    timed: list[int] = []

    def stopwatch(_: Any, __: int) -> Callable[[], float]:
        rank = current_rank()
        if rank == 1:
            raise RuntimeError("out of memory on purpose")

        def replay() -> float:
            timed.append(rank)
            return 1.0

        return replay

    monkeypatch.setattr(trial, "stopwatch", stopwatch)
    results, _ = run(group, Machine(RANKS))
    assert timed == []
    assert all(isinstance(result, CollectiveError) for result in results), results
    assert "rank 1: RuntimeError: out of memory on purpose" in str(results[0])


def test_a_buffer_too_small_for_a_trial_says_so(group: Threads) -> None:
    results, _ = run(group, Machine(RANKS), buffer_bytes=64)
    assert all(isinstance(result, CollectiveError) for result in results)
    assert "buffers of 64 bytes are too small for a trial" in str(results[0])


def test_a_buffer_too_small_for_what_is_timed_stays_with_unicast(group: Threads) -> None:
    assert trial.timed_classes(2**12, RANKS) == []
    results, _ = run(group, Machine(RANKS), buffer_bytes=2**12)
    assert results == [SizeClasses(0, 0)] * RANKS


@given(st.integers(2, 64), st.sampled_from([2, 4]), st.integers(0, 2**27))
def test_the_checked_problem_fits(ranks: int, element_bytes: int, buffer_bytes: int) -> None:
    def needed(tokens: int, hidden: int) -> int:
        return max(
            sizing.native_oneshot_bytes(tokens, hidden, element_bytes, ranks),
            sizing.native_twoshot_bytes(tokens, hidden, element_bytes, ranks),
        )

    shape = trial.checked_shape(ranks, element_bytes, buffer_bytes)
    if shape is None:
        assert needed(1, 8) > buffer_bytes
    else:
        assert needed(*shape) <= buffer_bytes
        # Smaller than the most only because the most does not fit.
        assert shape == (max(64, 2 * ranks), 2048) or needed(*shape) * 4 > buffer_bytes


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_every_rank_owns_a_token_of_the_checked_problem(ranks: int) -> None:
    shape = trial.checked_shape(ranks, 2, 2**30)
    assert shape is not None
    assert shape.tokens >= 2 * ranks
    # What just fits, fits.
    exact = max(
        size(*shape, 2, ranks)
        for size in (sizing.native_oneshot_bytes, sizing.native_twoshot_bytes)
    )
    assert trial.checked_shape(ranks, 2, exact) == shape


@given(st.integers(2, 64), st.integers(0, 2**28))
def test_timed_problems_are_of_their_class_and_fit(ranks: int, buffer_bytes: int) -> None:
    for strategy, one in trial.timed_classes(buffer_bytes, ranks):
        tokens, hidden = trial._timed_shape(one)
        assert size_class(tokens * hidden * 2) == one
        assert trial._fits(strategy, trial._timed_shape(one), torch.bfloat16, ranks, buffer_bytes)
