"""The environment variables that all-reduce workspaces obey, read when a workspace is created.

All ranks of a group must have the same settings; the creation of a workspace checks it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

from .sizing import DEFAULT_ONESHOT_MAX_BYTES

ENGINE = "FLASHINFER_MNNVL_ENGINE"
"""``auto`` (default), ``native`` (our kernels) or ``upstream`` (FlashInfer's own)."""

ONESHOT_MAX_MB = "FLASHINFER_MNNVL_ONESHOT_MAX_MB"
"""MiB a buffer that are provided for one-shot, 64 by default; see ``sizing.buffer_bytes``."""

TIMEOUT_S = "FLASHINFER_MNNVL_TIMEOUT_S"
"""Seconds that a kernel waits for a peer, 600 by default; 0 waits for ever."""

MULTICAST = "FLASHINFER_MNNVL_MULTICAST"
"""``auto`` (default), ``0`` (never) or ``1`` (or no workspace); see ``multicast.py``."""

NAMES = (ENGINE, ONESHOT_MAX_MB, TIMEOUT_S, MULTICAST)

YES = frozenset({"1", "true", "yes", "on"})
NO = frozenset({"0", "false", "no", "off"})
"""Words for either, in lower case, where a variable is a switch."""

_MULTICASTS = ("auto", "0", "1")
_ENGINES = ("auto", "native", "upstream")
_DEFAULT_TIMEOUT_S = 600.0


class Settings(NamedTuple):
    """What the environment asks for."""

    engine: str
    oneshot_max_bytes: int
    timeout_s: float
    multicast: str


def read(environment: Mapping[str, str] | None = None) -> Settings:
    """Read and check the settings.

    Parameters
    ----------
    environment : mapping of str to str, optional
        ``os.environ`` if not given. An empty value counts as unset.

    Raises
    ------
    ValueError
        Names the variable, what it holds and what is allowed.
    """
    values = os.environ if environment is None else environment
    max_mb = _number(values, ONESHOT_MAX_MB, DEFAULT_ONESHOT_MAX_BYTES / 2**20)
    return Settings(
        _choice(values, ENGINE, _ENGINES),
        int(max_mb * 2**20),
        _number(values, TIMEOUT_S, _DEFAULT_TIMEOUT_S),
        _choice(values, MULTICAST, _MULTICASTS),
    )


def _choice(values: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """Return one of the words that are allowed, the first where the variable is not set."""
    text = values.get(name, "").strip().lower() or allowed[0]
    if text not in allowed:
        raise ValueError(f"{name}={values[name]!r}: allowed are {', '.join(allowed)}")
    return text


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    text = values.get(name, "").strip()
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    # Above 2**31 a number of seconds or MiB is a mistake, and nanoseconds would overflow soon.
    if not 0 <= number <= 2**31:
        raise ValueError(f"{name}={text!r}: a number from 0 to {2**31} is allowed")
    return number
