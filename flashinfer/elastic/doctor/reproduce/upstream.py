"""What the installed FlashInfer does with the case, by its own code.

Of 0.6.x, its constructor sizes the workspace, and its entry point makes the check and writes the
message. Device memory and the compiled launcher are stood in: the first because the numbers are
those of eight GPUs, the second because the check comes before any launch. Later versions are asked
for their arithmetic only.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from flashinfer.elastic import allreduce, shadow

from .case import DTYPE, Case

ENTRY_POINT = "trtllm_mnnvl_fused_allreduce_add_rmsnorm"
"""Which upstream function vLLM's fused all-reduce ends in."""


class Refusal(NamedTuple):
    """How upstream fails.

    Attributes
    ----------
    version : str
        Of flashinfer-python.
    buffer_bytes : int
        Of each buffer that upstream allocates for the reported tokens.
    required_bytes : int
        What one-shot takes for the tokens of the call, by upstream's count.
    error : str or None
        Text of the ValueError; None if the call would have been launched.
    ran : bool
        Whether upstream's code was run on the case; if not, only its arithmetic was, and ``error``
        is None.
    """

    version: str
    buffer_bytes: int
    required_bytes: int
    error: str | None
    ran: bool

    @property
    def as_reported(self) -> bool:
        """Whether the buffer falls short and, where upstream's code was run, it said so."""
        if not self.ran:
            return self.buffer_bytes < self.required_bytes
        text = f"Buffer: {self.buffer_bytes} bytes, Required: {self.required_bytes} bytes."
        return self.error is not None and text in self.error


def load_module() -> Any:
    """Import upstream's all-reduce module, patched, on a machine without a GPU too.

    Raises
    ------
    RuntimeError
        If the patch was not applied; the text says why.
    """
    _load_cudart()
    name = "flashinfer.comm.trtllm_mnnvl_ar"
    module = importlib.import_module(name)
    record = shadow.registry().get(name)
    if record is None or not record.patched:
        reason = record.reason if record else "the wheel is not installed beside FlashInfer"
        raise RuntimeError(f"{name} is not patched: {reason}")
    return module


def refusal(case: Case) -> Refusal:
    """Put the case to the installed FlashInfer."""
    module = load_module()
    version = shadow.upstream_version() or "of unknown version"
    workspace_class = allreduce.upstream_original(allreduce.WORKSPACE)
    strategies = module.MNNVLAllreduceFusionStrategy

    def required(tokens: int, strategy: Any) -> int:
        sizes = workspace_class.get_required_buffer_size_bytes
        return int(sizes(case.ranks, tokens, case.hidden, DTYPE, strategy))

    needed = required(case.asked, strategies.ONESHOT)
    if not hasattr(module, "_alloc_symm_buffer_bytes"):
        return Refusal(version, required(case.reported, strategies.TWOSHOT), needed, None, False)
    with mock.patch.multiple(module, **_stand_ins()):
        workspace = _make_workspace(workspace_class, case, module.TorchDistBackend())
        error = _call(workspace, case, strategies.ONESHOT)
        size = int(workspace.buffer_size_bytes)
        workspace.destroy()
    return Refusal(version, size, needed, error, True)


def _make_workspace(workspace_class: Any, case: Case, backend: object) -> Any:
    mapping = types.SimpleNamespace(world_size=case.ranks, rank=0, tp_size=case.ranks, tp_rank=0)
    return workspace_class(mapping, case.reported, case.hidden, DTYPE, comm_backend=backend)


def _call(workspace: Any, case: Case, strategy: Any) -> str | None:
    """Return the text of upstream's ValueError, or None if it came to a launch."""
    rows = torch.empty(case.asked, case.hidden, dtype=DTYPE, device="meta")
    gamma = torch.empty(case.hidden, dtype=DTYPE, device="meta")
    try:
        allreduce.upstream_original(ENTRY_POINT)(rows, rows, gamma, workspace, strategy=strategy)
    except ValueError as error:
        return str(error)
    return None


def _stand_ins() -> dict[str, Any]:
    """Return what upstream's module sees instead of a device, for the time of the check."""

    class Torch(types.ModuleType):
        cuda = types.SimpleNamespace(current_device=lambda: 0, synchronize=lambda: None)

        def device(self, *_: object) -> torch.device:
            return torch.device("cpu")

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    class Backend:
        _group = types.SimpleNamespace(group_name="")

        def barrier(self) -> None:
            """Rank 0 is alone."""

    def allocate(size: int, ranks: int, *_: object) -> tuple[list[int], torch.Tensor, Any]:
        handle = types.SimpleNamespace(
            buffer_size=size, buffer_ptrs=[0] * ranks, buffer_ptrs_dev=0, multicast_ptr=0
        )
        return handle.buffer_ptrs, torch.empty(0), handle

    launcher = types.SimpleNamespace(trtllm_mnnvl_allreduce_fusion=lambda *_: None)
    return {
        "torch": Torch("torch"),
        "TorchDistBackend": Backend,
        "_alloc_symm_buffer_bytes": allocate,
        "get_trtllm_mnnvl_comm_module": lambda: launcher,
    }


def _load_cudart() -> None:
    """Load a libcudart: importing ``flashinfer.comm`` of 0.6.x looks for one that is loaded.

    A torch built for CUDA brings its own. Otherwise the one of the nvidia-cuda-runtime package or
    of a toolkit will do; without any, upstream's own error says what is missing.
    """
    if torch.version.cuda is not None:
        return
    places = [(Path(entry), "nvidia/*/lib/libcudart.so.*") for entry in sys.path]
    places.append((Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), "lib64/libcudart.so.*"))
    for directory, pattern in places:
        for library in sorted(directory.glob(pattern)):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return
