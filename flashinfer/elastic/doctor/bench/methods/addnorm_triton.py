"""Add + RMSNorm in Triton; a module of its own because Triton is not installed everywhere."""
# mypy: ignore-errors
# ruff: noqa: N803 - Triton's constants are written in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rmsnorm(x, residual, gamma, epsilon, hidden, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = columns < hidden
    places = tl.program_id(0).to(tl.int64) * hidden + columns
    total = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + places, total.to(residual.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(total * total) / hidden + epsilon)
    weight = tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + places, (total * scale * weight).to(x.dtype.element_ty), mask=inside)


def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> None:
    """``residual += x``, then ``x = norm(residual) * gamma``; one program a row."""
    tokens, hidden = x.shape
    width = triton.next_power_of_2(hidden)
    _add_rmsnorm[(tokens,)](x, residual, gamma, epsilon, hidden, WIDTH=width, num_warps=8)
