"""Values, layouts and arguments that are legal and unusual."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from allreduce_cases import (
    DTYPES,
    ONESHOT,
    TWOSHOT,
    Problem,
    make_problem,
    needs_gpus,
    open_workspace,
    poisoned,
    run_norm,
    run_sum,
    strategy_named,
)
from allreduce_reference import SAME_SIZE_INT, bits_of, check_bits, digest, same_bits
from ranks import run_ranks

pytestmark = needs_gpus

CHUNK_BYTES = 1 << 17
"""Bytes of the small workspace, where the group is not too large for them."""
HIDDEN = (63, 1000, 7168)
TOKENS = 24

SIGN = {2: 0x8000, 4: 0x80000000}


class Workspaces:
    """One in which everything fits, and one in which it runs in chunks."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.large = open_workspace(rank, ranks, buffer_bytes=16 << 20)
        # At least a row of the widest problem, in fp32.
        self.small = open_workspace(rank, ranks, buffer_bytes=max(CHUNK_BYTES, ranks * 7168 * 4))
        self.calls = 0
        self.digests: list[torch.Tensor] = []

    def ways(self) -> list[tuple[str, Any, str]]:
        return [
            (f"{name} {strategy}", workspace, strategy)
            for name, workspace in (("whole", self.large), ("chunked", self.small))
            for strategy in (ONESHOT, TWOSHOT)
        ]

    def check(self, what: str, problem: Problem) -> None:
        """Run both patterns all ways; any NaN is right where the model has NaN."""
        own = problem.inputs[self.rank]
        expected = problem.expected()
        assert expected.residual is not None
        assert expected.norm is not None
        first: list[torch.Tensor] = []
        for way, workspace, strategy in self.ways():
            total = run_sum(workspace, own, strategy)
            norm, residual = run_norm(workspace, problem, own, strategy)
            check_bits(f"sum, {what}, {way}", total, expected.sum)
            check_bits(f"residual, {what}, {way}", residual, expected.residual)
            check_bits(f"norm, {what}, {way}", norm, expected.norm)
            results = [total, norm, residual]
            first = first or results
            # NaN included.
            assert all(map(same_bits, first, results)), f"{what}: {way} differs"
            self.calls += 2
        self.digests += [digest(result) for result in first]

    def close(self) -> tuple[int, list[int]]:
        self.large.destroy()
        self.small.destroy()
        return self.calls, torch.stack(self.digests).tolist()


def patterns(dtype: torch.dtype, kind: str) -> list[int]:
    """Bit patterns of a kind, both signs."""
    size = dtype.itemsize
    sign = SIGN[size]
    info = torch.finfo(dtype)

    def of(value: float) -> int:
        bits = int(bits_of(torch.tensor([value], dtype=dtype))[0])
        return bits & (2 * sign - 1)

    infinity, one, normal = of(float("inf")), of(1.0), of(info.smallest_normal)
    positive = {
        # Words that look like an empty place of a buffer, next to their neighbours.
        "zeros": [0],
        "sentinels": [0, 0, 0, one, 1],
        "subnormals": [1, 2, 3, normal // 2, normal - 1, normal],
        "infinities": [infinity, one, 0],
        "nans": [infinity + 1, infinity | infinity >> 1 | 1, sign - 1, one, 0],
        "largest": [of(info.max / 16), one],
    }[kind]
    return positive + [value | sign for value in positive]


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, generator: torch.Generator
) -> torch.Tensor:
    """Draw elements from a kind's bit patterns."""
    choices = patterns(dtype, kind)
    integer = SAME_SIZE_INT[dtype.itemsize]
    half = SIGN[dtype.itemsize]
    signed = torch.tensor([c - 2 * half if c >= half else c for c in choices], dtype=integer)
    index = torch.randint(len(choices), shape, generator=generator, device="cuda")
    return signed.cuda()[index].view(dtype)


def special_values(spaces: Workspaces) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    kinds = ("zeros", "sentinels", "subnormals", "infinities", "nans", "largest")
    for dtype, hidden in itertools.product(DTYPES, HIDDEN):
        for kind in kinds:
            problem = make_problem(spaces.ranks, TOKENS, hidden, dtype, hidden)
            shape = (spaces.ranks, TOKENS, hidden)
            special = draw(shape, dtype, kind, generator)
            spaces.check(f"all {kind}", problem._replace(inputs=special))
            # One element in a hundred, on one rank at a time.
            rare = torch.rand(shape, generator=generator, device="cuda") < 0.01
            mixed = torch.where(rare, special, problem.inputs)
            residual = torch.where(rare[0], special[-1], problem.residual)
            spaces.check(f"some {kind}", problem._replace(inputs=mixed, residual=residual))
        # A residual of -0.0 under a sum of +0.0 and of -0.0.
        zeros = draw(shape, dtype, "zeros", generator)
        problem = problem._replace(inputs=zeros, residual=zeros[0].clone())
        spaces.check("zeros everywhere", problem)
        problem = problem._replace(inputs=torch.full_like(zeros, -0.0))
        spaces.check("-0.0 everywhere", problem)


def every_bit_pattern(spaces: Workspaces) -> None:
    """All 65536 patterns of a 16-bit type in one call, in each half of a word."""
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
        for shift in (0, 1):
            row = every.roll(shift).view(dtype).view(64, 1024)
            inputs = torch.zeros(spaces.ranks, 64, 1024, dtype=dtype, device="cuda")
            for contributor in range(spaces.ranks):
                inputs.zero_()
                inputs[contributor] = row
                problem = make_problem(spaces.ranks, 64, 1024, dtype, 5)
                spaces.check(f"every {dtype}", problem._replace(inputs=inputs))


def outliers(spaces: Workspaces) -> None:
    """Channels of 1e5 (of fp16's range) beside ordinary ones, as some models have."""
    for dtype, hidden in itertools.product(DTYPES, HIDDEN):
        problem = make_problem(spaces.ranks, TOKENS, hidden, dtype, 7)
        largest = min(1e5, torch.finfo(dtype).max / 2 / spaces.ranks)
        inputs = problem.inputs.clone()
        for channel in (0, 7, hidden // 2, hidden - 1):
            inputs[:, :, channel] = largest
            inputs[0, ::2, channel] = -largest
        spaces.check("outliers", problem._replace(inputs=inputs))


def weights(spaces: Workspaces) -> None:
    for dtype, hidden in itertools.product(DTYPES, HIDDEN):
        for gamma_dtype, bias, epsilon in itertools.product(
            dict.fromkeys((dtype, torch.float32)), (0.0, 1.0), (1e-6, 1e-5, 0.0)
        ):
            problem = make_problem(
                spaces.ranks,
                TOKENS,
                hidden,
                dtype,
                11,
                gamma_dtype=gamma_dtype,
                weight_bias=bias,
                epsilon=epsilon,
            )
            spaces.check(f"gamma {gamma_dtype}, bias {bias}, epsilon {epsilon}", problem)
        # A weight that starts in the middle of a vector.
        shifted = torch.empty(hidden + 1, dtype=dtype, device="cuda")[1:]
        problem = make_problem(spaces.ranks, TOKENS, hidden, dtype, 12)
        spaces.check("shifted gamma", problem._replace(gamma=shifted.copy_(problem.gamma)))


def aliasing(spaces: Workspaces) -> None:
    """The ways in which vLLM reuses tensors, and an all-reduce in place."""
    from flashinfer.comm.trtllm_mnnvl_ar import (
        trtllm_mnnvl_allreduce,
        trtllm_mnnvl_fused_allreduce_add_rmsnorm,
    )

    for dtype, hidden in itertools.product(DTYPES, (*HIDDEN, 33003)):
        problem = make_problem(spaces.ranks, TOKENS, hidden, dtype, 13)
        own = problem.inputs[spaces.rank]
        expected = problem.expected()
        assert expected.residual is not None
        assert expected.norm is not None

        def fused(
            workspace: Any,
            strategy: str,
            rows: torch.Tensor,
            residual: torch.Tensor,
            output: torch.Tensor,
            stream: torch.Tensor,
            problem: Problem = problem,
        ) -> None:
            trtllm_mnnvl_fused_allreduce_add_rmsnorm(
                rows,
                residual,
                problem.gamma,
                workspace,
                problem.epsilon,
                output,
                stream,
                strategy=strategy_named(strategy),
            )

        for way, workspace, strategy in spaces.ways():
            if hidden > max(HIDDEN) and workspace is spaces.small:
                continue
            rows, residual = own.clone(), problem.residual.clone()
            fused(workspace, strategy, rows, residual, output=rows, stream=residual)
            check_bits(f"norm in the input, {way}", rows, expected.norm)
            check_bits(f"residual in place, {way}", residual, expected.residual)

            rows, residual, norm = own.clone(), problem.residual.clone(), poisoned(own)
            fused(workspace, strategy, rows, residual, output=norm, stream=rows)
            check_bits(f"norm, {way}", norm, expected.norm)
            check_bits(f"residual in the input, {way}", rows, expected.residual)
            check_bits(f"residual untouched, {way}", residual, problem.residual)

            rows, residual = own.clone(), problem.residual.clone()
            fused(workspace, strategy, rows, residual, output=residual, stream=rows)
            check_bits(f"norm in the residual, {way}", residual, expected.norm)
            check_bits(f"residual in the input, {way}", rows, expected.residual)

            rows = own.clone()
            trtllm_mnnvl_allreduce(rows, workspace, False, rows, strategy_named(strategy))
            check_bits(f"sum in place, {way}", rows, expected.sum)
            spaces.calls += 4


class Slice:
    """Columns of a wider matrix whose other columns must stay as they are."""

    GUARD = 12345.0

    def __init__(self, like: torch.Tensor, left: int, right: int) -> None:
        tokens, hidden = like.shape
        self.wide = torch.full(
            (tokens, left + hidden + right), self.GUARD, dtype=like.dtype, device=like.device
        )
        self.rows = self.wide[:, left : left + hidden]
        self.sides = (self.wide[:, :left], self.wide[:, left + hidden :])

    def check_sides(self, what: str) -> None:
        for side in self.sides:
            assert bool((side == torch.tensor(self.GUARD, dtype=side.dtype)).all()), (
                f"{what}: written beside the rows"
            )


def layouts(spaces: Workspaces) -> None:
    """Column slices of wider matrices, on and off vector boundaries, for each tensor."""
    from flashinfer.comm.trtllm_mnnvl_ar import (
        trtllm_mnnvl_allreduce,
        trtllm_mnnvl_fused_allreduce_add_rmsnorm,
    )

    for dtype, hidden in itertools.product(DTYPES, HIDDEN):
        problem = make_problem(spaces.ranks, TOKENS, hidden, dtype, 17)
        own = problem.inputs[spaces.rank]
        expected = problem.expected()
        assert expected.residual is not None
        assert expected.norm is not None
        for left, right in ((0, 16), (8, 8), (1, 0), (3, 14), (0, 1)):
            for way, workspace, strategy in spaces.ways():
                what = f"{dtype} {hidden} + {left} + {right}, {way}"
                # Other ranks' layouts are their own affair.
                shift = left + spaces.rank
                rows, residual = Slice(own, shift, right), Slice(own, right, left)
                norm, stream = Slice(own, left, right), Slice(own, right + 1, left)
                rows.rows.copy_(own)
                residual.rows.copy_(problem.residual)
                trtllm_mnnvl_fused_allreduce_add_rmsnorm(
                    rows.rows,
                    residual.rows,
                    problem.gamma,
                    workspace,
                    problem.epsilon,
                    norm.rows,
                    stream.rows,
                    strategy=strategy_named(strategy),
                )
                check_bits(f"norm, {what}", norm.rows.contiguous(), expected.norm)
                check_bits(f"residual, {what}", stream.rows.contiguous(), expected.residual)
                total = Slice(own, left, right)
                trtllm_mnnvl_allreduce(
                    rows.rows, workspace, False, total.rows, strategy_named(strategy)
                )
                check_bits(f"sum, {what}", total.rows.contiguous(), expected.sum)
                for slice_ in (rows, residual, norm, stream, total):
                    slice_.check_sides(what)
                check_bits(f"input, {what}", rows.rows.contiguous(), own)
                spaces.calls += 2
        # One row as the input of every token.
        repeated = problem._replace(inputs=problem.inputs[:, :1].expand_as(problem.inputs))
        total = repeated.expected().sum
        assert repeated.inputs[spaces.rank].stride(0) == 0
        check_bits("repeated", run_sum(spaces.large, repeated.inputs[spaces.rank]), total)
        spaces.calls += 1


def defaults(spaces: Workspaces) -> None:
    """What a caller may leave out, inference mode, and a weight that wants a gradient."""
    from flashinfer.comm.trtllm_mnnvl_ar import (
        trtllm_mnnvl_allreduce,
        trtllm_mnnvl_fused_allreduce_add_rmsnorm,
    )

    for dtype, hidden in itertools.product(DTYPES, HIDDEN):
        problem = make_problem(
            spaces.ranks, TOKENS, hidden, dtype, 19, epsilon=torch.finfo(dtype).eps
        )
        own = problem.inputs[spaces.rank]
        expected = problem.expected()
        assert expected.residual is not None
        assert expected.norm is not None
        weight = torch.nn.Parameter(problem.gamma)
        slices = Slice(own, 1, 0)
        slices.rows.copy_(own)
        for rows in (own, slices.rows):
            for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
                with mode():
                    total = trtllm_mnnvl_allreduce(rows, spaces.large, False)
                    norm, residual = trtllm_mnnvl_fused_allreduce_add_rmsnorm(
                        rows, problem.residual, weight, spaces.large
                    )
                assert total.is_contiguous()
                assert norm.is_contiguous()
                assert residual.is_contiguous()
                check_bits("sum", total, expected.sum)
                check_bits("norm", norm, expected.norm)
                check_bits("residual", residual, expected.residual)
                spaces.calls += 2
        with torch.inference_mode():
            made_inside = (own.clone(), problem.residual.clone(), problem.gamma.clone())
            norm, residual = trtllm_mnnvl_fused_allreduce_add_rmsnorm(*made_inside, spaces.large)
        check_bits("norm of inference tensors", norm.clone(), expected.norm)
        check_bits("residual of inference tensors", residual.clone(), expected.residual)
        spaces.calls += 1


PARTS = (special_values, every_bit_pattern, outliers, weights, aliasing, layouts, defaults)


def check_values(rank: int, ranks: int) -> tuple[dict[str, int], list[int]]:
    spaces = Workspaces(rank, ranks)
    calls = {}
    for part in PARTS:
        before = spaces.calls
        part(spaces)
        calls[part.__name__] = spaces.calls - before
    return calls, spaces.close()[1]


def test_values_layouts_and_arguments() -> None:
    results = run_ranks(check_values, timeout_s=150.0)
    calls, digests = results[0]
    assert all(other == digests for _, other in results), "ranks have different bits"
    print(f"calls a rank: {calls}; {len(digests)} results equal on {len(results)} ranks")
