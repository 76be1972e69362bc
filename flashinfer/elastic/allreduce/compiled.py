"""The entry points as ``torch.compile`` sees them: functional operators on a workspace's number.

Only code that is being compiled comes here; eager calls go to the workspace directly. The operators
return new tensors, which is what a compiler can reason about. A caller's output tensors, which may
be the input or the residual, receive copies that the compiler is free to elide. Quantised values
and their scales, which cannot be those, are written in place: not all scales are written.
"""

# ruff: noqa: A002 - parameters are named as in upstream's functions

# Annotations stay objects here: torch reads the operators' schemas from them.
import itertools
import weakref
from typing import Any

import torch
import torch.fx.node

from .engines import Call, Quantization
from .strategy import Strategy

_AUTO = -1

_numbers = itertools.count()
_workspaces: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def enroll(workspace: Any) -> int:
    """Give a workspace the number by which compiled code finds it."""
    number = next(_numbers)
    _workspaces[number] = workspace
    return number


def allreduce(number: int, requested: Strategy | None, call: Call) -> None:
    """Run a call by an operator, and copy its results to the call's outputs."""
    for name, tensor in (("output", call.output), ("residual_out", call.residual_out)):
        # A copy would broadcast and convert, which the kernels refuse.
        if tensor is not None and (
            tensor.shape != call.input.shape or tensor.dtype != call.input.dtype
        ):
            raise ValueError(
                f"{name} must be like input, {call.input.dtype} {tuple(call.input.shape)}, "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if call.output is not None and call.output is call.residual_out:
        raise ValueError("output and residual_out must be different tensors")
    strategy = _AUTO if requested is None else int(requested)
    if call.gamma is None:
        output = _allreduce(number, strategy, call.input, call.dependent_launch)
    else:
        assert call.residual_in is not None
        assert call.residual_out is not None
        norm = (
            number,
            strategy,
            call.input,
            call.residual_in,
            call.gamma,
            call.epsilon,
            call.weight_bias,
            call.dependent_launch,
        )
        if call.quantization is None:
            output, residual_out = _allreduce_add_rmsnorm(*norm)
        else:
            output, residual_out = _allreduce_add_rmsnorm_quant(
                *norm, call.output is not None, *call.quantization.arguments()
            )
        call.residual_out.copy_(residual_out)
    if call.output is not None:
        call.output.copy_(output)


def _run(number: int, strategy: int, call: Call) -> None:
    workspace = _workspaces.get(number)
    if workspace is None:
        raise RuntimeError("The workspace that this code was compiled with no longer exists.")
    workspace._run(None if strategy == _AUTO else Strategy(strategy), call)


@torch.library.custom_op("flashinfer_elastic::allreduce", mutates_args=())
def _allreduce(
    number: int, strategy: int, input: torch.Tensor, dependent_launch: bool
) -> torch.Tensor:
    output = _like(input)
    _run(number, strategy, Call(input, output, dependent_launch=dependent_launch))
    return output


@_allreduce.register_fake
def _(number: int, strategy: int, input: torch.Tensor, dependent_launch: bool) -> torch.Tensor:
    return _like(input)


@torch.library.custom_op("flashinfer_elastic::allreduce_add_rmsnorm", mutates_args=())
def _allreduce_add_rmsnorm(
    number: int,
    strategy: int,
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    weight_bias: float,
    dependent_launch: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, residual_out = _like(input), _like(input)
    call = Call(
        input, output, residual_in, residual_out, gamma, epsilon, weight_bias, dependent_launch
    )
    _run(number, strategy, call)
    return output, residual_out


@_allreduce_add_rmsnorm.register_fake
def _(
    number: int, strategy: int, input: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(input), _like(input)


@torch.library.custom_op(
    "flashinfer_elastic::allreduce_add_rmsnorm_quant", mutates_args=("values", "scales")
)
def _allreduce_add_rmsnorm_quant(
    number: int,
    strategy: int,
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    weight_bias: float,
    dependent_launch: bool,
    keeps_norm: bool,
    recipe: int,
    layout: int,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    scale: float,
    scale_in_memory: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, residual_out = _norm_if_kept(input, keeps_norm), _like(input)
    quantization = Quantization(
        recipe, layout, values, scales, scale if scale_in_memory is None else scale_in_memory
    )
    call = Call(
        input,
        output if keeps_norm else None,
        residual_in,
        residual_out,
        gamma,
        epsilon,
        weight_bias,
        dependent_launch,
        quantization,
    )
    _run(number, strategy, call)
    return output, residual_out


@_allreduce_add_rmsnorm_quant.register_fake
def _(
    number: int,
    strategy: int,
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    weight_bias: float,
    dependent_launch: bool,
    keeps_norm: bool,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _norm_if_kept(input, keeps_norm), _like(input)


# A rank on which nothing reads a result has to take part all the same: as torch does for its own
# collectives, keep compilers from dropping the call as dead code.
for _name in ("allreduce", "allreduce_add_rmsnorm", "allreduce_add_rmsnorm_quant"):
    torch.fx.node.has_side_effect(getattr(torch.ops.flashinfer_elastic, _name).default)


def _norm_if_kept(input: torch.Tensor, keeps_norm: bool) -> torch.Tensor:
    """Return a place for the norm; an operator has to return a tensor where there is none too."""
    return _like(input) if keeps_norm else input.new_empty(0)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
