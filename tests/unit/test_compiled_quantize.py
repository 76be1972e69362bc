"""The quantising entry point under ``torch.compile``: one graph, eager results, eager errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.elastic.allreduce import compiled, ops
from flashinfer.elastic.allreduce.engines import Call
from flashinfer.elastic.allreduce.strategy import Strategy
from flashinfer.elastic.shadow import TESTED_VERSIONS

sys.path.insert(0, str(Path(__file__).parent))
from upstream_on_cpu import Loaded

NAME = "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant"
TOKENS, HIDDEN = 5, 96
FP8, NVFP4, DYNAMIC_FP8, MXFP8 = 1, 2, 3, 4
RECIPES = {"FP8": FP8, "NVFP4": NVFP4, "DYNAMIC_FP8": DYNAMIC_FP8, "MXFP8": MXFP8}
BLOCKS = {NVFP4: 16, MXFP8: 32}
LAYOUTS = {"SWIZZLED": 0, "LINEAR": 2}
UNWRITTEN = 0x77
F8 = torch.float8_e4m3fn


class TwoEqualRanks:
    """Computes what two ranks with the same input would, and something for each scale.

    The scales of a swizzled layout's padding are left as they are, as the kernels leave them.
    """

    def __init__(self) -> None:
        self.requested: list[Strategy | None] = []
        self.launches: list[tuple[Any, ...]] = []
        self._number = compiled.enroll(self)

    def _require_handles_attached(self) -> None: ...

    def _run(self, requested: Strategy | None, call: Call) -> None:
        self.requested.append(requested)
        if call.input.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"input has dtype {call.input.dtype}")
        quantization = call.quantization
        assert quantization is not None
        assert call.gamma is not None
        assert call.residual_in is not None
        assert call.residual_out is not None
        recipe, layout, values, scales, scale = quantization
        # What divides by none, or multiplies by none, has 1.
        factor = 1.0 if scale is None else float(scale)
        self.launches.append(
            (recipe, layout, factor, call.output is None, call.dependent_launch, call.epsilon)
        )
        residual = call.input + call.input + call.residual_in
        root = torch.rsqrt(residual.float().pow(2).mean(-1, keepdim=True) + call.epsilon)
        norm = (residual * root * (call.gamma + call.weight_bias)).to(call.input.dtype)
        call.residual_out.copy_(residual)
        if call.output is not None:
            call.output.copy_(norm)
        scaled = norm.float() * factor
        if recipe == NVFP4:
            codes = scaled.abs().clamp(max=15).to(torch.uint8)
            values.view(torch.uint8).copy_(codes[:, 0::2] | codes[:, 1::2] << 4)
        else:
            values.view(torch.uint8).copy_(scaled.to(F8).view(torch.uint8))
        if recipe == DYNAMIC_FP8:
            assert scales is not None
            scales.copy_(norm.float().abs().amax(1, keepdim=True))
        elif recipe in BLOCKS:
            assert scales is not None
            blocks = norm.shape[1] // BLOCKS[recipe]
            largest = norm.float().abs().view(-1, blocks, BLOCKS[recipe]).amax(2)
            codes = largest.clamp(max=100).to(torch.uint8).flatten()
            scales.view(torch.uint8).view(-1)[: codes.numel()] = codes


@pytest.fixture(scope="module", params=[v for v in TESTED_VERSIONS if v != "0.6.12"])
def module(request: pytest.FixtureRequest, upstream_tree: Callable[[str], Path]) -> Any:
    module: Any = Loaded(upstream_tree(request.param)).module
    module.torch = torch
    module._compute_swizzled_layout_sf_size = lambda rows, columns: (
        -(-rows // 128) * 128 * (-(-columns // 4) * 4)
    )
    return module


@pytest.fixture
def quantize(module: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return ops.make_entry_points(module, TwoEqualRanks)[NAME]


def has(module: Any, recipe: str) -> bool:
    return hasattr(module.MNNVLQuantType, recipe)


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, residual, gamma = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((TOKENS, HIDDEN), (TOKENS, HIDDEN), (HIDDEN,))
    )
    return x, residual, gamma


def outputs(recipe: int, layout: int) -> dict[str, torch.Tensor]:
    """Give outputs of the caller's, which hold what nobody may write."""
    width, dtype = (HIDDEN // 2, torch.uint8) if recipe == NVFP4 else (HIDDEN, F8)
    given = {
        "quant_out": torch.full((TOKENS, width), UNWRITTEN, dtype=torch.uint8).view(dtype),
        "residual_out": torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16),
    }
    if recipe == DYNAMIC_FP8:
        given["scale_out"] = torch.zeros(TOKENS, 1)
    elif recipe in BLOCKS:
        blocks = HIDDEN // BLOCKS[recipe]
        size = TOKENS * blocks if layout == LAYOUTS["LINEAR"] else 128 * (-(-blocks // 4) * 4)
        scales = torch.full((size,), UNWRITTEN, dtype=torch.uint8)
        given["scale_out"] = scales.view(F8) if recipe == NVFP4 else scales
    return given


def same(got: Any, expected: Any) -> None:
    """Compare what two calls have returned, bit for bit."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        if b is None:
            assert a is None
            continue
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("keeps_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_compiles_into_one_graph_that_gives_the_eager_result(
    module: Any, quantize: Callable[..., Any], recipe: str, layout: str, keeps_norm: bool
) -> None:
    """Outputs of the caller's; the norm takes the input's place, as in vLLM."""
    if not has(module, recipe):
        pytest.skip(f"no {recipe}")
    workspace = TwoEqualRanks()

    def layer(
        x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, **out: torch.Tensor
    ) -> Any:
        return quantize(
            x,
            residual,
            gamma,
            workspace,
            1e-6,
            output=x if keeps_norm else None,
            output_scale=0.25,
            layout_code=LAYOUTS[layout],
            quant_type=RECIPES[recipe],
            launch_with_pdl=True,
            strategy=module.MNNVLAllreduceFusionStrategy.TWOSHOT,
            weight_bias=1.0,
            **out,
        )

    given = [outputs(RECIPES[recipe], LAYOUTS[layout]) for _ in range(2)]
    inputs = [rows(), rows()]
    expected = layer(*inputs[0], **given[0])
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs[1], **given[1])
    same(got, expected)
    # The caller's own, with what is not to be written in them.
    same(list(given[1].values()), list(given[0].values()))
    same(inputs[1], inputs[0])
    assert workspace.requested == [Strategy.TWOSHOT] * 2
    assert workspace.launches[0] == workspace.launches[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_left_out_is_made(
    module: Any, quantize: Callable[..., Any], recipe: str, layout: str
) -> None:
    if not has(module, recipe):
        pytest.skip(f"no {recipe}")
    workspace = TwoEqualRanks()

    def layer(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor) -> Any:
        return quantize(
            x, residual, gamma, workspace, layout_code=LAYOUTS[layout], quant_type=RECIPES[recipe]
        )

    expected = layer(*rows())
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*rows())
    shapes = [None if t is None else (t.shape, t.dtype) for t in expected]
    assert [None if t is None else (t.shape, t.dtype) for t in got] == shapes
    same((got[0], got[2]), (expected[0], expected[2]))
    assert workspace.requested == [None] * 2
    assert workspace.launches[0] == workspace.launches[1]


def test_a_scale_in_memory_is_read_when_the_code_runs(
    module: Any, quantize: Callable[..., Any]
) -> None:
    workspace = TwoEqualRanks()
    x, residual, gamma = rows()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(scale: torch.Tensor) -> Any:
        return quantize(x, residual, gamma, workspace, quant_type=FP8, output_scale=scale)

    for factor in (0.5, 2.0):
        layer(torch.tensor([factor]))
        assert workspace.launches[-1][2] == factor


def test_any_number_of_rows_is_one_compilation(module: Any, quantize: Callable[..., Any]) -> None:
    workspace = TwoEqualRanks()
    _, _, gamma = rows()

    def layer(x: torch.Tensor) -> Any:
        return quantize(x, x, gamma, workspace, quant_type=NVFP4)

    compiled_layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (3, 200, 7):
        x = torch.randn(tokens, HIDDEN).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        with torch.compiler.set_stance("default" if tokens == 3 else "fail_on_recompile"):
            got, expected = compiled_layer(x), layer(x)
        assert [t.shape for t in got[:3]] == [t.shape for t in expected[:3]]
        same((got[0], got[2]), (expected[0], expected[2]))


WRONG: dict[str, dict[str, Any]] = {
    "input": {"input": torch.zeros(HIDDEN)},
    "gamma": {"gamma": torch.zeros(HIDDEN - 1)},
    "values": {"quant_out": torch.zeros(TOKENS, HIDDEN, dtype=torch.uint8)},
    "shape": {"quant_out": torch.zeros(TOKENS, 3, dtype=F8)},
    "scales": {"scale_out": torch.zeros(1, dtype=torch.uint8)},
    "layout": {"layout_code": 1},
    "recipe": {"quant_type": 17},
    "workspace": {"workspace": 7},
    "strategy": {"strategy": "ONESHOT"},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_the_eager_ones(module: Any, quantize: Callable[..., Any], wrong: str) -> None:
    x, residual, gamma = rows()
    recipe = NVFP4 if wrong == "scales" else FP8
    given = {
        "input": x, "residual_in": residual, "gamma": gamma, "workspace": TwoEqualRanks(),
        "quant_type": recipe,
    } | WRONG[wrong]  # fmt: skip

    def layer() -> Any:
        return quantize(**given)

    with pytest.raises((ValueError, TypeError)) as eager:
        layer()
    with pytest.raises(type(eager.value)) as when_compiled:
        torch.compile(layer, backend="aot_eager")()
    assert str(when_compiled.value) == str(eager.value)


@pytest.mark.parametrize("keeps_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_operator_does_what_its_schema_says(recipe: int, layout: int, keeps_norm: bool) -> None:
    workspace = TwoEqualRanks()
    # Bytes, since the check compares with what CPUs do not do for 8-bit floats.
    out = {
        name: tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint8)
        for name, tensor in outputs(recipe, layout).items()
    }
    for scale in (None, torch.tensor([0.5])):
        torch.library.opcheck(
            compiled._allreduce_add_rmsnorm_quant,
            (
                workspace._number, compiled._AUTO, *rows(), 1e-6, 0.0, True, keeps_norm, recipe,
                layout, out["quant_out"], out.get("scale_out"), 0.25, scale,
            ),
        )  # fmt: skip
