"""Interrupts that come while the ranks of a group depend on each other.

A rank that is interrupted between two collectives would leave without a word, and its peers would
wait for it as long as their backend does. So what a signal's handler raises (``KeyboardInterrupt``,
or the ``SystemExit`` of a server's own handler) is held until this rank can tell the others, which
is at the next step that they agree on.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Holder:
    """Stands in for the handlers of some signals and keeps what they raise."""

    def __init__(self) -> None:
        self.exception: BaseException | None = None
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._holding = True

    def install(self) -> None:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            # Not one that is ignored, left to the system or installed from outside of Python.
            if callable(handler):
                self._handlers[number] = handler
                try:
                    signal.signal(number, self._handle)
                except ValueError:  # a subinterpreter: its handlers never run
                    return

    def remove(self) -> None:
        try:
            for number, handler in reversed(self._handlers.items()):
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, handler)
        finally:
            # A signal amid these lines may leave one in place. It does no more than pass on.
            self._holding = False

    def take(self) -> BaseException | None:
        exception, self.exception = self.exception, None
        return exception

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            if not self._holding or self.exception is not None:
                raise
            # Its traceback would keep alive whatever the interrupted frames hold.
            self.exception = error.with_traceback(None)


_holder: _Holder | None = None


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold what handlers of SIGINT and SIGTERM raise in this block.

    It is raised by :func:`deliver`, or at the end of the block. Handlers themselves run at once.
    While one exception is held, that of the next signal is raised at once, for a user whose peers
    never come. Does nothing within another such block, and in other threads than the main one, the
    only one whose work signals interrupt.
    """
    global _holder
    if _holder is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    holder = _holder = _Holder()
    try:
        holder.install()
        yield
    finally:
        _holder = None
        holder.remove()
        exception = holder.take()
        if exception is not None:
            raise exception


def deliver() -> None:
    """Raise what is held for this thread, if anything."""
    if _holder is not None and threading.current_thread() is threading.main_thread():
        exception = _holder.take()
        if exception is not None:
            raise exception
