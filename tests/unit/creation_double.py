"""A node without GPUs on which whole workspaces are created, by ranks that share real sockets.

Upstream's module, our patch, the agreement, the topology check, the exchange of descriptors and the
symmetric memory are the real ones. The driver, NVML and the compiled kernels are doubles.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.elastic.allreduce import install, settings, symmetric, topology
from flashinfer.elastic.allreduce import workspace as our_workspace
from flashinfer.elastic.allreduce.driver import Driver
from flashinfer.elastic.allreduce.engines import native

sys.path.insert(0, str(Path(__file__).parent))
from driver_double import FakeApi, Machine
from nvml_double import FakeNvml
from upstream_on_cpu import Loaded, without_gpu

_REAL_TOPOLOGY_CHECK = topology.require_nvlink
_REAL_MEMORY = native.SymmetricMemory


def _descriptors() -> Iterator[str]:
    """Give the open files that creations may leave: shared memory, and sockets that share it.

    Gloo opens and closes connections of its own, over TCP.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(number)) as opened:
                    name = opened.family.name
        except OSError:  # the listing's own
            continue
        if name.startswith("/memfd:") or name == "AF_UNIX":
            yield name


class Node:
    """The GPUs of one node, as one process sees them.

    Parameters
    ----------
    tree : Path
        Python files of an upstream version.
    ranks : int
        As many GPUs, one for each rank.
    this_rank : callable
        Returns the rank that asks.
    threads : bool
        Whether ranks are threads of this process rather than processes.
    """

    def __init__(
        self,
        tree: Path,
        ranks: int,
        this_rank: Callable[[], int],
        *,
        threads: bool = False,
    ) -> None:
        self.loaded = Loaded(tree)
        install(self.loaded.module)
        self.ranks = ranks
        self.machine = Machine(shared=threads)
        self.apis = [FakeApi(self.machine, ranks) for _ in range(ranks)]
        self.nvml = FakeNvml(["N" * ranks] * ranks)
        self.this_rank = this_rank

    def enter(self, patch: pytest.MonkeyPatch) -> None:
        """Let workspaces be created here until the patches are undone."""
        for name in settings.NAMES:
            patch.delenv(name, raising=False)
        patch.delenv(topology.ALLOW_PCIE, raising=False)
        self.library = without_gpu(patch)
        patch.setattr(our_workspace.topology, "require_nvlink", _REAL_TOPOLOGY_CHECK)
        patch.setattr(native, "SymmetricMemory", _REAL_MEMORY)
        patch.setattr(symmetric, "load_driver", self._driver)
        patch.setattr(topology, "load_driver", self._driver)
        patch.setattr(topology, "_load_nvml", lambda: self.nvml)

    def create(self, backend: Any, **more: Any) -> Any:
        """Create this rank's workspace; arguments as upstream's class takes them."""
        rank = self.this_rank()
        return self.loaded.module.MNNVLAllReduceFusionWorkspace(
            self.loaded.mapping(rank, self.ranks),
            **({"max_num_tokens": 42, "hidden_dim": 6144, "dtype": torch.bfloat16} | more),
            comm_backend=backend,
        )

    def held(self) -> tuple[Any, ...]:
        """Return what this process holds: of each driver, of memory, of NVML, of descriptors."""
        gc.collect()
        live = [api.live for api in self.apis]
        return live, self.machine.live, self.nvml.initialised, sorted(_descriptors())

    def _driver(self) -> Driver:
        rank = self.this_rank()

        class OwnDriver(Driver):
            # Torch counts no GPU here.
            def device(self, index: int | None) -> int:
                return super().device(rank if index is None else index)

        return OwnDriver(self.apis[rank])
