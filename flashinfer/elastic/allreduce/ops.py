"""The entry points that take the place of upstream's ``trtllm_mnnvl_*`` functions.

The two that run after every layer are written here for the least host time. The others are
upstream's own functions, whose checks, defaults and texts differ between versions, running on our
launcher: a copy of each function sees a few names of its module replaced.
"""

# ruff: noqa: A002 - the parameters have the names that upstream gave them

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

from . import compiled
from .engines import Call, Quantization
from .strategy import Strategy
from .workspace import find_by_pointer_table


def make_entry_points(module: ModuleType, workspace_class: type) -> dict[str, Callable[..., Any]]:
    """Return the functions to set in an upstream module, by name.

    Parameters
    ----------
    module : types.ModuleType
        Upstream's ``flashinfer.comm.trtllm_mnnvl_ar``.
    workspace_class : type
        What ``workspace.make_workspace_class`` made of it.
    """
    strategies = module.MNNVLAllreduceFusionStrategy
    auto = strategies.AUTO
    known: dict[Any, Strategy | None] = {
        auto: None,
        strategies.ONESHOT: Strategy.ONESHOT,
        strategies.TWOSHOT: Strategy.TWOSHOT,
    }

    def requested(strategy: Any) -> Strategy | None:
        try:
            return known[strategy]
        except (KeyError, TypeError):
            raise ValueError(
                f"strategy must be a MNNVLAllreduceFusionStrategy, got {strategy!r}"
            ) from None

    def check_workspace(workspace: Any) -> None:
        if not isinstance(workspace, workspace_class):
            raise TypeError(
                f"workspace must be a {workspace_class.__name__}, got {type(workspace).__name__}"
            )

    def serve(workspace: Any, strategy: Any, call: Call) -> None:
        check_workspace(workspace)
        if torch.compiler.is_compiling():
            compiled.allreduce(workspace._number, requested(strategy), call)
        else:
            workspace._run(requested(strategy), call)

    def trtllm_mnnvl_allreduce(
        input: torch.Tensor,
        workspace: Any,
        launch_with_pdl: bool,
        output: torch.Tensor | None = None,
        strategy: Any = auto,
    ) -> torch.Tensor:
        _check_matrix("input", input)
        if output is None:
            output = torch.empty_like(input, memory_format=torch.contiguous_format)
        else:
            _check_matrix("output", output)
        call = Call(input, output, dependent_launch=bool(launch_with_pdl))
        serve(workspace, strategy, call)
        return output

    def trtllm_mnnvl_fused_allreduce_add_rmsnorm(
        input: torch.Tensor,
        residual_in: torch.Tensor,
        gamma: torch.Tensor,
        workspace: Any,
        epsilon: float | None = None,
        output: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        launch_with_pdl: bool = False,
        strategy: Any = auto,
        weight_bias: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if epsilon is None:
            epsilon = torch.finfo(input.dtype).eps
        _check_matrix("input", input)
        _check_matrix("residual input", residual_in)
        if gamma.numel() != input.shape[1]:
            raise ValueError(
                "The gamma tensor must have the same number of elements as the hidden dimension, "
                f"got {gamma.numel()} elements but expected {input.shape[1]} elements."
            )
        if output is None:
            output = torch.empty_like(input, memory_format=torch.contiguous_format)
        else:
            _check_matrix("output", output)
        if residual_out is None:
            residual_out = torch.empty_like(residual_in, memory_format=torch.contiguous_format)
        else:
            _check_matrix("residual output", residual_out)
        call = Call(
            input,
            output,
            residual_in,
            residual_out,
            gamma,
            epsilon,
            weight_bias,
            bool(launch_with_pdl),
        )
        serve(workspace, strategy, call)
        return output, residual_out

    functions: dict[str, Callable[..., Any]] = {
        "trtllm_mnnvl_allreduce": trtllm_mnnvl_allreduce,
        "trtllm_mnnvl_fused_allreduce_add_rmsnorm": trtllm_mnnvl_fused_allreduce_add_rmsnorm,
    }
    launcher = _PointerLauncher(module)
    for name in ("trtllm_mnnvl_all_reduce", "trtllm_mnnvl_fused_allreduce_rmsnorm"):
        functions[name] = _with_names(
            module, getattr(module, name), get_trtllm_mnnvl_comm_module=lambda: launcher
        )
    functions["get_allreduce_mnnvl_workspace"] = _with_names(
        module,
        module.get_allreduce_mnnvl_workspace,
        MNNVLAllReduceFusionWorkspace=functools.partial(_with_flags, workspace_class),
    )
    name = "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant"
    if hasattr(module, name):
        quantizer = _QuantizingLauncher()
        names = {
            "get_trtllm_mnnvl_comm_module": lambda: quantizer,
            "torch": _TorchWithNumbers(module),
            # As they are, at less host time.
            "MNNVLQuantType": module.MNNVLQuantType,
            "QuantizationSFLayout": module.QuantizationSFLayout,
            "MNNVLAllreduceFusionStrategy": strategies,
        }
        upstreams = _with_names(module, getattr(module, name), **names)
        traceable = _traceable_with_names(module, getattr(module, name), **names)

        def trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
            input: torch.Tensor,
            residual_in: torch.Tensor,
            gamma: torch.Tensor,
            workspace: Any,
            epsilon: float | None = None,
            output: torch.Tensor | None = None,
            residual_out: torch.Tensor | None = None,
            quant_out: torch.Tensor | None = None,
            scale_out: torch.Tensor | None = None,
            output_scale: torch.Tensor | float | None = None,
            layout_code: int = module.QuantizationSFLayout.SWIZZLED_128x4,
            quant_type: int = module.MNNVLQuantType.NONE,
            launch_with_pdl: bool = False,
            strategy: Any = auto,
            weight_bias: float = 0.0,
        ) -> Any:
            compiling = torch.compiler.is_compiling()

            def run(call: Call) -> None:
                check_workspace(workspace)
                if compiling:
                    compiled.allreduce(workspace._number, requested(strategy), call)
                else:
                    workspace._run(requested(strategy), call)

            return (traceable if compiling else upstreams)(
                input,
                residual_in,
                gamma,
                _AnySize(workspace, run),
                epsilon,
                output,
                residual_out,
                quant_out,
                scale_out,
                output_scale,
                layout_code,
                quant_type,
                launch_with_pdl,
                # Any but AUTO, which upstream would resolve; `run` has what was asked for.
                strategies.ONESHOT,
                weight_bias,
            )

        functions[name] = trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant
    return functions


def _check_matrix(what: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2:
        raise ValueError(
            f"The {what} tensor must be 2D, got {tensor.dim()}D. The shape is {tensor.shape}."
        )


class _PointerLauncher:
    """Stands in for upstream's compiled module in functions that are given raw addresses.

    Addresses of one of our workspaces lead back to it, with its fallbacks; others go to upstream's
    launcher.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def trtllm_mnnvl_allreduce_fusion(
        self,
        input: torch.Tensor,
        multicast_buffer_ptr: int,
        buffer_ptrs_dev: int,
        buffer_ptr_local: int,
        buffer_flags_mnnvl: torch.Tensor,
        nranks: int,
        rank: int,
        rmsnorm_fusion: bool,
        launch_with_pdl: bool,
        use_oneshot: bool,
        output: torch.Tensor,
        residual_out: torch.Tensor | None,
        residual_in: torch.Tensor | None,
        gamma: torch.Tensor | None,
        epsilon: float | None,
    ) -> None:
        workspace = find_by_pointer_table(buffer_ptrs_dev)
        if workspace is None:
            self._module.get_trtllm_mnnvl_comm_module().trtllm_mnnvl_allreduce_fusion(
                input,
                multicast_buffer_ptr,
                buffer_ptrs_dev,
                buffer_ptr_local,
                buffer_flags_mnnvl,
                nranks,
                rank,
                rmsnorm_fusion,
                launch_with_pdl,
                use_oneshot,
                output,
                residual_out,
                residual_in,
                gamma,
                epsilon,
            )
            return
        if (nranks, rank) != (workspace.tp_size, workspace.rank):
            raise ValueError(
                f"The workspace belongs to rank {workspace.rank} of {workspace.tp_size}, got "
                f"rank={rank} and nranks={nranks}."
            )
        call = Call(input, output, dependent_launch=bool(launch_with_pdl))
        if rmsnorm_fusion:
            assert epsilon is not None
            call = call._replace(
                residual_in=residual_in, residual_out=residual_out, gamma=gamma, epsilon=epsilon
            )
        workspace._run(Strategy.ONESHOT if use_oneshot else Strategy.TWOSHOT, call)


class _AnySize:
    """What upstream's quantising function takes for its workspace: one that everything fits.

    Its ``buffer_flags``, which the function hands on to its launcher, are this object itself.
    """

    tp_size = rank = mc_ptr = uc_ptrs_dev = uc_ptr_local = 0

    def __init__(self, workspace: Any, run: Callable[[Call], None]) -> None:
        self._workspace = workspace
        self.run = run

    @property
    def buffer_flags(self) -> _AnySize:
        return self

    def is_buffer_size_sufficient(self, *_: object) -> bool:
        return True

    def _require_handles_attached(self) -> None:
        require = getattr(self._workspace, "_require_handles_attached", None)
        if require is not None:
            require()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workspace, name)


class _QuantizingLauncher:
    """Stands in for upstream's compiled module in its quantising function."""

    def trtllm_mnnvl_allreduce_fusion(
        self,
        input: torch.Tensor,
        _multicast_buffer_ptr: int,
        _buffer_ptrs_dev: int,
        _buffer_ptr_local: int,
        buffer_flags: _AnySize,
        _nranks: int,
        _rank: int,
        _rmsnorm_fusion: bool,
        launch_with_pdl: bool,
        _use_oneshot: bool,
        output: torch.Tensor | None,
        residual_out: torch.Tensor,
        residual_in: torch.Tensor,
        gamma: torch.Tensor,
        epsilon: float,
        weight_bias: float,
        quant_type: int,
        quant_out: torch.Tensor,
        sf_out: torch.Tensor | None,
        output_scale: torch.Tensor | float | None,
        layout_code: int,
    ) -> None:
        quantization = Quantization(quant_type, layout_code, quant_out, sf_out, output_scale)
        call = Call(
            input,
            output,
            residual_in,
            residual_out,
            gamma,
            epsilon,
            weight_bias,
            bool(launch_with_pdl),
            quantization,
        )
        buffer_flags.run(call)


class _TorchWithNumbers:
    """Torch, as a function sees it that makes a device tensor of a number for its kernel.

    Ours takes the number itself: nothing is copied, and nothing has to outlive a captured graph.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def tensor(self, numbers: list[float], **_: object) -> float:
        """Return the number."""
        (number,) = numbers
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module.torch, name)


def _with_flags(workspace_class: type, *args: Any, **kwargs: Any) -> Any:
    """Make a workspace for a deprecated function, which hands its ``buffer_flags`` to the caller.

    The native engine has none. The caller only passes them back, so any tensor will do.
    """
    workspace = workspace_class(*args, **kwargs)
    if not hasattr(workspace, "buffer_flags"):
        workspace.buffer_flags = torch.zeros(
            9, dtype=torch.uint32, device=torch.device("cuda", torch.cuda.current_device())
        )
    return workspace


class _Names(dict[str, Any]):
    """Globals of a function: some names of its own, and its module's, as they are, for the rest."""

    def __init__(self, module: ModuleType, names: dict[str, Any]) -> None:
        super().__init__(names)
        self._module = module
        self["__builtins__"] = module.__dict__["__builtins__"]

    def __missing__(self, name: str) -> Any:
        # KeyError, where the module lacks it too, makes Python look among the builtins.
        return self._module.__dict__[name]


def _with_names(module: ModuleType, function: Any, **names: Any) -> Callable[..., Any]:
    """Return a copy of a module's function that sees other values of a few global names."""
    return _with_globals(function, _Names(module, names))


def _traceable_with_names(module: ModuleType, function: Any, **names: Any) -> Callable[..., Any]:
    """Return such a copy for a compiler, which takes nothing but a plain dict for its globals.

    It sees the module's other names as they are now. ``__name__`` is not among them: by it, a
    compiler would look the names up in the module after all.
    """
    known = {**vars(module), **names}
    del known["__name__"]
    return _with_globals(function, known)


def _with_globals(function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    plain = inspect.unwrap(function)
    copy = FunctionType(
        plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy
