"""Symmetric memory and its failures on real GPUs, one process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from flashinfer.elastic.allreduce import symmetric, topology
from flashinfer.elastic.allreduce.agreement import Agreement, CollectiveError
from flashinfer.elastic.allreduce.driver import Driver, DriverError, load_driver
from flashinfer.elastic.allreduce.symmetric import SymmetricMemory

SIZE = 8 << 20
WORDS = SIZE // 4


class GroupBackend:
    """A torch.distributed group as a backend, the way upstream wraps it."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def allgather(self, data: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, data, group=self.group)
        return gathered

    def barrier(self) -> None:
        dist.barrier(group=self.group)


class PlainBackend:
    """Takes bytes of one size only, as a user's own backend may, and gathers them as a tensor."""

    def allgather(self, data: bytes) -> list[bytes]:
        assert type(data) is bytes
        gathered = [torch.empty(len(data), dtype=torch.uint8) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [bytes(item.numpy()) for item in gathered]

    def barrier(self) -> None:
        self.allgather(b"")


def make_agreement(kind: str, rank: int, world_size: int) -> Agreement:
    ranks = list(range(world_size))
    backend: Any
    if kind == "plain":
        backend = PlainBackend()
    else:
        backend = GroupBackend(dist.new_group(ranks, backend=kind))
    return Agreement(backend, rank, world_size)


def as_tensor(address: int, words: int = WORDS) -> torch.Tensor:
    """Return an int32 tensor of this device over mapped memory, which must outlive it.

    Not through ``__cuda_array_interface__``: torch would put a peer's memory on the peer's device,
    for which it is not mapped here.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    storage = torch._C._construct_storage_from_data_pointer(address, device, 4 * words)
    return torch.empty(0, dtype=torch.int32, device=device).set_(storage)


def exchange_words(memory: SymmetricMemory, agreement: Agreement, salt: int) -> None:
    """Every rank writes its part of every rank's memory and reads it back from its own."""
    rank, size = memory.rank, memory.world_size
    part = WORDS // size
    for peer, address in enumerate(memory.addresses):
        words = as_tensor(address)[rank * part : (rank + 1) * part]
        # A kernel's stores, not a copy engine's.
        counting = torch.arange(part, device="cuda", dtype=torch.int32)
        torch.add(counting, salt + 100 * rank + peer, out=words)
    torch.cuda.synchronize()
    agreement.barrier()
    own = as_tensor(memory.addresses[rank])
    for peer in range(size):
        got = own[peer * part : (peer + 1) * part]
        expected = torch.arange(part, device="cuda", dtype=torch.int32) + salt + 100 * peer + rank
        assert torch.equal(got, expected), f"words of rank {peer}"
    # Reading a peer's memory shows what it holds.
    neighbour = (rank + 1) % size
    got = as_tensor(memory.addresses[neighbour])[rank * part : (rank + 1) * part]
    assert int(got[0]) == salt + 100 * rank + neighbour
    torch.cuda.synchronize()
    agreement.barrier()


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def assert_free(agreement: Agreement, expected: int) -> None:
    """Fail unless the free memory comes back to ``expected`` when all ranks have let go."""
    agreement.barrier()
    found = free_bytes()
    assert found == expected, f"{expected - found} bytes are not back"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def write_and_read(rank: int, world_size: int, kind: str) -> None:
    agreement = make_agreement(kind, rank, world_size)
    memory = SymmetricMemory.create(agreement, rank, SIZE)
    assert torch.cuda.current_device() == rank
    assert memory.mapped
    assert memory.allocated_bytes >= SIZE
    assert all(address % 256 == 0 for address in memory.addresses)
    for salt in (0, 12345):
        exchange_words(memory, agreement, salt)
    memory.close()
    memory.close()


@pytest.mark.parametrize("kind", ["gloo", "nccl", "plain"])
def test_peers_read_and_write(kind: str) -> None:
    run_ranks(write_and_read, None, kind)


def create_and_close(rank: int, world_size: int, cycles: int) -> float:
    agreement = make_agreement("gloo", rank, world_size)
    for _ in range(3):  # what the driver keeps for itself, for kernels too, is taken now
        memory = SymmetricMemory.create(agreement, rank, SIZE)
        exchange_words(memory, agreement, 0)
        memory.close()
    agreement.barrier()
    before, descriptors = free_bytes(), open_descriptors()
    start = time.monotonic()
    for cycle in range(cycles):
        memory = SymmetricMemory.create(agreement, rank, SIZE)
        if cycle % 100 == 0:
            exchange_words(memory, agreement, cycle)
        memory.close()
    seconds = time.monotonic() - start
    assert_free(agreement, before)
    assert open_descriptors() == descriptors
    return seconds / cycles


def test_a_thousand_cycles_give_every_byte_back() -> None:
    seconds = run_ranks(create_and_close, None, 1000, timeout_s=300)
    print(f"{max(seconds) * 1e3:.2f} ms to create and close")


class Failing(Driver):
    """The installed driver, one of whose methods fails."""

    def __init__(self, method: str) -> None:
        super().__init__(load_driver()._api)

        def fail(*args: Any, **kwargs: Any) -> None:
            raise DriverError(method, "CUDA_ERROR_OUT_OF_MEMORY", "injected")

        setattr(self, method, fail)


STEPS = [
    "device",
    "retain_primary_context",
    "granularity",
    "can_access_peer",
    "reserve",
    "create_memory",
    "export_fd",
    "import_fd",
    "map",
    "allow_access",
]


def fail_on_one_rank(rank: int, world_size: int, kind: str) -> None:
    agreement = make_agreement(kind, rank, world_size)
    SymmetricMemory.create(agreement, rank, SIZE).close()
    agreement.barrier()
    before, descriptors = free_bytes(), open_descriptors()
    for number, step in enumerate(STEPS):
        culprit = number % world_size
        driver = Failing(step) if rank == culprit else None
        start = time.monotonic()
        with pytest.raises(CollectiveError, match=f"rank {culprit}: DriverError: {step} failed"):
            SymmetricMemory.create(agreement, rank, SIZE, driver=driver)
        assert time.monotonic() - start < 5
        assert_free(agreement, before)
        assert open_descriptors() == descriptors
    memory = SymmetricMemory.create(agreement, rank, SIZE)
    exchange_words(memory, agreement, 7)
    memory.close()


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_a_failure_on_one_rank(kind: str) -> None:
    run_ranks(fail_on_one_rank, None, kind)


def run_out_of_memory(rank: int, world_size: int) -> None:
    agreement = make_agreement("gloo", rank, world_size)
    SymmetricMemory.create(agreement, rank, SIZE).close()
    agreement.barrier()
    # The last rank has no room for what all the others could hold.
    hog = None
    if rank == world_size - 1:
        hog = torch.empty(free_bytes() - (1 << 30), dtype=torch.uint8, device="cuda")
    agreement.barrier()
    before = free_bytes()
    with pytest.raises(
        CollectiveError, match=rf"rank {world_size - 1}: .*CUDA_ERROR_OUT_OF_MEMORY"
    ):
        SymmetricMemory.create(agreement, rank, 2 << 30)
    assert_free(agreement, before)
    memory = SymmetricMemory.create(agreement, rank, SIZE)
    exchange_words(memory, agreement, 1)
    memory.close()
    del hog


def test_one_rank_out_of_memory() -> None:
    run_ranks(run_out_of_memory)


def detach_and_attach(rank: int, world_size: int) -> None:
    agreement = make_agreement("gloo", rank, world_size)
    SymmetricMemory.create(agreement, rank, SIZE).close()
    agreement.barrier()
    before = free_bytes()
    memory = SymmetricMemory.create(agreement, rank, SIZE)
    agreement.barrier()
    with_memory = free_bytes()
    assert with_memory < before
    addresses = memory.addresses
    # A graph captured before the checkpoint works after it: the addresses are in it.
    neighbour = as_tensor(addresses[(rank + 1) % world_size])
    source = torch.full((WORDS,), 1000 + rank, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        neighbour.copy_(source)
    for salt in range(3):
        exchange_words(memory, agreement, salt)
        graph.replay()
        torch.cuda.synchronize()
        agreement.barrier()
        assert int(as_tensor(addresses[rank])[-1]) == 1000 + (rank - 1) % world_size
        torch.cuda.synchronize()
        agreement.barrier()
        held = free_bytes()
        memory.detach()
        memory.detach()
        assert not memory.mapped
        agreement.barrier()
        assert free_bytes() - held >= memory.allocated_bytes
        memory.attach(agreement)
        assert memory.addresses == addresses
    exchange_words(memory, agreement, 99)
    memory.close()


def test_addresses_survive_a_checkpoint() -> None:
    run_ranks(detach_and_attach)


def create_in_capture(rank: int, world_size: int) -> None:
    agreement = make_agreement("gloo", rank, world_size)
    memory = SymmetricMemory.create(agreement, rank, SIZE)
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        # On one rank only: a collective would hang.
        if rank == 0:
            for action in (
                lambda: SymmetricMemory.create(agreement, rank, SIZE),
                memory.close,
                memory.detach,
            ):
                with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
                    action()
    graph.replay()
    torch.cuda.synchronize()
    assert y.sum().item() == 16
    exchange_words(memory, agreement, 3)
    memory.close()


def test_nothing_is_created_or_closed_in_a_capture() -> None:
    run_ranks(create_in_capture)


def forget_in_capture(rank: int, world_size: int) -> None:
    agreement = make_agreement("gloo", rank, world_size)
    SymmetricMemory.create(agreement, rank, SIZE).close()
    x = torch.ones(8, device="cuda")
    memory: SymmetricMemory | None = SymmetricMemory.create(agreement, rank, SIZE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        memory = None
    graph.replay()
    torch.cuda.synchronize()
    assert y.sum().item() == 16
    assert len(symmetric._postponed) == 1
    agreement.barrier()
    held = free_bytes()
    SymmetricMemory.create(agreement, rank, SIZE).close()
    assert symmetric._postponed == []
    agreement.barrier()
    assert free_bytes() - held >= SIZE
    assert memory is None


def test_memory_forgotten_in_a_capture_is_given_back_later() -> None:
    run_ranks(forget_in_capture)


def close_early(rank: int, world_size: int) -> None:
    """A rank that closes first, with its kernels in flight, disturbs no peer."""
    agreement = make_agreement("gloo", rank, world_size)
    memory = SymmetricMemory.create(agreement, rank, SIZE)
    peer = as_tensor(memory.addresses[(rank + 1) % world_size])
    if rank == 0:
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        peer.fill_(5)
        memory.close()
        agreement.barrier()
    else:
        agreement.barrier()
        for value in range(100):
            peer.fill_(value)
        torch.cuda.synchronize()
        assert int(peer[-1]) == 99
        memory.close()
    agreement.barrier()


def test_a_rank_that_closes_first() -> None:
    run_ranks(close_early)


def create_beside_destroyed_group(rank: int, world_size: int) -> None:
    agreement = make_agreement("nccl", rank, world_size)
    memory = SymmetricMemory.create(agreement, rank, SIZE)
    dist.destroy_process_group()
    memory.close()


def test_close_after_the_group_is_gone() -> None:
    run_ranks(create_beside_destroyed_group)


def expandable(rank: int, world_size: int) -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    agreement = make_agreement("nccl", rank, world_size)
    tensors = [torch.ones(1 << 20, device="cuda") for _ in range(8)]
    memory = SymmetricMemory.create(agreement, rank, SIZE)
    exchange_words(memory, agreement, 11)
    memory.close()
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_with_expandable_segments() -> None:
    run_ranks(expandable)


def from_another_thread(rank: int, world_size: int) -> None:
    """A thread that has never used CUDA creates; the caller's current device stays its own."""
    agreement = make_agreement("gloo", rank, world_size)
    made: list[SymmetricMemory] = []
    thread = threading.Thread(
        target=lambda: made.append(SymmetricMemory.create(agreement, rank, SIZE))
    )
    thread.start()
    thread.join(60)
    exchange_words(made[0], agreement, 21)
    made[0].close()


def test_from_another_thread() -> None:
    run_ranks(from_another_thread)


def check_topology(rank: int, world_size: int) -> tuple[list[tuple[int, int]], float]:
    agreement = make_agreement("gloo", rank, world_size)
    os.environ[topology.ALLOW_PCIE] = "1"
    start = time.monotonic()
    missing = topology.require_nvlink(agreement, rank)
    return missing, time.monotonic() - start


def test_topology_is_the_one_that_nvidia_smi_shows() -> None:
    results = run_ranks(check_topology)
    assert all(missing == results[0][0] for missing, _ in results)
    matrix = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in matrix.stdout.splitlines() if line.startswith("GPU")]
    size = len(results)
    expected = [
        (a, b)
        for a in range(size)
        for b in range(a + 1, size)
        if not rows[a][1 + b].startswith("NV")
    ]
    assert results[0][0] == expected


LIVE_AT_EXIT = """
import json, runpy, sys
sys.path[:0] = json.loads(sys.argv[1])
runpy.run_path(sys.argv[2])
import torch
import torch.distributed as dist
from test_symmetric import SIZE, GroupBackend
from flashinfer.elastic.allreduce.agreement import Agreement
from flashinfer.elastic.allreduce.symmetric import SymmetricMemory
rank, size, store, destroy = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6] == "1"
torch.cuda.set_device(rank)
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
memory = SymmetricMemory.create(Agreement(GroupBackend(dist.group.WORLD), rank, size), rank, SIZE)
cycle = [memory]
cycle.append(cycle)
dist.barrier()
if destroy:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("destroy", [False, True])
def test_exit_with_live_memory_is_silent(destroy: bool, tmp_path: Path) -> None:
    size = torch.cuda.device_count()
    if size < 2:
        pytest.skip(f"needs two GPUs or more, found {size}")
    here = Path(__file__).resolve().parent
    paths = json.dumps([str(here), *[path for path in sys.path if path]])
    command = [sys.executable, "-c", LIVE_AT_EXIT, paths, str(here.parent / "conftest.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path / "store"), str(int(destroy))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, outputs
    noise = [line for text in outputs for line in text.splitlines() if "ymmetric" in line]
    assert noise == []
    assert not any("Traceback" in text for text in outputs)
