"""A communication backend that interrupts its own process around one of its collectives."""

from __future__ import annotations

import os
import signal
from typing import Any


class InterruptedBackend:
    """To be put before a backend's class; ``at`` counts its collectives from 1."""

    def __init__(self, at: int, *, after: bool) -> None:
        super().__init__()
        self.left = at
        self.after = after

    def allgather(self, data: bytes) -> list[bytes]:
        """Gather, and interrupt before or after the collective that was chosen."""
        backend: Any = super()
        self.left -= 1
        if self.left == 0 and not self.after:
            os.kill(os.getpid(), signal.SIGINT)
        gathered: list[bytes] = backend.allgather(data)
        if self.left == 0 and self.after:
            os.kill(os.getpid(), signal.SIGINT)
        return gathered
