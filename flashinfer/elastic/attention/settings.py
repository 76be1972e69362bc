"""What the environment says about elastic attention workspaces."""

from __future__ import annotations

import os

SWITCH = "FLASHINFER_ELASTIC_WORKSPACE"
"""``0`` leaves FlashInfer's attention untouched. Read when FlashInfer is imported."""

CAP = "FLASHINFER_ELASTIC_WORKSPACE_MAX_MB"
"""MiB that the replacements on one device may take together. Read whenever one is made."""


def enabled() -> bool:
    """Whether workspaces may grow at all."""
    return os.environ.get(SWITCH, "1").strip().lower() not in ("0", "off", "false", "no")


def cap_bytes() -> int | None:
    """Return the most bytes that the replacements on one device may take; None for no limit.

    Raises
    ------
    ValueError
        If the variable is set and is not a non-negative number of MiB.
    """
    text = os.environ.get(CAP, "").strip()
    if not text:
        return None
    try:
        mebibytes = float(text)
    except ValueError:
        mebibytes = -1.0
    if not 0 <= mebibytes < float("inf"):
        raise ValueError(f"{CAP}={text!r}: a number of MiB, 0 or more, is allowed")
    return int(mebibytes * 2**20)
