"""The settings in the environment, each checked by the code that obeys it."""

from __future__ import annotations

import os
import re

from flashinfer.elastic.allreduce import settings, topology

from . import alone
from .facts import Environment, Setting

_OURS = re.compile(r"FLASHINFER_(MNNVL|ELASTIC)_")
"""How all variables of this wheel start, and none of FlashInfer's own."""


def gather() -> Environment:
    """Read and check the settings of this process."""
    attention = alone.load("attention.settings")
    problems: dict[str, str] = {}
    valid: dict[str, str] = {}
    for name in settings.NAMES:
        value = os.environ.get(name, "")
        try:
            settings.read({name: value})
            valid[name] = value
        except ValueError as error:
            problems[name] = str(error)
    cap = None
    try:
        cap = attention.cap_bytes()
    except ValueError as error:
        problems[attention.CAP] = str(error)
    allow_pcie = False
    try:
        allow_pcie = topology.pcie_allowed()
    except ValueError as error:
        problems[topology.ALLOW_PCIE] = str(error)
    read = settings.read(valid)
    known = {
        *settings.NAMES,
        topology.ALLOW_PCIE,
        attention.SWITCH,
        attention.CAP,
    }
    found = [
        Setting(name, value, name in known, problems.get(name, ""))
        for name, value in sorted(os.environ.items())
        if _OURS.match(name) and value.strip()
    ]
    return Environment(
        engine=read.engine,
        oneshot_max_bytes=read.oneshot_max_bytes,
        timeout_s=read.timeout_s,
        multicast=read.multicast,
        allow_pcie=allow_pcie,
        attention=attention.enabled(),
        attention_cap_bytes=cap,
        settings=tuple(found),
    )
