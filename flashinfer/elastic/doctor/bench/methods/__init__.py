"""The contestants: ways to compute all-reduce + residual + RMSNorm on the GPUs of one host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..problem import Data, Problem


def _nothing() -> None:
    """Do nothing."""


@dataclasses.dataclass
class Runnable:
    """A method, ready to compute one problem.

    Attributes
    ----------
    calls : dict
        Equivalent ways to make the call, by name; a method's time is that of the fastest.
    norm, residual : torch.Tensor
        Where the results are after a call, ``[tokens, hidden]``.
    reset : callable
        Restores the inputs that calls overwrite, and poisons the outputs that are not inputs.
    after_capture : callable
        To be called on all ranks after calls were captured into graphs, before a replay.
    """

    calls: dict[str, Callable[[], object]]
    norm: torch.Tensor
    residual: torch.Tensor
    reset: Callable[[], None]
    after_capture: Callable[[], None] = _nothing


class Method(Protocol):
    """One way to compute the pattern."""

    def prepare(self, problem: Problem, data: Data) -> Runnable:
        """Make ready for a problem; collective.

        Raises
        ------
        Exception
            If the method does not do this problem; the text says why.
        """
        ...


NAMES = (
    "native_auto",
    "native_oneshot",
    "native_twoshot",
    "trtllm_oneshot",
    "trtllm_twoshot",
    "vllm_custom_ar",
    "symm_mem_oneshot",
    "symm_mem_twoshot",
    "nccl",
    "nccl_symm",
)
"""All methods, in the order in which they are measured. The limit is not one: see ``limit``."""


def make(name: str, rig: Any) -> Method:
    """Return a method on a :class:`~.rig.Rig`; collective.

    Raises
    ------
    KeyError
        If there is no method of this name.
    Exception
        If it is not available here; the text says why.
    """
    from . import fused, unfused

    makers = {**fused.MAKERS, **unfused.MAKERS}
    return makers[name](rig)
