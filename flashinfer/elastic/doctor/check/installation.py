"""What is installed: distributions, requirements, and what an import does.

This process itself never imports FlashInfer: :mod:`.probe` does, in a process of its own.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from . import alone, probe
from .facts import Applied, Distribution, Installation, Kernels, Module, Requirement

OURS = "flashinfer"
UPSTREAM = "flashinfer-python"

SHADOWED = (
    "flashinfer.comm.trtllm_mnnvl_ar",
    "flashinfer.prefill",
    "flashinfer.decode",
    "flashinfer.mla._core",
    "flashinfer.sparse",
    "flashinfer.pod",
    "flashinfer.attention._core",
)
"""The modules that this wheel extends."""

LIBRARY: Path = alone.load("allreduce.engines.library").FILE

_TIMEOUT_S = 300

Probe = Callable[[], dict[str, Any]]
"""Gives what :mod:`.probe` writes, with ``crashed`` where it did not end well."""


def gather(run: Probe | None = None) -> Installation:
    """Find out what is installed.

    Parameters
    ----------
    run : Probe, optional
        Imports FlashInfer in a process of its own by default, which takes seconds.
    """
    result = (run or run_probe)()
    ours = _distribution(OURS)
    return Installation(
        python=platform.python_version(),
        upstream=_distribution(UPSTREAM),
        ours=ours,
        our_directory=str(alone.PACKAGE.parents[1]),
        requirements=tuple(_requirements(OURS)) if ours.version else (),
        flashinfer_file=result.get("flashinfer_file"),
        modules=tuple(module(name, result) for name in SHADOWED),
        kernels=_kernels(result),
        torch=result.get("torch"),
        torch_cuda=result.get("torch_cuda"),
        crashed=result.get("crashed", ""),
    )


def run_probe() -> dict[str, Any]:
    """Run :mod:`.probe` with this interpreter and environment; return what it wrote."""
    source = Path(probe.__file__).read_text()
    with tempfile.TemporaryDirectory(prefix="flashinfer-doctor-") as folder:
        file = Path(folder, "result.json")
        command = [sys.executable, "-c", source, str(file), str(LIBRARY), *SHADOWED]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S)
            ended = _ending(done.returncode)
        except subprocess.TimeoutExpired:
            ended = f"did not end within {_TIMEOUT_S} s"
        result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if ended:
        result["crashed"] = f"{ended}, {result.get('at') or 'before its first step'}"
    return result


def _ending(code: int) -> str:
    if code == 0:
        return ""
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


def _distribution(name: str) -> Distribution:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return Distribution(name, None, None)
    return Distribution(name, found.version, str(Path(str(found.locate_file(""))).resolve()))


def _requirements(name: str) -> list[Requirement]:
    """Return what a distribution requires, extras and other platforms aside."""
    texts = metadata.requires(name) or []
    return [_requirement(text) for text in texts if ";" not in text]


def _requirement(text: str) -> Requirement:
    name = text
    for mark in "<>=!~([ ":
        name = name.split(mark)[0]
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Requirement(text, None, False)
    try:
        # A requirement of flashinfer-python, not of ours.
        from packaging.requirements import Requirement as Parsed

        return Requirement(text, installed, Parsed(text).specifier.contains(installed, True))
    except ImportError:
        return Requirement(text, installed, None)


def module(name: str, result: dict[str, Any]) -> Module:
    """Return what became of a module, by what :mod:`.probe` wrote."""
    record = result.get("registry", {}).get(name)
    imports = result.get("imports", {})
    # A failing package fails its modules, and says better why.
    error = imports.get("flashinfer") or imports.get(name)
    if error:
        return Module(name, Applied.FAILED, error["text"], error["missing"])
    if name not in imports:
        return Module(name, Applied.FAILED, result.get("crashed") or "it was not imported")
    if record is None:
        return Module(name, Applied.UNTOUCHED, "this wheel's package did not run")
    if record["patched"]:
        return Module(name, Applied.PATCHED, "")
    return Module(name, Applied.STEPPED_ASIDE, record["reason"])


def _kernels(result: dict[str, Any]) -> Kernels:
    file = str(LIBRARY)
    if not LIBRARY.exists():
        reason = "it is missing: the source tree was installed without building its kernels"
        return Kernels(file, False, reason, (), None)
    found = result.get("library")
    if found is None:
        reason = result.get("library_error") or result.get("crashed") or "it was not loaded"
        return Kernels(file, False, reason, (), None)
    return Kernels(file, True, "", tuple(found["archs"]), found.get("cuda"))
