"""Descriptors between real processes, with memory files in place of GPU memory."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from flashinfer.elastic.allreduce import fd_exchange
from flashinfer.elastic.allreduce.agreement import Agreement
from flashinfer.elastic.allreduce.fd_exchange import peer_descriptors

# Forked, so that a rank starts in milliseconds; nothing here runs threads of its own.
CONTEXT = mp.get_context("fork")


class PipeBackend:
    """A backend whose root gathers over pipes; a root that lost a peer tells the others."""

    def __init__(self, rank: int, pipes: list[Connection]) -> None:
        self.rank = rank
        self.pipes = pipes

    def allgather(self, data: bytes) -> list[bytes]:
        if self.rank != 0:
            self.pipes[0].send(data)
            return self._checked(self.pipes[0])
        gathered: Any = [data]
        for pipe in self.pipes:
            try:
                gathered.append(pipe.recv())
            except EOFError:
                gathered = ConnectionError("a peer died")
                break
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(gathered)
        if isinstance(gathered, Exception):
            raise gathered
        return list(gathered)

    @staticmethod
    def _checked(pipe: Connection) -> list[bytes]:
        answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return list(answer)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(size: int, work: Callable[[Agreement], Any], timeout_s: float = 60.0) -> list[Any]:
    """Run ``work`` in one forked process per rank; return results, or None of those that died."""
    upward = [CONTEXT.Pipe() for _ in range(size - 1)]
    results = [CONTEXT.Pipe(duplex=False) for _ in range(size)]

    def main(rank: int) -> None:
        # Only this rank's ends stay open, or the death of a peer would go unnoticed.
        for index, (root_end, rank_end) in enumerate(upward):
            if rank != 0:
                root_end.close()
            if rank != index + 1:
                rank_end.close()
        pipes = [ends[0] for ends in upward] if rank == 0 else [upward[rank - 1][1]]
        agreement = Agreement(PipeBackend(rank, pipes), rank, size)
        try:
            result = work(agreement)
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        results[rank][1].send(result)

    processes = [CONTEXT.Process(target=main, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for ends in upward:
        for end in ends:
            end.close()
    for _, write_end in results:
        write_end.close()
    deadline = time.monotonic() + timeout_s
    answers = []
    try:
        for read_end, _ in results:
            assert read_end.poll(max(deadline - time.monotonic(), 0)), "ranks did not finish"
            try:
                answers.append(read_end.recv())
            except EOFError:
                answers.append(None)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for read_end, _ in results:
            read_end.close()
    return answers


def memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("shared")
    os.write(descriptor, content)
    return descriptor


def share(agreement: Agreement) -> tuple[dict[int, bytes], bool, int]:
    before = open_descriptors()
    own = memory_file(b"memory of %d" % agreement.rank)
    with peer_descriptors(agreement, own) as peers:
        contents = {rank: os.pread(peer, 100, 0).rstrip(b"\0") for rank, peer in peers.items()}
        inheritable = any(os.get_inheritable(peer) for peer in peers.values())
        for peer in peers.values():
            os.pwrite(peer, b"seen", 200 + 8 * agreement.rank)
        agreement.barrier()
        # It is the same memory, not a copy.
        for rank in peers:
            assert os.pread(own, 4, 200 + 8 * rank) == b"seen"
    os.close(own)
    return contents, inheritable, open_descriptors() - before


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_everyone_gets_everyones(size: int) -> None:
    for rank, (contents, inheritable, leaked) in enumerate(run(size, share)):
        assert contents == {r: b"memory of %d" % r for r in range(size) if r != rank}
        assert not inheritable
        assert leaked == 0


def test_many_exchanges_leak_nothing() -> None:
    def work(agreement: Agreement) -> int:
        share(agreement)
        before = open_descriptors()
        for _ in range(50):
            share(agreement)
        return open_descriptors() - before

    assert run(4, work) == [0] * 4


def failing_share(agreement: Agreement, timeout_s: float) -> tuple[str, float, int]:
    before = open_descriptors()
    start = time.monotonic()
    own = memory_file(b"x")
    try:
        with peer_descriptors(agreement, own, timeout_s=timeout_s):
            return "got them all", 0.0, 0
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        os.close(own)
    return text, time.monotonic() - start, open_descriptors() - before


def replace_send(
    monkeypatch: pytest.MonkeyPatch, culprit: int, replacement: Callable[[], bool]
) -> None:
    """Let one rank do something else instead of sending."""
    send = fd_exchange._send

    def patched(address: bytes, secret: bytes, rank: int, descriptor: int) -> bool:
        return replacement() if rank == culprit else send(address, secret, rank, descriptor)

    monkeypatch.setattr(fd_exchange, "_send", patched)


def test_a_peer_that_never_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_send(monkeypatch, 2, lambda: True)
    for text, seconds, leaked in run(4, lambda agreement: failing_share(agreement, 0.5)):
        assert text == (
            "CollectiveError: exchange of memory handles: "
            "ranks 0-1, 3: TimeoutError: no memory handle from rank 2 in time"
        )
        assert seconds < 5
        assert leaked == 0


def test_a_peer_whose_queue_stays_full(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_send(monkeypatch, 1, lambda: False)
    for text, seconds, leaked in run(2, lambda agreement: failing_share(agreement, 0.5)):
        assert "rank 0: TimeoutError: no memory handle from rank 1 in time" in text
        assert "rank 1: TimeoutError: no connection to rank 0 in time" in text
        assert seconds < 5
        assert leaked == 0


def test_a_peer_that_cannot_send(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise OSError("Too many open files")

    replace_send(monkeypatch, 1, broken)
    for text, seconds, leaked in run(2, lambda agreement: failing_share(agreement, 0.5)):
        assert "rank 1: OSError: Too many open files" in text
        assert seconds < 5
        assert leaked == 0


def test_a_peer_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_send(monkeypatch, 3, lambda: os._exit(1))
    *survivors, dead = run(4, lambda agreement: failing_share(agreement, 0.5))
    assert dead is None
    for text, seconds, leaked in survivors:
        assert "a peer died" in text
        assert seconds < 5
        assert leaked == 0


def test_a_process_out_of_descriptors() -> None:
    import resource

    def work(agreement: Agreement) -> tuple[str, float, int]:
        if agreement.rank == 0:
            # Room for the inbox, its selector and the connections, not for all descriptors.
            room = os.dup(0)
            os.close(room)
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (room + 5, hard))
        return failing_share(agreement, 1.0)

    for text, seconds, leaked in run(4, work):
        assert text.startswith("CollectiveError: exchange of memory handles: ")
        assert "rank 0: OSError" in text
        assert seconds < 10
        assert leaked == 0


def test_strangers_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections with no message, a wrong secret, or a descriptor nobody asked for."""
    open_inbox = fd_exchange._open_inbox

    def invaded(connections: int) -> socket.socket:
        inbox = open_inbox(connections)
        address = inbox.getsockname()
        strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        for stranger in strangers:
            stranger.connect(address)
        for stranger, message in zip(strangers, [b"hello", b"\0" * 20], strict=False):
            trash = memory_file(b"trash")
            socket.send_fds(stranger, [message], [trash])
            os.close(trash)
        strangers[0].close()
        # The last one stays connected and silent for as long as the process lives.
        silent.append(strangers[1:])
        return inbox

    silent: list[Any] = []
    monkeypatch.setattr(fd_exchange, "_open_inbox", invaded)

    def work(agreement: Agreement) -> tuple[dict[int, bytes], int]:
        contents, _, more = share(agreement)
        return contents, more - 2  # the two strangers that are still connected

    assert run(2, work) == [({1: b"memory of 1"}, 0), ({0: b"memory of 0"}, 0)]


def test_a_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    open_inbox = fd_exchange._open_inbox
    monkeypatch.setattr(fd_exchange, "_open_inbox", lambda connections: open_inbox(0))
    start = time.monotonic()
    for contents, _, leaked in run(8, share):
        assert len(contents) == 7
        assert leaked == 0
    assert time.monotonic() - start < 10


def test_an_error_in_the_block_closes_descriptors() -> None:
    def work(agreement: Agreement) -> int:
        before = open_descriptors()
        own = memory_file(b"x")
        with pytest.raises(ZeroDivisionError), peer_descriptors(agreement, own):
            raise ZeroDivisionError
        os.close(own)
        return open_descriptors() - before

    assert run(3, work) == [0] * 3
