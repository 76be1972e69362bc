"""The emulated machine for scripts: builds and loads its module, and runs one call on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build import MODULE, build

Bits = NDArray[np.uint16] | NDArray[np.uint32]

_POISON = 0xA5A5A5A5


def load(library: Path | None = None) -> ModuleType:
    """Import the module, built first unless ``library`` is where it already lies."""
    spec = importlib.util.spec_from_file_location(MODULE, library or build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def allreduce_rmsnorm(
    module: ModuleType,
    steps: Iterable[tuple[int, int, int]],
    inputs: Sequence[Bits],
    residual: Bits,
    gamma: Bits,
    *,
    dtype: str,
    buffer_bytes: int,
    epsilon: float = 1e-6,
    group: Any = None,
) -> tuple[list[Bits], list[Bits]]:
    """Run all-reduce, residual add and RMSNorm on emulated ranks.

    Parameters
    ----------
    module : ModuleType
        What :func:`load` gave.
    steps : iterable of (first, count, strategy)
        The call's launches; strategy 0 is one-shot, 1 two-shot. One step of all tokens, or chunks.
    inputs : sequence of array, ``[tokens, hidden]``
        One per rank: the elements' bits, ``uint16`` or (float32) ``uint32``.
    residual : array, ``[tokens, hidden]``
        The same on all ranks.
    gamma : array, ``[hidden]``
        The norm's weight, of the same type.
    dtype : str
        ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    buffer_bytes : int
        Size of each Lamport buffer, a multiple of 256.
    epsilon : float
        Added to the mean square.
    group : Group, optional
        Ranks to run on; by default new ones with ``buffer_bytes``.

    Returns
    -------
    tuple of list of array
        Of each rank, the norm's output and the residual's new value, as bits.

    Raises
    ------
    ValueError
        If a step does not fit the buffer.
    """
    ranks = len(inputs)
    if group is None:
        group = module.Group(ranks, buffer_bytes)
    outputs = [np.full_like(x, _POISON & np.iinfo(x.dtype).max) for x in inputs]
    residuals = [x.copy() for x in outputs]
    group.run(
        [
            module.Call(
                module.Strategy(int(strategy)),
                getattr(module.ElementType, dtype.upper()),
                input=[x[first : first + count] for x in inputs],
                output=[x[first : first + count] for x in outputs],
                residual_in=[residual[first : first + count]] * ranks,
                residual_out=[x[first : first + count] for x in residuals],
                gamma=[gamma] * ranks,
                epsilon=epsilon,
            )
            for first, count, strategy in steps
        ]
    )
    return outputs, residuals
