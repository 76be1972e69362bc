"""The quantisers as written down, in numpy: what a fused call must give, to the bit.

They take a norm's output as float32 values ``[tokens, hidden]``, which its element type holds
exactly. Codes and scales are found by searching tables of all numbers of a type, which has nothing
in common with how the kernels round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

F32 = np.float32
TILE_ROWS, TILE_BLOCKS = 128, 4

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
_CODES = np.arange(127)
E4M3 = np.where(
    _CODES < 8,
    _CODES * 2.0**-9,
    (1 + _CODES % 8 / 8) * 2.0 ** (_CODES // 8 - 7.0),
)
"""The numbers that are not negative, by code; code 127 is NaN."""


def _nearest(values: Floats, table: NDArray[np.float64]) -> NDArray[np.int64]:
    """Index of the nearest number of a table to each magnitude, of two the even one."""
    size = np.abs(values.astype(np.float64))
    middles = (table[1:] + table[:-1]) / 2
    below = np.searchsorted(middles, size, side="left")  # ties: the lower
    above = np.searchsorted(middles, size, side="right")  # ties: the upper
    return np.where(below % 2 == 0, below, above)


def e4m3(values: Floats) -> Bytes:
    """Round to e4m3, saturating; NaN is 0x7f."""
    codes = _nearest(np.where(np.isnan(values), 0, values), E4M3) | np.signbit(values) * 0x80
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def e2m1(values: Floats) -> Bytes:
    """Round to e2m1, saturating; NaN is 6."""
    codes = _nearest(np.where(np.isnan(values), 0, values), E2M1) | np.signbit(values) * 8
    return np.where(np.isnan(values), 7, codes).astype(np.uint8)


def from_e4m3(codes: Bytes) -> Floats:
    """Give the values of codes."""
    sizes = np.append(E4M3, np.nan)[codes & 0x7F]
    return np.where(codes & 0x80, -sizes, sizes).astype(np.float32)


@dataclass(frozen=True)
class Quantized:
    """Codes as bytes ``[tokens, width]``; scales of rows, or of blocks ``[tokens, blocks]``."""

    values: Bytes
    scales: NDArray[Any] | None = None


def _largest(x: Floats, axis: int) -> Floats:
    """Largest magnitude, NaN only where all are."""
    return np.fmax.reduce(np.abs(x), axis=axis)


def float8(x: Floats, scale: float) -> Quantized:
    return Quantized(e4m3(x / F32(scale)))


def dynamic_float8(x: Floats, scale: float) -> Quantized:
    smallest = F32(2.0**-9) / F32(448)
    scales = np.fmax(_largest(x, 1) / F32(448), smallest)
    return Quantized(e4m3(x / scales[:, None]), scales)


def nv_float4(x: Floats, scale: float) -> Quantized:
    tokens, hidden = x.shape
    blocks = x.reshape(tokens, hidden // 16, 16)
    scales = e4m3(F32(scale) * (_largest(blocks, 2) * (F32(1) / F32(6))))
    decoded = from_e4m3(scales)
    factors = np.where(decoded == 0, F32(0), F32(scale) / decoded)
    codes = e2m1(blocks * factors[..., None]).reshape(tokens, hidden)
    return Quantized(codes[:, 0::2] | codes[:, 1::2] << 4, scales)


def mx_float8(x: Floats, scale: float) -> Quantized:
    tokens, hidden = x.shape
    blocks = x.reshape(tokens, hidden // 32, 32)
    wanted = _largest(blocks, 2) * (F32(1) / F32(448))
    powers = 2.0 ** (np.arange(255) - 127.0)
    exponents = np.searchsorted(powers, wanted.astype(np.float64), side="left")
    exponents = np.where(np.isnan(wanted), 254, np.minimum(exponents, 254))
    inside = (exponents > 0) & (exponents < 254)
    factors = np.where(inside, 2.0 ** (127.0 - exponents), 0).astype(np.float32)
    scaled = blocks * factors[..., None]
    codes = e4m3(np.where(np.isnan(scaled), F32(448), scaled)).reshape(tokens, hidden)
    return Quantized(codes, exponents.astype(np.uint8))


RECIPES = {
    "FLOAT8": float8,
    "DYNAMIC_FLOAT8": dynamic_float8,
    "NV_FLOAT4": nv_float4,
    "MX_FLOAT8": mx_float8,
}
BLOCKS = {"NV_FLOAT4": 16, "MX_FLOAT8": 32}


def quantize(recipe: str, x: Floats, scale: float) -> Quantized:
    """Quantise with a recipe of that name."""
    with np.errstate(all="ignore"):
        return RECIPES[recipe](x, scale)


def swizzled_places(rows: int, blocks: int) -> NDArray[np.int64]:
    """Where the scale of each row and block lies: ``[rows, blocks]``, rounded up to whole tiles."""
    tiles = (-(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS))
    places = np.arange(tiles[0] * tiles[1] * 512).reshape(*tiles, 32, 4, TILE_BLOCKS)
    # Of a tile's rows, the four that are 32 apart lie side by side.
    return places.transpose(0, 3, 2, 1, 4).reshape(tiles[0] * TILE_ROWS, tiles[1] * TILE_BLOCKS)
