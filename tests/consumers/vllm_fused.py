"""Calls of vLLM's fused all-reduce and norm, as its compiled graphs make them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from allreduce_cases import Problem, make_problem
from allreduce_reference import Expected, check_against_float64
from vllm_parallel import fusion, on_architecture

DTYPE = torch.bfloat16
MIB = 2**20


class Static(NamedTuple):
    """The tensors that a captured call reads and writes."""

    rows: torch.Tensor
    residual: torch.Tensor
    gamma: torch.Tensor
    norm: torch.Tensor | None

    def load(self, problem: Problem, rank: int) -> None:
        """Set this rank's inputs; what the call must overwrite becomes NaN."""
        self.rows.copy_(problem.inputs[rank])
        self.residual.copy_(problem.residual)
        self.gamma.copy_(problem.gamma)
        if self.norm is not None:
            self.norm.fill_(float("nan"))

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return norm and residual stream: where vLLM asks for them, see its function."""
        if self.norm is None:
            return self.rows, self.residual
        return self.norm, self.rows


def make_static(problem: Problem, *, separate_norm: bool) -> Static:
    """Allocate a problem's tensors, with an output of its own for the norm or in place."""
    like = problem.residual
    norm = torch.empty_like(like) if separate_norm else None
    return Static(
        torch.empty_like(like), torch.empty_like(like), torch.empty_like(problem.gamma), norm
    )


def call(static: Static, ranks: int, max_tokens: int, epsilon: float) -> None:
    """Call vLLM's operator with the arguments that its fusion pass writes into graphs."""
    module = fusion()
    parameters = module.FlashInferFusedAllReduceParams(world_size=ranks, max_token_num=max_tokens)
    module.flashinfer_trtllm_fused_allreduce_norm(
        allreduce_in=static.rows,
        residual=static.residual,
        norm_out=static.norm,
        quant_out=None,
        scale_out=None,
        rms_gamma=static.gamma,
        rms_eps=epsilon,
        pattern_code=module.flashinfer_comm.AllReduceFusionPattern.kARResidualRMSNorm,
        **parameters.get_trtllm_fused_allreduce_kwargs(),
    )


@contextlib.contextmanager
def asked_of_flashinfer() -> Iterator[list[tuple[int, bool | None]]]:
    """Yield a list that fills with ``(tokens, use_oneshot)`` of each call, which goes through."""
    comm = fusion().flashinfer_comm
    original = comm.allreduce_fusion
    asked: list[tuple[int, bool | None]] = []

    @functools.wraps(original)
    def spy(*args: Any, **kwargs: Any) -> Any:
        asked.append((kwargs["input"].shape[0], kwargs["use_oneshot"]))
        return original(*args, **kwargs)

    with mock.patch.object(comm, "allreduce_fusion", spy):
        yield asked


def max_tokens(ranks: int, hidden: int) -> int:
    """Return what vLLM reports: its table's size in rows."""
    size = on_architecture(fusion().FI_ALLREDUCE_FUSION_MAX_SIZE_MB)[ranks] * MIB
    return int(size) // (hidden * DTYPE.itemsize)


def table_tokens(ranks: int, hidden: int) -> list[int]:
    """Return the token counts at, below and above each size of vLLM's tables, and small ones.

    Those of other group sizes too, as far as they are within this one's maximum.
    """
    module = fusion()
    row, most = hidden * DTYPE.itemsize, max_tokens(ranks, hidden)
    sizes = [
        *on_architecture(module.FI_ALLREDUCE_FUSION_MAX_SIZE_MB).values(),
        *on_architecture(module._FI_ALLREDUCE_ONE_SHOT_MAX_SIZES_MB).values(),
    ]
    edges = {int(size * MIB) // row + step for size in sizes for step in (-1, 0, 1)}
    return sorted(n for n in {1, 2, 3, 17, 40, *edges} if 0 < n <= most)


def capture(static: list[Static], ranks: int, tokens: int, epsilon: float) -> torch.cuda.CUDAGraph:
    """Capture one call for each set of tensors, in one graph; nothing runs before the capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in static:
            call(each, ranks, tokens, epsilon)
    return graph


def check_replays(
    graph: torch.cuda.CUDAGraph, static: list[Static], rank: int, ranks: int, seeds: range
) -> None:
    """Replay with new data for each seed and hold every result against bits and float64."""
    for seed in seeds:
        problems = [
            make_problem(ranks, *each.rows.shape, DTYPE, 1000 * seed + i)
            for i, each in enumerate(static)
        ]
        for each, problem in zip(static, problems, strict=True):
            each.load(problem, rank)
        graph.replay()
        torch.cuda.synchronize()
        for each, problem in zip(static, problems, strict=True):
            check(each, problem)


def check(static: Static, problem: Problem) -> None:
    """Raise unless a call's results are right, to the bit and against float64."""
    norm, stream = static.results()
    expected = problem.expected()
    tokens = norm.shape[0]
    assert torch.equal(stream, expected.residual), f"residual stream of {tokens} tokens"
    assert torch.equal(norm, expected.norm), f"norm of {tokens} tokens"
    got = Expected(expected.sum, stream, norm)
    check_against_float64(
        problem.inputs, got, problem.residual, problem.gamma, problem.epsilon, problem.weight_bias
    )
