"""An interrupt at any moment of a creation: all ranks learn of it, and nothing is left behind."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from flashinfer.elastic.allreduce import agreement, interrupts, settings
from flashinfer.elastic.allreduce import workspace as our_workspace
from flashinfer.elastic.allreduce.agreement import CollectiveError
from flashinfer.elastic.shadow import TESTED_VERSIONS

sys.path.insert(0, str(Path(__file__).parent))
from creation_double import Node

RANKS = 3
PRODUCT = str(Path(agreement.__file__).parent)

this_rank = threading.local()


class Group:
    """Ranks on threads; rank 0 is the main thread, the one that signals interrupt."""

    def __init__(self) -> None:
        self._cells: list[Any] = [None] * RANKS
        self._gate = threading.Barrier(RANKS)

    def allgather(self, data: bytes) -> list[Any]:
        self._cells[this_rank.value] = data
        self._gate.wait(15)
        gathered = list(self._cells)
        self._gate.wait(15)
        return gathered

    def barrier(self) -> None:
        self.allgather(b"")

    def run(self, work: Callable[[], Any]) -> list[Any]:
        """Call ``work`` on every rank; return results, or what was raised, by rank."""
        results: list[Any] = [None] * RANKS

        def one(rank: int) -> None:
            this_rank.value = rank
            try:
                results[rank] = work()
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(1, RANKS)]
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()
        return results


@pytest.fixture(autouse=True)
def _interrupts_are_pythons() -> Iterator[None]:
    """Raise KeyboardInterrupt also where the tests run in the background, deaf to Ctrl-C."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.fixture(scope="module")
def made(upstream_tree: Callable[[str], Path]) -> Node:
    return Node(upstream_tree(TESTED_VERSIONS[0]), RANKS, lambda: this_rank.value, threads=True)


@pytest.fixture
def node(made: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made.enter(monkeypatch)
    handler = signal.getsignal(signal.SIGINT)
    gc.freeze()  # collections then look at what a test makes, not at all of torch
    yield made
    gc.unfreeze()
    assert signal.getsignal(signal.SIGINT) is handler


class Interrupting:
    """Raises a signal in the main thread when it has executed so many lines of the product.

    Lines count from where interrupts are held: before, a rank is interrupted as if it had not
    called.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        if event == "line" and signal.getsignal(signal.SIGINT) is not self._handler:
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self

    def __enter__(self) -> Interrupting:
        self._former = sys.gettrace()
        self._handler = signal.getsignal(signal.SIGINT)
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._former)


def create(node: Node, group: Group, at: int) -> tuple[list[Any], Interrupting]:
    interrupting = Interrupting(at)

    def work() -> Any:
        if this_rank.value != 0:
            return node.create(group)
        with interrupting:
            return node.create(group)

    return group.run(work), interrupting


def test_an_interrupt_at_any_line_of_a_creation(node: Node) -> None:
    results, counted = create(node, Group(), -1)
    for workspace in results:
        workspace.destroy()
    del results, workspace
    before = node.held()
    assert counted.lines > 500
    told = alone = 0
    for at in range(1, counted.lines, 97):
        group = Group()
        start = time.monotonic()
        results, interrupting = create(node, group, at)
        where = f"line {at} of {counted.lines}, {interrupting.where}: {results}"
        assert time.monotonic() - start < 10, where
        assert type(results[0]) is KeyboardInterrupt, where
        if all(type(result) is CollectiveError for result in results[1:]):
            assert all("rank 0: KeyboardInterrupt" in str(error) for error in results[1:]), where
            told += 1
        else:
            # All was made and agreed on: the interrupt is this rank's alone.
            for workspace in results[1:]:
                workspace.destroy()
            workspace = None
            alone += 1
        results.clear()
        assert node.held() == before, where

        # The same group tries again.
        again = group.run(lambda group=group: node.create(group))
        for workspace in again:
            workspace.destroy()
    assert told > 20
    assert alone <= 3


def test_what_was_made_before_a_late_interrupt_is_destroyed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have their workspaces; this rank keeps nothing, even while its error lives."""
    enroll = our_workspace.compiled.enroll

    def interrupted(workspace: Any) -> int:
        if this_rank.value == 0:
            signal.raise_signal(signal.SIGINT)
        return enroll(workspace)

    monkeypatch.setattr(our_workspace.compiled, "enroll", interrupted)
    before = node.held()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group = Group()
        made = group.run(lambda: node.create(group))
        assert type(made[0]) is KeyboardInterrupt
        for workspace in made[1:]:
            workspace.destroy()
        assert node.held() == before
        made.clear()
        del workspace
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_an_interrupt_while_upstreams_workspace_is_made(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = our_workspace.UpstreamEngine

    def interrupted(*arguments: Any) -> Any:
        if this_rank.value == 0:
            signal.raise_signal(signal.SIGINT)
        return engine(*arguments)

    monkeypatch.setenv(settings.ENGINE, "upstream")
    monkeypatch.setattr(our_workspace, "UpstreamEngine", interrupted)
    group = Group()
    results = group.run(lambda: node.create(node.loaded.torch_backend(group)))
    assert type(results[0]) is KeyboardInterrupt
    assert all("rank 0: KeyboardInterrupt" in str(error) for error in results[1:]), results


def test_an_interrupt_of_a_destruction_waits_for_its_end(node: Node) -> None:
    group = Group()
    made = group.run(lambda: node.create(group))
    for workspace in made:
        workspace.destroy()
    before = node.held()
    for at in range(1, 60, 7):
        made = group.run(lambda: node.create(group))
        with pytest.raises(KeyboardInterrupt), Interrupting(at) as interrupting:
            made[0].destroy()
        assert made[0]._destroyed, interrupting.where
        # Before it began, it can be called again.
        for workspace in made:
            workspace.destroy()
        made.clear()
        del workspace
        assert node.held() == before, interrupting.where


def raise_signals(*numbers: int) -> None:
    for number in numbers:
        signal.raise_signal(number)


def test_what_a_handler_raises_is_held_until_delivered() -> None:
    with interrupts.held():
        raise_signals(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.deliver()
        interrupts.deliver()


def test_what_was_not_delivered_is_raised_at_the_end() -> None:
    reached = []

    def work() -> None:
        with interrupts.held(), interrupts.held():
            raise_signals(signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached


def test_a_second_interrupt_is_not_held() -> None:
    """For a user whose peers never come."""
    reached = []

    def work() -> None:
        with interrupts.held():
            raise_signals(signal.SIGINT, signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not reached


def test_the_interrupt_wins_over_an_error() -> None:
    def work() -> None:
        with interrupts.held():
            raise_signals(signal.SIGINT)
            raise ValueError("an error")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_does_not_raise_runs_at_once() -> None:
    seen: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with interrupts.held():
            raise_signals(signal.SIGTERM, signal.SIGTERM)
            assert seen == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_handler_that_exits_is_held_as_well() -> None:
    former = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
    try:
        with pytest.raises(SystemExit), interrupts.held():
            raise_signals(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_ignored_or_the_systems_stays_so(handler: signal.Handlers) -> None:
    former = signal.signal(signal.SIGTERM, handler)
    try:
        with interrupts.held():
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_handler_installed_meanwhile_stays() -> None:
    former = signal.getsignal(signal.SIGINT)

    def other(number: int, frame: FrameType | None) -> None: ...

    try:
        with interrupts.held():
            signal.signal(signal.SIGINT, other)
        assert signal.getsignal(signal.SIGINT) is other
    finally:
        signal.signal(signal.SIGINT, former)


def test_other_threads_hold_nothing() -> None:
    """Python runs handlers in the main thread only."""
    handler = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def work() -> None:
        with interrupts.held():
            seen.append(signal.getsignal(signal.SIGINT))
            interrupts.deliver()

    with interrupts.held():
        raise_signals(signal.SIGINT)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with pytest.raises(KeyboardInterrupt):
            interrupts.deliver()
    assert len(seen) == 1 and seen[0] is not handler


def test_where_no_handler_can_be_installed_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a subinterpreter, whose main thread Python lets install none."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            with interrupts.held():
                outcome.append("done")
        except BaseException as error:
            outcome.append(error)

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    monkeypatch.setattr(interrupts.threading, "main_thread", lambda: thread)
    thread.start()
    thread.join()
    assert outcome == ["done"]
    assert signal.getsignal(signal.SIGINT) is handler
