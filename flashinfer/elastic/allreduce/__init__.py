"""All-reduce workspaces that never come up short.

``install`` is the patch of ``flashinfer.comm.trtllm_mnnvl_ar`` (see ``flashinfer.elastic.shadow``).
It replaces the workspace class and the entry points that run on it, and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

WORKSPACE = "MNNVLAllReduceFusionWorkspace"
"""Upstream's workspace class, which ours subclasses and replaces."""

ENTRY_POINTS = (
    "trtllm_mnnvl_allreduce",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant",
    "get_allreduce_mnnvl_workspace",
    "trtllm_mnnvl_all_reduce",
    "trtllm_mnnvl_fused_allreduce_rmsnorm",
)
"""Upstream's functions that are replaced. The last three are its deprecated ones."""

OPTIONAL = frozenset({"trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant"})
"""What some supported versions lack: callers ask with ``hasattr``, so it must not appear there."""

_MODULE_ATTRIBUTES = (
    WORKSPACE,
    *(name for name in ENTRY_POINTS if name not in OPTIONAL),
    "MNNVLAllreduceFusionStrategy",
    "get_trtllm_mnnvl_comm_module",
)
_WORKSPACE_METHODS = ("destroy", "get_required_buffer_size_bytes", "is_buffer_size_sufficient")
_WORKSPACE_ATTRIBUTES = (*_WORKSPACE_METHODS, "NUM_LAMPORT_BUFFERS", "backend")
_STRATEGY_ATTRIBUTES = ("ONESHOT", "TWOSHOT", "AUTO", "select_strategy")

_originals: dict[str, Any] = {}


def upstream_original(name: str) -> Any:
    """Return upstream's own object that a replacement stands in for.

    Parameters
    ----------
    name : str
        ``MNNVLAllReduceFusionWorkspace`` or one of the entry points.

    Raises
    ------
    KeyError
        If the name was not replaced: the installed upstream lacks it, or its module is unpatched
        or not imported yet.
    """
    return _originals[name]


def install(module: ModuleType) -> None:
    """Replace the workspace class and the entry points in upstream's module.

    Parameters
    ----------
    module : types.ModuleType
        Upstream's ``flashinfer.comm.trtllm_mnnvl_ar``, just executed.

    Raises
    ------
    flashinfer.elastic.shadow.ContractError
        If the module lacks what the replacements build on, or if one of upstream's functions takes
        other parameters than its replacement. The module is then as it was.
    """
    from flashinfer.elastic import shadow

    shadow.check_attributes(module, _MODULE_ATTRIBUTES)
    shadow.check_attributes(module.MNNVLAllreduceFusionStrategy, _STRATEGY_ATTRIBUTES)
    upstream_class = getattr(module, WORKSPACE)
    shadow.check_attributes(upstream_class, _WORKSPACE_ATTRIBUTES)

    # Imported here, for the sizing rule to be usable without torch.
    from .ops import make_entry_points
    from .workspace import make_workspace_class

    workspace_class = make_workspace_class(module)
    entry_points = make_entry_points(module, workspace_class)
    replacements: dict[str, Any] = {
        WORKSPACE: workspace_class,
        **{name: entry_points[name] for name in ENTRY_POINTS if hasattr(module, name)},
    }
    originals = {name: getattr(module, name) for name in replacements}
    for name, replacement in replacements.items():
        shadow.check_parameters(originals[name], replacement, name)
    for name in _WORKSPACE_METHODS:
        theirs, ours = getattr(upstream_class, name), getattr(workspace_class, name)
        shadow.check_parameters(theirs, ours, f"{WORKSPACE}.{name}")

    _pose_as_class(workspace_class, upstream_class)
    for name, replacement in replacements.items():
        if name != WORKSPACE:
            replacement = _pose_as_function(replacement, originals[name])
        setattr(module, name, replacement)
    _originals.update(originals)


def _pose_as_class(ours: type, upstream: type) -> None:
    """Give our class upstream's name and place, by which it is pickled, and its annotations."""
    ours.__module__ = upstream.__module__
    ours.__name__ = upstream.__name__
    ours.__qualname__ = upstream.__qualname__
    if ours.__doc__ is None:
        ours.__doc__ = upstream.__doc__
    for name, member in vars(ours).items():
        # Methods, static and cached ones too. Their annotations name upstream's own classes, which
        # ours can only name as text.
        method, theirs = inspect.unwrap(member), inspect.unwrap(getattr(upstream, name, member))
        if inspect.isfunction(method) and inspect.isfunction(theirs):
            method.__annotations__ = dict(theirs.__annotations__)


def _pose_as_function(ours: Callable[..., Any], upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Give our function upstream's name, place, signature, documentation and deprecation.

    ``__wrapped__`` stays out, so that ``inspect.getsource`` shows the code that runs.
    """
    from typing_extensions import deprecated

    ours.__module__ = upstream.__module__
    ours.__name__ = upstream.__name__
    ours.__qualname__ = upstream.__qualname__
    ours.__doc__ = upstream.__doc__
    ours.__annotations__ = dict(upstream.__annotations__)
    vars(ours)["__signature__"] = inspect.signature(upstream)
    message = getattr(upstream, "__deprecated__", None)
    if message is not None and not hasattr(ours, "__deprecated__"):
        ours = deprecated(message)(ours)
    return ours
