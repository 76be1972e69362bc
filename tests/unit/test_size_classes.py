"""The table that says which launches go by multicast."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.elastic.allreduce import size_classes
from flashinfer.elastic.allreduce.size_classes import LAST_CLASS, WORTHWHILE, choose, size_class

ALL = (1 << LAST_CLASS + 1) - 1
times = st.dictionaries(
    st.integers(1, LAST_CLASS), st.tuples(st.floats(0.5, 100), st.floats(0.5, 100)), max_size=12
)


def chosen(bits: int, one: int) -> bool:
    return bool(bits >> one & 1)


@given(st.integers(0, 2**LAST_CLASS - 1))
def test_a_class_holds_payloads_of_as_many_binary_digits(payload: int) -> None:
    one = size_class(payload)
    assert payload == 0 if one == 0 else 2 ** (one - 1) <= payload < 2**one


@given(times)
def test_a_timed_class_goes_by_what_was_faster_by_a_margin(
    measured: dict[int, tuple[float, float]],
) -> None:
    unicast = {one: pair[0] for one, pair in measured.items()}
    multicast = {one: pair[1] for one, pair in measured.items()}
    bits = choose(unicast, multicast)
    assert 0 <= bits <= ALL
    for one in measured:
        assert chosen(bits, one) is (multicast[one] <= WORTHWHILE * unicast[one])


@given(times)
def test_a_class_between_goes_as_the_next_smaller_that_was_timed(
    measured: dict[int, tuple[float, float]],
) -> None:
    bits = choose(
        {one: pair[0] for one, pair in measured.items()},
        {one: pair[1] for one, pair in measured.items()},
    )
    for one in range(LAST_CLASS + 1):
        smaller = [timed for timed in measured if timed <= one]
        like = max(smaller) if smaller else min(measured, default=None)
        assert chosen(bits, one) is (like is not None and chosen(bits, like))


def test_the_margin_itself_is_enough() -> None:
    assert choose({3: 1.0}, {3: WORTHWHILE})


def test_nothing_timed_is_nothing_chosen() -> None:
    assert choose({}, {}) == 0


def test_times_of_different_classes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different classes: \[3, 4\] and \[3\]"):
        choose({3: 1.0, 4: 1.0}, {3: 1.0})


def test_the_examples() -> None:
    failed, attempted = doctest.testmod(size_classes)
    assert attempted >= 4
    assert failed == 0
