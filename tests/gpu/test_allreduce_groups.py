"""Groups, subgroups, several workspaces, and every kind of communication backend."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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
    strategy_named,
)
from allreduce_reference import check_bits
from ranks import run_ranks

pytestmark = needs_gpus


def check_calls(rank: int, ranks: int, workspace: Any, seed: int) -> int:
    """Run a few calls of both patterns and compare every bit."""
    calls = 0
    for tokens, hidden, dtype in (
        (1, 7168, torch.bfloat16),
        (5, 63, torch.float32),
        (40, 6144, torch.bfloat16),
        (130, 2880, torch.float16),
    ):
        problem = make_problem(ranks, tokens, hidden, dtype, seed + calls)
        expected = problem.expected()
        assert expected.norm is not None
        for strategy in (ONESHOT, TWOSHOT, AUTO):
            total = run_sum(workspace, problem.inputs[rank], strategy)
            norm, _ = run_norm(workspace, problem, problem.inputs[rank], strategy, pdl=True)
            check_bits(f"sum {tokens} x {hidden}", total, expected.sum)
            check_bits(f"norm {tokens} x {hidden}", norm, expected.norm)
            calls += 2
    return calls


# One process for each GPU


def every_backend(rank: int, ranks: int) -> int:
    """Upstream's backend over gloo, NCCL and the default group, a subclass, and a plain object."""
    from flashinfer.comm.mnnvl import TorchDistBackend

    class Subclass(TorchDistBackend):  # type: ignore[misc]
        def barrier(self) -> None:
            raise AssertionError("agreement needs no barrier that guesses a device")

    class Bare:
        """SGLang's: a group and two methods."""

        def __init__(self, group: Any) -> None:
            self._group = group

        def allgather(self, data: Any) -> list[Any]:
            gathered: list[Any] = [None] * ranks
            dist.all_gather_object(gathered, data, group=self._group)
            return gathered

        def barrier(self) -> None:
            dist.barrier(self._group)

    gloo = dist.new_group(backend="gloo")
    nccl = dist.new_group(backend="nccl")
    backends = (
        TorchDistBackend(gloo),
        TorchDistBackend(nccl),
        TorchDistBackend(dist.group.WORLD),
        TorchDistBackend(),
        Subclass(gloo),
        Bare(nccl),
        PlainBackend(),
    )
    calls = 0
    for backend in backends:
        workspace = open_workspace(
            rank, ranks, backend, tokens=64, hidden=7168, dtype=torch.bfloat16
        )
        calls += check_calls(rank, ranks, workspace, seed=1)
        workspace.destroy()
    return calls


def two_groups(rank: int, ranks: int) -> int:
    """Two groups of the same ranks, a workspace each, alternating call by call."""
    from flashinfer.comm.mnnvl import TorchDistBackend

    spaces = [
        open_workspace(
            rank,
            ranks,
            TorchDistBackend(dist.new_group(backend=backend)),
            tokens=tokens,
            hidden=hidden,
            dtype=torch.bfloat16,
        )
        for backend, tokens, hidden in (("gloo", 256, 7168), ("nccl", 8, 2880))
    ]
    calls = 0
    for turn in range(6):
        calls += check_calls(rank, ranks, spaces[turn % 2], seed=100 * turn)
    # The end of one says nothing about the other.
    spaces[0].destroy()
    calls += check_calls(rank, ranks, spaces[1], seed=999)
    spaces[1].destroy()
    return calls


def two_streams(rank: int, ranks: int) -> int:
    """Two workspaces at the same time on two streams, as of target and draft model.

    Ranks do not even agree on which goes first: the two have nothing to do with each other. Small
    calls, because kernels that wait for peers need room on the device at the same time; and every
    kernel is loaded and all memory taken first, for both may wait until the device is idle.
    """
    from flashinfer.comm.trtllm_mnnvl_ar import trtllm_mnnvl_fused_allreduce_add_rmsnorm

    turns, variants = 400, 4
    spaces = [
        open_workspace(rank, ranks, tokens=16, hidden=2880, dtype=torch.bfloat16) for _ in range(2)
    ]
    streams = [torch.cuda.Stream() for _ in spaces]
    problems = [make_problem(ranks, 4, 2880, torch.bfloat16, seed) for seed in range(variants)]
    shape = (turns, len(spaces), *problems[0].residual.shape)
    norms = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    streamed = torch.full_like(norms, float("nan"))

    def call(turn: int, which: int, pdl: bool) -> None:
        problem = problems[(turn + which) % variants]
        trtllm_mnnvl_fused_allreduce_add_rmsnorm(
            problem.inputs[rank],
            problem.residual,
            problem.gamma,
            spaces[which],
            problem.epsilon,
            norms[turn, which],
            streamed[turn, which],
            pdl,
            strategy_named((ONESHOT, TWOSHOT)[turn % 2]),
        )

    for turn in (0, 1):
        call(turn, 0, pdl=False)
    torch.cuda._sleep(10)
    torch.cuda.synchronize()
    for turn in range(turns):
        for which in (0, 1) if (turn + rank) % 3 else (1, 0):
            with torch.cuda.stream(streams[which]):
                if (turn + which) % 7 == rank:
                    torch.cuda._sleep(50_000)
                call(turn, which, pdl=turn % 3 == 0)
    torch.cuda.synchronize()
    for number, problem in enumerate(problems):
        expected = problem.expected()
        assert expected.norm is not None
        assert expected.residual is not None
        for turn in range(turns):
            which = (number - turn) % variants
            if which < len(spaces):
                check_bits(f"norm of turn {turn}", norms[turn, which], expected.norm)
                check_bits(f"residual of turn {turn}", streamed[turn, which], expected.residual)
    for space in spaces:
        space.destroy()
    return turns * len(spaces)


def group_of_one(rank: int, ranks: int) -> int:
    """A group of one GPU gives what it is given."""
    workspace = open_workspace(0, 1, tokens=16, hidden=2880, dtype=torch.bfloat16)
    calls = check_calls(0, 1, workspace, seed=5)
    workspace.destroy()
    return calls


def halves(rank: int, ranks: int) -> int:
    """Two groups of half the ranks each, at work at the same time; needs four GPUs."""
    if ranks < 4:
        return 0
    from flashinfer.comm.mnnvl import TorchDistBackend

    half = ranks // 2
    groups = [dist.new_group(list(range(first, first + half))) for first in (0, half)]
    mine, place = divmod(rank, half)
    if mine > 1:
        return 0
    workspace = open_workspace(
        place, half, TorchDistBackend(groups[mine]), tokens=64, hidden=7168, dtype=torch.bfloat16
    )
    calls = check_calls(place, half, workspace, seed=7 + mine)
    workspace.destroy()
    return calls


PARTS = (every_backend, two_groups, two_streams, group_of_one, halves)


def check_groups(rank: int, ranks: int) -> dict[str, int]:
    counts = {}
    for part in PARTS:
        counts[part.__name__] = part(rank, ranks)
        meet()
        torch.cuda.empty_cache()
    return counts


def test_groups_workspaces_and_backends() -> None:
    results = run_ranks(check_groups, timeout_s=120.0)
    print(f"calls by rank: {results}")


# A world that is larger than the tensor-parallel group


def check_subgroup(rank: int, size: int) -> int:
    """Rank 0 of the world has no GPU; the others are the group, so all its ranks are shifted."""
    ranks = size - 1
    members = list(range(1, size))
    groups = [dist.new_group(members, backend=backend) for backend in ("gloo", "nccl")]
    calls = 0
    if rank != 0:
        place = rank - 1
        torch.cuda.set_device(place)
        from flashinfer.comm.mnnvl import TorchDistBackend

        from flashinfer.comm import create_allreduce_fusion_workspace

        for group in groups:
            backend = TorchDistBackend(group)
            workspace = open_workspace(
                place, ranks, backend, tokens=64, hidden=7168, dtype=torch.bfloat16
            )
            assert (workspace.rank, workspace.tp_size) == (place, ranks)
            calls += check_calls(place, ranks, workspace, seed=3)
            workspace.destroy()

            workspace = create_allreduce_fusion_workspace(
                backend="mnnvl",
                world_size=ranks,
                rank=place,
                max_token_num=64,
                hidden_dim=7168,
                dtype=torch.bfloat16,
                comm_backend=backend,
            )
            calls += check_calls(place, ranks, workspace, seed=4)
            workspace.destroy()
    # Rank 0 took part in nothing but the making of the groups, and waits here.
    meet()
    return calls


def test_the_group_is_a_part_of_the_world() -> None:
    calls = run_ranks(check_subgroup, torch.cuda.device_count() + 1, timeout_s=90.0)
    assert calls[0] == 0
    assert min(calls[1:]) > 0
    print(f"calls by rank: {calls}")
