"""What the kernels must compute, twice over: bit for bit, and in float64.

Arrays of elements are bits: ``uint16`` for the 16-bit types, ``uint32`` for float32. The bit-exact
model follows the definition of the numerics step by step with numpy alone; it knows nothing of
strategies, launch shapes or threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger]
Floats = NDArray[np.float32]

SEGMENT = 8
LANES = 32

EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}
SIGN = {"float16": 0x8000, "bfloat16": 0x8000, "float32": 0x80000000}
NAN = {"float16": 0x7FFF, "bfloat16": 0x7FFF, "float32": 0x7FFFFFFF}


def bits_dtype(dtype: str) -> type[np.unsignedinteger]:
    """The numpy type that holds an element's bits."""
    return np.uint32 if dtype == "float32" else np.uint16


def to_float(bits: Bits, dtype: str) -> Floats:
    """Give the elements' values as float32, which holds all of them exactly."""
    if dtype == "float32":
        return bits.astype(np.uint32).view(np.float32)
    if dtype == "float16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def from_float(values: Floats, dtype: str) -> Bits:
    """Round float32 values to nearest even. There is one NaN, as on the device."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits: Bits
    if dtype == "float32":
        bits = values.view(np.uint32).copy()
    elif dtype == "float16":
        with np.errstate(over="ignore"):
            bits = values.astype(np.float16).view(np.uint16).copy()
    else:
        wide = values.view(np.uint32).astype(np.uint64)
        bits = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
    bits[np.isnan(values)] = NAN[dtype]
    return bits


def without_negative_zero(bits: Bits, dtype: str) -> Bits:
    """Replace -0.0, and nothing else, by +0.0."""
    return np.where(bits == SIGN[dtype], 0, bits).astype(bits.dtype)


def fma(a: Floats, b: Floats | np.float32, c: Floats | np.float32) -> Floats:
    """Give ``a * b + c`` rounded once to float32.

    The product is exact in float64. The sum is rounded to odd there, which a second rounding to
    fewer bits cannot tell from the exact value.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    shifted = total - product
    error = (product - (total - shifted)) + (addend - shifted)
    inexact = np.isfinite(total) & (error != 0)
    even = (np.ascontiguousarray(total).view(np.uint64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    total = np.where(inexact & even, np.nextafter(total, towards), total)
    with np.errstate(over="ignore"):
        return total.astype(np.float32)


def reciprocal_sqrt(values: Floats) -> Floats:
    """Give ``1 / sqrt(values)`` rounded once to float32."""
    wide = 1 / np.sqrt(values.astype(np.float64))
    rounded = wide.astype(np.float32)
    # The float64 quotient is off by a unit or two in its last place, which decides a rounding only
    # next to a tie; there, exact fractions decide.
    ulp = np.spacing(np.abs(rounded)).astype(np.float64)
    to_tie = np.abs(np.abs(wide - rounded) - ulp / 2)
    for i in np.flatnonzero(np.isfinite(wide) & (to_tie < np.abs(wide) * 2.0**-50)):
        candidates = [np.nextafter(rounded.flat[i], np.float32(to)) for to in (0, np.inf)]
        for other in candidates:
            tie = (Fraction(float(rounded.flat[i])) + Fraction(float(other))) / 2
            is_above = tie**2 * Fraction(float(values.flat[i])) < 1
            if is_above == (other > rounded.flat[i]):
                rounded.flat[i] = other
                break
    return rounded


def sum_of_ranks(inputs: Bits, dtype: str) -> Bits:
    """All-reduce ``inputs[ranks, tokens, hidden]``."""
    total = np.zeros(inputs.shape[1:], np.float32)
    for contribution in inputs:
        total = total + to_float(without_negative_zero(contribution, dtype), dtype)
    return without_negative_zero(from_float(total, dtype), dtype)


def sum_of_squares(values: Floats) -> Floats:
    """Sum the squares of each row of ``values[tokens, hidden]`` along the fixed tree."""
    tokens, hidden = values.shape
    warps = -(-hidden // (SEGMENT * LANES))
    padded = np.zeros((tokens, warps * LANES * SEGMENT), np.float32)
    padded[:, :hidden] = values
    segments = padded.reshape(tokens, warps, LANES, SEGMENT)
    lanes = np.zeros((tokens, warps, LANES), np.float32)
    for i in range(SEGMENT):
        lanes = fma(segments[..., i], segments[..., i], lanes)
    partials = _butterfly(lanes)
    rounds = -(-warps // LANES)
    last = np.zeros((tokens, LANES), np.float32)
    for i in range(rounds):
        part = partials[:, i * LANES : (i + 1) * LANES]
        last[:, : part.shape[1]] = last[:, : part.shape[1]] + part
    return _butterfly(last)


def _butterfly(lanes: Floats) -> Floats:
    """Sum 32 lanes (the last axis) pair by pair."""
    index = np.arange(LANES)
    for mask in (1, 2, 4, 8, 16):
        lanes = lanes + lanes[..., index ^ mask]
    return lanes[..., 0]


@dataclass(frozen=True)
class Norm:
    """The arguments of residual add and RMSNorm; ``gamma`` may be of another type."""

    residual: Bits  # [tokens, hidden]
    gamma: Bits  # [hidden]
    gamma_dtype: str
    epsilon: float
    weight_bias: float


@dataclass(frozen=True)
class Result:
    """``output`` is the sum, or the norm's output and then ``residual`` is set."""

    output: Bits
    residual: Bits | None = None


def bit_exact(inputs: Bits, dtype: str, norm: Norm | None = None) -> Result:
    """Give the exact bits that any strategy must produce from ``inputs[ranks, tokens, hidden]``."""
    with np.errstate(all="ignore"):
        total = sum_of_ranks(inputs, dtype)
        if norm is None:
            return Result(total)
        row = to_float(total, dtype) + to_float(norm.residual, dtype)
        residual = from_float(row, dtype)
        row = to_float(residual, dtype)
        inverse_hidden = np.float32(1) / np.float32(row.shape[1])
        mean = fma(sum_of_squares(row), inverse_hidden, np.float32(norm.epsilon))
        rstd = reciprocal_sqrt(mean)
        scale = to_float(norm.gamma, norm.gamma_dtype) + np.float32(norm.weight_bias)
        return Result(from_float((row * rstd[:, None]) * scale, dtype), residual)


def float64(inputs: Bits, dtype: str, norm: Norm | None = None) -> tuple[NDArray[np.float64], ...]:
    """Give the sum, or the norm's output and the residual, without rounding before the end."""
    total = to_float(inputs, dtype).astype(np.float64).sum(axis=0)
    if norm is None:
        return (total,)
    residual = total + to_float(norm.residual, dtype).astype(np.float64)
    rstd = 1 / np.sqrt(np.square(residual).mean(axis=1, keepdims=True) + norm.epsilon)
    scale = to_float(norm.gamma, norm.gamma_dtype).astype(np.float64) + norm.weight_bias
    return residual * rstd * scale, residual
