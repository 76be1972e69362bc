"""Creations that fail, on a gloo group of real processes: what fails on one rank fails on all.

Each failure is met by every rank within seconds; afterwards nothing is held, and the same group
creates its workspace. Without GPUs: ``creation_double`` says what is real.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashinfer.elastic.allreduce import topology
from flashinfer.elastic.allreduce import workspace as our_workspace
from flashinfer.elastic.allreduce.agreement import CollectiveError
from flashinfer.elastic.shadow import TESTED_VERSIONS

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
from creation_double import Node
from driver_double import Status
from interrupted_backend import InterruptedBackend
from ranks import RankError, run_ranks

RANKS = 3
CULPRIT = 1
SECONDS = 15.0
"""How long a failed creation may take; a second where nothing else runs."""

NVLINK_BUT_FOR_ONE_PAIR = ["XNP", "NXN", "PNX"]


class Gloo:
    """The default group as a backend."""

    def allgather(self, data: bytes) -> list[bytes]:
        gathered = [torch.empty(len(data), dtype=torch.uint8) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [bytes(item.numpy()) for item in gathered]

    def barrier(self) -> None:
        self.allgather(b"")


@pytest.fixture(scope="module")
def tree(upstream_tree: Callable[[str], Path]) -> Path:
    return upstream_tree(TESTED_VERSIONS[0])


@contextlib.contextmanager
def node_of(rank: int, ranks: int, tree: Path) -> Iterator[Node]:
    """Give this process's node, and check at the end that failures left the group usable."""
    node = Node(tree, ranks, lambda: rank)
    with pytest.MonkeyPatch.context() as patch:
        node.enter(patch)
        node.create(Gloo()).destroy()
        gc.freeze()  # collections then look at what a test makes, not at all of torch
        before = node.held()
        yield node
        assert node.held() == before
        workspace = node.create(Gloo())
        assert workspace.handle.mapped
        workspace.destroy()
        assert node.held() == before


def check_fails(
    node: Node, expected: str, backend: Any = None, own: type[BaseException] = CollectiveError
) -> None:
    """Create; every rank raises in time. ``own`` is what the culprit gets."""
    kind = own if node.this_rank() == CULPRIT else CollectiveError
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        node.create(backend or Gloo())
    assert time.monotonic() - start < SECONDS
    assert type(caught.value) is kind
    if kind is CollectiveError:
        assert re.search(expected, str(caught.value)), caught.value


# The driver and the machine


def no_peer_access(api: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(api, "peer_access", False)


def refuse(name: str) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def breaks(api: Any, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(api, name, lambda *_: Status.CUDA_ERROR_OUT_OF_MEMORY)

    return breaks


FAILURES: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], None], str]] = {
    "no peer access": (no_peer_access, "rank 1: RuntimeError: GPU .* has no peer access .*ranks 0"),
    "one rank out of memory": (
        refuse("cuMemCreate"),
        "allocation of .* bytes: rank 1: DriverError: cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY",
    ),
    "a handle that cannot be exported": (
        refuse("cuMemExportToShareableHandle"),
        "export of the memory handle: rank 1: DriverError",
    ),
    "a peer that cannot import the handle": (
        refuse("cuMemImportFromShareableHandle"),
        "import of the peers' memory: rank 1: DriverError: cuMemImportFromShareableHandle failed",
    ),
    "no addresses": (refuse("cuMemAddressReserve"), "reservation of addresses: rank 1"),
    "memory that cannot be mapped": (refuse("cuMemMap"), "mapping of memory: rank 1"),
    "memory that may not be accessed": (refuse("cuMemSetAccess"), "mapping of memory: rank 1"),
}


def fail_in_every_way(rank: int, ranks: int, tree: Path) -> int:
    """All in one group of processes, whose start takes longer than any of this."""
    with node_of(rank, ranks, tree) as node:
        for breaks, expected in FAILURES.values():
            with pytest.MonkeyPatch.context() as patch:
                if rank == CULPRIT:
                    breaks(node.apis[rank], patch)
                before = node.held()
                # A second creation after a failed one fails as clearly, and is as harmless.
                for _ in range(2):
                    check_fails(node, expected)
                    assert node.held() == before
            node.create(Gloo()).destroy()
        check_topology(node)
        check_capture(node)
    return len(FAILURES)


def check_topology(node: Node) -> None:
    """A pair without NVLink is refused by all, before anything is allocated, unless allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.nvml, "recorded", NVLINK_BUT_FOR_ONE_PAIR)
        before = node.held()
        calls = node.apis[node.this_rank()].calls
        calls.clear()
        check_fails(node, "no NVLink between ranks 0 and 2: .*multicast.*ALLOW_PCIE=1")
        assert node.held() == before
        assert calls and "cuMemCreate" not in calls
        patch.setenv(topology.ALLOW_PCIE, "1")
        node.create(Gloo()).destroy()


def check_capture(node: Node) -> None:
    """A creation inside a capture raises at once, and alone: the others do not even know."""
    if node.this_rank() != CULPRIT:
        return
    with pytest.MonkeyPatch.context() as patch:
        cuda = our_workspace.torch.cuda
        patch.setattr(cuda, "is_available", lambda: True)
        patch.setattr(cuda, "is_current_stream_capturing", lambda: True, raising=False)
        with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
            node.create(Gloo())


def test_what_fails_on_one_rank_fails_the_creation_everywhere(tree: Path) -> None:
    assert run_ranks(fail_in_every_way, RANKS, tree) == [len(FAILURES)] * RANKS


# Interrupts


def interrupt_at_call(node: Node, patch: pytest.MonkeyPatch, name: str) -> None:
    """Interrupt this process at its next call of one driver function."""
    api = node.apis[node.this_rank()]
    original = getattr(type(api), name)

    def call(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(api, *args)

    patch.setattr(api, name, call)


class Interrupted(InterruptedBackend, Gloo):
    """Interrupts this process around one of its collectives."""


INTERRUPTED_CALLS = (
    "cuDevicePrimaryCtxRetain",
    "cuDeviceCanAccessPeer",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemSetAccess",
)


def interrupt_in_every_way(rank: int, ranks: int, tree: Path) -> int:
    # Also where the tests run in the background, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    count = 0
    with node_of(rank, ranks, tree) as node:
        before = node.held()
        for name in INTERRUPTED_CALLS:
            with pytest.MonkeyPatch.context() as patch:
                if rank == CULPRIT:
                    interrupt_at_call(node, patch, name)
                check_fails(node, "rank 1: KeyboardInterrupt", own=KeyboardInterrupt)
            assert node.held() == before, name
            count += 1
        counting = Interrupted(0, after=False)
        node.create(counting).destroy()
        # All but the last, after which the others have their workspace.
        collectives = -counting.left
        for at, after in itertools.product(range(1, collectives, 2), (False, True)):
            backend = Interrupted(at, after=after) if rank == CULPRIT else Gloo()
            check_fails(node, "rank 1: KeyboardInterrupt", backend, own=KeyboardInterrupt)
            assert node.held() == before, (at, after)
            count += 1
        # After the last: the interrupt is this rank's alone, and it keeps nothing.
        if rank == CULPRIT:
            with pytest.raises(KeyboardInterrupt):
                node.create(Interrupted(collectives, after=True))
        else:
            node.create(Gloo()).destroy()
        check_all_interrupted(node)
    return count


def check_all_interrupted(node: Node) -> None:
    """Ctrl-C reaches all processes of a terminal, at different moments of theirs."""
    before = node.held()
    for name in (INTERRUPTED_CALLS[node.this_rank()], "cuMemMap"):
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at_call(node, patch, name)
            start = time.monotonic()
            with pytest.raises((KeyboardInterrupt, CollectiveError)) as caught:
                node.create(Gloo())
            assert time.monotonic() - start < SECONDS
            assert name != "cuMemMap" or type(caught.value) is KeyboardInterrupt
        assert node.held() == before


def test_interrupted_ranks_tell_the_others_and_leave_nothing(tree: Path) -> None:
    counts = run_ranks(interrupt_in_every_way, RANKS, tree)
    assert counts[0] == counts[1] == counts[2] > 20


# Ends of processes


def die_in_the_middle(rank: int, ranks: int, tree: Path) -> None:
    node = Node(tree, ranks, lambda: rank)
    with pytest.MonkeyPatch.context() as patch:
        node.enter(patch)
        node.create(Gloo()).destroy()
        before = node.held()
        if rank == CULPRIT:
            patch.setattr(node.apis[rank], "cuMemCreate", lambda *_: os._exit(9))
        start = time.monotonic()
        # The backend notices, and says it in its own words.
        with pytest.raises(RuntimeError):
            node.create(Gloo())
        assert time.monotonic() - start < SECONDS
        assert node.held() == before


def test_a_rank_that_dies_in_the_middle_leaves_the_others_with_nothing(tree: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(die_in_the_middle, RANKS, tree)
    assert str(caught.value) == f"rank {CULPRIT}: exited with code 9 without a result"


EXIT = """
import runpy, sys, time
here, tree, store, rank, ranks, how = sys.argv[1:]
sys.path.insert(0, here)
runpy.run_path(here + "/../conftest.py")
import pytest
import torch.distributed as dist
from pathlib import Path
from creation_double import Node
from test_creation_failures import Gloo
rank, ranks = int(rank), int(ranks)
dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
node = Node(Path(tree), ranks, lambda: rank)
node.enter(pytest.MonkeyPatch())
print("marker: begin", file=sys.stderr, flush=True)
workspace = node.create(Gloo())
dist.barrier()
if how == "in a cycle":
    cycle = [workspace]
    cycle.append(cycle)
    del workspace
if how != "group alive":
    dist.destroy_process_group()
else:
    # A thread of gloo that still drops tensors of the last collective wants the interpreter's lock,
    # and one that asks for it during the exit is ended in a way that C++ answers with terminate().
    time.sleep(0.5)
"""


@pytest.mark.parametrize("how", ["group alive", "group destroyed", "in a cycle"])
def test_an_exit_with_a_live_workspace_is_quiet(tree: Path, tmp_path: Path, how: str) -> None:
    here = str(Path(__file__).parent)
    place, ranks = [str(tree), str(tmp_path / "store")], 2
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT, here, *place, str(rank), str(ranks), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, outputs
    for text in outputs:
        _, marker, said = text.partition("marker: begin\n")
        assert marker, text
        # ResourceWarnings are off by default, as in a server.
        assert [line for line in said.splitlines() if "[Gloo]" not in line] == [], text
