"""A process that overstays is killed, and the failure says what it printed and where it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
from watched import Watched

OVERSTAYS = """
import threading, time
def here_a_thread_waits():
    time.sleep(600)
def here_it_waits():
    print("marker: waiting", flush=True)
    time.sleep(600)
threading.Thread(target=here_a_thread_waits).start()
here_it_waits()
"""


def test_a_process_that_overstays_is_shown_and_gone() -> None:
    one = Watched(OVERSTAYS)
    one.expect("marker: waiting", 30)
    with pytest.raises(AssertionError) as failure:
        one.expect_end(4)
    text = str(failure.value)
    assert "still there after 4 s" in text
    assert "marker: waiting" in text
    for function in ("here_it_waits", "here_a_thread_waits"):
        assert f"in {function}" in text
    assert f"  {one.process.pid} python" in text
    assert one.process.returncode is not None


def test_a_process_that_lingers_after_its_interpreter_is_shown_too() -> None:
    """What a library does at exit, when no Python stack is left to show."""
    one = Watched(
        """
import ctypes
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)
print("marker: leaving", flush=True)
"""
    )
    one.expect("marker: leaving", 30)
    with pytest.raises(AssertionError, match=r"(?s)without a Python interpreter.*marker: leaving"):
        one.expect_end(4)


def test_a_process_that_ends_gives_its_code_and_all_output() -> None:
    one = Watched("import os, sys; print(sys.argv[1], os.environ['LETTER']); sys.exit(7)",
                  ["word"], {"LETTER": "x"})  # fmt: skip
    assert one.expect_end(30) == 7
    assert one.text == "word x\n"
    one.kill()


def test_a_process_that_ends_early_is_not_waited_for() -> None:
    one = Watched("print('only this')")
    with pytest.raises(AssertionError, match=r"(?s)no 'marker'.*only this"):
        one.expect("marker", 60)
    one.kill()
