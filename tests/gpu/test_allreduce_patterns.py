"""Both patterns, all shapes and strategies, against float64 and to the bit."""

from __future__ import annotations

from typing import Any

import torch
from allreduce_cases import (
    AUTO,
    DTYPES,
    ONESHOT,
    TWOSHOT,
    make_problem,
    needs_gpus,
    open_workspace,
    run_norm,
    run_sum,
)
from allreduce_reference import Expected, check_against_float64, check_bits, digest, same_bits
from ranks import run_ranks

pytestmark = needs_gpus

TOKENS = (0, 1, 2, 3, 7, 40, 42, 128, 1000, 4096, 16384)
HIDDEN = (63, 64, 2880, 5120, 6144, 7168, 8192, 16384)

WIDE = ((1, 33003), (5, 40960), (3, 65536), (130, 33003))
"""Rows of more segments than a cluster of blocks has threads."""

CHUNK_BYTES = 1 << 20
"""A buffer that holds one team of the widest rows, of eight ranks, in fp32."""

ALONE = (0, 1, 6, 41, 999, 16383)
"""Tokens that are also sent alone, where a problem has them."""


def check_shape(
    rank: int, ranks: int, tokens: int, hidden: int, dtype: torch.dtype, large: Any, small: Any
) -> tuple[int, list[torch.Tensor]]:
    """Check everything that holds for one shape; return how many calls and digests of results."""
    problem = make_problem(ranks, tokens, hidden, dtype, seed=tokens * 100003 + hidden)
    own = problem.inputs[rank]
    expected = problem.expected()
    assert expected.residual is not None
    assert expected.norm is not None
    calls = 0
    results = []
    for name, workspace in (("whole", large), ("chunked", small)):
        for strategy in (ONESHOT, TWOSHOT, AUTO):
            what = f"{name} {strategy} of {tokens} x {hidden} {dtype}"
            total = run_sum(workspace, own, strategy)
            check_bits(f"sum, {what}", total, expected.sum)
            norm, residual = run_norm(workspace, problem, own, strategy)
            check_bits(f"residual, {what}", residual, expected.residual)
            check_bits(f"norm, {what}", norm, expected.norm)
            calls += 2
            results.append((total, norm, residual))
    total, norm, residual = results[0]
    check_against_float64(
        problem.inputs,
        Expected(total, residual, norm),
        problem.residual,
        problem.gamma,
        problem.epsilon,
        problem.weight_bias,
    )
    for others in results[1:]:
        assert all(map(same_bits, results[0], others)), f"strategies differ, {tokens} x {hidden}"

    for token in (t for t in ALONE if t < tokens):
        one = slice(token, token + 1)
        for strategy in (ONESHOT, TWOSHOT):
            norm, residual = run_norm(
                large, problem, own[one], strategy, residual=problem.residual[one]
            )
            assert same_bits(norm, results[0][1][one]), f"row {token} of {tokens} x {hidden}, norm"
            assert same_bits(residual, results[0][2][one]), f"row {token} of {tokens} x {hidden}"
            assert same_bits(run_sum(large, own[one], strategy), results[0][0][one])
            calls += 2
    return calls, [digest(result) for result in results[0]]


def check_all_shapes(rank: int, ranks: int) -> list[tuple[int, int, list[int]]]:
    answers = []
    for dtype in DTYPES:
        large = open_workspace(rank, ranks, tokens=max(TOKENS), hidden=max(HIDDEN), dtype=dtype)
        small = open_workspace(rank, ranks, buffer_bytes=CHUNK_BYTES)
        assert small.buffer_size_bytes == CHUNK_BYTES
        shapes = [(tokens, hidden) for tokens in TOKENS for hidden in HIDDEN]
        # A row of every rank has to fit even the small buffer.
        shapes += [shape for shape in WIDE if ranks * (shape[1] + 8) * dtype.itemsize < CHUNK_BYTES]
        calls = 0
        digests = []
        for tokens, hidden in shapes:
            done, parts = check_shape(rank, ranks, tokens, hidden, dtype, large, small)
            calls += done
            digests += parts
        large.destroy()
        small.destroy()
        torch.cuda.empty_cache()
        answers.append((len(shapes), calls, torch.stack(digests).tolist()))
    return answers


def test_all_shapes() -> None:
    """Float64, one-shot == two-shot == chunked, alone == in a batch, and equal on all ranks."""
    results = run_ranks(check_all_shapes, timeout_s=240.0)
    for dtype, by_rank in zip(DTYPES, zip(*results, strict=True), strict=True):
        shapes, calls, digests = by_rank[0]
        for rank, (_, _, others) in enumerate(by_rank):
            assert others == digests, f"{dtype}: rank {rank} has other results than rank 0"
        print(f"{dtype}: {shapes} shapes, {calls} calls a rank, {len(digests)} results compared")
