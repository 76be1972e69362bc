"""FlashInfer's own kernels, on a workspace that upstream's constructor made."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ..sizing import ALIGNMENT
from ..strategy import Strategy
from . import Call


class UpstreamEngine:
    """Runs steps with the launcher of the upstream module.

    Parameters
    ----------
    module : types.ModuleType
        Upstream's ``flashinfer.comm.trtllm_mnnvl_ar``.
    workspace : MNNVLAllReduceFusionWorkspace
        Holds what upstream's constructor set.
    """

    name = "upstream"

    def __init__(self, module: ModuleType, workspace: Any) -> None:
        self._module = module
        self._workspace = workspace
        self._align_buffers()

    def launch(self, call: Call, first: int, count: int, strategy: Strategy) -> None:
        """Launch the tokens ``[first, first + count)`` of a call on the current stream."""
        rows = slice(first, first + count)
        workspace = self._workspace
        norm = call.gamma is not None
        self._module.get_trtllm_mnnvl_comm_module().trtllm_mnnvl_allreduce_fusion(
            _dense(call.input[rows]),
            workspace.mc_ptr,
            workspace.uc_ptrs_dev,
            workspace.uc_ptr_local,
            workspace.buffer_flags,
            workspace.tp_size,
            workspace.rank,
            norm,
            call.dependent_launch,
            strategy == Strategy.ONESHOT,
            call.output[rows],
            call.residual_out[rows] if call.residual_out is not None else None,
            _dense(call.residual_in[rows]) if call.residual_in is not None else None,
            call.gamma,
            call.epsilon if norm else None,
            *((call.weight_bias,) if norm else ()),
        )

    def close(self) -> None:
        """Nothing: upstream's ``destroy`` releases the workspace."""

    def _align_buffers(self) -> None:
        # Upstream rounds down to 16 or 32 bytes, so that two-shot's second stage may start off a
        # vector boundary. The kernels read the size from the flags.
        workspace = self._workspace
        workspace.buffer_size_bytes = workspace.buffer_size_bytes // ALIGNMENT * ALIGNMENT
        workspace.workspace_size_bytes = workspace.buffer_size_bytes * workspace.NUM_LAMPORT_BUFFERS
        flags = workspace.buffer_flags.cpu()
        flags[2] = workspace.buffer_size_bytes
        with torch.inference_mode():
            workspace.buffer_flags.copy_(flags)


def _dense(rows: torch.Tensor) -> torch.Tensor:
    # Upstream's kernels ignore strides.
    return rows.contiguous()
