"""One kernel for everything: this wheel's, and FlashInfer's trtllm backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import machine
from ..problem import EPSILON, Data, Problem
from . import Method, Runnable
from .rig import Rig


class Fused:
    """``flashinfer.comm.allreduce_fusion`` on a workspace.

    Parameters
    ----------
    comm : module
        ``flashinfer.comm``.
    workspace : object
        Of ``create_allreduce_fusion_workspace``.
    use_oneshot : bool or None
        The strategy; None lets the backend choose.
    variants : dict
        Further arguments of the call, by the variant's name.
    """

    def __init__(
        self,
        comm: Any,
        workspace: Any,
        use_oneshot: bool | None,
        variants: dict[str, dict[str, Any]],
    ) -> None:
        self._comm = comm
        self._workspace = workspace
        self._use_oneshot = use_oneshot
        self._variants = variants

    def prepare(self, problem: Problem, data: Data) -> Runnable:
        norm, residual = torch.empty_like(data.residual), torch.empty_like(data.residual)

        def reset() -> None:
            norm.fill_(torch.nan)
            residual.fill_(torch.nan)

        calls: dict[str, Callable[[], object]] = {
            name: functools.partial(
                self._comm.allreduce_fusion,
                input=data.contribution,
                workspace=self._workspace,
                pattern=self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
                launch_with_pdl=True,
                residual_in=data.residual,
                residual_out=residual,
                norm_out=norm,
                rms_gamma=data.gamma,
                rms_eps=EPSILON,
                use_oneshot=self._use_oneshot,
                fp32_acc=True,
                **arguments,
            )
            for name, arguments in self._variants.items()
        }
        return Runnable(calls, norm, residual, reset)


_TRIGGERS: dict[str, dict[str, Any]] = {
    "late trigger": {"trigger_completion_at_end": True},
    "early trigger": {"trigger_completion_at_end": False},
}
"""When trtllm's kernel lets its successor start. The default is late; early is faster for some
sizes, and safe where the successor waits for it, as these do."""


def _native(use_oneshot: bool | None) -> Callable[[Rig], Method]:
    def make(rig: Rig) -> Method:
        if use_oneshot is not None and machine.flashinfer_python() == "0.6.12":
            raise NotImplementedError("FlashInfer 0.6.12 does not pass use_oneshot on to mnnvl")
        return Fused(rig.comm, rig.native, use_oneshot, {"": {}})

    return make


def _trtllm(use_oneshot: bool) -> Callable[[Rig], Method]:
    return lambda rig: Fused(rig.comm, rig.trtllm, use_oneshot, _TRIGGERS)


MAKERS: dict[str, Callable[[Rig], Method]] = {
    "native_auto": _native(None),
    "native_oneshot": _native(True),
    "native_twoshot": _native(False),
    "trtllm_oneshot": _trtllm(True),
    "trtllm_twoshot": _trtllm(False),
}
