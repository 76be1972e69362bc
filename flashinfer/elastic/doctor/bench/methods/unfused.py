"""A plain all-reduce, then one kernel that adds the residual and normalises."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from ..problem import DTYPE, EPSILON, Data, Problem
from . import Method, Runnable, _nothing
from .rig import Rig


class Reduction(NamedTuple):
    """An all-reduce between two fixed places.

    Attributes
    ----------
    source, sum : torch.Tensor
        ``[tokens, hidden]``; one and the same where the all-reduce is in place.
    run : callable
        Makes the call.
    after_capture : callable
        As in :class:`Runnable`.
    """

    source: torch.Tensor
    sum: torch.Tensor
    run: Callable[[], object]
    after_capture: Callable[[], None] = _nothing


class AllReduce(Protocol):
    """A way to sum over the ranks."""

    def __call__(self, problem: Problem) -> Reduction:
        """Make ready for a problem; collective."""
        ...


class Unfused:
    """An all-reduce followed by the norm, which works in place on the sum and the residual."""

    def __init__(self, rig: Rig, all_reduce: AllReduce) -> None:
        self._add_norm = rig.addnorm.apply
        self._all_reduce = all_reduce

    def prepare(self, problem: Problem, data: Data) -> Runnable:
        reduction = self._all_reduce(problem)
        residual = data.residual.clone()
        add_norm = self._add_norm

        def call() -> None:
            reduction.run()
            add_norm(reduction.sum, residual, data.gamma, EPSILON)

        def reset() -> None:
            reduction.sum.fill_(torch.nan)
            reduction.source.copy_(data.contribution)
            residual.copy_(data.residual)

        return Runnable({"": call}, reduction.sum, residual, reset, reduction.after_capture)


def _shaped(buffer: torch.Tensor, problem: Problem) -> torch.Tensor:
    return buffer[: problem.elements].view(problem.tokens, problem.hidden)


def _nccl(rig: Rig) -> AllReduce:
    """NCCL, in place in ordinary memory."""
    buffer = torch.empty(rig.largest.elements, dtype=DTYPE, device=rig.group.device)
    return _in_place_nccl(buffer)


def _nccl_symmetric(rig: Rig) -> AllReduce:
    """NCCL, in place in memory that is registered as a symmetric window (NCCL 2.27 and later)."""
    import torch.distributed as dist

    device = rig.group.device
    # The communicator must exist before memory can be registered with it.
    dist.all_reduce(torch.zeros(1, device=device))
    group: Any = dist.group.WORLD
    backend = group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        buffer = torch.empty(rig.largest.elements, dtype=DTYPE, device=device)
    backend.register_mem_pool(pool, symm=True)
    return _in_place_nccl(buffer, pool)


def _in_place_nccl(buffer: torch.Tensor, pool: object = None) -> AllReduce:
    """Return all-reduce in a buffer, whose memory pool has to live as long as it."""
    import torch.distributed as dist

    def reduction(problem: Problem, pool: object = pool) -> Reduction:
        rows = _shaped(buffer, problem)
        return Reduction(rows, rows, functools.partial(dist.all_reduce, rows))

    return reduction


def _symm_mem(rig: Rig, *, one_shot: bool) -> AllReduce:
    """torch's symmetric-memory kernels."""
    import torch.distributed as dist

    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    group: Any = dist.group.WORLD
    name = group.group_name
    buffer = symmetric.empty(rig.largest.elements, dtype=DTYPE, device=rig.group.device)
    symmetric.rendezvous(buffer, name)
    kernels = torch.ops.symm_mem

    def reduction(problem: Problem) -> Reduction:
        rows = _shaped(buffer, problem)
        if not one_shot:
            run = functools.partial(kernels.two_shot_all_reduce_, rows, "sum", name)
            return Reduction(rows, rows, run)
        total = torch.empty_like(rows)
        run = functools.partial(kernels.one_shot_all_reduce_out, rows, "sum", name, total)
        return Reduction(rows, total, run)

    return reduction


_VLLM_CTAS = 36
"""What vLLM launches, and the most that its kernel allows."""

_VLLM_RANK_DATA_BYTES = 8 * 2**20


def _vllm(rig: Rig) -> AllReduce:
    """vLLM's custom all-reduce as FlashInfer ships it, from registered memory."""
    module: Any = importlib.import_module("flashinfer.comm.vllm_ar")
    ipc: Any = importlib.import_module("flashinfer.comm.cuda_ipc")
    group, size = rig.group, rig.largest.payload_bytes

    # Behind the signals lies the second kernel's scratch space.
    signal_bytes = module.meta_size() + size
    signals: list[int] = ipc.create_shared_buffer(signal_bytes)
    _view(signals[group.rank], signal_bytes, group.device).zero_()
    sources: list[int] = ipc.create_shared_buffer(size)
    rank_data = torch.empty(_VLLM_RANK_DATA_BYTES, dtype=torch.uint8, device=group.device)
    torch.cuda.synchronize()
    group.barrier()
    handle = module.init_custom_ar(signals, rank_data, group.rank, True)
    module.register_buffer(handle, sources)
    buffer = _view(sources[group.rank], size, group.device).view(DTYPE)

    def publish(rank_data: torch.Tensor = rank_data) -> None:
        # The handle has the address of this tensor, not the tensor.
        handles, offsets = module.get_graph_buffer_ipc_meta(handle)
        everyone = group.gather((list(handles), list(offsets)))
        module.register_graph_buffers(handle, [h for h, _ in everyone], [o for _, o in everyone])

    def reduction(problem: Problem) -> Reduction:
        rows = _shaped(buffer, problem)
        total = torch.empty_like(rows)
        run = functools.partial(module.all_reduce, handle, rows, total, 0, 0, _VLLM_CTAS)
        return Reduction(rows, total, run, publish)

    return reduction


class _DeviceBytes:
    """Device memory that somebody else owns, as CUDA array interface version 3."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _view(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_DeviceBytes(address, size_bytes), device=device)


def _unfused(make: Callable[..., AllReduce], **options: Any) -> Callable[[Rig], Method]:
    return lambda rig: Unfused(rig, make(rig, **options))


MAKERS: dict[str, Callable[[Rig], Method]] = {
    "vllm_custom_ar": _unfused(_vllm),
    "symm_mem_oneshot": _unfused(_symm_mem, one_shot=True),
    "symm_mem_twoshot": _unfused(_symm_mem, one_shot=False),
    "nccl": _unfused(_nccl),
    "nccl_symm": _unfused(_nccl_symmetric),
}
