"""What the all-reduce tests share: workspaces, backends, inputs and calls."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from allreduce_reference import Expected, expect

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ONESHOT, TWOSHOT, AUTO = "ONESHOT", "TWOSHOT", "AUTO"

TIMEOUT_S = 20
"""How long a kernel waits in the tests before it ends its process."""


def _why_not() -> str:
    if torch.cuda.device_count() < 2:
        return f"needs two GPUs or more, found {torch.cuda.device_count()}"
    try:
        importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "flashinfer-python is not installed"
    return ""


_REASON = _why_not()

needs_gpus = pytest.mark.skipif(bool(_REASON), reason=_REASON)
"""Marks tests that run upstream's package with ours on two GPUs or more."""


# Groups


class PlainBackend:
    """A user's own backend: gathers bytes of one size as a tensor, and nothing else."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._size = dist.get_world_size(group)

    def allgather(self, data: bytes) -> list[bytes]:
        assert type(data) is bytes
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(gathered, own, group=self._group)
        return [bytes(item.numpy()) for item in gathered]

    def barrier(self) -> None:
        self.allgather(b"-")


def meet() -> None:
    """Wait for all ranks of the world, without a collective on the GPUs."""
    dist.all_reduce(torch.zeros(1))


def open_workspace(
    rank: int,
    ranks: int,
    backend: Any = None,
    *,
    tokens: int | None = None,
    hidden: int | None = None,
    dtype: torch.dtype | None = None,
    buffer_bytes: int | None = None,
) -> Any:
    """Create a workspace through the class that upstream's module holds; collective."""
    os.environ.setdefault("FLASHINFER_MNNVL_TIMEOUT_S", str(TIMEOUT_S))
    from flashinfer.comm import Mapping
    from flashinfer.comm.trtllm_mnnvl_ar import MNNVLAllReduceFusionWorkspace

    mapping = Mapping(world_size=ranks, rank=rank, gpus_per_node=ranks, tp_size=ranks)
    return MNNVLAllReduceFusionWorkspace(
        mapping,
        max_num_tokens=tokens,
        hidden_dim=hidden,
        dtype=dtype,
        buffer_size_in_bytes=buffer_bytes,
        comm_backend=PlainBackend() if backend is None else backend,
    )


# Problems


class Problem(NamedTuple):
    """One call's arguments, those of all ranks included."""

    inputs: torch.Tensor
    """``[P, N, H]``, every rank's contribution."""

    residual: torch.Tensor
    gamma: torch.Tensor
    epsilon: float = 1e-6
    weight_bias: float = 0.0

    def expected(self) -> Expected:
        """Compute all results to the bit."""
        return expect(self.inputs, self.residual, self.gamma, self.epsilon, self.weight_bias)


def make_problem(
    ranks: int,
    tokens: int,
    hidden: int,
    dtype: torch.dtype,
    seed: int,
    *,
    gamma_dtype: torch.dtype | None = None,
    epsilon: float = 1e-6,
    weight_bias: float = 0.0,
) -> Problem:
    """Draw the same random problem on every rank: rows of widely different scale."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    inputs = torch.empty(ranks, tokens, hidden, dtype=dtype, device=device)
    scale = torch.exp2(normal(tokens, 1) * 2)
    for contribution in inputs:
        contribution.copy_(normal(tokens, hidden) * scale)
    residual = normal(tokens, hidden).to(dtype)
    gamma = (1 - weight_bias + normal(hidden) * 0.5).to(gamma_dtype or dtype)
    return Problem(inputs, residual, gamma, epsilon, weight_bias)


# Calls


def strategy_named(name: str) -> Any:
    """Return upstream's enumerator."""
    from flashinfer.comm.trtllm_mnnvl_ar import MNNVLAllreduceFusionStrategy

    return MNNVLAllreduceFusionStrategy[name]


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor of that shape full of NaN, which no finite problem gives."""
    return torch.full(like.shape, float("nan"), dtype=like.dtype, device=like.device)


def run_sum(
    workspace: Any, rows: torch.Tensor, strategy: str = AUTO, *, pdl: bool = False
) -> torch.Tensor:
    """All-reduce this rank's rows into a poisoned output."""
    from flashinfer.comm.trtllm_mnnvl_ar import trtllm_mnnvl_allreduce

    output = poisoned(rows)
    got = trtllm_mnnvl_allreduce(rows, workspace, pdl, output, strategy_named(strategy))
    assert got is output
    return output


def run_norm(
    workspace: Any,
    problem: Problem,
    rows: torch.Tensor,
    strategy: str = AUTO,
    *,
    pdl: bool = False,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-reduce this rank's rows, add the residual and normalise, into poisoned outputs.

    Returns the normalised rows and the residual stream, as the entry point does.
    """
    from flashinfer.comm.trtllm_mnnvl_ar import trtllm_mnnvl_fused_allreduce_add_rmsnorm

    output, stream = poisoned(rows), poisoned(rows)
    got = trtllm_mnnvl_fused_allreduce_add_rmsnorm(
        rows,
        problem.residual if residual is None else residual,
        problem.gamma,
        workspace,
        problem.epsilon,
        output,
        stream,
        pdl,
        strategy_named(strategy),
        problem.weight_bias,
    )
    assert got[0] is output
    assert got[1] is stream
    return output, stream
