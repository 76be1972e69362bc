"""Waits of a trial of multicast, which end without a trap where a word does not arrive."""

from __future__ import annotations

import time
from types import ModuleType

import harness
import numpy as np
import pytest
from harness import STRATEGIES, Prepared

TIMEOUT_S = 0.5


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_a_trial_ends_without_a_trap_where_words_do_not_arrive(
    machine: ModuleType, ranks: int, strategy: str
) -> None:
    """A rank whose stores never arrive is to its peers what broken multicast is."""
    rng = np.random.default_rng([70, ranks])
    problem = harness.problem(rng, "bfloat16", ranks, 40, 520)
    group = machine.Group(
        ranks, harness.buffer_for(machine, [problem]), timeout_s=TIMEOUT_S, gives_up=True
    )
    prepared = [Prepared(problem) for _ in range(2)]
    begun = time.monotonic()
    group.run(
        [one.call(machine, strategy, multicast=True) for one in prepared], absent={ranks - 1: 1}
    )
    # Only the first wait lasts: those for the words of 40 rows do not add up.
    assert time.monotonic() - begun < 20 * TIMEOUT_S
    prepared[0].check("the call before")
    assert group.expired(ranks - 1) == 0
    assert all(group.expired(rank) > 0 for rank in range(ranks - 1))


def test_a_trial_that_works_is_like_any_call(machine: ModuleType) -> None:
    rng = np.random.default_rng(71)
    problem = harness.problem(rng, "bfloat16", 4, 7, 520)
    group = machine.Group(4, harness.buffer_for(machine, [problem]), gives_up=True)
    prepared = [Prepared(problem) for _ in range(4)]
    group.run(
        [
            one.call(machine, STRATEGIES[index % 2], multicast=index < 2)
            for index, one in enumerate(prepared)
        ]
    )
    for index, one in enumerate(prepared):
        one.check(index)
    assert [group.expired(rank) for rank in range(4)] == [0] * 4


def test_unicast_waits_fail_as_ever_beside_a_trial(machine: ModuleType) -> None:
    rng = np.random.default_rng(72)
    problem = harness.problem(rng, "bfloat16", 2, 1, 64)
    group = machine.Group(
        2, harness.buffer_for(machine, [problem]), timeout_s=TIMEOUT_S, gives_up=True
    )
    with pytest.raises(machine.WaitTimeout):
        group.run([Prepared(problem).call(machine, "ONESHOT")], absent={1: 0})
