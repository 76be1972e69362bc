"""All ranks of a group on one GPU: every kernel's arithmetic and protocol on real hardware.

Each rank has its buffers, its turn counter and a stream of its own, and the ranks' kernels wait for
each other on the same device. That takes one GPU for any group size, so the kernels for groups that
no machine at hand has GPUs for are run too. It says nothing about NVLink or about time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import allreduce_quantize_reference as recipes
import pytest
import torch
from allreduce_cases import DTYPES, Problem, make_problem, poisoned
from allreduce_quantize_reference import DYNAMIC_FP8, FP8, LINEAR, MXFP8, NVFP4, SWIZZLED
from allreduce_reference import check_bits
from ranks import run_ranks
from test_allreduce_quantize import NAMES, SCALES, Outputs

from flashinfer.elastic.allreduce.strategy import Strategy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SENTINEL = -(2**31)
STATE_BYTES = 256
TIMEOUT_S = 10.0
STRATEGIES = (Strategy.ONESHOT, Strategy.TWOSHOT)
SIZES = ((1, 7168), (2, 64), (3, 63), (5, 1280), (17, 2880), (40, 512), (64, 6144))


class Loopback:
    """A group whose ranks share the current device."""

    def __init__(self, ranks: int, buffer_bytes: int) -> None:
        from flashinfer.elastic.allreduce.engines import library

        self.functions = library.load()
        self.ranks = ranks
        device = torch.cuda.current_device()
        words = (2 * buffer_bytes + STATE_BYTES) // 4
        self.memory = torch.full((ranks, words), SENTINEL, dtype=torch.int32, device="cuda")
        self.memory[:, 2 * buffer_bytes // 4 :] = 0
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        torch.cuda.synchronize()
        addresses = [row.data_ptr() for row in self.memory]
        # All ranks' blocks have to be resident at once.
        share = torch.cuda.get_device_properties(device).multi_processor_count // (2 * ranks)
        self.contexts = [
            self.functions.context_create(
                rank,
                addresses,
                0,
                buffer_bytes,
                addresses[rank] + 2 * buffer_bytes,
                TIMEOUT_S,
                False,
                max(share, 1),
                device,
            )
            for rank in range(ranks)
        ]

    def call(self, name: str, strategy: Strategy, tokens: int, arguments: Sequence[Any]) -> None:
        """Launch a call on all ranks; ``arguments`` are those of each rank."""
        function = getattr(self.functions, name)
        for rank, (context, stream) in enumerate(zip(self.contexts, self.streams, strict=True)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function(context, int(strategy), 0, tokens, True, *arguments[rank])

    def finish(self) -> None:
        """Wait for all ranks; a wait that expires ends the process with the kernel's message."""
        torch.cuda.synchronize()

    def close(self) -> None:
        self.finish()
        assert int((self.memory[:, : -STATE_BYTES // 4] != SENTINEL).sum()) == 0, (
            "words left unread"
        )
        for context in self.contexts:
            self.functions.context_destroy(context)


class Prepared:
    """One call's outputs on all ranks, and what must be in them."""

    def __init__(self, problem: Problem, normalize: bool) -> None:
        self.problem, self.normalize = problem, normalize
        self.outputs = [poisoned(rows) for rows in problem.inputs]
        self.residuals = [poisoned(rows) for rows in problem.inputs]

    def run(self, group: Loopback, strategy: Strategy) -> None:
        problem = self.problem
        rest = (problem.residual, problem.gamma, problem.epsilon, problem.weight_bias)
        arguments = [
            (rows, output, rest[0], residual, *rest[1:])
            if self.normalize
            else (rows, output, None, None, None, 0.0, 0.0)
            for rows, output, residual in zip(
                problem.inputs, self.outputs, self.residuals, strict=True
            )
        ]
        group.call("allreduce", strategy, problem.inputs.shape[1], arguments)

    def check(self, what: object) -> None:
        expected = self.problem.expected()
        for rank, (output, residual) in enumerate(zip(self.outputs, self.residuals, strict=True)):
            if self.normalize:
                assert expected.norm is not None
                assert expected.residual is not None
                check_bits(f"norm of rank {rank}, {what}", output, expected.norm)
                check_bits(f"residual of rank {rank}, {what}", residual, expected.residual)
            else:
                check_bits(f"sum of rank {rank}, {what}", output, expected.sum)


def buffer_for(ranks: int) -> int:
    """Bytes that hold any of SIZES with any strategy and type."""
    rows = max(-(-tokens // ranks) * ranks for tokens, _ in SIZES) * max(ranks, 2)
    return -(-rows * max(hidden for _, hidden in SIZES) * 4 // 256) * 256


def check_sizes(_rank: int, _world: int, sizes: Sequence[int]) -> int:
    count = 0
    for ranks in sizes:
        group = Loopback(ranks, buffer_for(ranks))
        for dtype in DTYPES:
            for seed, (tokens, hidden) in enumerate(SIZES):
                problem = make_problem(ranks, tokens, hidden, dtype, seed)
                for strategy in STRATEGIES:
                    for normalize in (False, True):
                        prepared = Prepared(problem, normalize)
                        prepared.run(group, strategy)
                        group.finish()
                        prepared.check((ranks, dtype, tokens, hidden, strategy))
                        count += 1
        group.close()
    return count


def check_sequence(_rank: int, _world: int, ranks: int, calls: int) -> int:
    """Calls of changing size, type and strategy, none waited for before the next."""
    choose = random.Random(ranks)
    group = Loopback(ranks, buffer_for(ranks))
    problems = [
        make_problem(ranks, tokens, hidden, dtype, 100 + seed)
        for dtype in DTYPES
        for seed, (tokens, hidden) in enumerate(SIZES)
    ]
    prepared = [Prepared(choose.choice(problems), choose.random() < 0.7) for _ in range(calls)]
    torch.cuda.synchronize()
    for one in prepared:
        one.run(group, choose.choice(STRATEGIES))
    group.finish()
    for number, one in enumerate(prepared):
        one.check(number)
    group.close()
    return calls


def check_recipes(_rank: int, _world: int, sizes: Sequence[int]) -> int:
    count = 0
    for ranks in sizes:
        group = Loopback(ranks, buffer_for(ranks))
        for recipe in (FP8, DYNAMIC_FP8, NVFP4, MXFP8):
            for layout in (SWIZZLED, LINEAR):
                for tokens, hidden in ((1, 7168), (5, 64), (40, 2880)):
                    problem = make_problem(ranks, tokens, hidden, torch.bfloat16, count)
                    expected = problem.expected()
                    assert expected.norm is not None
                    quantized = recipes.quantize(recipe, expected.norm, SCALES[recipe])
                    for strategy in STRATEGIES:
                        outputs = [
                            Outputs(rows, recipe, layout, keeps_norm=strategy == Strategy.ONESHOT)
                            for rows in problem.inputs
                        ]
                        arguments = [
                            (
                                rows,
                                made.norm,
                                problem.residual,
                                made.residual,
                                problem.gamma,
                                problem.epsilon,
                                problem.weight_bias,
                                recipe,
                                layout,
                                made.values,
                                made.scales,
                                SCALES[recipe],
                                None,
                            )
                            for rows, made in zip(problem.inputs, outputs, strict=True)
                        ]
                        group.call("allreduce_quantized", strategy, tokens, arguments)
                        group.finish()
                        for made in outputs:
                            made.check(expected, quantized, (ranks, NAMES[recipe], layout, tokens))
                        count += 1
        group.close()
    return count


@pytest.fixture(autouse=True)
def queues(monkeypatch: pytest.MonkeyPatch) -> None:
    # Streams that share a hardware queue would wait for each other's kernels.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def test_every_group_size() -> None:
    sizes = (2, 3, 4, 5, 6, 7, 8, 9, 16)
    print(f"{run_ranks(check_sizes, 1, sizes, timeout_s=150)[0]} calls on groups of {sizes}")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_sequence_of_mixed_calls(ranks: int) -> None:
    print(f"{run_ranks(check_sequence, 1, ranks, 400, timeout_s=90)[0]} calls in a row")


def test_quantised_outputs() -> None:
    print(f"{run_ranks(check_recipes, 1, (2, 4, 8), timeout_s=120)[0]} quantised calls")
