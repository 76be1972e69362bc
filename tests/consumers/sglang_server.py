"""SGLang's workspace manager, from its released wheels, and what a running server tells it.

The module is ``sglang.srt.layers.flashinfer_comm_fusion``, executed as it was released. In a server
it asks others which ranks belong together and which backend was chosen; :func:`answers` has what
they say.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MODULE = "sglang.srt.layers.flashinfer_comm_fusion"

RELEASES = {"0.5.15.post1": "0.6.12", "0.5.23": "0.7.2.post1"}
"""SGLang releases, and the tested FlashInfer that each pins or is nearest to (0.5.23: 0.7.2)."""

_CACHE = Path(__file__).resolve().parents[2] / "build" / "upstreams"


@dataclass(frozen=True)
class Group:
    """One rank's view of a group, under the names of SGLang's ``GroupCoordinator``."""

    world_size: int
    rank_in_group: int
    device_group: Any = None
    cpu_group: Any = None


def module_file(version: str) -> Path:
    """Return the module's file of an SGLang release, from its wheel.

    The wheel is downloaded once. Where ``FLASHINFER_UPSTREAM_WHEELS`` names a directory, it is
    taken from there, and without it the test is skipped.
    """
    given = os.environ.get("FLASHINFER_UPSTREAM_WHEELS")
    file = _CACHE / f"sglang-{version}" / "flashinfer_comm_fusion.py"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as aside:
            wheels = Path(given) if given else Path(aside)
            if not given:
                _download(version, wheels)
            pattern = f"sglang-{version}-*.whl"
            wheel = next(wheels.glob(pattern), None)
            if wheel is None:
                pytest.skip(f"FLASHINFER_UPSTREAM_WHEELS={given} has no {pattern}")
            with zipfile.ZipFile(wheel) as archive:
                text = archive.read(MODULE.replace(".", "/") + ".py")
            part = Path(aside) / file.name
            part.write_bytes(text)
            part.rename(file)
    return file


def _download(version: str, where: Path) -> None:
    # The one file read is the same in the wheels of all Pythons and platforms.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(where)]
    kind = ["--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_34_x86_64"]
    subprocess.run([*pip, *kind, f"sglang=={version}"], check=True)


def answers(group: Group, backend: str = "mnnvl") -> dict[str, Callable[..., Any]]:
    """Return the functions by which the module asks its server, of all releases.

    Parameters
    ----------
    group : Group
        The tensor-parallel group, which is also the one of the experts.
    backend : str
        As given to ``--flashinfer-allreduce-fusion-backend``.
    """
    options = types.SimpleNamespace(flashinfer_allreduce_fusion_backend=backend, nnodes=1)
    parallel = types.SimpleNamespace(
        attn_tp_size=group.world_size,
        attn_tp_rank=group.rank_in_group,
        attn_tp_group=group,
        tp_size=group.world_size,
        tp_group=group,
        moe_ep_size=1,
        moe_tp_size=group.world_size,
        moe_tp_rank=group.rank_in_group,
        nnodes=1,
    )
    execution = types.SimpleNamespace(comm=options)
    groups = ("get_attn_tp_group", "get_moe_ep_group", "get_moe_tp_group", "get_tp_group")
    return {
        "get_parallel": lambda: parallel,
        "get_exec": lambda: execution,
        "get_global_server_args": lambda: options,
        **{name: lambda: group for name in groups},
    }


def import_installed(group: Group, backend: str = "mnnvl") -> types.ModuleType:
    """Import the module from the installed SGLang, as part of a server with this group."""
    sys.modules.update(heavy_neighbours(group))
    module = importlib.import_module(MODULE)
    for name, answer in answers(group, backend).items():
        if hasattr(module, name):
            setattr(module, name, answer)
    return module


def heavy_neighbours(group: Group) -> dict[str, types.ModuleType]:
    """Return stand-ins for SGLang modules of which one function is asked and thousands imported.

    They would draw in the configurations of all models, and the kernels of all experts.
    """
    experts: dict[str, Any] = {
        "can_merge_post_experts_all_reduce": lambda: False,
        "post_experts_reduction_group": lambda: group,
    }
    return {
        "sglang.srt.server_args": stand_in(
            "sglang.srt.server_args",
            get_global_server_args=answers(group)["get_global_server_args"],
        ),
        "sglang.srt.layers.moe.utils": stand_in("sglang.srt.layers.moe.utils", **experts),
    }


def stand_in(name: str, **attributes: Any) -> types.ModuleType:
    """Return a module with these attributes."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    return module
