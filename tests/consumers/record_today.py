#!/usr/bin/env python3
"""Record what vLLM 0.24's modules get from FlashInfer 0.6.x on this machine without this wheel.

    tests/consumers/record_today.py [--out FILE]

One process per GPU, multicast off. Records what upstream's mnnvl workspace is like (its
``mc_ptr``), the error of a call that a wider draft model makes on its target's workspace, and what
upstream says to the sizes of vLLM's tables. Its kernels are never launched: they would store
through ``mc_ptr``. A call that it would have launched is recorded as such.

Refuses to start where this wheel is installed, where FlashInfer is not 0.6.x (the constructor of
0.7.x creates a multicast object), or where TORCH_SYMM_MEM_DISABLE_MULTICAST is not 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "gpu")]

import torch  # noqa: E402
import vllm_parallel  # noqa: E402
from ranks import RankError, run_ranks  # noqa: E402

HIDDEN, WIDER, REPORTED = 2048, 6144, 42


class NotLaunchedError(Exception):
    """Raised in place of a launch."""


def refusal() -> str:
    """Say why nothing may be recorded here; empty if it may."""
    if vllm_parallel.version_of("flashinfer"):
        return "this wheel is installed"
    upstream = vllm_parallel.version_of("flashinfer-python")
    if not upstream.startswith("0.6."):
        return f"needs flashinfer-python 0.6.x, found {upstream or 'none'}"
    if not vllm_parallel.version_of("vllm").startswith("0.24."):
        return f"needs vLLM 0.24, found {vllm_parallel.version_of('vllm') or 'none'}"
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
        return "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 is not set"
    if torch.cuda.device_count() < 2:
        return f"needs two GPUs or more, found {torch.cuda.device_count()}"
    return ""


def observe(rank: int, ranks: int) -> dict[str, Any]:
    """Make vLLM's calls on one rank, up to where upstream would launch."""
    from vllm_fused import DTYPE, call, make_static, max_tokens, table_tokens

    def outcome(hidden: int, tokens: int, reported: int) -> str:
        shape = torch.zeros(tokens, hidden, dtype=DTYPE, device="cuda")
        inputs = shape.expand(ranks, tokens, hidden)
        problem = cases.Problem(inputs, shape, torch.ones(hidden, dtype=DTYPE, device="cuda"))
        static = make_static(problem, separate_norm=False)
        try:
            call(static, ranks, reported, 1e-6)
        except NotLaunchedError:
            return "would be launched; not made"
        except ValueError as error:
            return f"ValueError: {error}"
        raise AssertionError("upstream launched")

    cases = importlib.import_module("allreduce_cases")
    facts: dict[str, Any] = {"rank": rank}
    with vllm_parallel.tensor_parallel(rank, ranks, "mnnvl", patched=False) as group:
        module = vllm_parallel.communicator()
        create = module.get_fi_ar_workspace
        workspace = create(ranks, rank, REPORTED, HIDDEN, DTYPE, group.device_group)
        if workspace is None:
            return facts | {"workspace": "vLLM was refused one; its log says why"}
        kind = type(workspace)
        facts["workspace"] = f"{kind.__module__}.{kind.__qualname__}"
        facts["mc_ptr"] = int(workspace.mc_ptr)
        facts["buffer_bytes"] = int(workspace.buffer_size_bytes)
        upstream = importlib.import_module("flashinfer.comm.trtllm_mnnvl_ar")
        kernels = mock.Mock()
        kernels.trtllm_mnnvl_allreduce_fusion.side_effect = NotLaunchedError
        with mock.patch.object(upstream, "get_trtllm_mnnvl_comm_module", return_value=kernels):
            facts["target"] = outcome(HIDDEN, REPORTED, REPORTED)
            facts["wider draft"] = outcome(WIDER, REPORTED, REPORTED)
            module.destroy_fi_ar_workspace()
            most = max_tokens(ranks, WIDER)
            workspace = create(ranks, rank, most, WIDER, DTYPE, group.device_group)
            assert workspace is not None
            facts["tables"] = {n: outcome(WIDER, n, most) for n in table_tokens(ranks, WIDER)}
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    reason = refusal()
    if reason:
        print(f"nothing recorded: {reason}")
        return 2
    try:
        facts = run_ranks(observe, None, timeout_s=200)
    except RankError as error:
        print(error)
        return 1
    names = ("vllm", "flashinfer-python", "torch")
    versions = {name: vllm_parallel.version_of(name) for name in names}
    text = json.dumps({"versions": versions, "ranks": facts}, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
