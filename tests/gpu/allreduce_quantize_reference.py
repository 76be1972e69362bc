"""The quantisers as written down, in torch operations of one rounding each.

Each takes a norm's output ``[N, H]`` and gives its codes as bytes and its scales, ``[N]`` or
``[N, blocks]``. The recipes are in ``include/flashinfer_elastic/quantize.cuh``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FP8, NVFP4, DYNAMIC_FP8, MXFP8 = 1, 2, 3, 4
SWIZZLED, LINEAR = 0, 2
BLOCK = {NVFP4: 16, MXFP8: 32}

_HALF_CODES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Where one e2m1 magnitude gives way to the next."""


class Quantized(NamedTuple):
    """Codes, uint8, and scales: float32 of rows, or uint8 of blocks."""

    values: torch.Tensor
    scales: torch.Tensor | None = None


def quantize(recipe: int, norm: torch.Tensor, scale: float) -> Quantized:
    """Quantise rows with a recipe by upstream's number for it."""
    x = norm.float()
    # Tensors: torch turns a division by a Python number into a product with its reciprocal.
    factor = torch.full((), scale, dtype=torch.float32, device=x.device)
    if recipe == FP8:
        return Quantized(_e4m3(x / factor))
    largest_code = torch.full_like(factor, 448.0)
    if recipe == DYNAMIC_FP8:
        smallest = torch.full_like(factor, 2.0**-9) / largest_code
        scales = torch.fmax(_largest(x) / largest_code, smallest)
        return Quantized(_e4m3(x / scales[:, None]), scales)
    blocks = x.view(x.shape[0], -1, BLOCK[recipe])
    if recipe == NVFP4:
        sixth = torch.ones_like(factor) / torch.full_like(factor, 6.0)
        scales = _e4m3(factor * (_largest(blocks) * sixth))
        decoded = scales.view(torch.float8_e4m3fn).float()
        multiplier = torch.where(decoded == 0, torch.zeros_like(decoded), factor / decoded)
        codes = _e2m1(blocks * multiplier[..., None]).view(x.shape)
        return Quantized(codes[:, 0::2] | codes[:, 1::2] << 4, scales)
    wanted = _largest(blocks) * (torch.ones_like(factor) / largest_code)
    bits = wanted.view(torch.int32)
    # The biased exponent of the power of two above; up to 2**-127, below all normal numbers, zero.
    exponents = (bits + 0x7FFFFF >> 23).clamp(max=254)
    exponents = torch.where(bits <= 0x400000, torch.zeros_like(exponents), exponents)
    exponents = torch.where(wanted.isnan(), torch.full_like(exponents, 254), exponents)
    inside = (exponents > 0) & (exponents < 254)
    multiplier = torch.where(inside, 254 - exponents << 23, 0).view(torch.float32)
    scaled = (blocks * multiplier[..., None]).nan_to_num(448.0, 448.0, -448.0)
    return Quantized(_e4m3(scaled).view(x.shape), exponents.to(torch.uint8))


def swizzled_places(rows: int, blocks: int, device: torch.device) -> torch.Tensor:
    """Where each row's scale of each block lies: ``[rows, blocks]``, rounded up to whole tiles."""
    tiles = (-(-rows // 128), -(-blocks // 4))
    places = torch.arange(tiles[0] * tiles[1] * 512, device=device).view(*tiles, 32, 4, 4)
    return places.permute(0, 3, 2, 1, 4).reshape(tiles[0] * 128, tiles[1] * 4)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude along the last axis, NaN only where all are."""
    size = x.abs()
    largest = size.nan_to_num(-1.0, torch.inf).amax(-1)
    return torch.where(largest < 0, torch.full_like(largest, torch.nan), largest)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3, saturating; NaN is 0x7f."""
    codes = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(codes, 0x7F), codes)


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to e2m1, saturating; NaN is 6."""
    middles = torch.tensor(_HALF_CODES, device=x.device)
    size = x.abs().nan_to_num(6.0, 6.0).contiguous()
    # Next to a tie: the lower code, and the upper one.
    below = torch.searchsorted(middles, size)
    above = torch.searchsorted(middles, size, right=True)
    codes = torch.where(below % 2 == 0, below, above).to(torch.uint8)
    return codes | torch.where(x.signbit() & ~x.isnan(), 8, 0).to(torch.uint8)
