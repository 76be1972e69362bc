#!/usr/bin/env python3
"""Show the reported failure in the installed FlashInfer, and the same call served by this wheel.

    scripts/reproduce.py [--on auto|gpus|emulation]

Runs on this machine's GPUs, one rank each, where there are two or more with peer access; else on
the CPU emulation of the kernels with the eight ranks of the report, which is built first. Exits
with 0 only if upstream failed as reported and the call was served with the right result.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import torch

    from flashinfer.elastic.doctor.reproduce.case import EPSILON, Case, Data, Run
    from flashinfer.elastic.doctor.reproduce.report import reproduce
except ModuleNotFoundError as error:
    sys.exit(f"{error}. Install the wheel beside FlashInfer; scripts/build.sh does, in .venv.")

_ON = "where to make the call; auto, the default: the GPUs where they can, else the emulation"

EMULATION = Path(__file__).resolve().parent.parent / "emulation"


def emulate(case: Case, data: Data, buffers: Sequence[int]) -> list[Run]:
    """Make the call on emulated ranks, on a workspace of each size in turn."""
    sys.path.insert(0, str(EMULATION))
    try:
        emulator = importlib.import_module("emulator")
        module = emulator.load()
    except (ModuleNotFoundError, RuntimeError) as error:
        sys.exit(f"{error}\nThe emulation needs g++ and: pip install --group emulation")
    runs = []
    for size in buffers:
        norm, residual = emulator.allreduce_rmsnorm(
            module,
            case.steps(size),
            [_bits(x) for x in data.inputs],
            _bits(data.residual),
            _bits(data.gamma),
            dtype="bfloat16",
            buffer_bytes=size,
            epsilon=EPSILON,
        )
        runs.append(Run(size, [_tensor(x) for x in norm], [_tensor(x) for x in residual]))
    return runs


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint16).numpy()


def _tensor(bits: Any) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)


def main() -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--on", choices=("auto", "gpus", "emulation"), default="auto", help=_ON)
    return reproduce(emulate, on=parser.parse_args().on)


if __name__ == "__main__":
    sys.exit(main())
