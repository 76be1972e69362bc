"""Every wait ends: with the data, or with an error that says who waited for whom."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from types import ModuleType

import harness
import numpy as np
import pytest
from harness import STRATEGIES, Prepared

TIMEOUT_S = 0.5


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_peer_that_never_comes(machine: ModuleType, strategy: str, ranks: int) -> None:
    rng = np.random.default_rng([50, ranks])
    problem = harness.problem(rng, "bfloat16", ranks, 2, 64)
    group = machine.Group(
        ranks, harness.buffer_for(machine, [problem]), timeout_s=TIMEOUT_S, multiprocessors=2
    )
    prepared = [Prepared(problem) for _ in range(4)]
    calls = [p.call(machine, strategy) for p in prepared]
    missing = ranks - 1
    begun = time.monotonic()
    with pytest.raises(machine.WaitTimeout) as failed:
        group.run(calls, absent={missing: 2})
    assert time.monotonic() - begun < 20 * TIMEOUT_S
    messages = str(failed.value).splitlines()
    waited = [
        re.fullmatch(
            r"rank (\d+) waited \d+ ms for (the contribution|the sum) of rank (\d+), token [01]: "
            r"that rank has died, hangs, or made a different sequence of calls on this workspace",
            message,
        )
        for message in messages
    ]
    assert all(waited), messages
    whom = {int(m[1]): int(m[3]) for m in waited if m}
    assert set(whom) == set(range(ranks)) - {missing}, "every other rank says so"
    # With two-shot, who waits for a sum waits for a rank that itself waits.
    assert missing in whom.values()
    assert strategy == "TWOSHOT" or set(whom.values()) == {missing}
    for one in prepared[:2]:
        one.check("calls before the peer went away")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_owner_of_a_sum_never_comes(machine: ModuleType, strategy: str) -> None:
    """Of 16 ranks, rank 0 goes away; with two-shot it owns token 0, whose sum nobody gets."""
    rng = np.random.default_rng(51)
    problem = harness.problem(rng, "bfloat16", 16, 1, 64)
    group = machine.Group(16, harness.buffer_for(machine, [problem]), timeout_s=TIMEOUT_S)
    awaited = "the contribution" if strategy == "ONESHOT" else "the sum"
    with pytest.raises(machine.WaitTimeout, match=f"for {awaited} of rank 0, token 0"):
        group.run([Prepared(problem).call(machine, strategy)], absent={0: 0})


def test_no_thread_outlives_its_group(machine: ModuleType) -> None:
    rng = np.random.default_rng(52)
    problem = harness.problem(rng, "bfloat16", 4, 3, 520)
    before = thread_count()
    for _ in range(3):
        group = machine.Group(
            4, harness.buffer_for(machine, [problem]), timeout_s=TIMEOUT_S, multiprocessors=3
        )
        assert thread_count() == before + 12
        with pytest.raises(machine.WaitTimeout):
            group.run([Prepared(problem).call(machine, "TWOSHOT", shape=(2, 1, 64))], absent={2: 0})
        del group
        deadline = time.monotonic() + 5
        while thread_count() != before and time.monotonic() < deadline:
            time.sleep(0.01)  # a joined thread may be listed for a moment
        assert thread_count() == before


def test_other_python_threads_run_meanwhile(machine: ModuleType) -> None:
    """The interpreter's lock is not held while ranks wait."""
    rng = np.random.default_rng(53)
    problem = harness.problem(rng, "bfloat16", 2, 1, 64)
    group = machine.Group(2, harness.buffer_for(machine, [problem]), timeout_s=TIMEOUT_S)
    done = threading.Event()
    beats: list[float] = []

    def beat() -> None:
        while not done.wait(0.01):
            beats.append(time.monotonic())

    other = threading.Thread(target=beat)
    other.start()
    try:
        with pytest.raises(machine.WaitTimeout):
            group.run([Prepared(problem).call(machine, "ONESHOT")], absent={1: 0})
    finally:
        done.set()
        other.join()
    assert len(beats) > 5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seconds_of_skew_are_fine(machine: ModuleType, strategy: str) -> None:
    """A rank that comes late, but before the time-out, costs nothing but the wait."""
    rng = np.random.default_rng(54)
    problem = harness.problem(rng, "bfloat16", 3, 2, 64)
    group = machine.Group(3, harness.buffer_for(machine, [problem]), timeout_s=30)
    prepared = [Prepared(problem) for _ in range(3)]
    begun = time.monotonic()
    group.run([p.call(machine, strategy) for p in prepared], late={1: 1.0})
    assert time.monotonic() - begun >= 1.0
    for one in prepared:
        one.check()


def test_a_wait_without_end_waits(machine: ModuleType) -> None:
    """Time-out 0: for ever, here for longer than any clock read would allow."""
    rng = np.random.default_rng(55)
    problem = harness.problem(rng, "bfloat16", 2, 1, 64)
    group = machine.Group(2, harness.buffer_for(machine, [problem]), timeout_s=0)
    prepared = Prepared(problem)
    group.run([prepared.call(machine, "ONESHOT")], late={0: 1.5})
    prepared.check()
