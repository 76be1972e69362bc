"""The compiled kernels: one library with machine code for each architecture it was built for."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).resolve().parents[2] / "lib" / "libflashinfer_elastic.so"


class Library(NamedTuple):
    """The library's functions; see ``csrc/binding.cu``."""

    context_create: Callable[..., int]
    context_destroy: Callable[[int], None]
    context_choose_multicast: Callable[[int, int, int], None]
    context_expired_waits: Callable[[int], int]
    allreduce: Callable[..., None]
    allreduce_quantized: Callable[..., None]
    archs: tuple[int, ...]


@functools.cache
def load() -> Library:
    """Load the library. Needs no GPU.

    Raises
    ------
    RuntimeError
        If the file is missing or does not load.
    """
    import tvm_ffi

    if not FILE.exists():
        raise RuntimeError(
            f"{FILE} is missing: the flashinfer wheel is not installed, or was installed from a "
            "source tree without building its kernels."
        )
    module: Any = tvm_ffi.load_module(str(FILE))
    info = json.loads(str(module.elastic_build_info()))
    return Library(
        module.elastic_context_create,
        module.elastic_context_destroy,
        module.elastic_context_choose_multicast,
        module.elastic_context_expired_waits,
        module.elastic_allreduce,
        module.elastic_allreduce_quantized,
        tuple(info["archs"]),
    )


def runs_on(archs: tuple[int, ...], arch: int) -> bool:
    """Return whether machine code for one of ``archs`` runs on ``arch``.

    Parameters
    ----------
    archs, arch : int
        Compute capability as ``10 * major + minor``. Machine code runs on its own major version,
        from its own minor version on (CUDA's binary compatibility): 100 runs on 103.
    """
    return any(built // 10 == arch // 10 and built % 10 <= arch % 10 for built in archs)
