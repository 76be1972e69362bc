"""What an engine needs of the memory that a group's ranks share."""

from __future__ import annotations

from typing import Protocol

from .agreement import Agreement


class GroupMemory(Protocol):
    """Memory of the same size on every GPU of a group, mapped by every rank.

    ``symmetric.SymmetricMemory`` can be detached and attached again; ``torch_symmetric
    .TorchSymmetricMemory`` has a multicast address instead.
    """

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each rank's memory is mapped in this process; empty once closed."""
        ...

    @property
    def multicast_address(self) -> int:
        """Where a multimem store reaches the memory of all ranks; 0 for nowhere."""
        ...

    @property
    def mapped(self) -> bool:
        """Whether there is memory behind the addresses."""
        ...

    @property
    def detachable(self) -> bool:
        """Whether ``detach`` and ``attach`` are possible; the same on all ranks."""
        ...

    def close(self) -> None:
        """Give everything back; local, idempotent, refused while a CUDA graph is captured."""
        ...

    def detach(self) -> None:
        """Give the memory back and keep its addresses; local."""
        ...

    def attach(self, agreement: Agreement) -> None:
        """Take memory again at the same addresses, not initialised; collective."""
        ...
