"""Wrong arguments are refused before anything is launched, and the workspace works afterwards."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allreduce_cases import (
    AUTO,
    ONESHOT,
    TWOSHOT,
    PlainBackend,
    make_problem,
    meet,
    needs_gpus,
    open_workspace,
    run_norm,
    run_sum,
)
from allreduce_reference import check_bits
from ranks import run_ranks

pytestmark = needs_gpus

TOKENS, HIDDEN = 6, 2880


class Arguments:
    """Right arguments of both entry points, to be spoilt one at a time."""

    def __init__(self, rank: int, ranks: int, workspace: Any) -> None:
        self.problem = make_problem(ranks, TOKENS, HIDDEN, torch.bfloat16, 1)
        self.rank, self.ranks = rank, ranks
        self.workspace = workspace
        rows = self.problem.inputs[rank]
        self.named: dict[str, Any] = {
            "input": rows,
            "residual_in": self.problem.residual,
            "gamma": self.problem.gamma,
            "workspace": workspace,
            "epsilon": 1e-6,
            "output": torch.empty_like(rows),
            "residual_out": torch.empty_like(rows),
        }

    def norm(self, **wrong: Any) -> Any:
        from flashinfer.comm.trtllm_mnnvl_ar import trtllm_mnnvl_fused_allreduce_add_rmsnorm

        return trtllm_mnnvl_fused_allreduce_add_rmsnorm(**(self.named | wrong))

    def sum(self, **wrong: Any) -> Any:
        from flashinfer.comm.trtllm_mnnvl_ar import trtllm_mnnvl_allreduce

        right = {name: self.named[name] for name in ("input", "workspace", "output")}
        return trtllm_mnnvl_allreduce(**(right | {"launch_with_pdl": False} | wrong))

    def check_works(self) -> None:
        """All ranks call, and get what they should: no turn was taken by what was refused."""
        expected = self.problem.expected()
        assert expected.norm is not None
        for strategy in (ONESHOT, TWOSHOT):
            norm, _ = run_norm(
                self.workspace, self.problem, self.problem.inputs[self.rank], strategy
            )
            check_bits("norm after an error", norm, expected.norm)


def wrong_calls(given: Arguments) -> list[tuple[type[Exception], str, Callable[[], Any]]]:
    """What is refused, with the text expected."""
    rows = given.problem.inputs[given.rank]
    wide = rows.new_empty(TOKENS, 2 * HIDDEN)
    transposed = rows.new_empty(HIDDEN, TOKENS).T
    other_device = torch.device("cuda", (given.rank + 1) % given.ranks)
    shape = f"({TOKENS}, {HIDDEN})"
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = []

    def refuse(kind: type[Exception], text: str, call: Callable[..., Any], **wrong: Any) -> None:
        calls.append((kind, text, lambda: call(**wrong)))

    for call in (given.sum, given.norm):
        # Upstream's own texts.
        refuse(ValueError, "The input tensor must be 2D, got 3D.", call, input=rows[None])
        refuse(ValueError, "The output tensor must be 2D, got 1D.", call, output=rows[0])
        refuse(ValueError, "dtype", call, input=rows.double())
        refuse(ValueError, "dtype", call, output=rows.float())
        refuse(ValueError, "dtype", call, output=rows.half())
        refuse(ValueError, "output shape mismatch", call, output=rows[:-1].clone())
        refuse(ValueError, f"expected {shape}", call, output=wide)
        refuse(ValueError, "output must have dense rows", call, output=wide[:, ::2])
        refuse(ValueError, "output must have dense rows", call, output=transposed)
        refuse(ValueError, "input must have dense rows", call, input=wide[:, ::2])
        refuse(ValueError, "must not overlap", call, output=rows[:1].expand_as(rows))
        refuse(ValueError, "input must be on cuda", call, input=rows.cpu())
        refuse(ValueError, "output must be on cuda", call, output=rows.cpu())
        refuse(ValueError, "output must be on cuda", call, output=rows.to(other_device))
        refuse(ValueError, "input must be on cuda", call, input=rows.to(other_device))
        refuse(TypeError, "workspace must be a MNNVLAllReduce", call, workspace=object())
        refuse(TypeError, "workspace must be a MNNVLAllReduce", call, workspace=None)
        refuse(ValueError, "strategy must be", call, strategy="fastest")
    gamma = given.problem.gamma
    for wrong in (gamma[:-1], gamma.repeat(2)):
        refuse(
            ValueError,
            "The gamma tensor must have the same number of elements as the hidden dimension, got "
            f"{wrong.numel()} elements but expected {HIDDEN} elements.",
            given.norm,
            gamma=wrong,
        )
    refuse(ValueError, "gamma", given.norm, gamma=gamma.half())
    refuse(ValueError, "gamma", given.norm, gamma=gamma.repeat_interleave(2)[::2])
    refuse(ValueError, "gamma must be on cuda", given.norm, gamma=gamma.cpu())
    residual = given.problem.residual
    refuse(
        ValueError,
        "The residual input tensor must be 2D, got 1D.",
        given.norm,
        residual_in=residual.flatten(),
    )
    refuse(
        ValueError,
        "The residual output tensor must be 2D, got 4D.",
        given.norm,
        residual_out=residual[None, None],
    )
    refuse(ValueError, "residual_in shape mismatch", given.norm, residual_in=residual[1:])
    refuse(ValueError, "dtype", given.norm, residual_in=residual.float())
    refuse(ValueError, "dtype", given.norm, residual_out=residual.float())
    refuse(ValueError, "residual_in must be on cuda", given.norm, residual_in=residual.cpu())
    out = given.named["output"]
    refuse(ValueError, "different tensors", given.norm, output=out, residual_out=out)
    return calls


def check_wrong_calls(rank: int, ranks: int) -> int:
    """Each wrong call on one rank only: the others must not be left waiting."""
    workspace = open_workspace(rank, ranks, tokens=64, hidden=HIDDEN, dtype=torch.bfloat16)
    given = Arguments(rank, ranks, workspace)
    given.check_works()
    calls = wrong_calls(given)
    for number, (kind, text, call) in enumerate(calls):
        if number % ranks == rank:
            torch.cuda.synchronize()
            with pytest.raises(kind, match=re.escape(text)):
                call()
        if number % 8 == 7:
            given.check_works()
    given.check_works()

    # Also while a graph is captured, which can then go on.
    graph = torch.cuda.CUDAGraph()
    expected = given.problem.expected()
    with torch.cuda.graph(graph):
        for kind, text, call in calls:
            with pytest.raises(kind, match=re.escape(text)):
                call()
        total = run_sum(workspace, given.problem.inputs[rank], AUTO)
    graph.replay()
    check_bits("sum captured after errors", total, expected.sum)

    check_pointers(given)
    check_small_buffer(rank, ranks)
    check_destroyed(given)
    return len(calls)


def check_pointers(given: Arguments) -> None:
    """The deprecated functions notice a workspace of another group size or rank."""
    from flashinfer.comm import trtllm_mnnvl_ar as module

    workspace, rank, ranks = given.workspace, given.rank, given.ranks
    rows, out = given.named["input"], given.named["output"]
    pointers = (workspace.mc_ptr, workspace.uc_ptrs_dev)
    flags = torch.zeros(9, dtype=torch.int32, device="cuda")

    def call(buffer_rows: int, ranks: int, rank: int, wait: bool = True, into: Any = out) -> None:
        module.trtllm_mnnvl_all_reduce(
            rows, *pointers, buffer_rows, flags, ranks, rank, wait, False, into
        )

    with pytest.raises(ValueError, match=f"rank {rank} of {ranks}, got rank={rank} and nranks=64"):
        call(TOKENS, 64, rank)
    with pytest.raises(ValueError, match=f"got rank={rank + 1} and nranks={ranks}"):
        call(TOKENS, ranks, rank + 1)
    with pytest.raises(ValueError, match="is greater than the buffer_M 5"):
        call(TOKENS - 1, ranks, rank)
    with pytest.raises(AssertionError, match="wait_for_results=False is not supported"):
        call(TOKENS, ranks, rank, wait=False)
    with pytest.raises(AssertionError, match="is not supported"):
        call(TOKENS, ranks, rank, into=None)
    given.check_works()
    call(TOKENS, ranks, rank)
    check_bits("deprecated sum", out, given.problem.expected().sum)


def check_small_buffer(rank: int, ranks: int) -> None:
    """One row that does not fit: the one error about size that is left."""
    workspace = open_workspace(rank, ranks, buffer_bytes=ranks * 1024 * 2)
    rows = torch.ones(3, 1032, device="cuda", dtype=torch.bfloat16)
    required = ranks * 1032 * 2
    with pytest.raises(
        ValueError,
        match="The buffer size in the given workspace is insufficient for the given problem size. "
        f"Buffer: {workspace.buffer_size_bytes} bytes, Required: {required} bytes.",
    ):
        run_sum(workspace, rows)
    rows = torch.ones(3, 1024, device="cuda", dtype=torch.bfloat16)
    assert bool((run_sum(workspace, rows) == ranks).all())
    workspace.destroy()


def check_destroyed(given: Arguments) -> None:
    workspace = given.workspace
    table = workspace.uc_ptrs_dev
    workspace.destroy()
    workspace.destroy()
    for call in (given.sum, given.norm):
        with pytest.raises(RuntimeError, match="destroyed"):
            call()
    for name in ("mc_ptr", "uc_ptrs_dev", "uc_ptr_local", "handle", "ptrs"):
        with pytest.raises(AttributeError, match="destroyed"):
            getattr(workspace, name)
    from flashinfer.comm import trtllm_mnnvl_ar as module

    rows, out = given.named["input"], given.named["output"]
    flags = torch.zeros(9, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match="destroyed"):
        module.trtllm_mnnvl_all_reduce(
            rows, 1, table, TOKENS, flags, given.ranks, given.rank, True, False, out
        )


def test_wrong_calls_are_refused_and_harm_nothing() -> None:
    results = run_ranks(check_wrong_calls, timeout_s=90.0)
    print(f"{results[0]} wrong calls, spread over {len(results)} ranks")


# Creation


class WrongSize(PlainBackend):
    """Gathers from one rank fewer than the group has."""

    def allgather(self, data: bytes) -> list[bytes]:
        return super().allgather(data)[:-1]


def check_wrong_creations(rank: int, ranks: int) -> int:
    """All ranks get the error within seconds, and the group can be used afterwards."""
    from flashinfer.comm import Mapping
    from flashinfer.comm.trtllm_mnnvl_ar import MNNVLAllReduceFusionWorkspace

    bf16, twice = torch.bfloat16, 2 * ranks
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            AssertionError,
            "max_num_tokens, hidden_dim, and dtype must be provided if buffer_size_in_bytes is not "
            "provided.",
            lambda: open_workspace(rank, ranks, tokens=4, hidden=64),
        ),
        (
            ValueError,
            "is greater than the maximum supported size (UINT32_MAX)",
            lambda: open_workspace(rank, ranks, buffer_bytes=2**32),
        ),
        (ValueError, "negative", lambda: open_workspace(rank, ranks, buffer_bytes=-1)),
        (
            RuntimeError,
            "belongs to another group",
            lambda: open_workspace(rank, ranks, WrongSize(), tokens=4, hidden=64, dtype=bf16),
        ),
        (
            RuntimeError,
            "belongs to another group",
            lambda: MNNVLAllReduceFusionWorkspace(
                Mapping(world_size=twice, rank=rank, gpus_per_node=twice, tp_size=twice),
                buffer_size_in_bytes=1 << 20,
                comm_backend=PlainBackend(),
            ),
        ),
        (
            RuntimeError,
            "ranks are not 0 to",
            lambda: open_workspace(0, ranks, buffer_bytes=1 << 20),
        ),
        (
            RuntimeError,
            "ranks disagree",
            lambda: open_workspace(rank, ranks, buffer_bytes=(1 + rank) << 20),
        ),
    ]
    for kind, text, create in cases:
        start = time.monotonic()
        with pytest.raises(kind, match=re.escape(text)):
            create()
        assert time.monotonic() - start < 10
        meet()
    workspace = open_workspace(rank, ranks, tokens=64, hidden=HIDDEN, dtype=bf16)
    Arguments(rank, ranks, workspace).check_works()
    workspace.destroy()
    return len(cases)


def test_wrong_creations_raise_on_every_rank() -> None:
    results = run_ranks(check_wrong_creations, timeout_s=60.0)
    print(f"{results[0]} wrong creations on {len(results)} ranks")
