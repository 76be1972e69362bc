"""A group of threads with torch's symmetric memory and a multicast address, without a GPU."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from upstream_on_cpu import CpuTorch, Threads

from flashinfer.elastic.allreduce import multicast, torch_symmetric, trial
from flashinfer.elastic.allreduce.agreement import Agreement
from flashinfer.elastic.allreduce.engines import Call
from flashinfer.elastic.allreduce.strategy import Strategy

MULTICAST_ADDRESS = 0x7F0000000000


class TorchMemory:
    """Torch's class of symmetric memory.

    Attributes
    ----------
    multicast : int
        The address in its handles.
    supported : bool
        What it says of multicast on this GPU.
    backend : str or None
        What it allocates with.
    broken : dict of str to int
        Steps (``allocate``, ``rendezvous``) that fail, on which rank.
    allocations : list of weak references
        To the memory given out.
    """

    def __init__(self, group: Threads) -> None:
        self.multicast = MULTICAST_ADDRESS
        self.supported = True
        self.backend: str | None = "CUDA"
        self.broken: dict[str, int] = {}
        self.ranks = group.ranks
        self.touched = 0
        self.live = 0
        self.enabled: list[str] = []

    def rendezvous(self, tensor: Any, group_name: str) -> Any:
        assert group_name == "tp"
        rank = current_rank()
        self._fail("rendezvous", rank)
        addresses = [0x1000 * (1 + peer) for peer in range(self.ranks)]
        addresses[rank] = tensor.data_ptr()
        return types.SimpleNamespace(
            rank=rank,
            world_size=self.ranks,
            buffer_ptrs=addresses,
            buffer_size=tensor.numel(),
            multicast_ptr=self.multicast,
        )

    def get_backend(self, device: Any) -> str | None:
        return self.backend

    def has_multicast_support(self, kind: Any, index: int | None) -> bool:
        assert kind == torch._C._autograd.DeviceType.CUDA
        return self.supported

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: Any, device: Any) -> Any:
        assert stride == (1,)
        self._fail("allocate", current_rank())
        owner = self

        class Memory:
            def __init__(self) -> None:
                owner.live += 1

            def __del__(self) -> None:
                owner.live -= 1

            def data_ptr(self) -> int:
                return 0x900000 + 0x1000 * current_rank()

            def numel(self) -> int:
                return int(size[0])

        return Memory()

    def _fail(self, step: str, rank: int) -> None:
        if self.broken.get(step) == rank:
            raise RuntimeError(f"{step} broken on purpose")


_place = threading.local()


def current_rank() -> int:
    """Return the rank whose thread this is."""
    return int(_place.rank)


def on_ranks(group: Threads, work: Callable[[int], Any]) -> list[Any]:
    """Call ``work(rank)`` on all ranks, which the doubles can tell apart."""

    def one(rank: int) -> Any:
        _place.rank = rank
        return work(rank)

    return group.run(one)


def backend_of(group: Threads, rank: int) -> Any:
    """Return a backend over a group of torch's."""
    backend = group.backend(rank)
    backend._group = types.SimpleNamespace(rank=rank, size=group.ranks, group_name="tp")
    return backend


def agreement_of(group: Threads, rank: int) -> Agreement:
    return Agreement(group.backend(rank), rank, group.ranks)


def without_gpu(patch: pytest.MonkeyPatch, group: Threads) -> TorchMemory:
    """Let multicast be tried without a GPU; return what torch's memory will be."""
    memory = TorchMemory(group)
    doubled = CpuTorch()
    doubled.distributed = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda group: group.rank,
        get_world_size=lambda group: group.size,
    )
    doubled.cuda.is_initialized = lambda: False

    def module() -> TorchMemory:
        memory.touched += 1
        return memory

    for name in multicast._SWITCHES:
        patch.delenv(name, raising=False)
    patch.setattr(multicast, "torch", doubled)
    patch.setattr(multicast, "symmetric_memory", module)
    patch.setattr(torch_symmetric, "torch", doubled)
    patch.setattr(torch_symmetric, "symmetric_memory", module)
    around = types.ModuleType("torch.distributed._symmetric_memory")
    vars(around)["enable_symm_mem_for_group"] = memory.enabled.append
    patch.setitem(sys.modules, around.__name__, around)
    patch.setattr(trial, "torch", doubled)
    return memory


class Machine:
    """All-reduce over threads, as an engine over unicast and multicast would do it.

    Attributes
    ----------
    lost : set of int
        Ranks that words do not reach by multicast.
    wrong : set of int
        Ranks that get a wrong bit by multicast.
    mixed_up : bool
        Whether multicast brings the rows of rank 0 in the place of everybody's.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.lost: set[int] = set()
        self.wrong: set[int] = set()
        self.mixed_up = False
        self._gate = threading.Barrier(ranks)
        self._inputs: list[Any] = [None] * ranks

    def subject(self, rank: int) -> Subject:
        return Subject(self, rank)

    def sum(self, way: str, rank: int, rows: torch.Tensor) -> torch.Tensor:
        self._inputs[rank] = rows
        self._gate.wait(20)
        total = torch.zeros(rows.shape)
        for sender in range(self.ranks):
            mixed_up = self.mixed_up and way == "multicast"
            total += self._inputs[0 if mixed_up else sender].float()
        self._gate.wait(20)
        return total.to(rows.dtype)


class Subject:
    """One rank's engine."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self._machine = machine
        self._rank = rank
        self._expired = 0
        self.launches: list[tuple[str, Strategy, tuple[int, ...], torch.dtype]] = []

    def launch(self, call: Call, first: int, count: int, strategy: Strategy) -> None:
        self._launch("unicast", call, first, count, strategy)

    def launch_trial(self, call: Call, first: int, count: int, strategy: Strategy) -> None:
        output = self._launch("multicast", call, first, count, strategy)
        if self._rank in self._machine.lost:
            output.zero_()
            self._expired += 1
        if self._rank in self._machine.wrong:
            bits = output.view({2: torch.int16, 4: torch.int32}[output.dtype.itemsize])
            bits[-1, -1] ^= 1

    def expired_waits(self) -> int:
        return self._expired

    def _launch(
        self, way: str, call: Call, first: int, count: int, strategy: Strategy
    ) -> torch.Tensor:
        assert (first, count) == (0, call.input.shape[0])
        assert call.output is not None
        self.launches.append((way, strategy, tuple(call.input.shape), call.input.dtype))
        call.output.copy_(self._machine.sum(way, self._rank, call.input))
        return call.output
