"""Sizes of trtllm-gen's workspaces, and of what is grown to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.elastic.attention import overflow, sizing

REPORTED = 135_266_304  # trtllm_gen_softmax_workspace, of the public report


@pytest.mark.parametrize(("heads", "batch"), [(64, 1024), (128, 512)])
def test_statistics_are_the_reported_bytes(heads: int, batch: int) -> None:
    assert sizing.statistics_bytes(heads, batch, 1) == REPORTED


@pytest.mark.parametrize("left", [125_829_120, 134_217_728])
def test_the_reported_workspaces_are_too_small(left: int) -> None:
    """128 MiB, with 0.6.x's counters in it and without."""
    assert left in (128 * sizing.MIB - sizing.COUNTER_SLAB_BYTES, 128 * sizing.MIB)
    assert sizing.statistics_bytes(64, 1024, 1) > left


@pytest.mark.parametrize(("query", "tile"), [(1, 256), (256, 256), (257, 512), (4096, 4096)])
def test_statistics_count_whole_query_tiles(query: int, tile: int) -> None:
    assert sizing.statistics_bytes(8, 3, query) == 8 * 8 * 3 * tile + sizing.MIB


def test_the_reserve_holds_the_scratch_of_any_device_there_is() -> None:
    assert sizing.scratch_bytes(148, 512) == 148 * 128 * (8 + 2 * 512 * 2)
    assert sizing.scratch_bytes(160, 512) <= sizing.SCRATCH_RESERVE_BYTES


@given(
    multiprocessors=st.integers(1, 256),
    step=st.integers(1, sizing.MAX_QUERY_STEP),
    head_dim=st.sampled_from([64, 128, 256, 512]),
    pair=st.booleans(),
    split_head=st.sampled_from([1, 2, 4]),
)
def test_scratch_covers_upstreams_layout(
    multiprocessors: int, step: int, head_dim: int, pair: bool, split_head: int
) -> None:
    """Upstream: float2 statistics of every SM, then 2-byte partial outputs of every CTA."""
    statistics = multiprocessors * step * 8
    per_cta = step * (head_dim // split_head) * (2 if pair else 1) * 2
    assert statistics + multiprocessors * per_cta <= sizing.scratch_bytes(multiprocessors, head_dim)


@given(batch=st.integers(1, 10_000), heads=st.integers(1, 256), sms=st.integers(1, 256))
def test_counters_are_upstreams(batch: int, heads: int, sms: int) -> None:
    count = sizing.counter_bytes(batch, heads, sms) // 4
    assert count % 8 == 0
    assert 0 <= count - max(batch * heads, sms) < 8


@given(st.integers(1, 2**42))
def test_growth_is_enough_and_not_wasteful(needed: int) -> None:
    grown = sizing.grown_bytes(needed)
    assert grown >= needed + needed // 16
    assert grown <= max(2 * sizing.MIB, needed * 1.4)
    assert grown % 16 == 0
    assert sizing.grown_bytes(needed + 1) >= grown


def test_a_slowly_growing_need_seldom_grows() -> None:
    growths, held = 0, 0
    for needed in range(sizing.MIB, 1024 * sizing.MIB, 64 * 1024):
        if needed > held:
            held, growths = sizing.grown_bytes(needed), growths + 1
    assert growths <= 40


def test_the_small_allocation_after_the_large_one_fits_at_once() -> None:
    """tmp_s follows tmp_v and is head_dim times smaller."""
    tmp_v, head_dim = 536_346_624, 64
    shortage = overflow.Overflow("batch_prefill_tmp_v", tmp_v, 16, 413_138_944)
    grown = sizing.grown_bytes(shortage.needed(413_138_944))
    assert grown >= tmp_v + tmp_v // head_dim
