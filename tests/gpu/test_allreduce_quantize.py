"""Fused quantisation on GPUs: the written recipes of the norm's output, to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import allreduce_quantize_reference as recipes
import pytest
import torch
from allreduce_cases import (
    ONESHOT,
    TWOSHOT,
    Problem,
    make_problem,
    meet,
    needs_gpus,
    open_workspace,
    poisoned,
    strategy_named,
)
from allreduce_quantize_reference import (
    BLOCK,
    DYNAMIC_FP8,
    FP8,
    LINEAR,
    MXFP8,
    NVFP4,
    SWIZZLED,
    Quantized,
)
from allreduce_reference import Expected, check_bits
from ranks import run_ranks

pytestmark = needs_gpus

SCALES = {FP8: 0.037, NVFP4: 351.7, DYNAMIC_FP8: 1.0, MXFP8: 1.0}
NAMES = {FP8: "FP8", NVFP4: "NVFP4", DYNAMIC_FP8: "DYNAMIC_FP8", MXFP8: "MXFP8"}
TOKENS = (1, 2, 7, 130, 1000)
HIDDEN = (64, 2880, 7168)
POISON = 0xA5


def offered() -> list[int]:
    """Give the recipes that the installed upstream has."""
    from flashinfer.comm import trtllm_mnnvl_ar as module

    kinds = getattr(module, "MNNVLQuantType", None)
    return [recipe for recipe, name in NAMES.items() if hasattr(kinds, name)]


def expect(problem: Problem, recipe: int, scale: float) -> tuple[Expected, Quantized]:
    """Compute a call's results to the bit."""
    expected = problem.expected()
    assert expected.norm is not None
    return expected, recipes.quantize(recipe, expected.norm, scale)


class Outputs:
    """Poisoned outputs of one call."""

    def __init__(self, rows: torch.Tensor, recipe: int, layout: int, keeps_norm: bool) -> None:
        tokens, hidden = rows.shape
        self.recipe, self.layout, self.shape = recipe, layout, rows.shape
        self.norm = poisoned(rows) if keeps_norm else None
        self.residual = poisoned(rows)
        width = hidden // 2 if recipe == NVFP4 else hidden
        bytes_ = torch.full((tokens, width), POISON, dtype=torch.uint8, device=rows.device)
        self.values = bytes_ if recipe == NVFP4 else bytes_.view(torch.float8_e4m3fn)
        self.scales: torch.Tensor | None = None
        if recipe == DYNAMIC_FP8:
            self.scales = torch.full((tokens, 1), torch.nan, device=rows.device)
        elif recipe in BLOCK:
            blocks = hidden // BLOCK[recipe]
            size = tokens * blocks
            if layout == SWIZZLED:
                size = -(-tokens // 128) * 128 * (-(-blocks // 4) * 4)
            self.scales = torch.full((size,), POISON, dtype=torch.uint8, device=rows.device)
            if recipe == NVFP4:
                self.scales = self.scales.view(torch.float8_e4m3fn)

    def check(self, expected: Expected, quantized: Quantized, what: object) -> None:
        """Compare all of them."""
        assert expected.norm is not None
        assert expected.residual is not None
        check_bits(f"residual, {what}", self.residual, expected.residual)
        if self.norm is not None:
            check_bits(f"norm, {what}", self.norm, expected.norm)
        same(f"values, {what}", self.values.view(torch.uint8), quantized.values)
        if self.scales is None:
            return
        assert quantized.scales is not None
        if self.recipe == DYNAMIC_FP8:
            same(f"scales, {what}", self.scales[:, 0], quantized.scales)
            return
        tokens, blocks = quantized.scales.shape
        flat = self.scales.view(torch.uint8)
        if self.layout == LINEAR:
            same(f"scales, {what}", flat.view(tokens, blocks), quantized.scales)
            return
        matrix = flat[recipes.swizzled_places(tokens, blocks, flat.device)]
        same(f"scales, {what}", matrix[:tokens, :blocks], quantized.scales)
        assert not matrix[:tokens, blocks:].any(), f"padding, {what}"
        assert (matrix[tokens:] == POISON).all(), f"rows beyond the last, {what}"


def same(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if torch.equal(got, expected):
        return
    wrong = got != expected
    where = tuple(wrong.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, the first at {where}: "
        f"{got[where].item()!r}, expected {expected[where].item()!r}"
    )


def run(
    workspace: Any,
    problem: Problem,
    rows: torch.Tensor,
    outputs: Outputs,
    strategy: str,
    scale: float | torch.Tensor,
    pdl: bool = False,
) -> None:
    from flashinfer.comm.trtllm_mnnvl_ar import trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant

    trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
        rows,
        problem.residual,
        problem.gamma,
        workspace,
        problem.epsilon,
        outputs.norm,
        outputs.residual,
        outputs.values,
        outputs.scales,
        scale,
        outputs.layout,
        outputs.recipe,
        pdl,
        strategy_named(strategy),
        problem.weight_bias,
    )


def layouts(recipe: int) -> tuple[int, ...]:
    return (SWIZZLED, LINEAR) if recipe in BLOCK else (SWIZZLED,)


def check_shapes(rank: int, ranks: int) -> int:
    calls = 0
    kinds = offered()
    if not kinds:
        return 0
    large = open_workspace(rank, ranks, tokens=max(TOKENS), hidden=max(HIDDEN), dtype=torch.float32)
    # Two-shot of a few rows at a time: chunks begin in the middle of swizzled tiles.
    small = open_workspace(rank, ranks, buffer_bytes=1 << 20)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for dtype, tokens, hidden in itertools.product(dtypes, TOKENS, HIDDEN):
        problem = make_problem(ranks, tokens, hidden, dtype, seed=tokens + hidden, weight_bias=1.0)
        own = problem.inputs[rank]
        expected = problem.expected()
        assert expected.norm is not None
        for recipe in kinds:
            # Upstream refuses the two together.
            if recipe == NVFP4 and dtype == torch.float32:
                continue
            scale = SCALES[recipe]
            in_memory = torch.tensor([scale], device=own.device)
            quantized = recipes.quantize(recipe, expected.norm, scale)
            for (layout, keeps), (name, workspace, strategy) in itertools.product(
                itertools.product(layouts(recipe), (True, False)),
                (
                    ("whole", large, ONESHOT),
                    ("whole", large, TWOSHOT),
                    ("chunked", small, TWOSHOT),
                ),
            ):
                what = f"{NAMES[recipe]} {layout} {name} {strategy}, {tokens} x {hidden} {dtype}"
                outputs = Outputs(own, recipe, layout, keeps)
                run(workspace, problem, own, outputs, strategy, scale if keeps else in_memory)
                outputs.check(expected, quantized, what)
                calls += 1
    large.destroy()
    small.destroy()
    return calls


def check_strange_rows(rank: int, ranks: int) -> int:
    """Ragged rows of FP8, rows that no vector fits, rows wider than a cluster has threads."""
    calls = 0
    workspace = open_workspace(rank, ranks, buffer_bytes=8 << 20)
    for hidden, recipe in ((63, FP8), (1001, DYNAMIC_FP8), (33003, DYNAMIC_FP8), (40960, MXFP8)):
        if recipe not in offered():
            continue
        problem = make_problem(ranks, 5, hidden, torch.bfloat16, seed=hidden)
        for strategy in (ONESHOT, TWOSHOT):
            outputs = Outputs(problem.inputs[rank], recipe, LINEAR, True)
            run(workspace, problem, problem.inputs[rank], outputs, strategy, SCALES[recipe])
            what = f"{NAMES[recipe]}, {hidden} wide, {strategy}"
            outputs.check(*expect(problem, recipe, SCALES[recipe]), what)
            calls += 1
    for recipe in offered():
        problem = make_problem(ranks, 9, 4096, torch.float16, seed=recipe)
        wide = torch.empty(9, 4096 + 3, dtype=torch.float16, device="cuda")
        rows = wide[:, 1:4097]
        rows.copy_(problem.inputs[rank])
        outputs = Outputs(problem.inputs[rank], recipe, SWIZZLED, True)
        run(workspace, problem, rows, outputs, ONESHOT, SCALES[recipe])
        outputs.check(*expect(problem, recipe, SCALES[recipe]), f"{NAMES[recipe]}, strided")
        calls += 1
    workspace.destroy()
    return calls


def check_graphs(rank: int, ranks: int) -> int:
    """Captured with a number and with a tensor for the scale; the tensor's value may change."""
    calls = 0
    workspace = open_workspace(rank, ranks, tokens=64, hidden=4096, dtype=torch.bfloat16)
    for recipe in offered():
        problem = make_problem(ranks, 33, 4096, torch.bfloat16, seed=recipe)
        rows = problem.inputs[rank].clone()
        number, tensor = (Outputs(rows, recipe, SWIZZLED, True) for _ in range(2))
        scale = torch.tensor([SCALES[recipe]], device=rows.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        meet()
        # No call before: nothing may be left to be made during a capture.
        with torch.cuda.graph(graph):
            run(workspace, problem, rows, number, ONESHOT, SCALES[recipe], pdl=True)
            run(workspace, problem, rows, tensor, TWOSHOT, scale, pdl=True)
        for factor in (1.0, 0.25):
            other = make_problem(ranks, 33, 4096, torch.bfloat16, seed=recipe + int(8 * factor))
            rows.copy_(other.inputs[rank])
            problem.residual.copy_(other.residual)
            problem.gamma.copy_(other.gamma)
            scale.fill_(SCALES[recipe] * factor)
            graph.replay()
            number.check(*expect(other, recipe, SCALES[recipe]), f"{NAMES[recipe]}, captured")
            in_use = SCALES[recipe] * (factor if recipe in (FP8, NVFP4) else 1.0)
            tensor.check(*expect(other, recipe, in_use), f"{NAMES[recipe]}, captured tensor")
            calls += 2
    workspace.destroy()
    return calls


def check_front_end(rank: int, ranks: int) -> int:
    """Upstream's ``allreduce_fusion``, unmodified, with the patterns that it has."""
    from flashinfer.comm import AllReduceFusionPattern, allreduce_fusion

    patterns = {
        FP8: ("kARResidualRMSNormFP8Quant", "kARResidualRMSNormOutFP8Quant"),
        NVFP4: ("kARResidualRMSNormFP4Quant", "kARResidualRMSNormOutFP4Quant"),
        DYNAMIC_FP8: ("kARResidualRMSNormDynamicFP8Quant", "kARResidualRMSNormOutDynamicFP8Quant"),
        MXFP8: ("kARResidualRMSNormMXFP8Quant", "kARResidualRMSNormOutMXFP8Quant"),
    }
    calls = 0
    workspace = open_workspace(rank, ranks, tokens=40, hidden=6144, dtype=torch.bfloat16)
    for recipe in offered():
        problem = make_problem(ranks, 40, 6144, torch.bfloat16, seed=recipe)
        for pattern, use_oneshot in itertools.product(patterns[recipe], (True, False, None)):
            outputs = Outputs(problem.inputs[rank], recipe, SWIZZLED, "NormOut" in pattern)
            allreduce_fusion(
                problem.inputs[rank],
                workspace,
                getattr(AllReduceFusionPattern, pattern),
                residual_in=problem.residual,
                residual_out=outputs.residual,
                norm_out=outputs.norm,
                quant_out=outputs.values,
                scale_out=outputs.scales,
                rms_gamma=problem.gamma,
                rms_eps=problem.epsilon,
                scale_factor=SCALES[recipe],
                use_oneshot=use_oneshot,
            )
            outputs.check(*expect(problem, recipe, SCALES[recipe]), pattern)
            calls += 1
    workspace.destroy()
    return calls


def check_all(rank: int, ranks: int) -> dict[str, int]:
    parts = (check_shapes, check_strange_rows, check_graphs, check_front_end)
    return {part.__name__: part(rank, ranks) for part in parts}


def test_quantised_outputs() -> None:
    results = run_ranks(check_all, timeout_s=120.0)
    assert all(counts == results[0] for counts in results)
    print(f"calls a rank: {results[0]}")


# Upstream's own quantisers


def test_mxfp8_is_what_upstreams_quantiser_gives() -> None:
    """The recipe against ``mxfp8_quantize``, whose CuTe kernel needs no compiler of the machine."""
    try:
        from flashinfer import mxfp8_quantize
    except ImportError:
        pytest.skip("this FlashInfer has no mxfp8_quantize")
    generator = torch.Generator("cuda").manual_seed(5)
    for dtype, tokens, hidden in itertools.product(
        (torch.bfloat16, torch.float16), (1, 7, 130), (64, 2880)
    ):
        x = torch.randn(tokens, hidden, generator=generator, device="cuda")
        exponents = torch.randint(-24, 12, (tokens, hidden // 32, 1), device="cuda")
        x = (x.view(tokens, -1, 32) * torch.exp2(exponents.float())).view(tokens, hidden).to(dtype)
        expected = recipes.quantize(MXFP8, x, 1.0)
        assert expected.scales is not None
        try:
            values, scales = mxfp8_quantize(x, is_sf_swizzled_layout=False, backend="cute-dsl")
        except Exception as error:  # Whatever a missing package or an arch leads to.
            pytest.skip(f"upstream's quantiser does not run here: {error}")
        same("values", values.view(torch.uint8), expected.values)
        same("scales", scales.view(torch.uint8).view(expected.scales.shape), expected.scales)
