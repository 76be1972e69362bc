"""The ranks of a run, and how they agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Group(Protocol):
    """All ranks. Every method is collective."""

    rank: int
    ranks: int
    device: torch.device

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        ...

    def barrier(self) -> None:
        """Wait on the host for all ranks."""
        ...


class TorchGroup:
    """A rank of torch's default process group (NCCL), which this creates.

    Parameters
    ----------
    rank, ranks : int
        Rank ``r`` has GPU ``r``.
    rendezvous : str
        A file in a directory that all ranks see, which does not exist yet.
    timeout_s : float
        After which collectives give up.
    """

    def __init__(self, rank: int, ranks: int, rendezvous: str, timeout_s: float) -> None:
        import torch.distributed as dist

        self.rank = rank
        self.ranks = ranks
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=ranks,
            timeout=timeout,
            device_id=self.device,
        )
        # What the ranks tell each other must not go over what they measure.
        self._host: Any = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._host)
        return values

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self._host)


class UnavailableError(Exception):
    """Something cannot be done on at least one rank, hence is done on none. The text says why."""


def attempt(group: Group, action: Callable[[], T]) -> T:
    """Do something on all ranks; what fails on one fails on all.

    Raises
    ------
    UnavailableError
        On every rank, if ``action`` raised on any.
    """
    error = None
    try:
        value = action()
    except Exception as raised:
        error = f"{type(raised).__name__}: {_first_line(raised)}"
    errors = group.gather(error)
    for rank, text in enumerate(errors):
        if text is not None:
            everywhere = all(other is not None for other in errors)
            raise UnavailableError(text if everywhere else f"rank {rank}: {text}")
    return value


class Deadline:
    """When a run has to end; the same for all ranks, though their clocks may differ.

    Parameters
    ----------
    group : Group
    seconds : float
        From now on.
    """

    def __init__(self, group: Group, seconds: float) -> None:
        self._group = group
        self._end = time.monotonic() + seconds

    def passed(self) -> bool:
        """Return whether it has passed on any rank; collective."""
        return any(self._group.gather(time.monotonic() > self._end))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
