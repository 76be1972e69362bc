"""The kernel that adds the residual and normalises, for methods whose all-reduce does neither.

One fused kernel in any case, so that the comparison is with what a server without fused all-reduce
would run: FlashInfer's own if it can be had, else one in Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE, EPSILON

Apply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], object]


class AddNorm(NamedTuple):
    """``apply(x, residual, gamma, epsilon)``: ``residual += x``, then ``x = norm(residual)``."""

    description: str
    apply: Apply


def choose() -> AddNorm:
    """Return FlashInfer's kernel if it runs here, else Triton's.

    Raises
    ------
    Exception
        If neither runs.
    """
    try:
        norm: Any = importlib.import_module("flashinfer.norm")
        _try(norm.fused_add_rmsnorm)
    except Exception as error:
        _try(triton_add_rmsnorm)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return AddNorm(f"Triton kernel; flashinfer.norm: {reason[:200]}", triton_add_rmsnorm)
    implementation = "CUDA" if getattr(norm, "_USE_CUDA_NORM", True) else "CuTe DSL"
    return AddNorm(f"flashinfer.norm.fused_add_rmsnorm ({implementation})", norm.fused_add_rmsnorm)


def _try(apply: Apply) -> None:
    """Run once, so that what has to be compiled is compiled now."""
    x = torch.ones(2, 4096, dtype=DTYPE, device="cuda")
    apply(x, torch.zeros_like(x), torch.ones(4096, dtype=DTYPE, device="cuda"), EPSILON)
    torch.cuda.synchronize()


def triton_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> None:
    """Add and normalise in place; a program a row, which stays in registers between the passes.

    Parameters
    ----------
    x, residual : torch.Tensor
        ``[N, H]``, contiguous.
    gamma : torch.Tensor
        ``[H]``.
    epsilon : float
    """
    from .addnorm_triton import add_rmsnorm

    add_rmsnorm(x, residual, gamma, epsilon)
