"""vLLM 0.24's own modules over FlashInfer 0.6.12 and 0.6.13 with this wheel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allreduce_cases import make_problem, meet
from allreduce_reference import sum_of_ranks
from ranks import run_ranks
from vllm_fused import (
    DTYPE,
    MIB,
    asked_of_flashinfer,
    call,
    capture,
    check,
    check_replays,
    make_static,
    max_tokens,
    table_tokens,
)
from vllm_parallel import communicator, fusion, needs, on_architecture, tensor_parallel

pytestmark = needs("0.24.", "0.6.12", "0.6.13")

EPSILON = 1e-6


@pytest.mark.parametrize("hidden", [6144, 7168])
def test_fused_calls_of_all_table_sizes_replay_from_a_graph(hidden: int) -> None:
    """The calls that killed servers: one-shot forced by vLLM's table, under capture."""
    for tokens in run_ranks(_fused_under_capture, None, hidden, timeout_s=300):
        assert len(tokens) >= 7


def _fused_under_capture(rank: int, ranks: int, hidden: int) -> list[int]:
    with tensor_parallel(rank, ranks, "mnnvl") as group:
        most, sizes = max_tokens(ranks, hidden), table_tokens(ranks, hidden)
        # vLLM creates the workspace before it captures, when it builds its passes.
        workspace = communicator().get_fi_ar_workspace(
            ranks, rank, most, hidden, DTYPE, group.device_group
        )
        assert workspace is not None and workspace.backend == "mnnvl"
        limit = on_architecture(fusion()._FI_ALLREDUCE_ONE_SHOT_MAX_SIZES_MB)[ranks] * MIB
        for separate_norm in (False, True):
            static = [
                make_static(
                    make_problem(ranks, tokens, hidden, DTYPE, 0), separate_norm=separate_norm
                )
                for tokens in sizes
            ]
            with asked_of_flashinfer() as asked:
                graph = capture(static, ranks, most, EPSILON)
            assert asked == [(n, n * hidden * DTYPE.itemsize <= limit) for n in sizes]
            check_replays(graph, static, rank, ranks, range(1, 3))
            meet()
            del graph
        return sizes


def test_a_wider_draft_model_uses_the_workspace_of_its_target() -> None:
    """vLLM keeps one workspace a process, made for whichever model asked first."""
    run_ranks(_wider_draft, timeout_s=300)


def _wider_draft(rank: int, ranks: int) -> None:
    target, draft, reported = 2048, 6144, 42
    with tensor_parallel(rank, ranks, "mnnvl") as group:
        create = communicator().get_fi_ar_workspace
        workspace = create(ranks, rank, reported, target, DTYPE, group.device_group)
        assert create(ranks, rank, reported, draft, DTYPE, group.device_group) is workspace
        for hidden in (target, draft, 2 * draft):
            for tokens in (1, 7, reported):
                problem = make_problem(ranks, tokens, hidden, DTYPE, tokens)
                static = make_static(problem, separate_norm=False)
                static.load(problem, rank)
                call(static, ranks, reported, EPSILON)
                torch.cuda.synchronize()
                check(static, problem)


def test_stand_alone_all_reduce_is_right_for_all_sizes_it_takes() -> None:
    run_ranks(_stand_alone, timeout_s=300)


def _stand_alone(rank: int, ranks: int) -> None:
    hidden = 6144
    with tensor_parallel(rank, ranks, "mnnvl") as group:
        device = torch.device("cuda", rank)
        reduce: Any = communicator().FlashInferAllReduce(group.cpu_group, device)
        assert not reduce.disabled
        most = max_tokens(ranks, hidden)
        for tokens in (*table_tokens(ranks, hidden), most):
            problem = make_problem(ranks, tokens, hidden, DTYPE, tokens)
            rows = problem.inputs[rank].clone()
            assert reduce.should_use_fi_ar(rows)
            got = reduce.all_reduce(rows)
            torch.cuda.synchronize()
            assert torch.equal(got, sum_of_ranks(problem.inputs)), f"{tokens} tokens"
        assert not reduce.should_use_fi_ar(torch.empty(most + 1, hidden, dtype=DTYPE).to(device))
