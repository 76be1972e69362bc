"""File descriptors from every rank to every rank of one host.

Descriptors travel as ``SCM_RIGHTS`` messages over Unix sockets, which needs no ptrace permission
and so works in containers. The sockets have random names in the abstract namespace: nothing is left
on disk. Any process of the network namespace could connect to them, so a message counts only with
the secret that its receiver gave to the group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from .agreement import Agreement, format_ranks

DEFAULT_TIMEOUT_S = 20.0

_SECRET_BYTES = 16
_MESSAGE = struct.Struct(f"<{_SECRET_BYTES}sI")  # the receiver's secret, the sender's rank
_RETRY_S = 0.01


@contextlib.contextmanager
def peer_descriptors(
    agreement: Agreement, descriptor: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[dict[int, int]]:
    """Give ``descriptor`` to all other ranks and hold theirs within a block; collective.

    Parameters
    ----------
    agreement : Agreement
        Of ranks that all are on one host.
    descriptor : int
        Stays the caller's, who closes it.
    timeout_s : float
        Seconds to wait for the peers.

    Yields
    ------
    dict[int, int]
        Descriptors of the other ranks, by rank. They are closed when the block ends.

    Raises
    ------
    CollectiveError
        On every rank, when a rank could not send its descriptor or did not get all others in time.
    """
    received: dict[int, int] = {}
    try:
        _exchange(agreement, descriptor, received, timeout_s)
        yield received
    finally:
        for peer_descriptor in received.values():
            os.close(peer_descriptor)


def _exchange(
    agreement: Agreement, descriptor: int, received: dict[int, int], timeout_s: float
) -> None:
    if agreement.world_size == 1:
        return
    secret = secrets.token_bytes(_SECRET_BYTES)
    with contextlib.ExitStack() as sockets:
        inbox = agreement.attempt(
            "opening a socket for memory handles",
            lambda: sockets.enter_context(_open_inbox(agreement.world_size)),
        )
        own = [bytes(inbox.getsockname()).hex(), secret.hex()]
        inboxes = [
            (bytes.fromhex(name), bytes.fromhex(peer_secret))
            for name, peer_secret in agreement.gather("socket for memory handles", own)
        ]

        def send_and_receive() -> None:
            deadline = time.monotonic() + timeout_s
            # Sending first cannot deadlock: every inbox queues connections of the whole group and
            # a message fits a socket's buffer, so no send waits for its receiver.
            _send(inboxes, agreement.rank, descriptor, deadline)
            _receive(inbox, secret, agreement, received, deadline)

        agreement.attempt("exchange of memory handles", send_and_receive)


def _open_inbox(connections: int) -> socket.socket:
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        inbox.bind(f"\0flashinfer-elastic-{secrets.token_hex(16)}")
        inbox.listen(connections)
        inbox.setblocking(False)
    except BaseException:
        inbox.close()
        raise
    return inbox


def _send(
    inboxes: Sequence[tuple[bytes, bytes]], rank: int, descriptor: int, deadline: float
) -> None:
    for peer, (address, peer_secret) in enumerate(inboxes):
        if peer == rank:
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as outbox:
            outbox.settimeout(max(deadline - time.monotonic(), _RETRY_S))
            while True:
                try:
                    outbox.connect(address)
                    break
                except BlockingIOError:  # the peer's queue is full: strangers
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"rank {peer} accepts no connection") from None
                    time.sleep(_RETRY_S)
            socket.send_fds(outbox, [_MESSAGE.pack(peer_secret, rank)], [descriptor])


def _receive(
    inbox: socket.socket,
    secret: bytes,
    agreement: Agreement,
    received: dict[int, int],
    deadline: float,
) -> None:
    """Add one descriptor per peer to ``received``; whatever strangers send is dropped."""
    wanted = set(range(agreement.world_size)) - {agreement.rank}
    with contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
        selector.register(inbox, selectors.EVENT_READ)
        while wanted:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no memory handle from {format_ranks(sorted(wanted))} in time")
            for key, _ in selector.select(left):
                if key.fileobj is inbox:
                    with contextlib.suppress(BlockingIOError):
                        connection = connections.enter_context(inbox.accept()[0])
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj  # type: ignore[assignment]
                selector.unregister(connection)
                arrived = _read(connection, secret, wanted)
                connection.close()
                if arrived is not None:
                    rank, descriptor = arrived
                    received[rank] = descriptor
                    wanted.remove(rank)


def _read(connection: socket.socket, secret: bytes, wanted: set[int]) -> tuple[int, int] | None:
    """Read one message; return its sender and descriptor, or None for a stranger's."""
    try:
        message, descriptors, _, _ = socket.recv_fds(
            connection, _MESSAGE.size + 1, 1, socket.MSG_CMSG_CLOEXEC
        )
    except OSError:
        return None
    if len(message) == _MESSAGE.size:
        claimed, rank = _MESSAGE.unpack(message)
        if secrets.compare_digest(claimed, secret) and rank in wanted:
            if descriptors:
                return rank, descriptors[0]
            # The kernel drops descriptors that do not fit this process's table.
            raise OSError(f"no room for a file descriptor of rank {rank}: raise `ulimit -n`")
    for descriptor in descriptors:
        os.close(descriptor)
    return None
