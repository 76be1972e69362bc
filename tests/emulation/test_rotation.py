"""Two buffers alternate without a barrier between ranks: thousands of calls, none over another.

The machine itself checks every store and every reset against the protocol (emulation/memory.h), and
after a run that nothing is left unread; the tests make ranks drift apart, and plant faults to show
that the checks bite.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import harness
import numpy as np
import pytest
from harness import DTYPES, STRATEGIES, Prepared, Problem

SIZES = ((1, 8), (2, 64), (3, 257), (7, 63), (1, 520), (12, 32), (5, 7), (40, 8))


def mixed_problems(rng: np.random.Generator, ranks: int) -> list[Problem]:
    return [
        harness.problem(
            rng,
            str(rng.choice(DTYPES)),
            ranks,
            tokens,
            hidden,
            normalize=bool(rng.integers(2)),
        )
        for tokens, hidden in SIZES
        for _ in range(3)
    ]


def run_mixed(
    machine: ModuleType,
    group: Any,
    rng: np.random.Generator,
    problems: list[Problem],
    calls: int,
    holds: float = 0.0,
) -> int:
    """Make calls of changing size, type and strategy in one sequence; give how many held a rank."""
    prepared: list[Prepared] = []
    sequence = []
    held = 0
    was_held = (
        True  # neither the first call nor two in a row, whose ranks would wait for each other
    )
    for index in range(calls):
        problem = problems[rng.integers(len(problems))]
        strategy = STRATEGIES[rng.integers(2)]
        options: dict[str, Any] = {}
        was_held = not was_held and index + 1 < calls and bool(rng.random() < holds)
        if was_held:
            held += 1
            options["hold"] = str(rng.choice(["at_launch", "before_reading"]))
            # Nobody gets ahead of a rank that has rows left to send, or that owns a token and has
            # yet to read what it is to sum.
            owners = 1 if strategy == "TWOSHOT" else 0
            if problem.tokens > 1:
                options["hold"] = "at_launch"
            options["held_rank"] = int(rng.integers(owners, problem.ranks))
        prepared.append(Prepared(problem))
        sequence.append(prepared[-1].call(machine, strategy, **options))
    group.run(sequence)
    for index, one in enumerate(prepared):
        one.check(index)
    return held


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
def test_thousands_of_mixed_calls(machine: ModuleType, ranks: int) -> None:
    rng = np.random.default_rng([40, ranks])
    problems = mixed_problems(rng, ranks)
    group = machine.Group(ranks, harness.buffer_for(machine, problems))
    calls = 3000 if ranks < 8 else 1000
    for _ in range(calls // 500):
        run_mixed(machine, group, rng, problems, 500)
    assert [group.epoch(rank) for rank in range(ranks)] == [calls] * ranks


@pytest.mark.parametrize("multiprocessors", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
def test_random_delays(machine: ModuleType, ranks: int, multiprocessors: int) -> None:
    """Torn vectors in random order, threads and ranks that stop at any access."""
    rng = np.random.default_rng([41, ranks])
    problems = mixed_problems(rng, ranks)
    group = machine.Group(
        ranks,
        harness.buffer_for(machine, problems),
        seed=ranks,
        max_delay_us=200,
        multiprocessors=multiprocessors,
    )
    run_mixed(machine, group, rng, problems, 240 if ranks < 8 else 80)


@pytest.mark.parametrize("delay", [0, 100])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
def test_one_rank_an_epoch_behind(machine: ModuleType, ranks: int, delay: int) -> None:
    """A rank stops before it reads, and goes on when all others are in the next call, done sending.

    That is as far apart as the protocol lets ranks drift: both of the late rank's buffers are full.
    """
    rng = np.random.default_rng([42, ranks, delay])
    problems = mixed_problems(rng, ranks)
    group = machine.Group(
        ranks, harness.buffer_for(machine, problems), seed=ranks, max_delay_us=delay
    )
    one_row = [p for p in problems if p.tokens == 1]
    held = run_mixed(machine, group, rng, one_row, 80, holds=0.6)
    assert held > 15 and group.holds_reached == held
    run_mixed(machine, group, rng, problems, 60, holds=0.2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("first", [0, 1])
def test_the_turn_counter_wraps_around(machine: ModuleType, strategy: str, first: int) -> None:
    rng = np.random.default_rng(43)
    problems = mixed_problems(rng, 3)
    group = machine.Group(
        3, harness.buffer_for(machine, problems), first_epoch=(1 << 12) - 20 + first
    )
    prepared = [Prepared(problems[rng.integers(len(problems))]) for _ in range(40)]
    group.run([p.call(machine, strategy) for p in prepared])
    for one in prepared:
        one.check()
    assert [group.epoch(rank) for rank in range(3)] == [20 + first] * 3


def test_groups_run_side_by_side(machine: ModuleType) -> None:
    """Two workspaces in turns, as a model and its draft would use them."""
    rng = np.random.default_rng(44)
    problems = mixed_problems(rng, 4)
    size = harness.buffer_for(machine, problems)
    groups = [machine.Group(4, size, first_epoch=i) for i in range(2)]
    for turn in range(20):
        run_mixed(machine, groups[turn % 2], rng, problems, 7)


# ---- planted faults: the checks above can fail ----


def held_calls(machine: ModuleType, problem: Problem, count: int) -> list[Any]:
    """Keep rank 1 back in each call but the last, which has no next one to get ahead to."""
    return [
        Prepared(problem).call(machine, "ONESHOT", hold=hold, held_rank=1)
        for hold in ["before_reading"] * (count - 1) + ["none"]
    ]


def test_a_single_buffer_would_not_do(machine: ModuleType) -> None:
    """With one buffer, what is held above is what breaks: the check must see it."""
    rng = np.random.default_rng(45)
    problem = harness.problem(rng, "bfloat16", 3, 1, 64)
    size = harness.buffer_for(machine, [problem])
    machine.Group(3, size).run(held_calls(machine, problem, 4))
    faulty = machine.Group(3, size, single_buffer=True)
    with pytest.raises(
        machine.ProtocolViolation,
        match=r"rank \d, call 1, store at rank \d, buffer 0, offset \d+: overwrote data that",
    ):
        faulty.run(held_calls(machine, problem, 4))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_out_of_turn_is_noticed(machine: ModuleType, strategy: str) -> None:
    rng = np.random.default_rng(46)
    problem = harness.problem(rng, "bfloat16", 3, 2, 64)
    group = machine.Group(3, harness.buffer_for(machine, [problem]), timeout_s=0.5)
    group.set_epoch(1, 1)
    with pytest.raises(machine.WaitTimeout, match="a different sequence of calls"):
        group.run([Prepared(problem).call(machine, strategy)])


def test_a_word_left_behind_is_noticed(machine: ModuleType) -> None:
    rng = np.random.default_rng(47)
    problem = harness.problem(rng, "bfloat16", 2, 1, 64)
    size = harness.buffer_for(machine, [problem])
    group = machine.Group(2, size)
    group.set_word(0, size, 0x3F803F80)  # in the other buffer, where this call does not look
    with pytest.raises(machine.ProtocolViolation, match="rank 0: 1 words were never read"):
        group.run([Prepared(problem).call(machine, "ONESHOT")])
    group = machine.Group(2, size)
    group.set_word(0, 128, 0x3F803F80)  # where rank 1 is about to store
    with pytest.raises(
        machine.ProtocolViolation, match="rank 1, call 0, store at rank 0, buffer 0"
    ):
        group.run([Prepared(problem).call(machine, "ONESHOT")])


def test_a_failed_group_takes_no_more_calls(machine: ModuleType) -> None:
    rng = np.random.default_rng(48)
    problem = harness.problem(rng, "bfloat16", 2, 1, 64)
    group = machine.Group(2, harness.buffer_for(machine, [problem]))
    group.set_word(0, 128, 0x3F803F80)
    for _ in range(2):
        with pytest.raises(machine.ProtocolViolation, match="overwrote"):
            group.run([Prepared(problem).call(machine, "ONESHOT")])
