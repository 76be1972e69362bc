"""Whether a result is right: against float64, between ranks, and between ways to serve the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .case import DTYPE, EPSILON, Data, Run

MOST_ULP = 1.01
"""Two roundings to bf16 (of the sum, and with the residual) err by half a unit each; fp32
arithmetic before them adds less than a hundredth."""

_MANTISSA_BITS = 7  # of bf16, stored
_TINIEST = torch.finfo(DTYPE).smallest_normal


class Verdict(NamedTuple):
    """How good a run is.

    Attributes
    ----------
    residual_ulp, norm_ulp : float
        Largest error of any element of any rank, in units of the last place of bf16; NaN if a
        result is not a number.
    ranks_equal : bool
        Whether all ranks have the same bits.
    same_bits : bool
        Whether they are the bits of the first run.
    """

    residual_ulp: float
    norm_ulp: float
    ranks_equal: bool
    same_bits: bool

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        accurate = self.residual_ulp <= MOST_ULP and self.norm_ulp <= MOST_ULP
        return accurate and self.ranks_equal and self.same_bits


def judge(data: Data, runs: Sequence[Run]) -> list[Verdict]:
    """Judge runs on the same data."""
    return [_judge(data, run, runs[0]) for run in runs]


def _judge(data: Data, run: Run, first: Run) -> Verdict:
    total = torch.stack([x.double() for x in data.inputs]).sum(0)
    residual = data.residual.double()
    exact = total + residual
    # An addition cannot be more accurate than its operands.
    scale = torch.maximum(torch.maximum(total.abs(), residual.abs()), exact.abs())
    ranks = range(len(run.norm))
    residual_error = max(_error(run.residual[rank], exact, scale) for rank in ranks)
    norm_error = 0.0
    for rank in ranks:
        # The norm is defined on the rounded sum, which is what the next layer adds to.
        rows = run.residual[rank].double()
        mean = rows.square().mean(-1, keepdim=True)
        norm = rows * torch.rsqrt(mean + EPSILON) * data.gamma.double()
        norm_error = max(norm_error, _error(run.norm[rank], norm, norm.abs()))
    return Verdict(
        residual_error,
        norm_error,
        ranks_equal=_same(run.norm) and _same(run.residual),
        same_bits=_same([first.norm[0], run.norm[0]])
        and _same([first.residual[0], run.residual[0]]),
    )


def _error(got: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> float:
    """Return the largest error in units of the last place of a bf16 number as large as scale."""
    exponent = torch.frexp(scale.clamp_min(_TINIEST)).exponent - 1
    unit = torch.ldexp(torch.ones_like(scale), exponent - _MANTISSA_BITS)
    return float(((got.double() - exact).abs() / unit).max())


def _same(tensors: Sequence[torch.Tensor]) -> bool:
    bits = [tensor.contiguous().view(torch.int16) for tensor in tensors]
    return all(torch.equal(bits[0], other) for other in bits[1:])
