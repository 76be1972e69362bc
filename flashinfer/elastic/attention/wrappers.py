"""Keep the integer workspaces of FlashInfer's wrapper objects what their plans are written to.

A wrapper owns its integer workspace and its page-locked twin, as attributes, and consumers read
and write them: they decode plans from the twin and patch plans in place. So when an integer
workspace grows, the attributes of the wrappers that hold it are set to the replacement. Wrappers
are noted, weakly, when they are made; nothing is added to the path of a call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_RETIRED = "_elastic_retired_workspaces"

_wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def observe(cls: type) -> None:
    """Have a class note its instances. Subclasses that call its constructor are included."""
    initialise: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(initialise)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        initialise(self, *args, **kwargs)
        _wrappers[id(self)] = self

    cls.__init__ = __init__  # type: ignore[misc]


def exchange(old: torch.Tensor, new: torch.Tensor) -> None:
    """Set every attribute that is one tensor to another, in all wrappers that were noted.

    The old tensor stays alive as long as the wrapper, as it would have: a captured graph may read
    it.
    """
    for wrapper in list(_wrappers.values()):
        attributes = vars(wrapper)
        names = [name for name, value in attributes.items() if value is old]
        for name in names:
            setattr(wrapper, name, new)
        if names:
            attributes.setdefault(_RETIRED, []).append(old)
