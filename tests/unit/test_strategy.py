"""Strategy resolution: every call is covered, fits, and is split as little as possible."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flashinfer.elastic.allreduce import sizing
from flashinfer.elastic.allreduce.strategy import Step, Strategy, auto, resolve

REQUESTED = st.sampled_from(Strategy)
TOKENS = st.integers(0, 3000)
HIDDEN = st.integers(1, 16384)
ELEMENT = st.sampled_from([2, 4])
RANKS = st.integers(1, 64)
# In units of a one-shot row, so that chunking, its edges and its absence are all drawn often.
CAPACITY = st.fractions(1, 4000)


def needed(step: Step, hidden: int, element: int, ranks: int) -> int:
    """Return the bytes that a step occupies."""
    count = {
        Strategy.ONESHOT: sizing.native_oneshot_bytes,
        Strategy.TWOSHOT: sizing.native_twoshot_bytes,
    }[step.strategy]
    return count(step.count, hidden, element, ranks)


@given(REQUESTED, TOKENS, HIDDEN, ELEMENT, RANKS, CAPACITY)
def test_steps(
    requested: Strategy, tokens: int, hidden: int, element: int, ranks: int, capacity: float
) -> None:
    size = int(capacity * sizing.native_oneshot_bytes(1, hidden, element, ranks))
    steps = resolve(requested, tokens, hidden, element, ranks, size)

    # They partition [0, tokens) in order, and every one fits.
    covered = 0
    for step in steps:
        assert step.first == covered
        assert step.count > 0
        assert needed(step, hidden, element, ranks) <= size
        covered += step.count
    assert covered == tokens

    # One strategy throughout; two-shot chunks share out evenly, the last one apart.
    assert len({step.strategy for step in steps}) == (tokens > 0)
    for step in steps[:-1]:
        assert step.strategy == Strategy.ONESHOT or step.count % ranks == 0

    # What is asked for is taken if it fits, else two-shot if that does.
    whole = {
        strategy: needed(Step(0, tokens, strategy), hidden, element, ranks) <= size
        for strategy in Strategy
    }
    if tokens and whole[requested]:
        assert steps == (Step(0, tokens, requested),)
    elif tokens and whole[Strategy.TWOSHOT]:
        assert steps == (Step(0, tokens, Strategy.TWOSHOT),)


@given(REQUESTED, st.integers(1, 400), st.integers(1, 64), ELEMENT, st.integers(1, 9), CAPACITY)
def test_no_plan_has_fewer_steps(
    requested: Strategy, tokens: int, hidden: int, element: int, ranks: int, capacity: float
) -> None:
    """Compare with the largest chunk of either strategy, found by trying."""
    assume(capacity < 400)
    size = int(capacity * sizing.native_oneshot_bytes(1, hidden, element, ranks))
    largest = max(
        count
        for count in range(1, tokens + 1)
        for strategy in Strategy
        if needed(Step(0, count, strategy), hidden, element, ranks) <= size
    )
    steps = resolve(requested, tokens, hidden, element, ranks, size)
    assert len(steps) == -(-tokens // largest)


@given(REQUESTED, st.integers(1, 3000), HIDDEN, ELEMENT, RANKS, st.fractions(0, 1))
def test_one_row_that_does_not_fit_is_the_one_error(
    requested: Strategy, tokens: int, hidden: int, element: int, ranks: int, part: float
) -> None:
    assume(part < 1)
    row = sizing.native_oneshot_bytes(1, hidden, element, ranks)
    size = int(part * row)
    with pytest.raises(ValueError, match="insufficient") as caught:
        resolve(requested, tokens, hidden, element, ranks, size)
    text = str(caught.value)
    assert text.startswith(
        "The buffer size in the given workspace is insufficient for the given problem size. "
        f"Buffer: {size} bytes, Required: {row} bytes."
    )
    assert f"hidden_dim={hidden}" in text
    # The remedy works.
    assert resolve(requested, tokens, hidden, element, ranks, row)
    assert resolve(
        requested, tokens, hidden, element, ranks, sizing.buffer_bytes(1, hidden, element, ranks)
    )


@pytest.mark.parametrize("requested", Strategy)
def test_no_tokens_is_no_step(requested: Strategy) -> None:
    assert resolve(requested, 0, 6144, 2, 8, 0) == ()


def test_the_reported_case() -> None:
    """What upstream refuses runs as asked in our buffer, and as two-shot in upstream's."""
    ours = sizing.buffer_bytes(42, 6144, 2, 8)
    assert resolve(Strategy.ONESHOT, 40, 6144, 2, 8, ours) == (Step(0, 40, Strategy.ONESHOT),)
    assert resolve(Strategy.ONESHOT, 40, 6144, 2, 8, 1_179_648) == (Step(0, 40, Strategy.TWOSHOT),)


def test_chunks_are_even() -> None:
    """100 tokens where 64 fit: 56 and 44 in multiples of the group, not 64 and 36."""
    size = sizing.native_twoshot_bytes(64, 4096, 2, 8)
    assert resolve(Strategy.TWOSHOT, 100, 4096, 2, 8, size) == (
        Step(0, 56, Strategy.TWOSHOT),
        Step(56, 44, Strategy.TWOSHOT),
    )


def test_the_requested_strategy_breaks_a_tie() -> None:
    """In a group of two both strategies hold equally many tokens."""
    size = sizing.native_oneshot_bytes(10, 4096, 2, 2)
    for requested in Strategy:
        assert {step.strategy for step in resolve(requested, 30, 4096, 2, 2, size)} == {requested}


def test_one_shot_chunks_where_two_shot_does_not_fit() -> None:
    """Three one-shot rows of eight ranks hold less than one round of two-shot would need."""
    size = sizing.native_oneshot_bytes(1, 4096, 2, 8)
    assert resolve(Strategy.TWOSHOT, 3, 4096, 2, 8, size) == tuple(
        Step(first, 1, Strategy.ONESHOT) for first in range(3)
    )


@pytest.mark.parametrize(
    "arguments",
    [(-1, 8, 2, 8, 0), (1, 0, 2, 8, 0), (1, 8, 0, 8, 0), (1, 8, 2, 0, 0), (1, 8, 2, 8, -1)],
    ids=str,
)
def test_arguments_out_of_range_are_named(arguments: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="tokens >= 0, hidden >= 1"):
        resolve(Strategy.ONESHOT, *arguments)


def test_plans_are_cached() -> None:
    arguments = (Strategy.ONESHOT, 40, 6144, 2, 8, 1 << 22)
    assert resolve(*arguments) is resolve(*arguments)


def test_values_are_upstreams() -> None:
    assert [(entry.name, entry.value) for entry in Strategy] == [("ONESHOT", 0), ("TWOSHOT", 1)]


@given(TOKENS, HIDDEN, ELEMENT, RANKS, st.integers(70, 130))
def test_auto_turns_to_two_shot_once_and_for_all(
    tokens: int, hidden: int, element: int, ranks: int, arch: int
) -> None:
    """More tokens never turn two-shot back into one-shot, and a single token is never split."""
    if auto(tokens, hidden, element, ranks, arch) == Strategy.TWOSHOT:
        assert auto(tokens + 1, hidden, element, ranks, arch) == Strategy.TWOSHOT
    assert auto(0, hidden, element, ranks, arch) == Strategy.ONESHOT


@pytest.mark.parametrize(
    ("ranks", "arch", "mib"),
    [
        (4, 90, 2),
        (8, 90, 0.5),
        (4, 100, 4),
        (8, 100, 1),
        (8, 103, 2),
        # Sizes and archs between the entries, older and newer ones, larger groups.
        (3, 90, 2),
        (6, 103, 2),
        (8, 80, 0.5),
        (8, 107, 2),
        (16, 90, 1 / 16),
    ],
)
def test_auto_crosses_over_where_the_table_says(ranks: int, arch: int, mib: float) -> None:
    tokens = int(mib * 2**20) // 1024
    assert auto(tokens, 512, 2, ranks, arch) == Strategy.ONESHOT
    assert auto(tokens + 1, 512, 2, ranks, arch) == Strategy.TWOSHOT


@pytest.mark.parametrize("tokens", [1, 1 << 20])
def test_a_group_of_two_never_takes_two_hops(tokens: int) -> None:
    assert auto(tokens, 8192, 2, 2, 90) == Strategy.ONESHOT
