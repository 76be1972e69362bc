"""Make the call on the GPUs that are there, one process each, as a server does."""

from __future__ import annotations

import importlib
import itertools
import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from flashinfer.elastic.allreduce import settings, topology
from flashinfer.elastic.allreduce.driver import load_driver
from flashinfer.elastic.allreduce.engines import library
from flashinfer.elastic.allreduce.identity import identify

from .case import DTYPE, EPSILON, Case, Data, Run

_TIMEOUT_S = 60
"""For creation, and for kernels unless the environment says otherwise."""


def count() -> int:
    """Return how many GPUs there are."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_not() -> str:
    """Return why the call cannot be made on this machine's GPUs; empty if it can."""
    if count() < 2:
        return f"GPUs that torch sees: {count()}"
    archs = library.load().archs
    for index in range(count()):
        major, minor = torch.cuda.get_device_capability(index)
        if not library.runs_on(archs, 10 * major + minor):
            return f"the wheel has no kernels for sm{major}{minor}, GPU {index}"
    for a, b in itertools.permutations(range(count()), 2):
        if not torch.cuda.can_device_access_peer(a, b):
            return f"GPU {a} has no peer access to GPU {b}"
    try:
        pairs = _pairs_without_nvlink()
    except ValueError as error:  # a setting that nobody understands
        return str(error)
    if pairs:
        return "no NVLink between GPUs {} and {}".format(*pairs[0])
    return ""


def describe() -> str:
    """Return what the call is made on."""
    return f"{count()} x {torch.cuda.get_device_name(0)}"


def run(case: Case, data: Data, buffers: Sequence[int]) -> list[Run]:
    """Make the call on a workspace of each size in turn.

    A size that is what the wheel allocates unasked is not asked for.

    Raises
    ------
    Exception
        What a rank raised, with its traceback. All processes have ended then.
    """
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory(prefix="reproduce-") as folder:
        torch.save(tuple(data), Path(folder, "data"))
        multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _rank_main, args=(case, tuple(buffers), folder), nprocs=case.ranks
        )
        outputs = [_load(Path(folder, str(rank))) for rank in range(case.ranks)]
    return [
        Run(
            outputs[0][i]["buffer_bytes"],
            [output[i]["norm"] for output in outputs],
            [output[i]["residual"] for output in outputs],
        )
        for i in range(len(buffers))
    ]


def _rank_main(rank: int, case: Case, buffers: tuple[int, ...], folder: str) -> None:
    """Be one rank: take the data from a folder, and leave the results there."""
    os.environ.setdefault(settings.TIMEOUT_S, str(_TIMEOUT_S))
    # Multicast proves nothing here, and trying it asks more of a machine than a build may.
    os.environ.setdefault(settings.MULTICAST, "0")
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=case.ranks,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        data = Data(*_load(Path(folder, "data")))
        results = [_call(case, data, rank, size) for size in buffers]
        torch.save(results, Path(folder, str(rank)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _call(case: Case, data: Data, rank: int, size: int) -> dict[str, Any]:
    """Create a workspace as vLLM does, force one-shot on it, and take the result."""
    comm = importlib.import_module("flashinfer.comm")
    backend = importlib.import_module("flashinfer.comm.mnnvl").TorchDistBackend()
    if size == case.buffer_bytes:
        workspace = comm.create_allreduce_fusion_workspace(
            backend="mnnvl",
            world_size=case.ranks,
            rank=rank,
            max_token_num=case.reported,
            hidden_dim=case.hidden,
            dtype=DTYPE,
            comm_backend=backend,
        )
    else:
        workspace = comm.trtllm_mnnvl_ar.MNNVLAllReduceFusionWorkspace(
            comm.Mapping(world_size=case.ranks, rank=rank, tp_size=case.ranks),
            buffer_size_in_bytes=size,
            comm_backend=backend,
        )
    device = torch.device("cuda", rank)
    # Poisoned, so that an element that is not written shows.
    norm = torch.full((case.asked, case.hidden), torch.nan, dtype=DTYPE, device=device)
    residual = torch.full_like(norm, torch.nan)
    try:
        comm.allreduce_fusion(
            input=data.inputs[rank].to(device),
            workspace=workspace,
            pattern=comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=data.residual.to(device),
            residual_out=residual,
            norm_out=norm,
            rms_gamma=data.gamma.to(device),
            rms_eps=EPSILON,
            use_oneshot=True,
        )
        torch.cuda.synchronize()
        return {
            "buffer_bytes": int(workspace.buffer_size_bytes),
            "norm": norm.cpu(),
            "residual": residual.cpu(),
        }
    finally:
        workspace.destroy()


def _pairs_without_nvlink() -> list[tuple[int, int]]:
    """Return the pairs of GPUs for which a workspace would be refused."""
    if topology.pcie_allowed():
        return []
    driver = load_driver()
    identities = [identify(driver, driver.device(index)) for index in range(count())]
    nvml = importlib.import_module("pynvml")
    links = [topology.query_links(nvml, own, identities) for own in identities]
    return topology.pairs_without_nvlink(links)


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True)
