"""What every method computes: its inputs, and the right answer."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

DTYPE = torch.bfloat16
DTYPE_NAME = "bfloat16"
ELEMENT_BYTES = 2
PATTERN = "allreduce+residual+rmsnorm"
EPSILON = 1e-6

TOLERANCE = 0.03
"""Of :func:`deviation`. Loose: some methods round to bf16 after every addition."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """``tokens`` rows of ``hidden`` elements on every rank."""

    hidden: int
    tokens: int

    @property
    def elements(self) -> int:
        """Elements that each rank contributes."""
        return self.tokens * self.hidden

    @property
    def payload_bytes(self) -> int:
        """Bytes that each rank contributes."""
        return self.elements * ELEMENT_BYTES


class Data(NamedTuple):
    """One rank's inputs: ``[tokens, hidden]``, ``[tokens, hidden]`` and ``[hidden]``.

    The residual and the weight are the same on all ranks.
    """

    contribution: torch.Tensor
    residual: torch.Tensor
    gamma: torch.Tensor


class Expected(NamedTuple):
    """The right answer in float64, ``[tokens, hidden]`` each."""

    norm: torch.Tensor
    residual: torch.Tensor


def make_data(problem: Problem, rank: int, device: torch.device) -> Data:
    """Return a rank's inputs; the same on every call and every rank that asks."""
    shape = (problem.tokens, problem.hidden)
    residual = torch.randn(shape, generator=_generator(device, 0), device=device)
    gamma = 0.5 + torch.rand(problem.hidden, generator=_generator(device, 1), device=device)
    contribution = torch.randn(shape, generator=_generator(device, 2 + rank), device=device)
    return Data(contribution.to(DTYPE), residual.to(DTYPE), gamma.to(DTYPE))


def expect(problem: Problem, ranks: int, device: torch.device) -> Expected:
    """Return what the inputs of all ranks give, computed in float64."""
    data = make_data(problem, 0, device)
    total = data.residual.double() + data.contribution.double()
    for rank in range(1, ranks):
        total += make_data(problem, rank, device).contribution.double()
    mean_square = total.square().mean(dim=1, keepdim=True)
    norm = total * torch.rsqrt(mean_square + EPSILON) * data.gamma.double()
    return Expected(norm, total)


def deviation(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of an element, over its own size and the RMS of all.

    NaN if any element is NaN.
    """
    scale = expected.square().mean().sqrt()
    return float(((actual.double() - expected).abs() / (expected.abs() + scale)).max())


def _generator(device: torch.device, seed: int) -> torch.Generator:
    generator = torch.Generator(device)
    generator.manual_seed(1000 + seed)
    return generator
