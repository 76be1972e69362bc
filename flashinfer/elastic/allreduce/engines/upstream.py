"""FlashInfer's own kernels, on a workspace that upstream's constructor made."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..sizing import ALIGNMENT
from ..strategy import Strategy
from . import Call, Quantization


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
        self._scales: dict[float, torch.Tensor] = {}
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
        output, residual_out = _Written(call.output, rows), _Written(call.residual_out, rows)
        quantized = None
        if call.quantization is not None:
            quantized = _Quantized(call.quantization, rows, call.input.shape[1])
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
            output.dense,
            residual_out.dense,
            call.residual_in[rows].contiguous() if call.residual_in is not None else None,
            # Upstream reads the weight in the input's dtype, whatever it is.
            call.gamma.to(call.input.dtype) if call.gamma is not None else None,
            call.epsilon if norm else None,
            *((call.weight_bias,) if norm else ()),
            *(quantized.arguments(self._scale_in_memory) if quantized is not None else ()),
        )
        output.finish()
        residual_out.finish()
        if quantized is not None:
            quantized.finish()

    def close(self) -> None:
        """Nothing: upstream's ``destroy`` releases the workspace."""

    def _scale_in_memory(self, value: float) -> torch.Tensor:
        """Return a number as upstream's kernels take it; the same tensor for the same number."""
        scale = self._scales.get(value)
        if scale is None:
            device = self._workspace.buffer_flags.device
            # A fill can be captured, a copy from the host cannot.
            scale = torch.full((1,), value, dtype=torch.float32, device=device)
            # What is made during a capture lives in the graph's memory and is filled by its replay.
            if not (scale.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._scales[value] = scale
        return scale

    def _align_buffers(self) -> None:
        # Upstream rounds down to 16 or 32 bytes, so that two-shot's second stage may start off a
        # vector boundary. The kernels read the size from the flags.
        workspace = self._workspace
        workspace.buffer_size_bytes = workspace.buffer_size_bytes // ALIGNMENT * ALIGNMENT
        workspace.workspace_size_bytes = workspace.buffer_size_bytes * workspace.NUM_LAMPORT_BUFFERS
        flags = workspace.buffer_flags.cpu()
        flags[2] = workspace.buffer_size_bytes
        workspace.buffer_flags.copy_(flags)


class _Written:
    """Rows of a caller's output, if there is one, for kernels that ignore strides.

    Attributes
    ----------
    dense : torch.Tensor or None
        What a kernel may write: the rows themselves, or what ``finish`` copies to them.
    """

    def __init__(self, matrix: torch.Tensor | None, rows: slice) -> None:
        self._rows = self.dense = None if matrix is None else matrix[rows]
        if self._rows is not None and not self._rows.is_contiguous():
            self.dense = torch.empty_like(self._rows, memory_format=torch.contiguous_format)

    def finish(self) -> None:
        """Give the caller what was written."""
        if self._rows is not None and self.dense is not None and self.dense is not self._rows:
            self._rows.copy_(self.dense)


class _Quantized:
    """A step's part of a quantised copy, for kernels to which its first row is row 0.

    Swizzled scales come in tiles of 128 rows. A step that starts within one has its scales written
    row after row, and ``finish`` takes them to their places.
    """

    def __init__(self, quantization: Quantization, rows: slice, hidden: int) -> None:
        self._quantization = quantization
        self._values = _Written(quantization.values, rows)
        self._rows = rows
        self._blocks = hidden // _BLOCK.get(quantization.recipe, hidden)
        self._layout = quantization.layout
        self._scales = quantization.scales
        self._scattered: torch.Tensor | None = None
        if self._scales is None or rows.start == 0:
            return
        flat = self._scales.view(-1)
        if quantization.recipe not in _BLOCK or self._layout == _LINEAR:
            self._scales = flat[rows.start * self._blocks :]
        elif rows.start % 128 == 0:
            self._scales = flat[rows.start * _tiled(self._blocks) :]
        else:
            count = rows.stop - rows.start
            self._layout = _LINEAR
            self._scales = self._scattered = flat.new_empty(count, self._blocks)

    def arguments(self, scale_in_memory: Callable[[float], torch.Tensor]) -> tuple[object, ...]:
        """Return what upstream's launcher takes for this."""
        scale = self._quantization.scale
        if isinstance(scale, float):
            scale = scale_in_memory(scale)
        return self._quantization.recipe, self._values.dense, self._scales, scale, self._layout

    def finish(self) -> None:
        """Give the caller what was written."""
        self._values.finish()
        if self._scattered is None:
            return
        assert self._quantization.scales is not None
        columns = _tiled(self._blocks)
        # Bytes: indexed assignment is not defined for all 8-bit floats.
        flat = self._quantization.scales.view(-1).view(torch.uint8)
        used = flat[: -(-self._rows.stop // 128) * 128 * columns]
        tiles = used.view(-1, columns // 4, 32, 4, 4)
        rows = torch.arange(self._rows.start, self._rows.stop, device=flat.device)
        lines = flat.new_zeros(rows.numel(), columns)
        lines[:, : self._blocks] = self._scattered.view(torch.uint8)
        tiles[rows // 128, :, rows % 32, rows % 128 // 32] = lines.view(-1, columns // 4, 4)


_BLOCK = {2: 16, 4: 32}
"""Elements that share a scale, by ``MNNVLQuantType``: NVFP4 and MXFP8."""

_LINEAR = 2
"""``QuantizationSFLayout.LINEAR``."""


def _tiled(blocks: int) -> int:
    return -(-blocks // 4) * 4


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
