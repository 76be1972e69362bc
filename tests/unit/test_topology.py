"""Which pairs lack NVLink, from recorded topologies, and what the group makes of it."""

from __future__ import annotations

import doctest
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flashinfer.elastic.allreduce import topology
from flashinfer.elastic.allreduce.agreement import Agreement, CollectiveError
from flashinfer.elastic.allreduce.identity import Identity

sys.path.insert(0, str(Path(__file__).parent))
from nvml_double import FakeNvml

# `nvidia-smi topo -m`, one letter a pair: X itself, N NVLink, P PCIe.
NV18_ALL_TO_ALL = ["XNNN", "NXNN", "NNXN", "NNNX"]
BRIDGED_PAIRS = ["XNPP", "NXPP", "PPXN", "PPNX"]
PCIE = ["XP", "PX"]


class FakeDriver:
    """The part of the driver that tells who a GPU is."""

    def device(self, index: int) -> int:
        return index

    def attribute(self, device: int, name: str) -> int:
        return 1

    def granularity(self, device: int, *, fabric: bool) -> int:
        return 2 << 20

    def device_uuid(self, device: int) -> str:
        return f"{device:032x}"

    def pci_bus_id(self, device: int) -> str:
        return f"0000:{device:02x}:00.0"


def identities(size: int) -> list[Identity]:
    return [Identity("host", f"{i:032x}", f"{i}", True, False, 2 << 20) for i in range(size)]


def query_all(nvml: FakeNvml) -> list[list[str]]:
    gpus = identities(len(nvml.recorded))
    return [topology.query_links(nvml, gpu, gpus) for gpu in gpus]


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(topology)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize(
    ("recorded", "missing"),
    [
        (NV18_ALL_TO_ALL, []),
        (BRIDGED_PAIRS, [(0, 2), (0, 3), (1, 2), (1, 3)]),
        (PCIE, [(0, 1)]),
        (["X?", "?X"], []),
        (["X"], []),
    ],
)
def test_recorded_topologies(recorded: list[str], missing: list[tuple[int, int]]) -> None:
    nvml = FakeNvml(recorded)
    assert topology.pairs_without_nvlink(query_all(nvml)) == missing
    assert nvml.initialised == 0


@pytest.mark.parametrize(
    "nvml", [FakeNvml(PCIE, broken=True), FakeNvml(PCIE, hidden=(1,)), FakeNvml(PCIE, hidden=(0,))]
)
def test_what_nvml_cannot_say_is_not_held_against_a_pair(nvml: FakeNvml) -> None:
    assert topology.pairs_without_nvlink(query_all(nvml)) == []
    assert nvml.initialised == 0


def test_a_link_that_one_side_sees_is_a_link() -> None:
    assert topology.pairs_without_nvlink([["nvlink", "none"], ["nvlink", "nvlink"]]) == []


def test_no_nvml_at_all() -> None:
    gpus = identities(2)
    assert topology.query_links(None, gpus[0], gpus) == ["unknown", "unknown"]


def test_two_ranks_on_one_gpu_need_no_link() -> None:
    gpus = [identities(1)[0]] * 2
    assert topology.query_links(FakeNvml(["X"]), gpus[0], gpus) == ["nvlink"] * 2


class Threads:
    """A backend of threads."""

    def __init__(self, size: int) -> None:
        self.cells: list[Any] = [None] * size
        self.gate = threading.Barrier(size)

    def of(self, rank: int) -> Any:
        outer = self

        class Backend:
            def allgather(self, data: bytes) -> list[Any]:
                outer.cells[rank] = data
                outer.gate.wait(20)
                gathered = list(outer.cells)
                outer.gate.wait(20)
                return gathered

        return Backend()


def require(nvmls: list[Any]) -> list[Any]:
    """Call ``require_nvlink`` on as many ranks, each with its own NVML."""
    size = len(nvmls)
    threads = Threads(size)

    def one(rank: int) -> Any:
        agreement = Agreement(threads.of(rank), rank, size)
        try:
            return topology.require_nvlink(
                agreement,
                rank,
                driver=FakeDriver(),  # type: ignore[arg-type]
                nvml=nvmls[rank],
            )
        except CollectiveError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_all_to_all_is_fine() -> None:
    assert require([FakeNvml(NV18_ALL_TO_ALL) for _ in range(4)]) == [[]] * 4


def test_bridged_pairs_are_refused_by_all_with_the_word_that_vllm_looks_for() -> None:
    texts = require([FakeNvml(BRIDGED_PAIRS) for _ in range(4)])
    assert len(set(texts)) == 1
    assert "no NVLink between ranks 0 and 2, 0 and 3, 1 and 2, 1 and 3:" in texts[0]
    assert "multicast" in texts[0]
    assert "FLASHINFER_MNNVL_ALLOW_PCIE=1" in texts[0]


def test_many_pairs_are_cut_short() -> None:
    recorded = ["".join("X" if a == b else "P" for b in range(8)) for a in range(8)]
    assert "and 20 more pairs" in require([FakeNvml(recorded) for _ in range(8)])[0]


def test_one_rank_that_knows_is_enough() -> None:
    nvmls = [FakeNvml(PCIE, broken=True), FakeNvml(PCIE)]
    assert all("no NVLink between ranks 0 and 1" in text for text in require(nvmls))


def test_pcie_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_MNNVL_ALLOW_PCIE", "1")
    assert require([FakeNvml(PCIE) for _ in range(2)]) == [[(0, 1)]] * 2


def test_ranks_must_allow_it_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "pcie_allowed", lambda: "_0" in threading.current_thread().name)
    texts = require([FakeNvml(PCIE) for _ in range(2)])
    assert all(text.startswith("FLASHINFER_MNNVL_ALLOW_PCIE: ranks disagree") for text in texts)


@pytest.mark.parametrize(
    ("value", "allowed"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False)]
)
def test_the_environment(value: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_MNNVL_ALLOW_PCIE", value)
    assert topology.pcie_allowed() is allowed
    monkeypatch.delenv("FLASHINFER_MNNVL_ALLOW_PCIE")
    assert topology.pcie_allowed() is False


def test_neither_yes_nor_no_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_MNNVL_ALLOW_PCIE", "maybe")
    texts = require([FakeNvml(NV18_ALL_TO_ALL) for _ in range(2)])
    assert all("FLASHINFER_MNNVL_ALLOW_PCIE='maybe': allowed are 0, 1" in text for text in texts)
