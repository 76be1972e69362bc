"""Which GPUs of a group NVLink joins.

Peer access alone also exists over PCIe, where pushing every token to every peer is far slower than
NCCL. So a group with a pair that lacks NVLink is refused unless its user insists. What NVML cannot
say (no NVML, a peer on another host or hidden from this container) is not held against a pair:
mapping the memory settles it.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import uuid
from collections.abc import Sequence
from typing import Any

from . import settings
from .agreement import Agreement, CollectiveError
from .driver import Driver, load_driver
from .identity import Identity, exchange_identities, identify

logger = logging.getLogger(__name__)

ALLOW_PCIE = "FLASHINFER_MNNVL_ALLOW_PCIE"

NVLINK = "nvlink"
NO_NVLINK = "none"
UNKNOWN = "unknown"

_LISTED_PAIRS = 8


def require_nvlink(
    agreement: Agreement,
    device_index: int,
    *,
    driver: Driver | None = None,
    nvml: Any = None,
) -> list[tuple[int, int]]:
    """Check that NVLink joins all GPUs of the group; collective.

    Parameters
    ----------
    agreement : Agreement
        The ranks of the group.
    device_index : int
        This rank's GPU, as torch counts.
    driver : Driver, optional
        The installed cuda-bindings' by default.
    nvml : module, optional
        ``pynvml`` by default.

    Returns
    -------
    list[tuple[int, int]]
        Pairs of ranks known to lack NVLink; empty unless ``FLASHINFER_MNNVL_ALLOW_PCIE=1``.

    Raises
    ------
    CollectiveError
        On every rank, when the variable holds neither a yes nor a no on any of them, or when a pair
        lacks NVLink. In that case the message contains "multicast", by which vLLM
        knows that the hardware lacks something and takes another all-reduce.
    """

    def own_identity() -> Identity:
        opened = driver or load_driver()
        return identify(opened, opened.device(device_index))

    own = agreement.attempt("identifying the GPU", own_identity)
    identities = exchange_identities(agreement, own)
    allowed = agreement.attempt(ALLOW_PCIE, pcie_allowed)
    agreement.same(ALLOW_PCIE, allowed)
    own_links = agreement.attempt(
        "asking for NVLink", lambda: query_links(nvml or _load_nvml(), own, identities)
    )
    links = agreement.gather("NVLink topology", own_links)
    missing = pairs_without_nvlink(links)
    if missing and not allowed:
        raise CollectiveError(
            "NVLink topology",
            f"no NVLink between ranks {_format_pairs(missing)}: the fused all-reduce needs it "
            "between all GPUs of the group, for unicast and multicast alike, and is slower than "
            f"NCCL without. Set {ALLOW_PCIE}=1 to have it all the same.",
        )
    if missing and agreement.rank == 0:
        logger.warning("All-reduce without NVLink between ranks %s", _format_pairs(missing))
    return missing


def pcie_allowed() -> bool:
    """Return whether this process's environment allows pairs without NVLink.

    Raises
    ------
    ValueError
        If the variable is neither a yes nor a no.
    """
    text = os.environ.get(ALLOW_PCIE, "").strip().lower()
    if text in settings.YES:
        return True
    if not text or text in settings.NO:
        return False
    raise ValueError(f"{ALLOW_PCIE}={os.environ[ALLOW_PCIE]!r}: allowed are 0, 1")


def pairs_without_nvlink(links: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Return the pairs of ranks that lack NVLink.

    Parameters
    ----------
    links : sequence of sequences of str
        ``links[a][b]`` is what rank a saw towards rank b. A pair lacks NVLink when one side says
        so and the other does not say the opposite.

    Examples
    --------
    >>> pairs_without_nvlink([["nvlink", "none"], ["unknown", "nvlink"]])
    [(0, 1)]
    >>> pairs_without_nvlink([["nvlink", "unknown"], ["unknown", "nvlink"]])
    []
    """
    return [
        (a, b)
        for a, b in itertools.combinations(range(len(links)), 2)
        if NO_NVLINK in (seen := {links[a][b], links[b][a]}) and NVLINK not in seen
    ]


def query_links(nvml: Any, own: Identity, peers: Sequence[Identity]) -> list[str]:
    """Return what NVML says about NVLink from one GPU to each of others.

    Parameters
    ----------
    nvml : module or None
        ``pynvml``, or anything with its functions; None where there is none.
    own : Identity
        The GPU asked about.
    peers : sequence of Identity
        The others; the GPU itself may be among them.

    Returns
    -------
    list[str]
        ``"nvlink"``, ``"none"`` or ``"unknown"`` for each peer.
    """
    if nvml is None:
        return [UNKNOWN] * len(peers)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        logger.debug("NVML cannot be initialised: %s", error)
        return [UNKNOWN] * len(peers)
    try:
        return [_query_link(nvml, own, peer) for peer in peers]
    finally:
        nvml.nvmlShutdown()  # NVML counts: other users of this process keep theirs


def _query_link(nvml: Any, own: Identity, peer: Identity) -> str:
    if peer.gpu == own.gpu:
        return NVLINK
    try:
        status = nvml.nvmlDeviceGetP2PStatus(
            nvml.nvmlDeviceGetHandleByUUID(_nvml_uuid(own)),
            nvml.nvmlDeviceGetHandleByUUID(_nvml_uuid(peer)),
            nvml.NVML_P2P_CAPS_INDEX_NVLINK,
        )
    except nvml.NVMLError as error:
        logger.debug("NVML knows no link to %s: %s", peer.pci_bus_id, error)
        return UNKNOWN
    if status == nvml.NVML_P2P_STATUS_OK:
        return NVLINK
    return UNKNOWN if status == nvml.NVML_P2P_STATUS_UNKNOWN else NO_NVLINK


def _nvml_uuid(identity: Identity) -> str:
    return f"GPU-{uuid.UUID(hex=identity.gpu)}"


def _load_nvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _format_pairs(pairs: Sequence[tuple[int, int]]) -> str:
    text = ", ".join(f"{a} and {b}" for a, b in pairs[:_LISTED_PAIRS])
    more = len(pairs) - _LISTED_PAIRS
    return f"{text} and {more} more pairs" if more > 0 else text
