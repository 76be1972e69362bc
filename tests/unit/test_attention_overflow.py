"""What is read from upstream's errors."""

from __future__ import annotations

import pytest

from flashinfer.elastic.attention import overflow

MESSAGE = (
    "Error in function 'aligned_alloc' at /x/include/flashinfer/allocator.h:49: Buffer overflow "
    "when allocating memory for {} with size {} and alignment {}, but only {} bytes available in "
    "AlignedAllocator. Increase the workspace buffer size."
)


@pytest.mark.parametrize(
    ("name", "size", "available", "capacity", "is_float"),
    [
        ("batch_decode_tmp_v", 4_194_304, 1_048_576, 1_048_576, True),
        ("mla_partial_o", 17_301_504, 16_777_216, 16_777_216, True),
        ("batch_prefill_tmp_v", 536_346_624, 413_138_944, 413_138_944, True),
        ("batch_prefill_tmp_s", 4_190_208, 100, 536_870_912, True),
        ("batch_prefill_request_indices", 9_000_000, 8_388_608, 8_388_608, False),
        ("partial_indptr", 9_000_000, 8_388_608, 8_388_608, False),
    ],
)
def test_reported_overflows(
    name: str, size: int, available: int, capacity: int, is_float: bool
) -> None:
    shortage = overflow.parse(RuntimeError(MESSAGE.format(name, size, 16, available)))
    assert shortage == (name, size, 16, available)
    assert shortage.is_float is is_float
    assert shortage.needed(capacity) == capacity - available + size + 16


@pytest.mark.parametrize(
    "text",
    ["", "CUDA error: an illegal memory access", "Buffer overflow when allocating memory for x"],
)
def test_other_errors_are_none(text: str) -> None:
    assert overflow.parse(RuntimeError(text)) is None
    assert overflow.counter_bytes(RuntimeError(text)) is None
    assert overflow.preflight_bytes(RuntimeError(text)) is None


@pytest.mark.parametrize(
    "text",
    [
        "trtllm-gen multi-CTA KV counter buffer is too small: got 128 bytes, need 16384 bytes",
        "multi_ctas_kv_counter_buffer is too small: got 128 bytes, need 16384 bytes",
    ],
)
def test_counters(text: str) -> None:
    assert overflow.counter_bytes(ValueError(text)) == 16384


def test_preflight() -> None:
    text = "fa2 MLA needs 34734080 float workspace bytes for partial outputs and LSE."
    assert overflow.preflight_bytes(ValueError(text)) == 34734080
