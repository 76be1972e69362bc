"""What the facts mean for somebody who wants this wheel to serve their calls.

Pure functions: they look at the facts and at nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

from flashinfer.elastic.allreduce import sizing, topology
from flashinfer.elastic.shadow import REQUIREMENT, TESTED_VERSIONS

from ..plan import outcomes
from . import alone
from .facts import Applied, Facts, Gpu, Group, Installation, Kernels, Machine, Module, Pair


class Level(enum.Enum):
    """How good a finding is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing is wrong."""
    UNKNOWN = "unknown"
    """Could not be found out here."""
    PROBLEM = "problem"
    """This wheel does not do, or cannot do, what it is for."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes
    ----------
    topic : str
        What it is about: ``install``, ``patch``, ``kernels``, ``driver``, ``nvlink``,
        ``multicast``, ``engine``, ``memory``, ``attention`` or ``settings``.
    remedy : str
        What to do about it; empty if nothing.
    """

    topic: str
    level: Level
    text: str
    remedy: str = ""


def judge(facts: Facts, group: Group | None = None) -> list[Finding]:
    """Return all findings, in the order in which to read them."""
    found = [*_installation(facts.installation), *_patches(facts)]
    found += _kernels(facts.installation.kernels, facts.machine)
    found += _driver(facts.machine)
    found += _pairs(facts)
    found += _multicast(facts.machine)
    found += _engine(facts)
    if group is not None:
        found += _memory(facts, group)
    return [*found, *_attention(facts), *_settings(facts)]


def healthy(findings: Sequence[Finding]) -> bool:
    """Return whether there is no problem."""
    return all(finding.level is not Level.PROBLEM for finding in findings)


def engine(facts: Facts, gpu: Gpu) -> str | None:
    """Return the engine that a workspace on a GPU gets: native, upstream, none; None: unknown.

    The rule of ``workspace._Plan.engine``, for a group of GPUs like this one.
    """
    if facts.environment.engine == "upstream":
        return "upstream"
    kernels = facts.installation.kernels
    if not kernels.loads:
        return "none"
    if gpu.arch is None:
        return None
    if _runs_on(kernels.archs, gpu.arch):
        return "native"
    return "none" if facts.environment.engine == "native" else "upstream"


def _installation(installed: Installation) -> Iterator[Finding]:
    upstream, ours = installed.upstream, installed.ours
    if upstream.version is None:
        yield Finding(
            "install",
            Level.PROBLEM,
            "flashinfer-python is not installed; this wheel extends it and does nothing alone.",
            f'pip install "{REQUIREMENT}"',
        )
    elif upstream.version.split("+")[0] in TESTED_VERSIONS:
        yield Finding(
            "install",
            Level.OK,
            f"flashinfer-python {upstream.version}, a release it is tested with.",
        )
    else:
        yield Finding(
            "install",
            Level.NOTE,
            f"flashinfer-python {upstream.version} is none of the tested releases, "
            f"{', '.join(TESTED_VERSIONS)}: modules are extended where they pass the checks.",
        )
    if ours.version is None:
        yield Finding(
            "install",
            Level.PROBLEM,
            f"the flashinfer distribution is not installed; this program runs from "
            f"{installed.our_directory}.",
            "pip install dist/flashinfer-*.whl",
        )
    else:
        yield Finding("install", Level.OK, f"flashinfer {ours.version}, this wheel.")
    if upstream.directory and ours.directory and upstream.directory != ours.directory:
        yield Finding(
            "install",
            Level.PROBLEM,
            "the two distributions are in different directories, so neither sees the other: "
            f"flashinfer-python in {upstream.directory}, this wheel in {ours.directory}.",
            "Install both into one environment, neither with --user nor --target.",
        )
    for requirement in installed.requirements:
        if requirement.satisfied is False and not (
            # Said above.
            upstream.version is None and requirement.requirement.startswith("flashinfer-python")
        ):
            has = f"{requirement.installed} is" if requirement.installed else "it is not"
            yield Finding(
                "install",
                Level.PROBLEM,
                f"this wheel requires {requirement.requirement}, and {has} installed.",
                f'pip install "{requirement.requirement}"',
            )
    torch = installed.torch
    if torch is None:
        yield Finding("install", Level.PROBLEM, "torch does not import.", "Install torch for CUDA.")
    else:
        built = f"for CUDA {installed.torch_cuda}" if installed.torch_cuda else "without CUDA"
        yield Finding("install", Level.OK, f"torch {torch}, built {built}.")
    if installed.crashed:
        yield Finding(
            "install",
            Level.PROBLEM,
            f"the process that was to import FlashInfer {installed.crashed}.",
        )


def _patches(facts: Facts) -> Iterator[Finding]:
    """Give a finding for each thing that happened, with the modules that it happened to."""
    installation = facts.installation
    if installation.upstream.version is None and all(
        module.applied is Applied.FAILED for module in installation.modules
    ):
        yield Finding(
            "patch",
            Level.PROBLEM,
            f"{', '.join(module.name for module in installation.modules)}: not there without "
            "flashinfer-python.",
        )
        return
    fates: dict[tuple[object, ...], list[Module]] = {}
    for module in installation.modules:
        fates.setdefault((module.applied, module.reason), []).append(module)
    for modules in fates.values():
        yield _patch(", ".join(module.name for module in modules), modules[0], facts)


def _patch(names: str, module: Module, facts: Facts) -> Finding:
    if module.applied is Applied.PATCHED:
        return Finding("patch", Level.OK, f"{names}: extended.")
    if module.applied is Applied.STEPPED_ASIDE:
        return Finding(
            "patch",
            Level.PROBLEM,
            f"{names}: left as FlashInfer ships it, because {module.reason}.",
            f"Install a tested flashinfer-python: {', '.join(TESTED_VERSIONS)}.",
        )
    if module.applied is Applied.UNTOUCHED:
        return Finding(
            "patch",
            Level.PROBLEM,
            f"{names}: FlashInfer's own, since {module.reason}. `import flashinfer` takes "
            f"{facts.installation.flashinfer_file}.",
            "Install both distributions into one directory.",
        )
    remedy = f"Install what provides {module.missing!r}." if module.missing else ""
    if facts.machine.gpus or module.missing:
        return Finding(
            "patch", Level.PROBLEM, f"{names}: cannot be imported: {module.reason}", remedy
        )
    return Finding(
        "patch",
        Level.UNKNOWN,
        f"{names}: cannot be imported on this machine, which has no GPU: {module.reason}",
        "Run this on the machine with the GPUs.",
    )


def _kernels(kernels: Kernels, machine: Machine) -> Iterator[Finding]:
    if not kernels.loads:
        yield Finding(
            "kernels",
            Level.PROBLEM,
            f"the compiled kernels do not load: {kernels.reason}",
            "Install a wheel that was built, and its requirements.",
        )
        return
    built = ", ".join(f"sm{arch}" for arch in kernels.archs)
    yield Finding("kernels", Level.OK, f"kernels load; built for {built} with CUDA {kernels.cuda}.")
    for arch in sorted({gpu.arch for gpu in machine.gpus if gpu.arch is not None}):
        which = _list([gpu.index for gpu in machine.gpus if gpu.arch == arch])
        if _runs_on(kernels.archs, arch):
            yield Finding("kernels", Level.OK, f"GPU {which}: sm{arch}, which they run on.")
        else:
            yield Finding(
                "kernels",
                Level.PROBLEM,
                f"GPU {which}: sm{arch}, for which this wheel has no machine code.",
                f"Install a wheel whose name has sm{arch}, or build one with "
                f'FLASHINFER_CUDA_ARCH_LIST="{arch // 10}.{arch % 10}".',
            )


def _driver(machine: Machine) -> Iterator[Finding]:
    if machine.driver:
        cuda = f", for CUDA {machine.driver_cuda}" if machine.driver_cuda else ""
        yield Finding("driver", Level.OK, f"driver {machine.driver}{cuda}.")
    for text in machine.unknown:
        yield Finding("driver", Level.UNKNOWN, f"{text}.")
    if not machine.gpus:
        yield Finding(
            "driver",
            Level.UNKNOWN,
            "no GPU is visible: whether the kernels run, NVLink, multicast and the engine cannot "
            "be told here.",
        )
        return
    models = sorted({gpu.name or "GPU of unknown name" for gpu in machine.gpus})
    yield Finding("driver", Level.OK, f"{len(machine.gpus)} x {', '.join(models)}.")
    if len({gpu.arch for gpu in machine.gpus}) > 1:
        yield Finding(
            "driver",
            Level.NOTE,
            "the GPUs are of different architectures; a group has to be of one.",
        )
    private = [gpu.index for gpu in machine.gpus if gpu.shareable is False]
    if private:
        yield Finding(
            "driver",
            Level.PROBLEM,
            f"memory of GPU {_list(private)} cannot be shared between processes.",
        )


def _pairs(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if len(machine.gpus) == 1:
        yield Finding("nvlink", Level.NOTE, "one GPU: there is nothing to all-reduce with.")
    if not machine.pairs:
        return
    lacking = [pair for pair in machine.pairs if pair.nvlink == topology.NO_NVLINK]
    unknown = [pair for pair in machine.pairs if pair.nvlink == topology.UNKNOWN]
    joined = [pair for pair in machine.pairs if pair.nvlink == topology.NVLINK]
    if lacking:
        yield _without_nvlink(facts, lacking, joined)
    if unknown:
        yield Finding("nvlink", Level.UNKNOWN, f"NVLink between {_list_pairs(unknown)}.")
    if not lacking and not unknown:
        counts = sorted({pair.links for pair in joined if pair.links})
        links = f", {' or '.join(map(str, counts))} links each" if counts else ""
        count = "1 pair" if len(joined) == 1 else f"{len(joined)} pairs"
        text = f"NVLink joins every pair of GPUs ({count}{links})."
        yield Finding("nvlink", Level.OK, text)
    refused = [pair for pair in machine.pairs if pair.peer_access is False]
    if refused:
        yield Finding(
            "nvlink",
            Level.PROBLEM,
            f"no peer access between {_list_pairs(refused)}: they can share no memory.",
            "Look at `nvidia-smi topo -p2p r`, IOMMU and access control services.",
        )
    elif all(pair.peer_access for pair in machine.pairs):
        yield Finding("nvlink", Level.OK, "peer access between all pairs.")


def _without_nvlink(facts: Facts, lacking: list[Pair], joined: list[Pair]) -> Finding:
    which = _list_pairs(lacking)
    if facts.environment.allow_pcie:
        return Finding(
            "nvlink",
            Level.NOTE,
            f"no NVLink between {which}; {topology.ALLOW_PCIE} allows such groups, which are "
            "slower than NCCL.",
        )
    return Finding(
        "nvlink",
        Level.NOTE if joined else Level.PROBLEM,
        f"no NVLink between {which}: a group with such a pair is refused, as it would be slower "
        "than NCCL.",
        "Take groups of GPUs that NVLink joins."
        if joined
        else f"Leave it to NCCL, or insist with {topology.ALLOW_PCIE}=1.",
    )


def _multicast(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        return
    said = {gpu.multicast_attribute for gpu in machine.gpus}
    if said == {True}:
        yield Finding(
            "multicast",
            Level.NOTE,
            "the driver's attribute says multicast on all GPUs. That alone does not prove that it "
            "works (virtual machines, confidential computing, a broken fabric manager), and no "
            "multicast object is made here to try. The native engine needs none.",
        )
    elif said == {False}:
        yield Finding(
            "multicast", Level.NOTE, "no multicast on these GPUs. The native engine needs none."
        )
    elif None in said:
        yield Finding("multicast", Level.UNKNOWN, "whether the GPUs have multicast.")
    else:
        without = [gpu.index for gpu in machine.gpus if not gpu.multicast_attribute]
        yield Finding(
            "multicast",
            Level.NOTE,
            f"GPU {_list(without)} has no multicast, the others say they have. The native engine "
            "needs none.",
        )
    states = {gpu.fabric for gpu in machine.gpus}
    broken = {gpu.fabric_error for gpu in machine.gpus} - {""}
    if broken:
        yield Finding(
            "multicast",
            Level.NOTE,
            f"the NVLink fabric is not well: {'; '.join(sorted(broken))}. Multicast does not work "
            "then, nor do groups over several hosts.",
            "Look at the fabric manager's log.",
        )
    elif states & {"not started", "in progress"}:
        yield Finding(
            "multicast",
            Level.NOTE,
            "the NVLink fabric is not up (yet): "
            f"{', '.join(sorted(state or 'unknown' for state in states))}. Multicast does not work "
            "then, nor do groups over several hosts.",
            "Start the fabric manager, or wait for it.",
        )
    elif states == {"completed"}:
        yield Finding("multicast", Level.OK, "the NVLink fabric is up and reports no error.")
    elif states == {"not supported"}:
        yield Finding(
            "multicast", Level.NOTE, "these GPUs are in no NVLink fabric: groups are of one host."
        )
    else:
        yield Finding("multicast", Level.UNKNOWN, "the state of the NVLink fabric.")


def _engine(facts: Facts) -> Iterator[Finding]:
    by_engine: dict[str | None, list[int]] = {}
    for gpu in facts.machine.gpus:
        by_engine.setdefault(engine(facts, gpu), []).append(gpu.index)
    for name, indices in by_engine.items():
        which = f"GPU {_list(indices)}"
        if name == "native":
            yield Finding("engine", Level.OK, f"{which}: native, this wheel's kernels.")
        elif name == "upstream":
            yield _upstream_engine(facts, which, indices)
        elif name == "none":
            yield Finding(
                "engine",
                Level.PROBLEM,
                f"{which}: none; creating a workspace raises. See the kernels above.",
            )
        else:
            yield Finding("engine", Level.UNKNOWN, f"{which}: its architecture is unknown.")


def _upstream_engine(facts: Facts, which: str, indices: list[int]) -> Finding:
    gpus = [facts.machine.gpus[index] for index in indices]
    chosen = "as set" if facts.environment.engine == "upstream" else "for lack of machine code"
    text = f"{which}: upstream's kernels, {chosen}, with our sizing. They need multicast"
    if any(gpu.multicast_attribute is False for gpu in gpus):
        return Finding("engine", Level.PROBLEM, f"{text}, which there is none of.")
    return Finding("engine", Level.NOTE, f"{text}; whether it works shows at creation only.")


def _memory(facts: Facts, group: Group) -> Iterator[Finding]:
    size = sizing.buffer_bytes(
        group.max_tokens,
        group.hidden,
        group.element_bytes,
        group.ranks,
        oneshot_max_bytes=facts.environment.oneshot_max_bytes,
    )
    taken = outcomes.our_memory_bytes(size)
    yield Finding(
        "memory",
        Level.NOTE,
        f"a workspace for {group.max_tokens:,} tokens of {group.hidden:,} elements of "
        f"{group.element_bytes} bytes and {group.ranks} GPUs has buffers of {size:,} bytes and "
        f"takes {taken:,} bytes of each GPU.",
    )
    gpus = facts.machine.gpus
    if gpus and len(gpus) < group.ranks:
        yield Finding(
            "memory",
            Level.NOTE,
            f"{group.ranks} GPUs were asked about and {len(gpus)} are visible: the rest would have "
            "to be on other hosts of one NVLink fabric.",
        )
    short = [gpu.index for gpu in gpus if gpu.free_bytes is not None and gpu.free_bytes < taken]
    if short:
        yield Finding(
            "memory", Level.PROBLEM, f"GPU {_list(short)} has less memory free than that."
        )


def _attention(facts: Facts) -> Iterator[Finding]:
    environment = facts.environment
    if not environment.attention:
        yield Finding(
            "attention", Level.NOTE, "workspaces do not grow: switched off in the environment."
        )
        return
    cap = environment.attention_cap_bytes
    limit = f"up to {cap:,} bytes a device" if cap is not None else "without a limit"
    yield Finding(
        "attention",
        Level.OK,
        f"workspaces grow when a call needs more, {limit}. What grew in a server shows in its log, "
        "and there in flashinfer.elastic.attention.report().",
    )


def _settings(facts: Facts) -> Iterator[Finding]:
    for setting in facts.environment.settings:
        if setting.problem:
            yield Finding("settings", Level.PROBLEM, setting.problem)
        elif not setting.known:
            yield Finding(
                "settings",
                Level.NOTE,
                f"{setting.name}={setting.value!r}: this wheel reads no such variable.",
                "docs/environment.md lists those it reads.",
            )
        else:
            yield Finding("settings", Level.OK, f"{setting.name}={setting.value!r}")


def _runs_on(archs: tuple[int, ...], arch: int) -> bool:
    """Return whether machine code runs on a GPU: see ``engines.library.runs_on``."""
    return bool(alone.load("allreduce.engines.library").runs_on(archs, arch))


def _list(numbers: list[int]) -> str:
    """Write numbers, ranges of them as ranges."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


_LISTED_PAIRS = 6


def _list_pairs(pairs: list[Pair]) -> str:
    text = ", ".join(f"{pair.a} and {pair.b}" for pair in pairs[:_LISTED_PAIRS])
    more = len(pairs) - _LISTED_PAIRS
    return f"GPUs {text}" + (f" and {more} more pairs" if more > 0 else "")
