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
_DESCRIPTOR = struct.Struct("i")
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

        agreement.attempt(
            "exchange of memory handles",
            lambda: _trade(
                agreement.rank, inbox, inboxes, descriptor, received, time.monotonic() + timeout_s
            ),
        )


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


def _trade(
    rank: int,
    inbox: socket.socket,
    inboxes: Sequence[tuple[bytes, bytes]],
    descriptor: int,
    received: dict[int, int],
    deadline: float,
) -> None:
    """Send ``descriptor`` to every peer and add one of each to ``received``.

    Sends and receives are interleaved: strangers may fill a queue, and a peer that empties its own
    only after it has sent would then be waited for by all. What strangers send is dropped.
    """
    wanted = set(range(len(inboxes))) - {rank}
    unsent = set(wanted)
    secret = inboxes[rank][1]
    with contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
        selector.register(inbox, selectors.EVENT_READ)
        while True:
            unsent = {p for p in unsent if not _send(*inboxes[p], rank, descriptor)}
            if not (unsent or wanted):
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(_late(wanted, unsent))
            for key, _ in selector.select(min(left, _RETRY_S) if unsent else left):
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
                    peer, peer_descriptor = arrived
                    received[peer] = peer_descriptor
                    wanted.remove(peer)


def _send(address: bytes, peer_secret: bytes, rank: int, descriptor: int) -> bool:
    """Send to one peer; return False when its queue is full at the moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as outbox:
        outbox.setblocking(False)
        try:
            outbox.connect(address)
        except BlockingIOError:
            return False
        # The message fits the new socket's buffer, and stays there for the peer after the close.
        socket.send_fds(outbox, [_MESSAGE.pack(peer_secret, rank)], [descriptor])
        return True


def _read(connection: socket.socket, secret: bytes, wanted: set[int]) -> tuple[int, int] | None:
    """Read one message; return its sender and descriptor, or None for a stranger's."""
    try:
        # Not socket.recv_fds: CPython drops its flags, and children would inherit the descriptor.
        message, controls, _, _ = connection.recvmsg(
            _MESSAGE.size + 1, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
        )
    except OSError:
        return None
    descriptors = [
        _DESCRIPTOR.unpack(data)[0]
        for level, kind, data in controls
        if (level, kind, len(data)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.size)
    ]
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


def _late(wanted: set[int], unsent: set[int]) -> str:
    if wanted:
        return f"no memory handle from {format_ranks(sorted(wanted))} in time"
    return f"no connection to {format_ranks(sorted(unsent))} in time"
