"""vLLM 0.33's own modules over FlashInfer 0.7.2.post1 with this wheel."""

from __future__ import annotations

from typing import Any

import torch
from allreduce_cases import make_problem, meet
from allreduce_reference import sum_of_ranks
from ranks import run_ranks
from vllm_fused import (
    DTYPE,
    asked_of_flashinfer,
    capture,
    check_replays,
    make_static,
    max_tokens,
    table_tokens,
)
from vllm_parallel import communicator, needs, tensor_parallel

pytestmark = needs("0.33.", "0.7.2")

HIDDEN = 6144


def test_auto_keeps_our_workspace_and_routes_by_its_capacity() -> None:
    """``auto`` means mnnvl first; a null ``mc_ptr`` would send vLLM on to trtllm."""
    run_ranks(_auto, timeout_s=300)


def _auto(rank: int, ranks: int) -> None:
    with tensor_parallel(rank, ranks, "auto") as group:
        reduce: Any = communicator().FlashInferAllReduce(
            group.cpu_group, torch.device("cuda", rank)
        )
        assert not reduce.disabled
        taken = 0
        for tokens in (*table_tokens(ranks, HIDDEN), 2 * max_tokens(ranks, HIDDEN)):
            problem = make_problem(ranks, tokens, HIDDEN, DTYPE, tokens)
            rows = problem.inputs[rank].clone()
            takes = reduce.should_use_fi_ar(rows)
            workspace = _workspace()
            assert workspace.backend == "mnnvl" and workspace.mc_ptr
            assert takes == (
                tokens <= reduce.max_num_tokens
                and workspace.is_buffer_size_sufficient(ranks, tokens, HIDDEN, DTYPE)
            )
            if takes:
                got = reduce.all_reduce(rows)
                torch.cuda.synchronize()
                assert torch.equal(got, sum_of_ranks(problem.inputs)), f"{tokens} tokens"
                taken += 1
        assert taken >= 7


def test_fused_calls_leave_the_strategy_to_us_under_capture() -> None:
    run_ranks(_fused, timeout_s=300)


def _fused(rank: int, ranks: int) -> None:
    with tensor_parallel(rank, ranks, "auto") as group:
        most, sizes = max_tokens(ranks, HIDDEN), table_tokens(ranks, HIDDEN)
        workspace = communicator().get_fi_ar_workspace(
            ranks, rank, most, HIDDEN, DTYPE, group.cpu_group
        )
        assert workspace is _workspace() and workspace.backend == "mnnvl"
        static = [
            make_static(make_problem(ranks, n, HIDDEN, DTYPE, 0), separate_norm=False)
            for n in sizes
        ]
        with asked_of_flashinfer() as asked:
            graph = capture(static, ranks, most, 1e-6)
        assert asked == [(n, None) for n in sizes]
        check_replays(graph, static, rank, ranks, range(1, 3))
        meet()
        del graph


def test_calls_give_the_same_after_a_checkpoint() -> None:
    run_ranks(_checkpoint, timeout_s=300)


def _checkpoint(rank: int, ranks: int) -> None:
    with tensor_parallel(rank, ranks, "auto") as group:
        module = communicator()
        reduce: Any = module.FlashInferAllReduce(group.cpu_group, torch.device("cuda", rank))
        problem = make_problem(ranks, 64, HIDDEN, DTYPE, 1)
        rows = problem.inputs[rank].clone()
        expected = sum_of_ranks(problem.inputs)
        assert reduce.should_use_fi_ar(rows)
        static = make_static(problem, separate_norm=False)
        graph = capture([static], ranks, reduce.max_num_tokens, 1e-6)
        address = _workspace().uc_ptr_local
        for _ in range(2):
            assert torch.equal(reduce.all_reduce(rows), expected)
            check_replays(graph, [static], rank, ranks, range(1, 2))
            meet()
            module.checkpoint_prepare_fi_ar_workspaces(group.cpu_group)
            module.checkpoint_restore_fi_ar_workspaces(group.cpu_group)
            assert _workspace().uc_ptr_local == address
        assert torch.equal(reduce.all_reduce(rows), expected)
        check_replays(graph, [static], rank, ranks, range(2, 3))
        meet()
        del graph


def _workspace() -> Any:
    """Return the workspace that vLLM's module keeps."""
    return communicator()._fi_ar_workspace
