"""What an all-reduce must give, twice over: bit for bit, and in float64.

``Expected`` follows the definition of the numerics step by step in torch operations of one rounding
each; it knows nothing of strategies, launch shapes or chunks. The float64 bounds are independent of
it. Both work in blocks of rows, so that the largest problems need little memory beside the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

SEGMENT = 8
LANES = 32
SAME_SIZE_INT = {2: torch.int16, 4: torch.int32}
MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}

_BLOCK_ELEMENTS = 1 << 24


class Expected(NamedTuple):
    """What a call gives; the last two only with a norm."""

    sum: torch.Tensor
    residual: torch.Tensor | None = None
    norm: torch.Tensor | None = None


def expect(
    inputs: torch.Tensor,
    residual: torch.Tensor | None = None,
    gamma: torch.Tensor | None = None,
    epsilon: float = 0.0,
    weight_bias: float = 0.0,
) -> Expected:
    """Compute a call's results to the bit.

    Parameters
    ----------
    inputs : torch.Tensor
        ``[P, N, H]``, every rank's contribution.
    residual : torch.Tensor, optional
        ``[N, H]``, of the inputs' dtype.
    gamma : torch.Tensor, optional
        ``[H]``, of the inputs' dtype or float32.
    """
    total = _empty(inputs)
    for rows in _blocks(total):
        total[rows] = sum_of_ranks(inputs[:, rows])
    if residual is None or gamma is None:
        return Expected(total)
    stream, norm = torch.empty_like(total), torch.empty_like(total)
    for rows in _blocks(total):
        stream[rows] = (total[rows].float() + residual[rows].float()).to(total.dtype)
        norm[rows] = rms_norm(stream[rows], gamma, epsilon, weight_bias)
    return Expected(total, stream, norm)


def without_negative_zero(values: torch.Tensor) -> torch.Tensor:
    """Replace -0.0, and nothing else, by +0.0."""
    bits = bits_of(values)
    return bits.masked_fill(bits == torch.iinfo(bits.dtype).min, 0).view(values.dtype)


def sum_of_ranks(inputs: torch.Tensor) -> torch.Tensor:
    """Add in fp32 from rank 0 up and round once."""
    total = torch.zeros_like(inputs[0], dtype=torch.float32)
    for contribution in inputs:
        total += without_negative_zero(contribution).float()
    return without_negative_zero(total.to(inputs.dtype))


def rms_norm(
    values: torch.Tensor, gamma: torch.Tensor, epsilon: float, weight_bias: float
) -> torch.Tensor:
    """Normalise rows, with the tree of fp32 sums that depends on the row's length alone."""
    x = values.float()
    one = torch.ones((), dtype=torch.float32, device=x.device)
    # Tensors: torch turns a division by a Python number into a product with its reciprocal.
    inverse_hidden = one / torch.full_like(one, values.shape[1])
    mean = _fma(_sum_of_squares(x), inverse_hidden, torch.full_like(one, epsilon))
    # Float64 decides every rounding right: of all float32 mantissas none gives a reciprocal root
    # closer to a tie than 2**-51.8 of its value.
    scale = mean.double().rsqrt().float()
    weight = gamma.float() + torch.full_like(one, weight_bias)
    return ((x * scale[:, None]) * weight).to(values.dtype)


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    rows, hidden = x.shape
    partials = -(-hidden // (SEGMENT * LANES))
    padded = x.new_zeros(rows, partials * LANES * SEGMENT)
    padded[:, :hidden] = x
    segments = padded.view(rows, partials, LANES, SEGMENT)
    lanes = x.new_zeros(rows, partials, LANES)
    for element in range(SEGMENT):
        value = segments[..., element]
        lanes = _fma(value, value, lanes)
    sums = _sum_of_lanes(lanes)

    turns = -(-partials // LANES)
    padded = x.new_zeros(rows, turns * LANES)
    padded[:, :partials] = sums
    lanes = x.new_zeros(rows, LANES)
    for turn in padded.view(rows, turns, LANES).unbind(1):
        lanes = lanes + turn
    return _sum_of_lanes(lanes)


def _sum_of_lanes(values: torch.Tensor) -> torch.Tensor:
    """Add neighbours, then neighbouring sums, as a butterfly does in every one of its lanes."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Give ``a * b + c`` of fp32 values, rounded once.

    The product is exact in float64. The sum is rounded to odd there, which the second rounding,
    to fewer bits, cannot tell from the exact value.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    shifted = total - product
    error = (product - (total - shifted)) + (addend - shifted)
    even = total.view(torch.int64) & 1 == 0
    towards = torch.where(error > 0, torch.inf, -torch.inf)
    inexact = torch.isfinite(total) & (error != 0) & even
    return torch.where(inexact, torch.nextafter(total, towards), total).float()


# Bounds against float64


def check_against_float64(
    inputs: torch.Tensor,
    result: Expected,
    residual: torch.Tensor | None = None,
    gamma: torch.Tensor | None = None,
    epsilon: float = 0.0,
    weight_bias: float = 0.0,
) -> None:
    """Raise unless results of finite problems are as close to float64 as their definition allows.

    The sum: half a unit of the output dtype, and half a unit of fp32 for each addition. The
    residual stream and the norm are held against the rounded values that they are computed from:
    half a unit; for the norm also the 8 fp32 roundings of its way, which for 16-bit results make a
    difference only in the last 1/500 of a unit. So no norm is off by more than one unit in 16 bits,
    or by more than 8 in fp32.
    """
    ranks = inputs.shape[0]
    for rows in _blocks(result.sum):
        exact = inputs[:, rows].double().sum(0)
        slack = inputs[:, rows].double().abs().sum(0) * ranks * 2.0**-24
        _check_close("sum", result.sum[rows], exact, 0.5, slack)
        if result.residual is None or result.norm is None:
            continue
        assert residual is not None
        assert gamma is not None
        exact = result.sum[rows].double() + residual[rows].double()
        # fp32 holds the sum of two fp32 values rounded; of two 16-bit ones nearly always exactly.
        _check_close("residual", result.residual[rows], exact, 0.5, exact.abs() * 2.0**-24)
        x = result.residual[rows].double()
        rms = (x.square().mean(1, keepdim=True) + epsilon).sqrt()
        exact = x / rms * (gamma.double() + weight_bias)
        units = 8.0 if x.dtype == torch.float32 else 0.5
        _check_close("norm", result.norm[rows], exact, units, exact.abs() * 2.0**-20)


def _check_close(
    what: str, got: torch.Tensor, exact: torch.Tensor, units: float, slack: torch.Tensor
) -> None:
    # The slack is relative, so results that round to subnormals get their unit from `unit_of`.
    allowed = unit_of(exact, got.dtype) * units + slack
    # Negated, so that NaN fails.
    wrong = ~((got.double() - exact).abs() <= allowed)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are too far from float64, the "
            f"first at {where}: {got[where].item()!r}, exact {exact[where].item()!r}, allowed "
            f"difference {allowed[where].item()!r}"
        )


def unit_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Give the distance between neighbours of ``dtype`` at float64 ``values``."""
    exponent = torch.frexp(values).exponent.double() - 1
    smallest = torch.finfo(dtype).smallest_normal
    exponent = torch.where(values == 0, -2000.0, exponent)
    exponent = exponent.clamp(min=float(torch.tensor(smallest).log2()))
    return torch.exp2(exponent - MANTISSA_BITS[dtype])


# Comparing bits


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """View floats as integers."""
    return values.view(SAME_SIZE_INT[values.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors are equal bit for bit, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_of(a), bits_of(b))


def check_bits(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless tensors are equal bit for bit; any NaN stands for any other.

    Torch and the kernels may write different NaN. That all strategies and ranks write the same one
    is for ``same_bits`` to check.
    """
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
    if same_bits(got, expected):
        return
    wrong = bits_of(got) != bits_of(expected)
    wrong &= ~(got.isnan() & expected.isnan())
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, the first at {where}: "
            f"{got[where].item()!r} (bits {int(bits_of(got)[where]):#x}), expected "
            f"{expected[where].item()!r} (bits {int(bits_of(expected)[where]):#x})"
        )


def digest(values: torch.Tensor) -> torch.Tensor:
    """Give a 0-d int64 tensor that changes, most likely, with any bit of a matrix and its place."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    offset = 0
    for rows in _blocks(values):
        bits = bits_of(values[rows].contiguous()).long().flatten()
        place = torch.arange(offset, offset + bits.numel(), device=values.device)
        # Odd multipliers modulo 2**64, different for each place.
        total += (bits * (place * 0x9E3779B97F4A7C1 * 2 + 1)).sum()
        offset += bits.numel()
    return total


def _empty(inputs: torch.Tensor) -> torch.Tensor:
    return torch.empty(inputs.shape[1:], dtype=inputs.dtype, device=inputs.device)


def _blocks(matrix: torch.Tensor) -> Iterator[slice]:
    tokens, hidden = matrix.shape
    size = max(1, _BLOCK_ELEMENTS // max(hidden, 1))
    for first in range(0, tokens, size):
        yield slice(first, min(first + size, tokens))
