"""What runs a call: our kernels (``native``) or FlashInfer's own (``upstream``)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..strategy import Strategy


class Quantization(NamedTuple):
    """A quantised copy of a norm's output; ``include/flashinfer_elastic/quantize.cuh`` says how.

    Attributes
    ----------
    recipe : int
        Upstream's ``MNNVLQuantType``, not ``NONE``.
    layout : int
        Upstream's ``QuantizationSFLayout``: ``SWIZZLED_128x4`` or ``LINEAR``.
    values : torch.Tensor
        ``[N, H]`` float8_e4m3fn, or ``[N, H / 2]`` of one byte for NVFP4.
    scales : torch.Tensor or None
        Of all N rows, as the recipe and the layout have it; static FP8 has none.
    scale : torch.Tensor or float or None
        What static FP8 divides by and NVFP4 multiplies by; a tensor's first element, float32.
    """

    recipe: int
    layout: int
    values: torch.Tensor
    scales: torch.Tensor | None
    scale: torch.Tensor | float | None

    def arguments(
        self,
    ) -> tuple[int, int, torch.Tensor, torch.Tensor | None, float, torch.Tensor | None]:
        """Return it as functions take it that know no union: a scale by value, and one in memory.

        The first counts only where there is no other.
        """
        number, in_memory = 1.0, None
        if isinstance(self.scale, torch.Tensor):
            in_memory = self.scale
        elif self.scale is not None:
            number = self.scale
        return int(self.recipe), int(self.layout), self.values, self.scales, number, in_memory


class Call(NamedTuple):
    """One all-reduce of all its rows; with ``gamma``, also residual add and RMSNorm.

    Attributes
    ----------
    input : torch.Tensor
        This rank's contribution, ``[N, H]``; float16, bfloat16 or float32.
    output : torch.Tensor or None
        The sum, or with ``gamma`` the normalised rows; like ``input``. None only with
        ``quantization``, where nobody wants them.
    residual_in, residual_out : torch.Tensor or None
        The residual stream before and after; like ``input``.
    gamma : torch.Tensor or None
        The norm's weight, ``[H]``; of the input's dtype or float32.
    epsilon, weight_bias : float
        ``output = residual_out / rms * (gamma + weight_bias)``.
    dependent_launch : bool
        Whether the kernel may be scheduled before its predecessor has finished (PDL).
    quantization : Quantization or None
        With ``gamma``: what else becomes of the normalised rows.
    """

    input: torch.Tensor
    output: torch.Tensor | None
    residual_in: torch.Tensor | None = None
    residual_out: torch.Tensor | None = None
    gamma: torch.Tensor | None = None
    epsilon: float = 0.0
    weight_bias: float = 0.0
    dependent_launch: bool = False
    quantization: Quantization | None = None


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
