"""What a run was made on."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

import torch

from flashinfer.elastic import __version__

UNKNOWN = "unknown"


def describe(ranks: int) -> str:
    """Return the GPUs, their links and the driver in one line."""
    return f"{ranks} x {torch.cuda.get_device_name(0)} ({', '.join(_details())})"


def slug(ranks: int) -> str:
    """Return the start of a result file's name, such as ``h200x2``."""
    name = torch.cuda.get_device_name(0).removeprefix("NVIDIA ").lower()
    return f"{re.sub('[^a-z0-9]+', '-', name).strip('-')}x{ranks}"


def versions() -> dict[str, str]:
    """Return the versions of the software that the times depend on."""
    nccl: Any = importlib.import_module("torch.cuda.nccl")
    return {
        "flashinfer": __version__,
        "flashinfer-python": flashinfer_python(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, nccl.version())),
    }


def flashinfer_python() -> str:
    """Return the version of the FlashInfer beside this wheel."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def _details() -> list[str]:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return [f"driver {UNKNOWN}"]
    try:
        links = _active_links(nvml, nvml.nvmlDeviceGetHandleByIndex(0))
        driver = nvml.nvmlSystemGetDriverVersion()
        return [f"{links} NVLinks each", f"driver {driver}"]
    finally:
        nvml.nvmlShutdown()


def _active_links(nvml: Any, device: Any) -> int:
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(device, link)
        except nvml.NVMLError:
            break
    return active
