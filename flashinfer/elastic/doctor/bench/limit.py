"""The limit: what any all-reduce between these GPUs has to spend.

Measured with kernels that do nothing else: pushing the bytes of a strategy to the peers, back to
back in a graph (which includes the interval between launches), and passing a flag one way for every
hop. The limit of a problem is that of the better strategy.

==========  ====================================================  ====
strategy    bytes that a rank sends, of S = tokens * hidden * e   hops
==========  ====================================================  ====
one-shot    S to each of the P-1 peers                            1
two-shot    2 * S * (P-1) / P, in equal shares                    2
==========  ====================================================  ====

In a group of two both send S, and only one-shot counts.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .group import Group
from .kernels import Argument, Kernels
from .problem import Problem

_WORD_BYTES = 16
_THREADS_A_MULTIPROCESSOR = 2048
_WARM_UP_TURNS, _TURNS = 200, 2000
_FLAG_TIMEOUT_NS = 5 * 10**9


class Push(NamedTuple):
    """How a strategy moves its bytes.

    Attributes
    ----------
    strategy, kernel : str
    words : int
        Of 16 bytes, that the kernel reads; it sends each to all peers or to one.
    hops : int
        One-way flags that follow one another.
    """

    strategy: str
    kernel: str
    words: int
    hops: int


def pushes(problem: Problem, ranks: int) -> list[Push]:
    """Return what the strategies push for a problem."""
    one_shot = Push("one-shot", "push_to_all", _words(problem.payload_bytes), 1)
    if ranks == 2:
        return [one_shot]
    sent = 2 * problem.payload_bytes * (ranks - 1) // ranks
    return [one_shot, Push("two-shot", "push_shares", _words(sent), 2)]


def _words(size_bytes: int) -> int:
    return -(-size_bytes // _WORD_BYTES)


class Limit:
    """Measures what a limit is made of.

    Parameters
    ----------
    group : Group
    largest : Problem
        No problem has a larger payload.
    """

    def __init__(self, group: Group, largest: Problem) -> None:
        import torch.distributed as dist

        self._group = group
        self._kernels = Kernels()
        properties = torch.cuda.get_device_properties(group.device)
        self._multiprocessors: int = properties.multi_processor_count
        # Twice the payload bounds what two-shot sends. Every rank writes to a region of its own.
        self._region_bytes = 2 * _words(largest.payload_bytes) * _WORD_BYTES
        self._source = torch.randint(
            -(2**31), 2**31 - 1, (self._region_bytes // 4,), dtype=torch.int32, device=group.device
        )
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        world: Any = dist.group.WORLD
        self._flags_offset = group.ranks * self._region_bytes
        size = self._flags_offset + _WORD_BYTES
        self._memory = symmetric.empty(size, dtype=torch.uint8, device=group.device)
        handle = symmetric.rendezvous(self._memory, world.group_name)
        self._addresses: list[int] = [int(address) for address in handle.buffer_ptrs]
        destinations = [
            self._addresses[peer] + group.rank * self._region_bytes
            for peer in range(group.ranks)
            if peer != group.rank
        ]
        self._destinations = torch.tensor(destinations, dtype=torch.int64, device=group.device)

    def flag_us(self) -> float:
        """Return the microseconds that a flag takes one way between ranks 0 and 1; collective.

        Raises
        ------
        RuntimeError
            If the other GPU did not answer.
        """
        rank = self._group.rank
        flags = self._memory[self._flags_offset :]
        flags.zero_()
        elapsed = torch.zeros(1, dtype=torch.int64, device=self._group.device)
        torch.cuda.synchronize()
        self._group.barrier()
        if rank < 2:
            arguments: list[Argument] = [
                ("pointer", self._addresses[rank] + self._flags_offset),
                ("pointer", self._addresses[1 - rank] + self._flags_offset),
                ("int", int(rank == 0)),
                ("unsigned", _WARM_UP_TURNS),
                ("unsigned", _TURNS),
                ("long long", _FLAG_TIMEOUT_NS),
                ("pointer", elapsed.data_ptr()),
            ]
            self._kernels.launch("pass_flag", 1, 1, arguments)
        nanoseconds: int = max(self._group.gather(int(elapsed.item())))
        if not nanoseconds:
            raise RuntimeError("the other GPU did not return the flag")
        return nanoseconds / 1e3 / _TURNS / 2

    def launch_calls(self) -> dict[str, Callable[[], None]]:
        """Return calls that do nothing, whose interval is that of launches."""
        grid = self._multiprocessors
        return {
            name: functools.partial(
                self._kernels.launch, "do_nothing", grid, 128, dependent=dependent
            )
            for name, dependent in (("plain", False), ("dependent", True))
        }

    def push_calls(self, push: Push) -> dict[str, Callable[[], None]]:
        """Return calls that push the same bytes with different launches, by their description."""
        arguments: list[Argument] = [
            ("pointer", self._destinations.data_ptr()),
            ("int", self._group.ranks - 1),
            ("pointer", self._source.data_ptr()),
            ("long long", push.words),
        ]
        calls: dict[str, Callable[[], None]] = {}
        for block in (128, 512):
            most = self._multiprocessors * _THREADS_A_MULTIPROCESSOR // block
            grid = min(-(-push.words // block), most)
            for dependent in (False, True):
                name = f"{push.strategy} {grid}x{block}{' dependent' if dependent else ''}"
                calls[name] = functools.partial(
                    self._kernels.launch, push.kernel, grid, block, arguments, dependent=dependent
                )
        return calls

    def check(self, push: Push, call: Callable[[], None]) -> None:
        """Push once into zeroed memory and compare what arrived; collective.

        Raises
        ------
        RuntimeError
            If a peer's bytes did not arrive.
        """
        group = self._group
        self._memory.zero_()
        torch.cuda.synchronize()
        group.barrier()
        call()
        torch.cuda.synchronize()
        sums = group.gather(self._expected_sums(push))
        group.barrier()
        for source in range(group.ranks):
            if source == group.rank:
                continue
            start = source * self._region_bytes
            received = self._memory[start : start + push.words * _WORD_BYTES].view(torch.int32)
            if int(received.sum(dtype=torch.int64)) != sums[source][group.rank]:
                raise RuntimeError(f"{push.strategy}: what rank {source} pushed did not arrive")

    def _expected_sums(self, push: Push) -> list[int]:
        """Return the sum of the 32-bit words that each rank should have received from this one."""
        group = self._group
        words = self._source[: push.words * _WORD_BYTES // 4]
        peers = [peer for peer in range(group.ranks) if peer != group.rank]
        sums = [0] * group.ranks
        share = -(-push.words // len(peers)) * _WORD_BYTES // 4
        for place, peer in enumerate(peers):
            part = words if push.kernel == "push_to_all" else words[place * share :][:share]
            sums[peer] = int(part.sum(dtype=torch.int64))
        return sums
