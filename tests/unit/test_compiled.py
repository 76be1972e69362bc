"""The entry points under ``torch.compile``: one graph, right results, outputs that alias inputs."""

from __future__ import annotations

import builtins
import enum
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.elastic.allreduce import compiled, ops
from flashinfer.elastic.allreduce.engines import Call
from flashinfer.elastic.allreduce.strategy import Strategy


class UpstreamStrategy(enum.Enum):
    ONESHOT = 0
    TWOSHOT = 1
    AUTO = 99


class TwoEqualRanks:
    """Computes what two ranks with the same input would, and records how it was asked."""

    def __init__(self) -> None:
        self.requested: list[Strategy | None] = []
        self._number = compiled.enroll(self)

    def _run(self, requested: Strategy | None, call: Call) -> None:
        self.requested.append(requested)
        total = call.input + call.input
        if call.gamma is None:
            call.output.copy_(total)
            return
        assert call.residual_in is not None
        assert call.residual_out is not None
        residual = total + call.residual_in
        call.residual_out.copy_(residual)
        scale = torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + call.epsilon)
        call.output.copy_(residual * scale * (call.gamma + call.weight_bias))


@pytest.fixture
def entry_points() -> dict[str, Callable[..., Any]]:
    def deprecated_function() -> None:
        raise NotImplementedError

    module: Any = types.ModuleType("upstream")
    vars(module)["__builtins__"] = vars(builtins)
    module.MNNVLAllreduceFusionStrategy = UpstreamStrategy
    module.trtllm_mnnvl_all_reduce = deprecated_function
    module.trtllm_mnnvl_fused_allreduce_rmsnorm = deprecated_function
    module.get_allreduce_mnnvl_workspace = deprecated_function
    return ops.make_entry_points(module, TwoEqualRanks)


def test_a_layer_compiles_into_one_graph_that_gives_the_eager_result(
    entry_points: dict[str, Callable[..., Any]],
) -> None:
    workspace = TwoEqualRanks()
    allreduce = entry_points["trtllm_mnnvl_allreduce"]
    fused = entry_points["trtllm_mnnvl_fused_allreduce_add_rmsnorm"]

    def layer(
        x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = allreduce(x, workspace, True)
        return fused(
            total,
            residual,
            gamma,
            workspace,
            1e-6,
            strategy=UpstreamStrategy.ONESHOT,
            weight_bias=1.0,
        )

    x, residual, gamma = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    expected = layer(x, residual, gamma)
    result = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, residual, gamma)
    torch.testing.assert_close(result, expected)
    assert workspace.requested == [None, Strategy.ONESHOT] * 2


def test_outputs_may_be_the_input_and_the_residual(
    entry_points: dict[str, Callable[..., Any]],
) -> None:
    workspace = TwoEqualRanks()
    fused = entry_points["trtllm_mnnvl_fused_allreduce_add_rmsnorm"]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor) -> None:
        fused(x, residual, gamma, workspace, 1e-6, output=x, residual_out=residual)

    x, residual, gamma = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    output, residual_out = fused(x, residual, gamma, workspace, 1e-6)
    layer(x, residual, gamma)
    torch.testing.assert_close(x, output)
    torch.testing.assert_close(residual, residual_out)


def test_a_rank_that_does_not_read_the_result_takes_part(
    entry_points: dict[str, Callable[..., Any]],
) -> None:
    """Others may read theirs, and would wait for it."""
    workspace = TwoEqualRanks()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: torch.Tensor) -> torch.Tensor:
        entry_points["trtllm_mnnvl_allreduce"](x, workspace, True)
        entry_points["trtllm_mnnvl_fused_allreduce_add_rmsnorm"](x, x, x[0], workspace, 1e-6)
        return x + 1

    layer(torch.randn(3, 8))
    assert workspace.requested == [None, None]


def test_a_workspace_that_is_gone_is_named_as_the_reason() -> None:
    number = compiled.enroll(TwoEqualRanks())
    x = torch.randn(2, 8)
    with pytest.raises(RuntimeError, match="no longer exists"):
        compiled.allreduce(number, None, Call(x, torch.empty_like(x)))


@pytest.mark.parametrize(
    "output", [torch.empty(3, 64, dtype=torch.bfloat16), torch.empty(1, 64)], ids=["rows", "dtype"]
)
def test_outputs_that_only_a_copy_would_take(
    entry_points: dict[str, Callable[..., Any]], output: torch.Tensor
) -> None:
    """A copy broadcasts and converts, which a kernel does not."""
    workspace = TwoEqualRanks()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return entry_points["trtllm_mnnvl_allreduce"](x, workspace, True, output)

    rows = torch.ones(1, 64, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="output must be like input"):
        torch.compile(layer, backend="eager", fullgraph=True)(rows)


def test_outputs_that_are_one_tensor(entry_points: dict[str, Callable[..., Any]]) -> None:
    """As in an eager call, where the launch refuses them; two copies would hide it."""
    workspace = TwoEqualRanks()

    def layer(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor) -> None:
        fused = entry_points["trtllm_mnnvl_fused_allreduce_add_rmsnorm"]
        fused(x, residual, gamma, workspace, 1e-6, output=x, residual_out=x)

    with pytest.raises(Exception, match="output and residual_out must be different tensors"):
        torch.compile(layer, backend="eager", fullgraph=True)(
            torch.ones(3, 8), torch.ones(3, 8), torch.ones(8)
        )
