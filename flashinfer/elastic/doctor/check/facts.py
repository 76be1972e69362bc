"""What a check finds out, as records. They are also the ``facts`` of ``check --json``.

None stands for what could not be found out.
"""

from __future__ import annotations

import dataclasses
import enum


class Applied(enum.Enum):
    """What became of a module of FlashInfer that this wheel extends."""

    PATCHED = "patched"
    STEPPED_ASIDE = "stepped aside"
    """It is as FlashInfer ships it; the reason says what it lacks."""
    UNTOUCHED = "untouched"
    """It was imported and our package did not run: it is not beside FlashInfer's."""
    FAILED = "failed"
    """It does not import; the reason is the error."""


@dataclasses.dataclass(frozen=True)
class Distribution:
    """An installed distribution: its version and the ``site-packages`` it is in."""

    name: str
    version: str | None
    directory: str | None


@dataclasses.dataclass(frozen=True)
class Requirement:
    """What our wheel requires, as written there, and what is installed of it.

    ``satisfied`` is None where it is installed and its version cannot be compared.
    """

    requirement: str
    installed: str | None
    satisfied: bool | None


@dataclasses.dataclass(frozen=True)
class Module:
    """A module that this wheel extends, after its import in a process of its own.

    ``missing`` names the module that was not found, where that was the error.
    """

    name: str
    applied: Applied
    reason: str
    missing: str | None = None


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The compiled library. ``archs`` are compute capabilities as ``10 * major + minor``."""

    file: str
    loads: bool
    reason: str
    archs: tuple[int, ...]
    cuda: str | None


@dataclasses.dataclass(frozen=True)
class Installation:
    """What is installed, and what an import of it does.

    Attributes
    ----------
    flashinfer_file : str or None
        ``__file__`` of the package that ``import flashinfer`` gives.
    crashed : str
        How the process ended that was to import it, if not well.
    """

    python: str
    upstream: Distribution
    ours: Distribution
    our_directory: str
    requirements: tuple[Requirement, ...]
    flashinfer_file: str | None
    modules: tuple[Module, ...]
    kernels: Kernels
    torch: str | None
    torch_cuda: str | None
    crashed: str = ""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use, in the order in which CUDA counts.

    Attributes
    ----------
    arch : int or None
        Compute capability as ``10 * major + minor``.
    links : int or None
        NVLink links that are up.
    multicast_attribute : bool or None
        What the driver says of multicast. It does not prove that multicast works.
    shareable : bool or None
        Whether its memory can be shared with other processes, as workspaces need.
    granularity : int or None
        Shareable memory comes in multiples of this many bytes.
    fabric : str or None
        State of the NVLink fabric, as the fabric manager left it.
    fabric_error : str
        Why the fabric could not be joined, or what is unhealthy; empty if nothing.
    """

    index: int
    uuid: str
    pci: str
    name: str | None
    arch: int | None
    memory_bytes: int | None
    free_bytes: int | None
    links: int | None
    multicast_attribute: bool | None
    shareable: bool | None
    granularity: int | None
    fabric: str | None
    fabric_error: str = ""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two GPUs and what joins them.

    Attributes
    ----------
    nvlink : str
        ``nvlink``, ``none`` or ``unknown``.
    links : int or None
        How many links join them, directly or through switches.
    path : str or None
        The way over PCIe, in the words of ``nvidia-smi topo``.
    peer_access : bool or None
        Whether each can reach the other's memory.
    """

    a: int
    b: int
    nvlink: str
    links: int | None
    path: str | None
    peer_access: bool | None


@dataclasses.dataclass(frozen=True)
class Machine:
    """The driver and the GPUs.

    Attributes
    ----------
    driver, driver_cuda : str or None
        Version of the driver, and the CUDA version it is for.
    unknown : tuple of str
        What could not be asked, and why.
    """

    driver: str | None
    driver_cuda: str | None
    gpus: tuple[Gpu, ...]
    pairs: tuple[Pair, ...]
    unknown: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setting:
    """A variable that is set in the environment; ``known``: whether this wheel reads it."""

    name: str
    value: str
    known: bool
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What the environment asks for. A setting that is not valid shows as its default."""

    engine: str
    oneshot_max_bytes: int
    timeout_s: float
    multicast: str
    allow_pcie: bool
    attention: bool
    attention_cap_bytes: int | None
    settings: tuple[Setting, ...] = ()


@dataclasses.dataclass(frozen=True)
class Facts:
    """All of it."""

    installation: Installation
    machine: Machine
    environment: Environment


@dataclasses.dataclass(frozen=True)
class Group:
    """A workspace that is asked about: ``check --tp --hidden --dtype --max-tokens``."""

    ranks: int
    hidden: int
    element_bytes: int
    max_tokens: int
