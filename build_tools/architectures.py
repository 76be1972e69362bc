"""The CUDA architectures a build compiles for, and the names they give the wheel."""

from __future__ import annotations

import os
import re

VARIABLE = "FLASHINFER_CUDA_ARCH_LIST"
DEFAULT = "9.0 10.0"
#: The kernels use thread block clusters and programmatic dependent launch.
OLDEST = 90

_ENTRY = re.compile(r"(\d+)\.(\d)[af]?")


def parse(text: str) -> tuple[int, ...]:
    """Read an architecture list as FlashInfer and PyTorch write it.

    Parameters
    ----------
    text : str
        Compute capabilities such as ``"9.0 10.0"``, separated by spaces, commas or semicolons. A
        suffix ``a`` or ``f``, which FlashInfer's own compilation wants, is accepted and dropped:
        our kernels use no instruction that needs it, and only a plain ``sm_100`` binary also
        loads on devices of capability 10.3.

    Returns
    -------
    tuple of int
        Ascending, without repetition: ``(90, 100)``.

    Raises
    ------
    ValueError
        For an empty list, an entry that is no compute capability, or one older than 9.0.

    Examples
    --------
    >>> parse("10.0, 9.0a")
    (90, 100)
    """
    found = set()
    for entry in re.split(r"[\s,;]+", text.strip()):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(
                f"{VARIABLE}: {entry!r} in {text!r} is not a compute capability such as 9.0"
            )
        architecture = int(match[1]) * 10 + int(match[2])
        if architecture < OLDEST:
            raise ValueError(f"{VARIABLE}: {entry} is older than 9.0, which the kernels need")
        found.add(architecture)
    return tuple(sorted(found))


def requested() -> tuple[int, ...]:
    """Give the architectures of ``FLASHINFER_CUDA_ARCH_LIST``, or the default ones."""
    return parse(os.environ.get(VARIABLE) or DEFAULT)


def label(architectures: tuple[int, ...]) -> str:
    """Name the architectures as the wheel does.

    >>> label((90, 100))
    'sm90.sm100'
    """
    return ".".join(f"sm{architecture}" for architecture in architectures)
