"""The installed SGLang's workspace manager and operators on GPUs, over FlashInfer with our wheel.

Needs two GPUs, FlashInfer with the wheel, and ``sglang`` (``pip install --no-deps`` and what
``import sglang`` asks for are enough).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from allreduce_cases import TIMEOUT_S, Problem, make_problem, needs_gpus
from allreduce_reference import check_against_float64, check_bits
from ranks import run_ranks
from sglang_server import Group, import_installed

pytestmark = [
    needs_gpus,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="sglang is not installed"
    ),
]

DTYPE = torch.bfloat16


class Server:
    """One rank of a server: SGLang's module, and its group."""

    def __init__(self, rank: int, ranks: int) -> None:
        os.environ["FLASHINFER_MNNVL_TIMEOUT_S"] = str(TIMEOUT_S)
        self.rank, self.ranks = rank, ranks
        # As SGLang's coordinators have them: one for the GPUs, one for the hosts.
        self.group = Group(
            ranks, rank, dist.new_group(backend="nccl"), dist.new_group(backend="gloo")
        )
        self.sglang: types.ModuleType = import_installed(self.group)
        from flashinfer.elastic import shadow

        # Upstream's own constructor may make a multicast object; here it must never run.
        state = shadow.registry()["flashinfer.comm.trtllm_mnnvl_ar"]
        assert state.patched, state.reason

    @property
    def manager(self) -> Any:
        return self.sglang._get_workspace_manager(True)

    def problem(self, tokens: int, hidden: int, seed: int) -> Problem:
        return make_problem(self.ranks, tokens, hidden, DTYPE, seed)

    def norm(self, problem: Problem, max_tokens: int, use_oneshot: bool | None = None) -> Any:
        """Call the operator that SGLang's layers call."""
        return self.sglang.flashinfer_allreduce_residual_rmsnorm(
            problem.inputs[self.rank],
            problem.residual,
            problem.gamma,
            eps=problem.epsilon,
            max_token_num=max_tokens,
            use_oneshot=use_oneshot,
        )

    def check_norm(self, problem: Problem, got: Any, what: str) -> None:
        """The results are float64's within rounding, and ours to the bit."""
        expected = problem.expected()
        check_against_float64(
            problem.inputs, expected, problem.residual, problem.gamma, problem.epsilon
        )
        assert expected.norm is not None
        assert expected.residual is not None
        check_bits(f"{what}: norm", got[0], expected.norm)
        check_bits(f"{what}: residual", got[1], expected.residual)


def check_creation(server: Server) -> None:
    """Both workspaces exist before anything is captured; what upstream refuses is served."""
    server.sglang.pre_initialize_workspaces(max_token_num=42, hidden_dim=6144, dtype=DTYPE)
    manager = server.manager
    ours = manager.workspace
    assert (manager.initialized, ours.backend) == (True, "mnnvl")
    assert type(ours).__init__.__module__.startswith("flashinfer.elastic.")
    for tokens in (1, 2, 8, 40, 42):
        for use_oneshot in (True, False, None):
            problem = server.problem(tokens, 6144, tokens)
            got = server.norm(problem, 42, use_oneshot)
            server.check_norm(problem, got, f"{tokens} tokens, use_oneshot={use_oneshot}")
    assert manager.workspace is ours


def check_capture(server: Server) -> None:
    """Graphs of several batch sizes on one workspace, replayed with new contents, in any order."""
    before = server.manager.workspace
    captured = []
    for tokens in (42, 40, 1):
        problem = server.problem(tokens, 6144, 100 + tokens)
        server.norm(problem, 42)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = server.norm(problem, 42, True)
        captured.append((graph, problem, got))
    for round_ in range(3):
        for index, (graph, problem, got) in enumerate(captured):
            fresh = server.problem(*problem.residual.shape, 1000 * round_ + index)
            for mine, new in zip(problem[:3], fresh[:3], strict=True):
                mine.copy_(new)
            graph.replay()
            server.check_norm(problem, got, f"replay {round_} of {len(problem.residual)} tokens")
    assert server.manager.workspace is before


def check_growth(server: Server) -> None:
    """A larger model replaces the workspace on all ranks, and the smaller one still runs."""
    first = server.manager.workspace
    for tokens in (2048, 600, 3):
        problem = server.problem(tokens, 7168, tokens)
        server.check_norm(problem, server.norm(problem, 2048), f"{tokens} tokens of 7168")
    second = server.manager.workspace
    assert second is not first
    assert first._destroyed
    assert server.manager.is_buffer_size_sufficient(2048, 7168, DTYPE)
    problem = server.problem(42, 6144, 7)
    server.check_norm(problem, server.norm(problem, 42), "the smaller model again")
    assert server.manager.workspace is second


def check_plain_sum(server: Server) -> bool:
    """The all-reduce without a norm, which newer releases send to the workspace too."""
    sglang, group = server.sglang, server.group
    if not hasattr(sglang, "flashinfer_allreduce"):
        return False
    for tokens in (1, 40, 2048):
        problem = server.problem(tokens, 7168, 50 + tokens)
        rows = problem.inputs[server.rank]
        assert sglang.can_use_flashinfer_allreduce(
            rows,
            use_attn_tp_group=True,
            expected_world_size=server.ranks,
            expected_group_key=(group.device_group, group.cpu_group),
        )
        total = sglang.flashinfer_allreduce(rows, use_attn_tp_group=True)
        check_bits("sum", total, problem.expected().sum)
    return True


def check_clean_up(server: Server) -> None:
    server.sglang.cleanup_flashinfer_workspace()
    assert server.manager.workspace is None
    ones = torch.ones(4, device="cuda")
    dist.all_reduce(ones, group=server.group.device_group)
    assert bool((ones == server.ranks).all())


def serve(rank: int, ranks: int) -> dict[str, Any]:
    server = Server(rank, ranks)
    check_creation(server)
    check_capture(server)
    check_growth(server)
    plain = check_plain_sum(server)
    check_clean_up(server)
    return {
        "sglang": importlib.metadata.version("sglang"),
        "flashinfer-python": importlib.metadata.version("flashinfer-python"),
        "plain sum": plain,
    }


def test_a_server_creates_replaces_captures_and_calls_our_workspace() -> None:
    results = run_ranks(serve, timeout_s=150.0)
    print(results[0])
