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
        """Launch the tokens ``[first, first + count)`` of a call on the current stream.

        Raises
        ------
        ValueError
            If a tensor has the wrong dtype, shape or device, naming it; before the first step of
            the call is launched.
        """
        if first == 0:
            _check(call, self._workspace.buffer_flags.device)
        rows = slice(first, first + count)
        output, residual_out = call.output[rows], call.residual_out
        dense_output = _scratch_like(output)
        dense_residual_out = None
        if residual_out is not None:
            residual_out = residual_out[rows]
            dense_residual_out = _scratch_like(residual_out)
        workspace = self._workspace
        norm = call.gamma is not None
        self._module.get_trtllm_mnnvl_comm_module().trtllm_mnnvl_allreduce_fusion(
            call.input[rows].contiguous(),
            workspace.mc_ptr,
            workspace.uc_ptrs_dev,
            workspace.uc_ptr_local,
            workspace.buffer_flags,
            workspace.tp_size,
            workspace.rank,
            norm,
            call.dependent_launch,
            strategy == Strategy.ONESHOT,
            dense_output,
            dense_residual_out,
            call.residual_in[rows].contiguous() if call.residual_in is not None else None,
            # Upstream reads the weight in the input's dtype, whatever it is.
            call.gamma.to(call.input.dtype) if call.gamma is not None else None,
            call.epsilon if norm else None,
            *((call.weight_bias,) if norm else ()),
        )
        if dense_output is not output:
            output.copy_(dense_output)
        if dense_residual_out is not None and dense_residual_out is not residual_out:
            assert residual_out is not None
            residual_out.copy_(dense_residual_out)

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


def _scratch_like(rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor that the kernels, which ignore strides, can write: the rows if dense."""
    if rows.is_contiguous():
        return rows
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _check(call: Call, device: torch.device) -> None:
    """Check what upstream's launcher does not, or only after it has launched other steps."""
    shape, dtype = call.input.shape, call.input.dtype
    for name in ("input", "output", "residual_in", "residual_out"):
        tensor = getattr(call, name)
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(
                f"{name} shape mismatch: expected {tuple(shape)} but got {tuple(tensor.shape)}"
            )
        _check_type(name, tensor, dtype, device)
    if call.gamma is not None:
        if call.gamma.numel() != shape[1] or not call.gamma.is_contiguous():
            raise ValueError(
                "gamma must be dense and have the same shape as token dimension "
                f"({shape[1]}) but got ({call.gamma.numel()})"
            )
        _check_type("gamma", call.gamma, dtype, device, also=torch.float32)


def _check_type(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    also: torch.dtype | None = None,
) -> None:
    if tensor.dtype not in (dtype, also):
        raise ValueError(f"{name} has dtype {tensor.dtype}, expected {dtype}, that of input")
    if tensor.device != device:
        raise ValueError(
            f"{name} must be on {device}, the workspace's device, got {tensor.device}."
        )
