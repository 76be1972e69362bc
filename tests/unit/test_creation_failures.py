"""Creations that fail, on a gloo group of real processes: what fails on one rank fails on all.

Each failure is met by every rank within seconds; afterwards nothing is held, and the same group
creates its workspace. Without GPUs: ``creation_double`` says what is real.
"""

from __future__ import annotations

import contextlib
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


def fail_in_the_driver(rank: int, ranks: int, tree: Path) -> int:
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
    return len(FAILURES)


def test_what_the_driver_refuses_one_rank_fails_the_creation_everywhere(tree: Path) -> None:
    assert run_ranks(fail_in_the_driver, RANKS, tree) == [len(FAILURES)] * RANKS


def fail_by_topology(rank: int, ranks: int, tree: Path) -> None:
    with node_of(rank, ranks, tree) as node, pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.nvml, "recorded", NVLINK_BUT_FOR_ONE_PAIR)
        before = node.held()
        check_fails(node, "no NVLink between ranks 0 and 2: .*multicast.*ALLOW_PCIE=1")
        # Nothing was allocated on the way.
        assert node.held() == before
        assert "cuMemCreate" not in node.apis[rank].calls[-20:]
        patch.setenv(topology.ALLOW_PCIE, "1")
        node.create(Gloo()).destroy()


def test_a_pair_without_nvlink_is_refused_by_all(tree: Path) -> None:
    run_ranks(fail_by_topology, RANKS, tree)


def create_in_a_capture(rank: int, ranks: int, tree: Path) -> None:
    with node_of(rank, ranks, tree) as node:
        if rank == CULPRIT:
            # Alone, hence at once: the others do not even know.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(our_workspace.torch.cuda, "is_available", lambda: True)
                patch.setattr(
                    our_workspace.torch.cuda,
                    "is_current_stream_capturing",
                    lambda: True,
                    raising=False,
                )
                with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
                    node.create(Gloo())


def test_a_creation_inside_a_capture_raises_on_that_rank_alone(tree: Path) -> None:
    run_ranks(create_in_a_capture, RANKS, tree)


# Interrupts


def interrupt_at_call(node: Node, patch: pytest.MonkeyPatch, name: str) -> None:
    """Interrupt this process at its next call of one driver function."""
    original = getattr(type(node.apis[CULPRIT]), name)

    def call(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(node.apis[CULPRIT], *args)

    patch.setattr(node.apis[CULPRIT], name, call)


class Interrupted(Gloo):
    """Interrupts this process around one of its collectives."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.left = at
        self.after = after

    def allgather(self, data: bytes) -> list[bytes]:
        self.left -= 1
        if self.left == 0 and not self.after:
            os.kill(os.getpid(), signal.SIGINT)
        gathered = super().allgather(data)
        if self.left == 0 and self.after:
            os.kill(os.getpid(), signal.SIGINT)
        return gathered


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


def interrupt_one_rank(rank: int, ranks: int, tree: Path) -> int:
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
    return count


def test_an_interrupted_rank_tells_the_others_and_leaves_nothing(tree: Path) -> None:
    counts = run_ranks(interrupt_one_rank, RANKS, tree)
    assert counts[0] == counts[1] == counts[2] > 20


def interrupt_all_ranks(rank: int, ranks: int, tree: Path) -> None:
    """Ctrl-C reaches all processes of a terminal, at different moments of theirs."""
    with node_of(rank, ranks, tree) as node:
        before = node.held()
        for name in (INTERRUPTED_CALLS[rank], "cuMemMap"):
            with pytest.MonkeyPatch.context() as patch:
                original = getattr(type(node.apis[rank]), name)

                def call(*args: Any, original: Any = original) -> Any:
                    os.kill(os.getpid(), signal.SIGINT)
                    return original(node.apis[rank], *args)

                patch.setattr(node.apis[rank], name, call)
                start = time.monotonic()
                with pytest.raises((KeyboardInterrupt, CollectiveError)) as caught:
                    node.create(Gloo())
                assert time.monotonic() - start < SECONDS
                assert name != "cuMemMap" or type(caught.value) is KeyboardInterrupt
            assert node.held() == before


def test_an_interrupt_of_all_ranks_ends_them_all(tree: Path) -> None:
    run_ranks(interrupt_all_ranks, RANKS, tree)


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
import runpy, sys
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
