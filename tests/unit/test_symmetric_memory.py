"""Symmetric memory over a driver that counts what is alive and fails where it is told to."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashinfer.elastic.allreduce import identity, symmetric
from flashinfer.elastic.allreduce.agreement import Agreement, CollectiveError
from flashinfer.elastic.allreduce.driver import Driver, DriverError
from flashinfer.elastic.allreduce.identity import Identity
from flashinfer.elastic.allreduce.symmetric import SymmetricMemory, choose_fabric

sys.path.insert(0, str(Path(__file__).parent))
from driver_double import GRANULARITY, FakeApi, Machine, Status

SIZE = 3 << 20
RELEASES = {"cuMemRelease", "cuMemUnmap", "cuMemAddressFree", "cuDevicePrimaryCtxRelease"}


this_rank = threading.local()


class Group:
    """Ranks on threads, each with a driver of its own, on one machine."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.machine = Machine()
        self.apis = [FakeApi(self.machine, size) for _ in range(size)]
        self.cells: list[Any] = [None] * size
        self.gate = threading.Barrier(size)
        self.gathers = [0] * size

    def agreement(self, rank: int) -> Agreement:
        group = self

        class Backend:
            def allgather(self, data: bytes) -> list[Any]:
                group.gathers[rank] += 1
                group.cells[rank] = data
                group.gate.wait(30)
                gathered = list(group.cells)
                group.gate.wait(30)
                return gathered

        return Agreement(Backend(), rank, self.size)

    def run(self, work: Callable[[int, Agreement], Any]) -> list[Any]:
        """Run ``work(rank, agreement)`` on every rank; return results or exceptions."""

        def one(rank: int) -> Any:
            this_rank.value = rank
            try:
                return work(rank, self.agreement(rank))
            except BaseException as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))

    def create(self, size_bytes: Any = SIZE) -> list[Any]:
        return self.run(
            lambda rank, agreement: SymmetricMemory.create(
                agreement,
                rank,
                size_bytes[rank] if isinstance(size_bytes, list) else size_bytes,
                driver=Driver(self.apis[rank]),
            )
        )

    def assert_empty(self) -> None:
        assert [api.live for api in self.apis] == [(0, 0, 0, 0, 0)] * self.size
        assert self.machine.live == 0


@pytest.fixture(autouse=True)
def _no_descriptor_leaks() -> Any:
    gc.collect()  # What earlier tests left to be collected is not ours.
    before = len(os.listdir("/proc/self/fd"))
    symmetric._warned.clear()
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def assert_mapped(group: Group, memories: list[SymmetricMemory]) -> None:
    """Address r of every rank is the memory of rank r, usable, and nothing else is held."""
    own = [
        group.apis[rank].mappings[memory.addresses[rank]][0] for rank, memory in enumerate(memories)
    ]
    assert len(set(own)) == group.size
    for rank, memory in enumerate(memories):
        assert memory.mapped
        mappings = group.apis[rank].mappings
        assert [mappings[address][0] for address in memory.addresses] == own
        assert all(usable for _, _, usable in mappings.values())
        assert group.apis[rank].live == (1, 0, 0, 1, group.size)
    assert group.machine.live == group.size


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("fabric", [False, True])
def test_create_and_close(size: int, fabric: bool) -> None:
    group = Group(size)
    for api in group.apis:
        api.supports = {"virtual": 1, "posix_fd": not fabric, "fabric": fabric}
    memories = group.create()
    assert_mapped(group, memories)
    for rank, memory in enumerate(memories):
        assert (memory.rank, memory.world_size, memory.device_index) == (rank, size, rank)
        assert (memory.size_bytes, memory.allocated_bytes) == (SIZE, 2 * GRANULARITY)
    assert len(set(group.gathers)) == 1

    for closed, memory in enumerate(memories, 1):
        memory.close()
        assert not memory.mapped
        assert memory.addresses == ()
        # A peer's memory stays valid where it is still mapped.
        assert group.machine.live == (size if closed < size else 0)
        memory.close()
    group.assert_empty()


def failing_calls() -> list[tuple[int, int, str]]:
    """Return every driver call of a creation by three, as (rank, index, name)."""
    group = Group(3)
    memories = group.create()
    calls = [
        (rank, index, name)
        for rank, api in enumerate(group.apis)
        for index, name in enumerate(api.calls)
        if name not in RELEASES
    ]
    for memory in memories:
        memory.close()
    return calls


def test_a_failure_of_any_call_on_any_rank_is_everyones_and_leaves_nothing() -> None:
    calls = failing_calls()
    assert {name for _, _, name in calls} >= {
        "cuInit",
        "cuDevicePrimaryCtxRetain",
        "cuDeviceCanAccessPeer",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    }
    for rank, index, name in calls:
        group = Group(3)
        group.apis[rank].fail_at = index
        errors = group.create()
        assert all(type(error) is CollectiveError for error in errors), (name, errors)
        assert len({str(error) for error in errors}) == 1
        assert list(errors[0].failures) == [rank]
        assert f"{name} failed: CUDA_ERROR_OUT_OF_MEMORY" in str(errors[0])
        assert isinstance(errors[rank].__cause__, DriverError)
        if name == "cuCtxPopCurrent":
            group.apis[rank].stack.clear()  # the driver kept it, nobody else can have it back
        group.assert_empty()
        assert len(set(group.gathers)) == 1

        # The same group tries again.
        group.apis[rank].fail_at = None
        memories = group.create()
        assert_mapped(group, memories)
        for memory in memories:
            memory.close()
        group.assert_empty()


def test_an_interrupt_on_one_rank_leaves_nothing() -> None:
    group = Group(2)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    group.apis[1].cuMemMap = interrupted  # type: ignore[method-assign, assignment]
    first, second = group.create()
    assert str(first) == "mapping of memory: rank 1: KeyboardInterrupt"
    assert type(second) is KeyboardInterrupt
    group.assert_empty()


def test_detach_and_attach_keep_addresses() -> None:
    group = Group(3)
    memories = group.create()
    addresses = [memory.addresses for memory in memories]
    for _ in range(3):
        for memory in memories:
            memory.detach()
            memory.detach()
            assert not memory.mapped
        assert group.machine.live == 0
        assert [api.live for api in group.apis] == [(1, 0, 0, 1, 0)] * 3
        assert group.run(lambda rank, agreement: memories[rank].attach(agreement)) == [None] * 3
        assert [memory.addresses for memory in memories] == addresses
        assert_mapped(group, memories)
    # Attached already: agreed on, and nothing happens.
    assert group.run(lambda rank, agreement: memories[rank].attach(agreement)) == [None] * 3
    assert_mapped(group, memories)
    for memory in memories:
        memory.close()
    group.assert_empty()


def test_a_failure_of_any_call_of_attach_leaves_it_detached() -> None:
    group = Group(2)
    memories = group.create()
    addresses = [memory.addresses for memory in memories]

    def attach(rank: int, agreement: Agreement) -> None:
        memories[rank].attach(agreement)

    for memory in memories:
        memory.detach()
    start = len(group.apis[1].calls)
    group.run(attach)
    names = group.apis[1].calls[start:]
    for index, name in enumerate(names):
        if name in RELEASES or name == "cuCtxPopCurrent":
            continue
        for memory in memories:
            memory.detach()
        group.apis[1].fail_at = len(group.apis[1].calls) + index
        errors = group.run(attach)
        assert all(type(error) is CollectiveError for error in errors), (name, errors)
        assert f"rank 1: DriverError: {name} failed" in str(errors[0])
        assert [api.live for api in group.apis] == [(1, 0, 0, 1, 0)] * 2
        assert group.machine.live == 0
    group.apis[1].fail_at = None
    assert group.run(attach) == [None, None]
    assert [memory.addresses for memory in memories] == addresses
    assert_mapped(group, memories)
    for memory in memories:
        memory.close()
    group.assert_empty()


def test_attach_must_be_called_alike() -> None:
    group = Group(2)
    memories = group.create()
    memories[0].detach()
    errors = group.run(lambda rank, agreement: memories[rank].attach(agreement))
    assert all("ranks disagree" in str(error) for error in errors)

    errors = group.run(lambda rank, agreement: memories[1 - rank].attach(agreement))
    assert all("attaches memory that was created for rank" in str(error) for error in errors)

    memories[1].close()
    errors = group.run(lambda rank, agreement: memories[rank].attach(agreement))
    assert all("rank 1: RuntimeError: symmetric memory is closed" in str(e) for e in errors)
    with pytest.raises(RuntimeError, match="closed"):
        memories[1].detach()

    other = SymmetricMemory(0, 4, 0, SIZE)
    errors = group.run(lambda rank, agreement: other.attach(agreement))
    assert all("was created for rank 0 of 4" in str(error) for error in errors)
    memories[0].close()
    group.assert_empty()


def test_detach_reports_failed_work() -> None:
    group = Group(1)
    (memory,) = group.create()
    api = group.apis[0]
    api.failure = Status.CUDA_ERROR_LAUNCH_FAILED
    api.fail_at = len(api.calls) + 1  # after the push of the context
    with pytest.raises(DriverError, match="cuCtxSynchronize failed: CUDA_ERROR_LAUNCH_FAILED"):
        memory.detach()
    assert memory.mapped
    memory.close()
    group.assert_empty()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([SIZE, 0], "rank 1: ValueError: size must be positive, got 0 bytes"),
        ([SIZE, SIZE + 1], f"ranks disagree: rank 0: {SIZE}; rank 1: {SIZE + 1}"),
        ([SIZE, "many"], "rank 1: TypeError"),
    ],
)
def test_bad_sizes(sizes: list[Any], message: str) -> None:
    group = Group(2)
    assert all(message in str(error) for error in group.create(sizes))
    group.assert_empty()


def test_no_peer_access() -> None:
    group = Group(3)
    group.apis[2].peer_access = False
    errors = group.create()
    assert all(type(error) is CollectiveError for error in errors)
    assert "rank 2: RuntimeError: GPU 0000:02:00.0 has no peer access" in str(errors[0])
    assert "ranks 0-1" in str(errors[0])
    assert "multicast" in str(errors[0])
    group.assert_empty()


def test_peer_access_has_a_direction() -> None:
    """This rank writes to the memory of its peers, so it is this GPU that has to reach theirs."""
    group = Group(2)
    for api in group.apis:
        api.cuDeviceCanAccessPeer = lambda device, peer: int(device != 0)  # type: ignore
    errors = group.create()
    assert [list(error.failures) for error in errors] == [[0]] * 2
    group.assert_empty()


def test_memory_is_given_back_when_the_device_has_finished() -> None:
    group = Group(1)
    (memory,) = group.create()
    calls = group.apis[0].calls
    calls.clear()
    memory.close()
    assert "cuMemUnmap" in calls[calls.index("cuCtxSynchronize") :]
    assert "cuMemUnmap" not in calls[: calls.index("cuCtxSynchronize")]


def test_an_interrupt_does_not_cut_a_close_short() -> None:
    group = Group(2)
    memories = group.create()
    api = group.apis[0]
    unmap = FakeApi.cuMemUnmap

    def interrupted(address: int, size: int) -> None:
        del api.cuMemUnmap  # the next one is the double's own
        signal.raise_signal(signal.SIGINT)
        unmap(api, address, size)

    api.cuMemUnmap = interrupted  # type: ignore[method-assign]

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            memories[0].close()
    finally:
        signal.signal(signal.SIGINT, former)
    memories[1].close()
    group.assert_empty()


def test_peers_hidden_from_this_process_are_not_asked_about() -> None:
    group = Group(2)
    for rank, api in enumerate(group.apis):
        # Each process sees one GPU, as its device 0.
        api.devices = 1
        api.peer_access = False
        uuid = SimpleNamespace(bytes=bytes([rank]) * 16)
        api.cuDeviceGetUuid = functools.partial(lambda uuid, device: uuid, uuid)  # type: ignore
    memories = group.run(
        lambda rank, agreement: SymmetricMemory.create(
            agreement, 0, SIZE, driver=Driver(group.apis[rank])
        )
    )
    assert_mapped(group, memories)
    for memory in memories:
        memory.close()
    group.assert_empty()


@pytest.mark.parametrize("fabric", [False, True])
def test_ranks_on_two_hosts(fabric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "host_key", lambda: f"host{this_rank.value // 2}")
    group = Group(4)
    for api in group.apis:
        api.supports["fabric"] = fabric
    results = group.create()
    if fabric:
        assert_mapped(group, results)
        for memory in results:
            memory.close()
    else:
        assert len({str(error) for error in results}) == 1
        assert "ranks 0-1 on host0; ranks 2-3 on host1" in str(results[0])
        assert "multicast" in str(results[0])
        assert len(set(group.gathers)) == 1
    group.assert_empty()


def who(host: str = "a", *, posix_fd: bool = True, fabric: bool = False) -> Identity:
    return Identity(host, "0" * 32, "0", posix_fd, fabric, GRANULARITY)


@pytest.mark.parametrize(
    ("identities", "fabric"),
    [
        ([who(), who()], False),
        ([who(fabric=True), who(fabric=True)], False),
        ([who(posix_fd=False, fabric=True), who(fabric=True)], True),
        ([who("a", fabric=True), who("b", fabric=True)], True),
        ([who("a", fabric=True), who("b")], None),
        ([who(posix_fd=False), who()], None),
    ],
)
def test_choice_of_handles(identities: list[Identity], fabric: bool | None) -> None:
    if fabric is None:
        with pytest.raises(CollectiveError):
            choose_fabric(identities)
    else:
        assert choose_fabric(identities) is fabric


def test_host_key_is_stable_and_names_the_network() -> None:
    assert identity.host_key() == identity.host_key()
    assert str(os.stat("/proc/self/ns/net").st_ino) in identity.host_key()


def test_close_after_the_context_is_gone_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(1)
    (memory,) = group.create()
    group.apis[0].fail_all = Status.CUDA_ERROR_DEINITIALIZED
    memory.close()
    assert not memory.mapped
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_close_after_failed_work_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(2)
    memories = group.create()
    for api in group.apis:
        api.fail_all = Status.CUDA_ERROR_LAUNCH_FAILED
    for memory in memories:
        memory.close()
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "CUDA_ERROR_LAUNCH_FAILED" in warnings[0]


def test_one_release_that_fails_does_not_keep_the_rest() -> None:
    group = Group(2)
    memories = group.create()
    api = group.apis[0]
    api.fail_at = len(api.calls) + 2  # push, synchronize, then the first unmap
    memories[0].close()
    assert api.calls[-1] == "cuDevicePrimaryCtxRelease"
    assert len(api.mappings) == 1
    memories[1].close()


def test_half_built_memory_can_be_closed() -> None:
    memory = SymmetricMemory(0, 2, 0, SIZE)
    memory.close()
    memory.close()
    SymmetricMemory.__new__(SymmetricMemory).__del__()


def test_forgotten_memory_is_given_back() -> None:
    group = Group(2)
    memories = group.create()
    del memories
    gc.collect()
    group.assert_empty()


def test_nothing_happens_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2)
    memories = group.create()
    gathers = list(group.gathers)
    monkeypatch.setattr(symmetric, "_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot create symmetric memory while a CUDA graph"):
        SymmetricMemory.create(group.agreement(0), 0, SIZE, driver=Driver(group.apis[0]))
    with pytest.raises(RuntimeError, match="cannot close"):
        memories[0].close()
    with pytest.raises(RuntimeError, match="cannot detach"):
        memories[0].detach()
    with pytest.raises(RuntimeError, match="cannot attach"):
        memories[0].attach(group.agreement(0))
    assert group.gathers == gathers
    assert_mapped(group, memories)

    # Memory that is forgotten during a capture is given back after it.
    last = memories.pop()
    memories.clear()
    gc.collect()
    assert group.apis[0].live == (1, 0, 0, 1, 2)
    monkeypatch.undo()
    last.close()
    group.assert_empty()


def test_what_was_forgotten_during_a_capture_makes_room_for_new_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(2)
    memories = group.create()
    with monkeypatch.context() as patch:
        patch.setattr(symmetric, "_capturing", lambda: True)
        memories.clear()
        gc.collect()
    assert group.machine.live == 2
    memories = group.create()
    assert_mapped(group, memories)
    for memory in memories:
        memory.close()
    group.assert_empty()


def test_the_coarsest_granularity_is_everyones() -> None:
    """Ranks map each other's memory, so all have it of one size."""
    group = Group(2)
    group.apis[1].cuMemGetAllocationGranularity = (  # type: ignore[method-assign]
        lambda properties, flag: 4 * GRANULARITY
    )
    memories = group.create()
    assert [memory.allocated_bytes for memory in memories] == [4 * GRANULARITY] * 2
    for memory in memories:
        memory.close()
    group.assert_empty()


def test_without_cuda_bindings_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Driver:
        raise RuntimeError("cuda-bindings is not installed: pip install cuda-bindings")

    monkeypatch.setattr(symmetric, "load_driver", missing)
    group = Group(2)
    errors = group.run(lambda rank, agreement: SymmetricMemory.create(agreement, rank, SIZE))
    assert all("ranks 0-1: RuntimeError: cuda-bindings is not installed" in str(e) for e in errors)
