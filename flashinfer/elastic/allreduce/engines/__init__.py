"""What runs a call: our kernels (``native``) or FlashInfer's own (``upstream``)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..strategy import Strategy


class Call(NamedTuple):
    """One all-reduce of all its rows; with ``gamma``, also residual add and RMSNorm.

    Attributes
    ----------
    input : torch.Tensor
        This rank's contribution, ``[N, H]``; float16, bfloat16 or float32.
    output : torch.Tensor
        The sum, or with ``gamma`` the normalised rows; like ``input``.
    residual_in, residual_out : torch.Tensor or None
        The residual stream before and after; like ``input``.
    gamma : torch.Tensor or None
        The norm's weight, ``[H]``; of the input's dtype or float32.
    epsilon, weight_bias : float
        ``output = residual_out / rms * (gamma + weight_bias)``.
    dependent_launch : bool
        Whether the kernel may be scheduled before its predecessor has finished (PDL).
    """

    input: torch.Tensor
    output: torch.Tensor
    residual_in: torch.Tensor | None = None
    residual_out: torch.Tensor | None = None
    gamma: torch.Tensor | None = None
    epsilon: float = 0.0
    weight_bias: float = 0.0
    dependent_launch: bool = False


class Engine(Protocol):
    """Runs steps of calls on one workspace."""

    @property
    def name(self) -> str:
        """``native`` or ``upstream``."""
        ...

    def launch(self, call: Call, first: int, count: int, strategy: Strategy) -> None:
        """Launch the tokens ``[first, first + count)`` of a call on the current stream."""
        ...

    def close(self) -> None:
        """Release what the engine holds; local and idempotent."""
        ...
