"""How long the host is busy with an eager call, from Python to the launch."""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from flashinfer.elastic.allreduce.engines import Call
from flashinfer.elastic.allreduce.strategy import Strategy

from .group import Group, UnavailableError, attempt
from .methods.rig import Rig
from .problem import EPSILON, Data, Problem, make_data
from .results import Skip

_BATCH = 100
"""Calls between two synchronisations; few enough that the launch queue never fills up."""

_BATCHES = 30

Layers = dict[str, Callable[[], object]]


def measure(rig: Rig, hidden: int) -> tuple[list[dict[str, Any]], list[Skip]]:
    """Time the same call of one row, layer by layer, on this wheel's workspace and on trtllm's.

    Parameters
    ----------
    rig : Rig
    hidden : int
        Length of the row.

    Returns
    -------
    list of dict
        ``backend``, ``layer`` (from the outermost in), ``median_us``, ``p10_us``, ``p90_us``: the
        slowest rank's microseconds a call, over the batches.
    list of Skip
        Backends that could not be measured.
    """
    group = rig.group
    data = make_data(Problem(hidden, 1), group.rank, group.device)
    found: list[dict[str, Any]] = []
    skipped = []
    for backend, layers_of in (("native", _native_layers), ("trtllm", _trtllm_layers)):
        try:
            layers = attempt(group, functools.partial(layers_of, rig, data))
            for layer, call in layers.items():
                attempt(group, call)
                found.append({"backend": backend, "layer": layer, **_time(group, call)})
        except UnavailableError as error:
            skipped.append(Skip(f"host cost of {backend}", str(error), hidden, 1))
    return found, skipped


def _time(group: Group, call: Callable[[], object]) -> dict[str, float]:
    batches = []
    for _ in range(_BATCHES):
        torch.cuda.synchronize()
        group.barrier()
        start = time.perf_counter_ns()
        for _ in range(_BATCH):
            call()
        batches.append((time.perf_counter_ns() - start) / 1e3 / _BATCH)
    torch.cuda.synchronize()
    deciles = statistics.quantiles(batches, n=10)
    own = {
        "median_us": statistics.median(batches),
        "p10_us": deciles[0],
        "p90_us": deciles[-1],
    }
    everyone = group.gather(own)
    return {name: round(max(ranks[name] for ranks in everyone), 3) for name in own}


def _arguments(rig: Rig, data: Data, workspace: Any) -> dict[str, Any]:
    return {
        "input": data.contribution,
        "workspace": workspace,
        "pattern": rig.comm.AllReduceFusionPattern.kARResidualRMSNorm,
        "launch_with_pdl": True,
        "residual_in": data.residual,
        "residual_out": torch.empty_like(data.residual),
        "norm_out": torch.empty_like(data.residual),
        "rms_gamma": data.gamma,
        "rms_eps": EPSILON,
        "use_oneshot": True,
        "fp32_acc": True,
    }


def _native_layers(rig: Rig, data: Data) -> Layers:
    workspace = rig.native
    arguments = _arguments(rig, data, workspace)
    module: Any = importlib.import_module("flashinfer.comm.trtllm_mnnvl_ar")
    call = Call(
        input=data.contribution,
        output=arguments["norm_out"],
        residual_in=data.residual,
        residual_out=arguments["residual_out"],
        gamma=data.gamma,
        epsilon=EPSILON,
        dependent_launch=True,
    )
    layers: Layers = {
        "flashinfer.comm.allreduce_fusion": functools.partial(
            rig.comm.allreduce_fusion, **arguments
        ),
        "trtllm_mnnvl_fused_allreduce_add_rmsnorm": functools.partial(
            module.trtllm_mnnvl_fused_allreduce_add_rmsnorm,
            input=data.contribution,
            residual_in=data.residual,
            gamma=data.gamma,
            workspace=workspace,
            epsilon=EPSILON,
            output=arguments["norm_out"],
            residual_out=arguments["residual_out"],
            launch_with_pdl=True,
            strategy=module.MNNVLAllreduceFusionStrategy.ONESHOT,
        ),
    }
    engine = getattr(workspace, "_engine", None)
    if engine is not None:
        layers["workspace"] = functools.partial(workspace._run, Strategy.ONESHOT, call)
        layers["engine (checks and launch)"] = functools.partial(
            engine.launch, call, 0, 1, Strategy.ONESHOT
        )
    return layers


def _trtllm_layers(rig: Rig, data: Data) -> Layers:
    arguments = _arguments(rig, data, rig.trtllm)
    return {
        "flashinfer.comm.allreduce_fusion": functools.partial(
            rig.comm.allreduce_fusion, **arguments
        )
    }
