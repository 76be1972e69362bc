"""Print what importing FlashInfer loads and what its mnnvl module offers, as JSON."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from typing import Any

import cudart
import torch

NAME = "flashinfer.comm.trtllm_mnnvl_ar"


def signature_of(value: object) -> str | None:
    """Return the signature of a callable, annotations included."""
    try:
        return str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def kind_of(value: object) -> str:
    """Return what a name is to its users; of a callable, not how it is made."""
    if inspect.isclass(value):
        return "class"
    if isinstance(value, property):
        return "property"
    if callable(value) or isinstance(value, (staticmethod, classmethod)):
        return "callable"
    return type(value).__name__


def describe(value: object) -> dict[str, Any]:
    """Describe an object that a module defines or imports."""
    plain = isinstance(value, (int, float, str, tuple, bool, type(None)))
    return {
        "kind": kind_of(value),
        "module": getattr(value, "__module__", None),
        "qualname": getattr(value, "__qualname__", None),
        "signature": signature_of(value) if callable(value) else None,
        "doc": value.__doc__ if callable(value) else None,
        "deprecated": getattr(value, "__deprecated__", None),
        "value": repr(value) if plain else None,
    }


def describe_class(owner: type) -> dict[str, Any]:
    """Describe every attribute of a class, inherited ones included, object's own left out."""
    # Not by dir alone, of which enumerations leave out their methods.
    names = set(dir(owner)).union(*map(vars, owner.__mro__)) - set(dir(object))
    described = {
        name: describe(getattr(owner, name))
        | {"kind": kind_of(inspect.getattr_static(owner, name))}
        for name in sorted(names)
        if not name.startswith("__") and hasattr(owner, name)
    }
    return described | {"__init__": describe(owner.__init__)}


def main() -> None:
    """Describe the module's names, and the attributes of the classes that it defines."""
    before = set(sys.modules)
    importlib.import_module("flashinfer")
    loaded = sorted(set(sys.modules) - before)
    cudart.load()
    module = importlib.import_module(NAME)
    names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    print(
        json.dumps(
            {
                "loaded": loaded,
                "cuda_initialized": torch.cuda.is_initialized(),
                "module": {"name": module.__name__, "package": module.__package__}
                | {"doc": module.__doc__, "path": hasattr(module, "__path__")},
                "names": {name: describe(value) for name, value in names.items()},
                "classes": {
                    name: describe_class(value)
                    for name, value in names.items()
                    if inspect.isclass(value) and value.__module__ == NAME
                },
            }
        )
    )


main()
