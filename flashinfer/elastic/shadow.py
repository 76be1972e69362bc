"""Load upstream's module in place of a package that shadows it, and patch it there.

Python's path finder prefers a package directory over a module of the same name beside it, so
``flashinfer/comm/trtllm_mnnvl_ar/__init__.py`` is what an import of
``flashinfer.comm.trtllm_mnnvl_ar`` runs, while upstream's ``trtllm_mnnvl_ar.py`` stays on disk as
it was installed. Such a package consists of one call::

    from flashinfer.elastic import shadow

    shadow.load(__name__, __file__, patch="flashinfer.elastic.allreduce:install")

:func:`load` executes upstream's file *under the module's real name*, puts the resulting module
into ``sys.modules`` in its own place, and hands it to the patch function, which sets the names
that it replaces. The import system returns what ``sys.modules`` holds when the package has run and
binds that to the parent package. Hence there is one namespace, upstream's: its functions see the
replacements, underscored names and star-imports work, monkeypatching works, and ``__module__``,
pickling and ``inspect`` are as before.

A patch either applies whole or not at all. When the installed upstream does not have what a patch
builds on, or the patch fails, upstream's module is returned as it is and one warning is logged.
Importing FlashInfer never fails because of us.

This module runs inside ``import flashinfer``: it imports nothing but the standard library.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

REQUIREMENT = "flashinfer-python>=0.6.12,<0.8"
"""The distribution whose modules are shadowed, and the versions it is made for."""

TESTED_VERSIONS = ("0.6.12", "0.6.13", "0.7.2.post1", "0.7.4")
"""The versions that the contract tests read. Others are patched where a patch's checks hold."""

_logger = logging.getLogger("flashinfer.elastic")


class ContractError(Exception):
    """The installed upstream lacks something that a patch builds on. Its text says what."""


@dataclass(frozen=True)
class Shadowed:
    """What became of one shadowed module.

    Attributes
    ----------
    name : str
        The module's name.
    file : str
        Upstream's file, which was executed.
    patched : bool
        Whether the patch was applied; if not, the module is upstream's, untouched.
    reason : str
        Why it was not applied; empty if it was.
    """

    name: str
    file: str
    patched: bool
    reason: str = ""


_registry: dict[str, Shadowed] = {}


def registry() -> dict[str, Shadowed]:
    """Return what became of each shadowed module that was imported so far, by module name."""
    return dict(_registry)


def upstream_version() -> str | None:
    """Return the version of the installed upstream distribution, or None if there is none.

    Reads the installed metadata, which takes milliseconds: not for use at import.
    """
    from importlib import metadata

    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return None


def load(name: str, file: str, *, patch: str) -> ModuleType:
    """Execute the upstream module that a package shadows, patch it, and put it in its place.

    Called once from the ``__init__.py`` of the shadow.

    Parameters
    ----------
    name : str
        ``__name__`` of the shadow: the module's real name.
    file : str
        ``__file__`` of the shadow. Upstream's file is ``<directory of the shadow>.py``.
    patch : str
        ``"package.module:function"``, imported after upstream's module has run. The function takes
        that module and sets the names it replaces. It raises :class:`ContractError` if it cannot
        serve the installed version; see :func:`check_attributes` and :func:`check_parameters`.

    Returns
    -------
    types.ModuleType
        Upstream's module, patched or not; also ``sys.modules[name]``.

    Raises
    ------
    ModuleNotFoundError
        If upstream's file is not there: this version has no such module, or upstream is not
        installed in this directory.
    """
    upstream = Path(file).parent.with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, upstream)
    if spec is None or spec.loader is None or not upstream.is_file():
        raise ModuleNotFoundError(
            f"No module named {name!r}: {upstream} is not there. The flashinfer wheel extends an "
            f"installed {REQUIREMENT}, which has to be in the same directory.",
            name=name,
            path=str(upstream),
        )
    module = importlib.util.module_from_spec(spec)
    # As the import system does while a module runs: other threads that import it then wait for
    # the import lock, which this thread holds for the shadow, instead of getting half a module.
    setattr(spec, "_initializing", True)  # noqa: B010 (not in the stubs)
    sys.modules[name] = module
    try:
        # Should it fail, the import system removes the entry, as it would without the shadow.
        spec.loader.exec_module(module)
        reason = _apply(module, patch)
    finally:
        setattr(spec, "_initializing", False)  # noqa: B010
    _registry[name] = Shadowed(name, str(upstream), patched=not reason, reason=reason)
    if reason:
        _logger.warning("%s is left as FlashInfer ships it: %s", name, reason)
    return module


def check_attributes(owner: object, names: Iterable[str]) -> None:
    """Raise :class:`ContractError` unless a module or class has all the attributes named."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise ContractError(f"{_describe(owner)} has no {', '.join(missing)}")


def check_parameters(
    original: Callable[..., Any], replacement: Callable[..., Any], name: str
) -> None:
    """Raise :class:`ContractError` unless a replacement takes exactly upstream's parameters.

    Names, order, kinds and defaults are compared. Annotations are not: upstream's name upstream's
    classes.

    Parameters
    ----------
    original, replacement : callable
        Functions or classes; of a class, its constructor.
    name : str
        What to call them in the error.
    """
    theirs, ours = _without_annotations(original), _without_annotations(replacement)
    if theirs != ours:
        raise ContractError(f"{name} takes {theirs}, expected {ours}")


def _apply(module: ModuleType, patch: str) -> str:
    """Patch the module, or leave it as it was and return the reason."""
    before = dict(vars(module))
    try:
        location, _, function = patch.partition(":")
        getattr(importlib.import_module(location), function)(module)
    except ContractError as error:
        reason = str(error)
    except Exception as error:
        # Anything: a workspace that stretches is not worth an engine that does not start.
        reason = f"{patch} failed with {type(error).__name__}: {error}"
        _logger.debug("The patch of %s failed", module.__name__, exc_info=True)
    else:
        return ""
    for name in vars(module).keys() - before.keys():
        delattr(module, name)
    vars(module).update(before)
    return reason


def _without_annotations(function: Callable[..., Any]) -> inspect.Signature:
    """Return the bare signature of a function, or of a class's constructor."""
    parameters = inspect.signature(function).parameters.values()
    return inspect.Signature(
        [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    )


def _describe(owner: object) -> str:
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", owner))
