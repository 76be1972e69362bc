"""Record what SGLang's workspace manager gets from FlashInfer 0.6.x without our wheel. A script.

Creates a workspace and looks at it; launches nothing, because its kernels would store to the null
address that it reports. It refuses FlashInfer 0.7 and later, whose constructor may make a multicast
object, and a FlashInfer with the wheel.

    python tests/consumers/sglang_without_wheel.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from ranks import run_ranks
from sglang_server import Group, import_installed


def record(rank: int, ranks: int) -> dict[str, Any]:
    """Create the workspace of the reported case through SGLang; return what there is."""
    group = Group(ranks, rank, dist.new_group(backend="nccl"), dist.new_group(backend="gloo"))
    sglang = import_installed(group)
    created = sglang.ensure_workspace_initialized(
        max_token_num=42, hidden_dim=6144, dtype=torch.bfloat16
    )
    manager = sglang._get_workspace_manager(True)
    ours = manager.workspace
    strategies = sys.modules["flashinfer.comm.trtllm_mnnvl_ar"].MNNVLAllreduceFusionStrategy
    return {
        "sglang": importlib.metadata.version("sglang"),
        "flashinfer-python": importlib.metadata.version("flashinfer-python"),
        "created": created,
        "disabled by SGLang": sglang.is_flashinfer_allreduce_unavailable(),
        "mc_ptr": None if ours is None else int(ours.mc_ptr),
        "buffer_size_bytes": None if ours is None else int(ours.buffer_size_bytes),
        "one-shot of 40 fits": None
        if ours is None
        else ours.is_buffer_size_sufficient(ranks, 40, 6144, torch.bfloat16, strategies.ONESHOT),
    }


def main() -> None:
    """Refuse what must not be created; else print what each rank saw, as JSON."""
    version = importlib.metadata.version("flashinfer-python")
    if not version.startswith("0.6."):
        sys.exit(f"flashinfer-python {version}: only 0.6.x is created without the wheel")
    if importlib.util.find_spec("flashinfer.elastic") is not None:
        sys.exit("the wheel is installed; this records what happens without it")
    print(json.dumps(run_ranks(record, 2, timeout_s=120.0), indent=2))


if __name__ == "__main__":
    main()
