"""The call to reproduce, its data, and what a run of it yields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from flashinfer.elastic.allreduce import sizing
from flashinfer.elastic.allreduce.strategy import Step, Strategy, resolve

DTYPE = torch.bfloat16
ELEMENT_BYTES = 2
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """A workspace, and one-shot forced on it.

    Attributes
    ----------
    ranks : int
        Size of the group.
    hidden : int
        Elements of a row, bf16.
    reported : int
        Tokens that the caller foresees when it creates the workspace.
    asked : int
        Tokens of the call.
    """

    ranks: int = 8
    hidden: int = 6144
    reported: int = 42
    asked: int = 40

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each buffer that this wheel allocates for the reported tokens."""
        return sizing.buffer_bytes(self.reported, self.hidden, ELEMENT_BYTES, self.ranks)

    def steps(self, buffer_bytes: int) -> tuple[Step, ...]:
        """Return how the call runs on buffers of a size."""
        return resolve(
            Strategy.ONESHOT, self.asked, self.hidden, ELEMENT_BYTES, self.ranks, buffer_bytes
        )

    def buffers(self) -> tuple[int, ...]:
        """Return buffer sizes that make the call run in three ways, where the group allows it.

        The size that this wheel allocates; upstream's for the same report, which two-shot fits;
        and room for one token a rank, which takes chunks.
        """
        upstream = sizing.native_twoshot_bytes(
            self.reported, self.hidden, ELEMENT_BYTES, self.ranks
        )
        one_token = sizing.native_twoshot_bytes(self.ranks, self.hidden, ELEMENT_BYTES, self.ranks)
        return self.buffer_bytes, upstream, one_token


class Data(NamedTuple):
    """What the ranks are given.

    Attributes
    ----------
    inputs : list of torch.Tensor
        Of each rank, ``[asked, hidden]``.
    residual : torch.Tensor
        ``[asked, hidden]``, the same on all ranks.
    gamma : torch.Tensor
        ``[hidden]``.
    """

    inputs: list[torch.Tensor]
    residual: torch.Tensor
    gamma: torch.Tensor


class Run(NamedTuple):
    """What the ranks got, on the CPU.

    Attributes
    ----------
    buffer_bytes : int
        Of each buffer of the workspace.
    norm, residual : list of torch.Tensor
        Of each rank, ``[asked, hidden]``.
    """

    buffer_bytes: int
    norm: list[torch.Tensor]
    residual: list[torch.Tensor]


Runner = Callable[[Case, Data, Sequence[int]], list[Run]]
"""Makes the call on a workspace of each size in turn."""


def make_data(case: Case, seed: int) -> Data:
    """Draw the data from a normal distribution; the same on every rank and machine."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DTYPE)

    inputs = [draw(case.asked, case.hidden) for _ in range(case.ranks)]
    return Data(inputs, draw(case.asked, case.hidden), draw(case.hidden))
