"""SGLang's module over upstream's API, on a machine without a GPU.

SGLang's file and FlashInfer's ``allreduce.py`` and ``trtllm_mnnvl_ar.py`` are the released ones.
What they import beyond that is replaced: SGLang's other modules by what they answer, the driver by
a record, FlashInfer's memory and kernels by those of ``tests/unit/upstream_on_cpu.py``.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import sglang_server
from sglang_server import Group, stand_in
from upstream_on_cpu import CpuTorch, Echo, Loaded

CUDA_SUCCESS, CUDA_ERROR_NOT_SUPPORTED = 0, 801
_GRANULARITY = 2 << 20


class _Anything(types.ModuleType):
    """A module that has every name: an empty class of that name, unless given."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def driver(multicast: bool = True) -> mock.MagicMock:
    """Return a CUDA driver that grants all memory, and says whether it knows multicast."""
    made = mock.MagicMock()
    made.CUresult.CUDA_SUCCESS = CUDA_SUCCESS
    made.cuMemGetAllocationGranularity.return_value = (CUDA_SUCCESS, _GRANULARITY)
    made.cuMulticastGetGranularity.return_value = (
        (CUDA_SUCCESS, _GRANULARITY) if multicast else (CUDA_ERROR_NOT_SUPPORTED, 0)
    )
    made.cuMemCreate.return_value = (CUDA_SUCCESS, object())
    return made


def load(
    patch: pytest.MonkeyPatch,
    file: Path,
    loaded: Loaded,
    tree: Path,
    group: Group,
    cuda: mock.MagicMock,
) -> types.ModuleType:
    """Execute SGLang's module over an upstream module, patched or not.

    Parameters
    ----------
    patch : pytest.MonkeyPatch
        Puts ``sys.modules`` back.
    file : pathlib.Path
        SGLang's file.
    loaded : Loaded
        Upstream's ``trtllm_mnnvl_ar``.
    tree : pathlib.Path
        The Python files of that upstream.
    group : Group
        The rank's group; the other ranks say what this one says.
    cuda : unittest.mock.MagicMock
        The driver that SGLang asks before it creates a workspace.
    """
    _lend_flashinfer(patch, loaded, tree, group.world_size)
    for name, module in (_neighbours(group, cuda) | sglang_server.heavy_neighbours(group)).items():
        patch.setitem(sys.modules, name, module)
    module = _execute(patch, sglang_server.MODULE, file)
    patch.setattr(module, "torch", CpuTorch())
    return module


def _lend_flashinfer(
    patch: pytest.MonkeyPatch, loaded: Loaded, tree: Path, ranks: int
) -> types.ModuleType:
    """Let ``flashinfer.comm`` be upstream's dispatch over the module that was loaded."""
    import flashinfer

    files = tree / "flashinfer" / "comm"
    theirs = loaded.module

    def unchanged(*arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments else lambda function: function

    package = stand_in("flashinfer.comm", __path__=[])
    modules = {
        "flashinfer.comm": package,
        "flashinfer.comm.trtllm_mnnvl_ar": theirs,
        "flashinfer.comm.mapping": stand_in("flashinfer.comm.mapping", Mapping=theirs.Mapping),
        "flashinfer.comm.workspace_base": stand_in(
            "flashinfer.comm.workspace_base",
            AllReduceFusionWorkspace=theirs.AllReduceFusionWorkspace,
        ),
        "flashinfer.comm.mnnvl": _Anything(
            "flashinfer.comm.mnnvl",
            TorchDistBackend=type(loaded.torch_backend(Echo(ranks))),
            is_mnnvl_fabric_supported=lambda _: False,
        ),
        "flashinfer.comm.trtllm_ar": _Anything(
            "flashinfer.comm.trtllm_ar",
            **{
                name: _class_of(files / "trtllm_ar.py", name)
                for name in ("AllReduceFusionPattern", "QuantizationSFLayout")
            },
        ),
        "flashinfer.api_logging": stand_in("flashinfer.api_logging", flashinfer_api=unchanged),
        "flashinfer.trace.templates.comm": _Anything("flashinfer.trace.templates.comm"),
        "flashinfer.utils": _Anything("flashinfer.utils", is_confidential_compute=lambda *_: False),
    }
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr(flashinfer, "comm", package, raising=False)
    dispatch = _execute(patch, "flashinfer.comm.allreduce", files / "allreduce.py")
    names = ("allreduce_fusion", "create_allreduce_fusion_workspace", "AllReduceFusionPattern")
    for name in names:
        setattr(package, name, getattr(dispatch, name))
    return package


def _neighbours(group: Group, cuda: Any) -> dict[str, types.ModuleType]:
    answers = sglang_server.answers(group)
    node = [True] * group.world_size
    buffers = types.SimpleNamespace(buffers={})
    platform = types.SimpleNamespace(is_sm90=True, is_sm100=False)
    modules: dict[str, dict[str, Any]] = {
        "sglang.srt.distributed": answers,
        "sglang.srt.distributed.parallel_state": {"in_the_same_node_as": lambda *_, **__: node},
        "sglang.srt.distributed.device_communicators.custom_all_reduce_utils": {
            "is_one_nvlink_clique": lambda **_: False,
        },
        "sglang.srt.runtime_context": answers
        | {"get_platform": lambda: platform, "get_resources": lambda: buffers},
        "sglang.srt.utils": {
            "ceil_align": lambda value, multiple: -(-value // multiple) * multiple,
            "get_cuda_driver_bindings": lambda: cuda,
            "is_flashinfer_available": lambda: True,
            "is_sm90_supported": lambda: True,
            "is_sm100_supported": lambda: False,
        },
        "sglang.srt.utils.custom_op": {"register_custom_op": lambda **_: lambda function: function},
    }
    return {name: stand_in(name, **attributes) for name, attributes in modules.items()}


def _execute(patch: pytest.MonkeyPatch, name: str, file: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def _class_of(file: Path, name: str) -> Any:
    """Return one class of a module that cannot be imported here."""
    (found,) = (
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    namespace: dict[str, Any] = {"__name__": file.stem}
    exec(compile(ast.Module([found], []), str(file), "exec"), namespace)
    return namespace[name]
