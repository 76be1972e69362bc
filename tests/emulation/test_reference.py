"""The model the kernels are compared with is right itself, and so are the machine's conversions."""

from __future__ import annotations

from fractions import Fraction
from types import ModuleType

import harness
import numpy as np
import pytest
import reference

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)


def _floats_around_halves(dtype: str) -> np.ndarray:
    """Every 16-bit value as float32, and its neighbours and midpoints with the next one."""
    values = reference.to_float(ALL_HALVES, dtype).view(np.uint32).astype(np.int64)
    step = 1 << (13 if dtype == "float16" else 16)
    around = [values + d for d in (-1, 0, 1, step // 2 - 1, step // 2, step // 2 + 1)]
    return (np.concatenate(around) & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def test_half_widens_exactly(machine: ModuleType) -> None:
    got = machine.float_of_half(ALL_HALVES)
    expected = ALL_HALVES.view(np.float16).astype(np.float32)
    number = ~np.isnan(expected)
    assert np.array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.isnan(got[~number]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_to_16_bits(machine: ModuleType, dtype: str) -> None:
    rng = np.random.default_rng(1)
    anywhere = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    # All float32 around where float16's subnormals are, which random bits seldom hit.
    small = (rng.standard_normal(1 << 18) * 2.0**-16).astype(np.float32)
    values = np.concatenate([_floats_around_halves(dtype), anywhere, small])
    convert = machine.half_of_float if dtype == "float16" else machine.bfloat_of_float
    assert np.array_equal(convert(values), reference.from_float(values, dtype))


def test_bfloat16_rounds_to_nearest_even() -> None:
    """Against exact fractions, for the model's own conversion."""
    rng = np.random.default_rng(2)
    values = rng.integers(0, 0x7F7F0000, 2000, dtype=np.uint32).view(np.float32)
    rounded = reference.from_float(values, "bfloat16")
    for value, bits in zip(values, rounded, strict=True):
        neighbours = [int(bits) + d for d in (-1, 0, 1) if 0 <= int(bits) + d < 0x7F80]
        exact = Fraction(float(value))
        distance = {
            n: abs(
                Fraction(float(reference.to_float(np.array([n], np.uint16), "bfloat16")[0])) - exact
            )
            for n in neighbours
        }
        nearest = min(distance.values())
        assert distance[int(bits)] == nearest
        if list(distance.values()).count(nearest) > 1:
            assert bits % 2 == 0


def test_fused_multiply_add_rounds_once() -> None:
    rng = np.random.default_rng(3)
    a = (rng.standard_normal(4000) * 2.0 ** rng.integers(-70, 40, 4000)).astype(np.float32)
    c = (rng.standard_normal(4000) * 2.0 ** rng.integers(-149, 60, 4000)).astype(np.float32)
    with np.errstate(all="ignore"):
        # Sums where the addend decides a tie that float64 alone would round twice.
        c[::2] = -(a[::2] * a[::2])
        c[::4] *= np.float32(2**-24)
        got = reference.fma(a, a, c)
    for x, z, result in zip(a, c, got, strict=True):
        exact = Fraction(float(x)) ** 2 + Fraction(float(z))
        down, up = (
            np.nextafter(result, np.float32(-np.inf)),
            np.nextafter(result, np.float32(np.inf)),
        )
        error = abs(Fraction(float(result)) - exact)
        for other in (down, up):
            if np.isfinite(other):
                assert error <= abs(Fraction(float(other)) - exact)


def test_reciprocal_root_rounds_once(machine: ModuleType) -> None:
    rng = np.random.default_rng(5)
    # Two binades hold every case there is, up to a power of two.
    every_other = np.arange(0x3F800000, 0x40800000, 2, dtype=np.uint32).view(np.float32)
    anywhere = rng.integers(0, 0x7F800000, 1 << 18, dtype=np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 1e-45], np.float32)
    values = np.concatenate([every_other, anywhere, special])
    with np.errstate(all="ignore"):
        expected = reference.reciprocal_sqrt(values)
    assert np.array_equal(machine.reciprocal_sqrt(values), expected, equal_nan=True)
    for value, result in zip(anywhere[:3000], expected[len(every_other) :], strict=False):
        if value == 0:
            continue
        exact = Fraction(float(value))
        ulp = Fraction(float(np.spacing(result)))
        low, high = Fraction(float(result)) - ulp / 2, Fraction(float(result)) + ulp / 2
        assert low**2 * exact <= 1 <= high**2 * exact


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_model_agrees_with_float64(dtype: str) -> None:
    rng = np.random.default_rng(4)
    drawn = harness.problem(rng, dtype, ranks=8, tokens=5, hidden=2880, weight_bias=1.0)
    output, residual = reference.float64(drawn.inputs, dtype, drawn.norm)
    # The sum and the residual are rounded to the element type on the way.
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22}[dtype]
    assert drawn.expected.residual is not None
    got = reference.to_float(drawn.expected.residual, dtype)
    np.testing.assert_allclose(got, residual, rtol=unit, atol=16 * unit)
    got = reference.to_float(drawn.expected.output, dtype)
    np.testing.assert_allclose(got, output, rtol=3 * unit, atol=16 * unit)
