"""Processes that have to end in time, and that tell where they were when they did not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_STACKS_BEFORE_LIMIT_S = 3.0
"""How long before a limit the stacks are asked for, for them to arrive."""

PRELUDE = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1, all_threads=True)
"""
"""What a program that is watched begins with: it prints its Python stacks when it is asked to."""


class Watched:
    """A Python program in a process of its own, whose output is read as it comes.

    Parameters
    ----------
    program : str
        Python source; ``PRELUDE`` goes before it.
    arguments : sequence of str
    environment : mapping of str to str
        Added to this process's own.

    Attributes
    ----------
    process : subprocess.Popen
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", PRELUDE + program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | dict(environment or {}),
        )
        self._lines: list[str] = []
        self._grew = threading.Condition()
        self._closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """The output so far."""
        return "".join(self._lines)

    def expect(self, marker: str, seconds: float) -> None:
        """Wait until a text has been printed.

        Raises
        ------
        AssertionError
            If it has not within ``seconds``, or the process ends without; with all output.
        """
        with self._grew:
            self._grew.wait_for(lambda: marker in self.text or self._closed, timeout=seconds)
        assert marker in self.text, f"no {marker!r} within {seconds} s:\n{self.text}"

    def expect_end(self, seconds: float) -> int:
        """Wait until the process ends; return its exit code.

        Raises
        ------
        AssertionError
            If it has not ended within ``seconds``. The text holds its output, its Python stacks and
            what its threads do in the kernel. The process is killed.
        """
        limit = time.monotonic() + seconds
        try:
            self.process.wait(max(seconds - _STACKS_BEFORE_LIMIT_S, 0))
        except subprocess.TimeoutExpired:
            threads = _threads(self.process.pid)
            # A process with a Python interpreter is not disturbed, and may still end in time.
            self.process.send_signal(signal.SIGUSR1)
            try:
                code = self.process.wait(max(limit - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                code = None
            if code in (None, -signal.SIGUSR1):
                self.kill()
                where = "" if code is None else ", without a Python interpreter any more"
                raise AssertionError(
                    f"still there after {seconds} s{where}\n{self.text}\nthreads:\n{threads}"
                ) from None
        self._reader.join(10)
        return self.process.returncode

    def kill(self) -> None:
        """End the process, if it has not ended."""
        self.process.kill()
        self.process.wait(60)
        self._reader.join(10)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grew:
                self._lines.append(line)
                self._grew.notify_all()
        with self._grew:
            self._closed = True
            self._grew.notify_all()


def _threads(pid: int) -> str:
    """Say of each thread its name, its state, and where it waits in the kernel."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        try:
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            where = (task / "wchan").read_text().strip()
        except OSError:  # it has ended meanwhile, or is not ours to see
            continue
        lines.append(f"  {task.name} {name}: {state}, {where}")
    return "\n".join(lines)
