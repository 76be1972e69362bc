"""The sizing rule: what a workspace owns covers what its caller may ask for."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.elastic.allreduce import sizing

TOKENS = st.integers(0, 1 << 17)
HIDDEN = st.integers(1, 32768)
ELEMENT = st.sampled_from([2, 4])
RANKS = st.integers(1, 64)


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(sizing)
    assert results.attempted > 0
    assert results.failed == 0


def test_the_reported_case() -> None:
    """P=8, H=6144, bf16, 42 tokens reported: upstream's two numbers, and ours above them."""
    assert sizing.twoshot_bytes(42, 6144, 2, 8) == 1_179_648
    assert sizing.oneshot_bytes(40, 6144, 2, 8) == 3_932_160
    assert sizing.buffer_bytes(42, 6144, 2, 8) >= sizing.oneshot_bytes(42, 6144, 2, 8)


@given(TOKENS, HIDDEN, ELEMENT, RANKS)
def test_native_layout_holds_upstreams(tokens: int, hidden: int, element: int, ranks: int) -> None:
    arguments = (tokens, hidden, element, ranks)
    oneshot, twoshot = sizing.oneshot_bytes(*arguments), sizing.twoshot_bytes(*arguments)
    assert oneshot <= sizing.native_oneshot_bytes(*arguments)
    assert twoshot <= sizing.native_twoshot_bytes(*arguments)
    if hidden % sizing.SEGMENT_ELEMENTS == 0:
        assert oneshot == sizing.native_oneshot_bytes(*arguments)
        assert twoshot == sizing.native_twoshot_bytes(*arguments)


@given(HIDDEN, ELEMENT)
def test_a_row_is_whole_segments(hidden: int, element: int) -> None:
    size = sizing.row_bytes(hidden, element)
    assert size % (sizing.SEGMENT_ELEMENTS * element) == 0
    assert 0 <= size - hidden * element < sizing.SEGMENT_ELEMENTS * element


@given(TOKENS, HIDDEN, ELEMENT, RANKS)
def test_two_shot_fits_for_the_maximum(tokens: int, hidden: int, element: int, ranks: int) -> None:
    size = sizing.buffer_bytes(tokens, hidden, element, ranks)
    assert size % sizing.ALIGNMENT == 0
    assert sizing.MIN_BUFFER_BYTES <= size <= sizing.MAX_BUFFER_BYTES
    assert (
        sizing.native_twoshot_bytes(tokens, hidden, element, ranks) <= size
        or size == sizing.MAX_BUFFER_BYTES
    )


@given(TOKENS, HIDDEN, ELEMENT, RANKS, st.integers(0, 128 * 2**20), st.data())
def test_one_shot_fits_up_to_the_maximum_within_the_bound(
    reported: int, hidden: int, element: int, ranks: int, bound: int, data: st.DataObject
) -> None:
    size = sizing.buffer_bytes(reported, hidden, element, ranks, oneshot_max_bytes=bound)
    asked = data.draw(st.integers(0, reported))
    if sizing.oneshot_bytes(asked, hidden, element, ranks) <= bound:
        assert sizing.native_oneshot_bytes(asked, hidden, element, ranks) <= size


@given(st.integers(1, 1 << 17), HIDDEN, ELEMENT, RANKS)
def test_nothing_is_allocated_without_a_reason(
    tokens: int, hidden: int, element: int, ranks: int
) -> None:
    """The size is one of the two needs, or the floor, rounded up: not a byte more."""
    size = sizing.buffer_bytes(tokens, hidden, element, ranks)
    per_token = sizing.oneshot_bytes(1, hidden, element, ranks)
    oneshot_tokens = min(tokens, sizing.DEFAULT_ONESHOT_MAX_BYTES // per_token)
    reasons = (
        sizing.native_twoshot_bytes(tokens, hidden, element, ranks),
        sizing.native_oneshot_bytes(oneshot_tokens, hidden, element, ranks),
        sizing.MIN_BUFFER_BYTES,
    )
    assert any(0 <= size - reason < sizing.ALIGNMENT for reason in reasons) or (
        size == sizing.MAX_BUFFER_BYTES
    )


def test_beyond_the_bound_one_shot_is_provided_for_the_largest_call_within_it() -> None:
    """P=2, H=8192, bf16: 2048 tokens of one-shot are 64 MiB; 4096 are reported."""
    at_bound = sizing.buffer_bytes(2048, 8192, 2, 2)
    assert at_bound == 64 * 2**20
    # Two-shot for 4096 tokens needs 128 MiB in a group of two, and takes over.
    assert sizing.buffer_bytes(4096, 8192, 2, 2) == 128 * 2**20
    # In a group of eight, two-shot for 1024 tokens needs 32 MiB and one-shot 128: the bound holds.
    assert sizing.buffer_bytes(1024, 8192, 2, 8) == 64 * 2**20
    assert sizing.buffer_bytes(1024, 8192, 2, 8, oneshot_max_bytes=0) == 32 * 2**20


@given(st.integers(0, sizing.MAX_EXPLICIT_BYTES - sizing.ALIGNMENT))
def test_an_explicit_size_is_honoured_whole(explicit: int) -> None:
    size = sizing.buffer_bytes(0, 0, 0, 8, explicit=explicit)
    assert size % sizing.ALIGNMENT == 0
    assert explicit <= size <= max(explicit + sizing.ALIGNMENT - 1, sizing.ALIGNMENT)


def test_a_maximum_of_no_tokens_counts_as_one() -> None:
    wide = 2**18
    assert sizing.buffer_bytes(0, wide, 2, 8) == sizing.buffer_bytes(1, wide, 2, 8) > 2**20


def test_an_explicit_size_beyond_32_bits_is_upstreams_error() -> None:
    with pytest.raises(ValueError, match=r"greater than the maximum supported size \(UINT32_MAX\)"):
        sizing.buffer_bytes(0, 0, 0, 8, explicit=2**32)
    with pytest.raises(ValueError, match="negative"):
        sizing.buffer_bytes(0, 0, 0, 8, explicit=-1)


@pytest.mark.parametrize(
    "arguments", [(-1, 8, 2, 8), (1, 0, 2, 8), (1, 8, 0, 8), (1, 8, 2, 0)], ids=str
)
def test_arguments_out_of_range_are_named(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="max_tokens >= 0, hidden >= 1"):
        sizing.buffer_bytes(*arguments)


def test_more_tokens_never_mean_less_memory() -> None:
    sizes = [sizing.buffer_bytes(tokens, 2880, 2, 8) for tokens in range(0, 4096, 7)]
    assert sizes == sorted(sizes)
