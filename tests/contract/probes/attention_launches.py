"""Call every trtllm-gen entry point of an upstream over workspaces of several sizes; print JSON.

The launchers are recorded ones that carve, throw and write as upstream's do; see
``attention_upstream``. Their parameter names come from the C++ sources, as the second argument.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import attention_upstream as upstream
import torch

MIB = 1 << 20
BF16 = torch.bfloat16
state = upstream.state
Call = Callable[[torch.Tensor, int, bool], Any]


def i32(*values: int) -> torch.Tensor:
    """Return an int32 vector."""
    return torch.tensor(values, dtype=torch.int32)


def lengths(batch: int) -> torch.Tensor:
    """Return the bounds of requests of one token each."""
    return torch.arange(batch + 1, dtype=torch.int32)


def decode(workspace: torch.Tensor, batch: int, lse: bool, **options: Any) -> Any:
    return flashinfer.decode.trtllm_batch_decode_with_kv_cache(
        torch.zeros(batch, 64, 128, dtype=BF16),
        torch.zeros(4, 2, 8, 16, 128, dtype=BF16),
        workspace,
        torch.zeros(batch, 1, dtype=torch.int32),
        torch.full((batch,), 16, dtype=torch.int32),
        16,
        backend="trtllm-gen",
        kv_layout="HND",
        return_lse=lse,
        **options,
    )


def context(workspace: torch.Tensor, batch: int, lse: bool) -> Any:
    return flashinfer.prefill.trtllm_batch_context_with_kv_cache(
        torch.zeros(batch, 64, 128, dtype=BF16),
        torch.zeros(4, 2, 8, 16, 128, dtype=BF16),
        workspace,
        torch.zeros(batch, 1, dtype=torch.int32),
        torch.full((batch,), 16, dtype=torch.int32),
        1,
        16,
        1.0,
        1.0,
        batch,
        lengths(batch),
        lengths(batch),
        kv_layout="HND",
        return_lse=lse,
    )


def ragged(workspace: torch.Tensor, batch: int, lse: bool) -> Any:
    return flashinfer.prefill.trtllm_ragged_attention_deepseek(
        torch.zeros(batch, 64, 192, dtype=BF16),
        torch.zeros(batch, 64, 192, dtype=BF16),
        torch.zeros(batch, 64, 128, dtype=BF16),
        workspace,
        torch.ones(batch, dtype=torch.int32),
        1,
        1,
        1.0,
        1.0,
        1.0,
        batch,
        -1,
        lengths(batch),
        lengths(batch),
        False,
        True,
        lse,
    )


def mla(workspace: torch.Tensor, batch: int, lse: bool, **options: Any) -> Any:
    function = options.pop("function", "trtllm_batch_decode_with_kv_cache_mla")
    return getattr(flashinfer.mla, function)(
        torch.zeros(batch, 1, 128, 576, dtype=BF16),
        torch.zeros(4, 1, 64, 576, dtype=BF16),
        workspace,
        128,
        512,
        64,
        options.pop("block_tables", torch.zeros(batch, 2, dtype=torch.int32)),
        torch.full((batch,), 16, dtype=torch.int32),
        16,
        bmm1_scale=1.0,
        bmm2_scale=1.0,
        backend="trtllm-gen",
        **({"return_lse": True} if lse else {}),
        **options,
    )


def sparse_mla(workspace: torch.Tensor, batch: int, lse: bool) -> Any:
    """MLA decode over the indices that a top-k selected."""
    return mla(
        workspace,
        batch,
        lse,
        sparse_mla_top_k=128,
        block_tables=torch.zeros(batch, 1, 128, dtype=torch.int32),
    )


def prefill_mla(workspace: torch.Tensor, batch: int, lse: bool) -> Any:
    return mla(workspace, batch, lse, function="trtllm_prefill_with_kv_cache_mla")


def sparse_mla_dsv4(workspace: torch.Tensor, batch: int, lse: bool) -> Any:
    return flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4(
        query=torch.zeros(batch, 1, 128, 512, dtype=BF16),
        swa_kv_cache=torch.zeros(4, 1, 64, 512, dtype=BF16),
        workspace_buffer=workspace,
        sparse_indices=torch.zeros(batch, 256, dtype=torch.int32),
        compressed_kv_cache=torch.zeros(4, 1, 64, 512, dtype=BF16),
        sparse_topk_lens=torch.full((batch,), 128, dtype=torch.int32),
        seq_lens=torch.full((batch,), 16, dtype=torch.int32),
        out=torch.zeros(batch, 1, 128, 512, dtype=BF16),
    )


def decode_wrapper(workspace: torch.Tensor, batch: int, lse: bool) -> Any:
    w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", backend="trtllm-gen")
    one = torch.ones(batch, dtype=torch.int32)
    indices = torch.zeros(batch, dtype=torch.int32)
    w.plan(lengths(batch), indices, one * 16, 64, 8, 128, 16, q_data_type=BF16, data_type=BF16)
    cache = torch.zeros(4, 2, 8, 16, 128, dtype=BF16)
    return w.run(torch.zeros(batch, 64, 128, dtype=BF16), cache, return_lse=lse)


def prefill_wrapper(workspace: torch.Tensor, batch: int, lse: bool) -> Any:
    w = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="trtllm-gen")
    one = torch.ones(batch, dtype=torch.int32)
    indices = torch.zeros(batch, dtype=torch.int32)
    bounds = lengths(batch)
    w.plan(bounds, bounds, indices, one * 16, 64, 8, 128, 16, causal=True, q_data_type=BF16)
    cache = torch.zeros(4, 2, 8, 16, 128, dtype=BF16)
    return w.run(torch.zeros(batch, 64, 128, dtype=BF16), cache, return_lse=lse)


CALLS: list[Call] = [
    decode,
    context,
    ragged,
    mla,
    sparse_mla,
    prefill_mla,
    sparse_mla_dsv4,
    decode_wrapper,
    prefill_wrapper,
]


def calls() -> list[Call]:
    """Return the calls that this version has."""
    has_prefill_mla = hasattr(flashinfer.mla, "trtllm_prefill_with_kv_cache_mla")
    return [call for call in CALLS if call is not prefill_mla or has_prefill_mla]


def attempt(call: Call, workspace: torch.Tensor, batch: int, lse: bool) -> dict[str, Any]:
    """Make a call, and return what happened."""
    state.reset()
    error = ""
    try:
        call(workspace, batch, lse)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {
        "error": error,
        "overflows": state.overflows,
        "faults": state.faults,
        "used": [launch["buffers"][0] for launch in state.calls if "size" in launch],
        "sizes": [launch["size"] for launch in state.calls if "size" in launch],
        "statistics": [launch["statistics"] for launch in state.calls if "statistics" in launch],
        "given": workspace.data_ptr(),
    }


def sizes() -> Any:
    """Every entry point, with and without LSE, on 1, 16 and 128 MiB; large batch where LSE is."""
    results: dict[str, Any] = {}
    for call in calls():
        for lse in (False, True):
            if lse and call is sparse_mla_dsv4:
                continue  # it has none
            for size in (1, 16, 128):
                batch = 1024 if lse else 4
                buffer = torch.zeros(size * MIB, dtype=torch.uint8)
                name = f"{call.__name__}, {'LSE, ' if lse else ''}{size} MiB"
                results[name] = attempt(call, buffer, batch, lse)
    return results


def one_buffer() -> Any:
    """One 128 MiB buffer of all layers: a small batch, LSE with a large one, then everything."""
    buffer = torch.zeros(128 * MIB, dtype=torch.uint8)
    steps = [attempt(mla, buffer, 4, False), attempt(decode, buffer, 4, True)]
    steps += [attempt(mla, buffer, 512, True)]
    steps += [attempt(call, buffer, 512, True) for call in calls() if call is not sparse_mla_dsv4]
    return steps


def counters() -> Any:
    """0.7.x: the caller's own counter buffer is too small."""
    if (
        "multi_ctas_kv_counter_buffer"
        not in inspect.signature(flashinfer.decode.trtllm_batch_decode_with_kv_cache).parameters
    ):
        return None
    buffer = torch.zeros(128 * MIB, dtype=torch.uint8)
    small = torch.zeros(128, dtype=torch.uint8)
    first = attempt(
        lambda *args: decode(*args, multi_ctas_kv_counter_buffer=small), buffer, 64, False
    )
    again = attempt(lambda *args: mla(*args, multi_ctas_kv_counter_buffer=small), buffer, 64, False)
    # Below Python, where only the launcher looks.
    op = sys.modules["flashinfer.decode"].get_trtllm_gen_fmha_module()
    state.reset()
    names = state.signatures["trtllm_paged_attention_decode"]
    values = {
        "query": torch.zeros(64, 64, 128, dtype=BF16),
        "out": torch.zeros(64, 64, 128, dtype=BF16),
        "workspace_buffer": buffer,
        "workspace_size": 128 * MIB,
        "multi_ctas_kv_counter_buffer": torch.zeros(256, dtype=torch.uint8),
        "batch_size": 64,
        "max_q_len": 1,
        "sm_count": 148,
    }
    op.trtllm_paged_attention_decode(*[values.get(name) for name in names])
    return [first, again, {"error": "", "faults": state.faults, "overflows": state.overflows}]


def main() -> None:
    """Run the scenarios that are named."""
    warnings.simplefilter("ignore")
    state.signatures = json.loads(sys.argv[2])
    print(json.dumps({name: globals()[name]() for name in sys.argv[1].split(",")}))


with contextlib.redirect_stdout(sys.stderr):
    flashinfer = upstream.load((10, 0))

if __name__ == "__main__":
    main()
