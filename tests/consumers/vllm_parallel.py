"""vLLM's own modules on spawned ranks: what must be installed, and a tensor-parallel group."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from allreduce_cases import TIMEOUT_S

MODULE = "flashinfer.comm.trtllm_mnnvl_ar"

# One communicator at a time. vLLM's own symmetric memory would look for multicast.
SETTINGS = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "FLASHINFER_MNNVL_TIMEOUT_S": str(TIMEOUT_S),
}


def version_of(distribution: str) -> str:
    """Return a distribution's version, or an empty string where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def why_not(vllm: str, flashinfer: tuple[str, ...]) -> str:
    """Say why a test of these versions cannot run here; empty if it can.

    Parameters
    ----------
    vllm : str
        The start of vLLM's version, up to a dot.
    flashinfer : tuple of str
        The starts of FlashInfer's versions.
    """
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return f"needs two GPUs or more, found {gpus}"
    found = version_of("vllm")
    if not found.startswith(vllm):
        return f"needs vLLM {vllm}x, found {found or 'none'}"
    found = version_of("flashinfer-python")
    if not found.startswith(flashinfer):
        return f"needs flashinfer-python {' or '.join(flashinfer)}, found {found or 'none'}"
    if not version_of("flashinfer"):
        return "this wheel is not installed beside FlashInfer"
    return ""


def needs(vllm: str, *flashinfer: str) -> pytest.MarkDecorator:
    """Mark tests that run those versions, with this wheel, on two GPUs or more."""
    reason = why_not(vllm, flashinfer)
    return pytest.mark.skipif(bool(reason), reason=reason)


def require_patched() -> None:
    """Raise unless the workspaces that FlashInfer makes from here on are ours.

    Upstream's own class of 0.7.x creates a multicast object, which a machine whose fabric is out of
    order does not survive; so this stands before everything else that a rank does.
    """
    shadow = importlib.import_module("flashinfer.elastic.shadow")
    importlib.import_module(MODULE)
    record = shadow.registry().get(MODULE)
    if record is None or not record.patched:
        reason = record.reason if record else "this wheel's package was not found in its place"
        raise RuntimeError(f"{MODULE} is not patched, nothing is created: {reason}")


@contextlib.contextmanager
def tensor_parallel(rank: int, ranks: int, backend: str, *, patched: bool = True) -> Iterator[Any]:
    """Yield vLLM's tensor-parallel group over all ranks; collective.

    After an exception nothing is taken down, since peers may be stuck in a collective.

    Parameters
    ----------
    backend : str
        Value of ``VLLM_FLASHINFER_ALLREDUCE_BACKEND``.
    patched : bool
        Whether to insist on :func:`require_patched`.
    """
    os.environ.update(SETTINGS, VLLM_FLASHINFER_ALLREDUCE_BACKEND=backend, LOCAL_RANK=str(rank))
    if patched:
        require_patched()
    config = importlib.import_module("vllm.config")
    state = importlib.import_module("vllm.distributed.parallel_state")
    with config.set_current_vllm_config(config.VllmConfig()):
        state.set_custom_all_reduce(False)
        state.init_distributed_environment(world_size=ranks, rank=rank, local_rank=rank)
        state.initialize_model_parallel(ranks)
        yield state.get_tp_group()
        communicator().destroy_fi_ar_workspace()
        state.destroy_model_parallel()
        state.destroy_distributed_environment()


def communicator() -> Any:
    """Return vLLM's module that creates and keeps FlashInfer's workspaces."""
    return importlib.import_module("vllm.distributed.device_communicators.flashinfer_all_reduce")


def fusion() -> Any:
    """Return vLLM's module that makes the fused calls."""
    return importlib.import_module("vllm.compilation.passes.fusion.allreduce_rms_fusion")


def on_architecture(table: dict[int, dict[int, float]]) -> dict[int, float]:
    """Return this GPU's part of one of vLLM's tables: MiB by size of the group."""
    major, minor = torch.cuda.get_device_capability()
    return table.get(10 * major + minor, {})
