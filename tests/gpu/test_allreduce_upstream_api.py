"""FlashInfer's own front ends, unmodified, over the patched module."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allreduce_cases import (
    DTYPES,
    TIMEOUT_S,
    PlainBackend,
    make_problem,
    meet,
    needs_gpus,
    poisoned,
    strategy_named,
)
from allreduce_reference import check_against_float64, check_bits
from ranks import run_ranks

pytestmark = needs_gpus


def create(rank: int, ranks: int, **more: Any) -> Any:
    from flashinfer.comm import create_allreduce_fusion_workspace

    arguments = {
        "backend": "mnnvl",
        "world_size": ranks,
        "rank": rank,
        "max_token_num": 64,
        "hidden_dim": 4096,
        "dtype": torch.bfloat16,
        "comm_backend": PlainBackend(),
    }
    return create_allreduce_fusion_workspace(**(arguments | more))


def check_fusion(rank: int, ranks: int, workspace: Any, tokens: int, hidden: int) -> int:
    """Call ``allreduce_fusion`` with all that this pattern may be given."""
    from flashinfer.comm import AllReduceFusionPattern, allreduce_fusion

    calls = 0
    for dtype in DTYPES:
        problem = make_problem(ranks, tokens, hidden, dtype, tokens + hidden)
        own = problem.inputs[rank]
        expected = problem.expected()
        assert expected.norm is not None
        assert expected.residual is not None
        check_against_float64(
            problem.inputs, expected, problem.residual, problem.gamma, problem.epsilon
        )
        for use_oneshot in (True, False, None):
            for pdl in (False, True):
                output = poisoned(own)
                got = allreduce_fusion(
                    own,
                    workspace,
                    AllReduceFusionPattern.kAllReduce,
                    launch_with_pdl=pdl,
                    output=output,
                    use_oneshot=use_oneshot,
                )
                assert got is output
                check_bits("sum", output, expected.sum)

                norm, residual = poisoned(own), poisoned(own)
                got = allreduce_fusion(
                    own,
                    workspace,
                    AllReduceFusionPattern.kARResidualRMSNorm,
                    launch_with_pdl=pdl,
                    residual_in=problem.residual,
                    residual_out=residual,
                    norm_out=norm,
                    rms_gamma=problem.gamma,
                    rms_eps=problem.epsilon,
                    use_oneshot=use_oneshot,
                )
                assert got is norm
                check_bits("norm", norm, expected.norm)
                check_bits("residual", residual, expected.residual)
                calls += 2
        got = allreduce_fusion(own, workspace, AllReduceFusionPattern.kAllReduce)
        check_bits("sum, output left out", got, expected.sum)
        got = allreduce_fusion(
            own,
            workspace,
            AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=problem.residual,
            rms_gamma=problem.gamma,
            rms_eps=problem.epsilon,
        )
        check_bits("norm, outputs left out", got, expected.norm)
        calls += 2
    return calls


def reported_case(rank: int, ranks: int) -> int:
    """42 tokens of 6144 reported, 40 asked for as one-shot: upstream refuses."""
    workspace = create(rank, ranks, max_token_num=42, hidden_dim=6144)
    required = workspace.get_required_buffer_size_bytes(
        8, 40, 6144, torch.bfloat16, strategy_named("ONESHOT")
    )
    assert required == 3_932_160
    assert (
        workspace.get_required_buffer_size_bytes(
            8, 42, 6144, torch.bfloat16, strategy_named("TWOSHOT")
        )
        == 1_179_648
    )
    assert workspace.is_buffer_size_sufficient(
        ranks, 40, 6144, torch.bfloat16, strategy_named("ONESHOT")
    )
    calls = check_fusion(rank, ranks, workspace, 40, 6144)
    # More than was ever reported, and a drafter's wider rows.
    calls += check_fusion(rank, ranks, workspace, 500, 6144)
    calls += check_fusion(rank, ranks, workspace, 40, 16384)
    assert workspace.backend == "mnnvl"
    workspace.destroy()
    return calls


def forced_oneshot_support(rank: int, ranks: int) -> int:
    """SGLang's way: a buffer for one-shot at the maximum, and a question before each call."""
    calls = 0
    for force in (True, False):
        workspace = create(
            rank, ranks, max_token_num=128, hidden_dim=4096, force_oneshot_support=force
        )
        for strategy in ("ONESHOT", "TWOSHOT", "AUTO"):
            assert workspace.is_buffer_size_sufficient(
                ranks, 128, 4096, torch.bfloat16, strategy=strategy_named(strategy)
            )
        assert not workspace.is_buffer_size_sufficient(ranks, 1 << 20, 4096, torch.bfloat16)
        calls += check_fusion(rank, ranks, workspace, 128, 4096)
        workspace.destroy()
    return calls


def attributes(rank: int, ranks: int) -> int:
    """What callers read of a workspace."""
    workspace = create(rank, ranks)
    assert (workspace.rank, workspace.tp_size, workspace.world_size) == (rank, ranks, ranks)
    # vLLM takes a null multicast pointer for a workspace that does not work.
    assert workspace.mc_ptr
    assert workspace.uc_ptr_local == workspace.ptrs[rank]
    assert len(set(workspace.ptrs)) == ranks
    assert workspace.uc_ptrs_dev
    assert workspace.buffer_size_bytes % 256 == 0
    assert workspace.workspace_size_bytes >= 2 * workspace.buffer_size_bytes
    assert not hasattr(workspace, "buffer_flags")
    assert not workspace._destroyed
    workspace.destroy()
    assert workspace._destroyed
    return 0


def checkpoint(rank: int, ranks: int) -> int:
    """Give the memory back and take it again, where upstream can: from 0.7 on."""
    from flashinfer.comm.trtllm_mnnvl_ar import trtllm_mnnvl_allreduce

    workspace = create(rank, ranks)
    if not hasattr(workspace, "checkpoint_prepare"):
        workspace.destroy()
        return 0
    addresses = list(workspace.ptrs)
    calls = check_fusion(rank, ranks, workspace, 40, 4096)
    torch.cuda.synchronize()
    meet()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(2):
        workspace.checkpoint_prepare()
    assert torch.cuda.mem_get_info()[0] > before
    rows = torch.zeros(1, 4096, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"^MNNVL handles are not attached$"):
        trtllm_mnnvl_allreduce(rows, workspace, False)
    for _ in range(2):
        workspace.checkpoint_restore(PlainBackend())
    assert list(workspace.ptrs) == addresses
    calls += check_fusion(rank, ranks, workspace, 40, 4096)
    workspace.destroy()
    return calls


def deprecated_functions(rank: int, ranks: int) -> int:
    """The functions that are given pointers, in place of a workspace."""
    from flashinfer.comm import Mapping
    from flashinfer.comm import trtllm_mnnvl_ar as module

    mapping = Mapping(world_size=ranks, rank=rank, gpus_per_node=ranks, tp_size=ranks)
    workspace, flags, elements = module.get_allreduce_mnnvl_workspace(
        mapping, torch.bfloat16, PlainBackend(), 3 * 2 * 2 * 7168 * 64
    )
    assert isinstance(workspace, module.MNNVLAllReduceFusionWorkspace)
    assert isinstance(flags, torch.Tensor)
    assert elements >= 7168 * 64
    calls = 0
    for dtype in DTYPES:
        # The last is more than the buffer was made for: in chunks.
        for tokens, hidden in ((1, 7168), (40, 6144), (64, 63), (700, 7168)):
            problem = make_problem(ranks, tokens, hidden, dtype, tokens)
            own = problem.inputs[rank]
            expected = problem.expected()
            assert expected.norm is not None
            assert expected.residual is not None
            output = poisoned(own)
            module.trtllm_mnnvl_all_reduce(
                own,
                workspace.mc_ptr,
                workspace.uc_ptrs_dev,
                tokens,
                flags,
                ranks,
                rank,
                True,
                False,
                output,
            )
            check_bits("sum", output, expected.sum)
            norm, residual = poisoned(own), poisoned(own)
            module.trtllm_mnnvl_fused_allreduce_rmsnorm(
                residual,
                norm,
                own,
                workspace.mc_ptr,
                workspace.uc_ptrs_dev,
                workspace.uc_ptr_local,
                tokens,
                flags,
                ranks,
                rank,
                problem.gamma,
                problem.epsilon,
                problem.residual,
                True,
            )
            check_bits("norm", norm, expected.norm)
            check_bits("residual", residual, expected.residual)
            calls += 2
    workspace.destroy()
    return calls


PARTS: tuple[Callable[[int, int], int], ...] = (
    attributes,
    reported_case,
    forced_oneshot_support,
    deprecated_functions,
    checkpoint,
)


def check_front_ends(rank: int, ranks: int) -> dict[str, int]:
    os.environ["FLASHINFER_MNNVL_TIMEOUT_S"] = str(TIMEOUT_S)
    return {part.__name__: part(rank, ranks) for part in PARTS}


def test_the_unmodified_front_ends() -> None:
    results = run_ranks(check_front_ends, timeout_s=120.0)
    assert all(counts == results[0] for counts in results)
    print(f"calls a rank: {results[0]}")
