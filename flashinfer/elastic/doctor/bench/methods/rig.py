"""What methods share: the group, the largest problem, and what is expensive to create."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ..group import Group
from ..problem import DTYPE, Problem
from .addnorm import AddNorm, choose


class Rig:
    """Creates on first use, on all ranks at the same point; what it creates lasts as long as it.

    Parameters
    ----------
    group : Group
    largest : Problem
        No problem has more rows, longer rows or more elements.
    """

    def __init__(self, group: Group, largest: Problem) -> None:
        self.group = group
        self.largest = largest

    @functools.cached_property
    def comm(self) -> Any:
        """The installed ``flashinfer.comm``."""
        return importlib.import_module("flashinfer.comm")

    @functools.cached_property
    def native(self) -> Any:
        """A workspace of this wheel, with room for one-shot of the largest problem."""
        return self._workspace("mnnvl", force_oneshot_support=True)

    @functools.cached_property
    def trtllm(self) -> Any:
        """A workspace of FlashInfer's trtllm backend."""
        return self._workspace("trtllm")

    @functools.cached_property
    def addnorm(self) -> AddNorm:
        """The add + RMSNorm kernel that follows a plain all-reduce."""
        return choose()

    def _workspace(self, backend: str, **options: Any) -> Any:
        backends = importlib.import_module("flashinfer.comm.mnnvl")
        return self.comm.create_allreduce_fusion_workspace(
            backend=backend,
            world_size=self.group.ranks,
            rank=self.group.rank,
            max_token_num=self.largest.tokens,
            hidden_dim=self.largest.hidden,
            dtype=DTYPE,
            comm_backend=backends.TorchDistBackend(),
            **options,
        )
