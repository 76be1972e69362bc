"""Architecture lists: what is accepted, and what the wheel is called for it."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build_tools import architectures

CAPABILITIES = st.tuples(st.integers(9, 12), st.integers(0, 9), st.sampled_from(["", "a", "f"]))


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(architectures)
    assert results.attempted >= 2
    assert results.failed == 0


@given(st.lists(CAPABILITIES, min_size=1, max_size=6), st.sampled_from([" ", ",", ";", ", ", "  "]))
def test_any_separator_order_and_suffix_gives_the_same_ascending_list(
    capabilities: list[tuple[int, int, str]], separator: str
) -> None:
    text = separator.join(f"{major}.{minor}{suffix}" for major, minor, suffix in capabilities)
    expected = tuple(sorted({10 * major + minor for major, minor, _ in capabilities}))
    assert architectures.parse(text) == expected


@pytest.mark.parametrize("text", ["", "  ", "90", "sm_90", "9.0 x", "9.0+PTX", "9.0b", "9.00"])
def test_what_is_no_capability_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"FLASHINFER_CUDA_ARCH_LIST.*not a compute capability"):
        architectures.parse(text)


def test_an_architecture_without_what_the_kernels_need_is_refused() -> None:
    with pytest.raises(ValueError, match=r"8\.9 is older than 9\.0"):
        architectures.parse("9.0 8.9")


def test_the_environment_decides_and_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    assert architectures.requested() == (90, 100)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "10.0a")
    assert architectures.requested() == (100,)
