"""Run every wrapper of an upstream that plans, over workspaces that are too small; print JSON."""

from __future__ import annotations

import contextlib
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


def i32(*values: int) -> torch.Tensor:
    """Return an int32 vector."""
    return torch.tensor(values, dtype=torch.int32)


def workspace(nbytes: int = MIB) -> torch.Tensor:
    """Return a workspace as callers make them."""
    return torch.zeros(nbytes, dtype=torch.uint8)


def query(tokens: int, heads: int = 2, dim: int = 128) -> torch.Tensor:
    """Return a query."""
    return torch.zeros(tokens, heads, dim, dtype=BF16)


CACHE = torch.zeros(4, 2, 16, 1, 128, dtype=BF16)
PAGES = (i32(0, 4), i32(0, 1, 2, 3), i32(16))
Case = tuple[Any, Callable[[], Any], Callable[[], Any]]


def paged_prefill(buffer: torch.Tensor, **options: Any) -> Case:
    w = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend="fa2", **options)
    return (
        w,
        lambda: w.plan(i32(0, 2), *PAGES, 2, 1, 128, 16, causal=True, q_data_type=BF16),
        lambda: w.run(query(2), CACHE),
    )


def paged_prefill_begin_forward(buffer: torch.Tensor) -> Case:
    w, _, run = paged_prefill(buffer)
    return w, lambda: w.begin_forward(i32(0, 2), *PAGES, 2, 1, 128, 16, q_data_type=BF16), run


def ragged_prefill(buffer: torch.Tensor) -> Case:
    w = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(buffer, "NHD", backend="fa2")
    keys = torch.zeros(4, 1, 128, dtype=BF16)
    return (
        w,
        lambda: w.plan(i32(0, 2), i32(0, 4), 2, 1, 128, q_data_type=BF16),
        lambda: w.run(query(2), keys, keys),
    )


def paged_decode(buffer: torch.Tensor, tensor_cores: bool = False) -> Case:
    w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, use_tensor_cores=tensor_cores)
    return (
        w,
        lambda: w.plan(*PAGES, 2, 1, 128, 16, q_data_type=BF16, data_type=BF16),
        lambda: w.run(query(1), CACHE),
    )


def paged_decode_tensor_cores(buffer: torch.Tensor) -> Case:
    return paged_decode(buffer, tensor_cores=True)


def fast_decode_plan(buffer: torch.Tensor) -> Case:
    w, plan, run = paged_decode(buffer, tensor_cores=True)
    demand, state.floats = state.floats, []
    plan()  # fast_decode_plan expects a wrapper that was planned once
    state.floats = demand
    fast = sys.modules["flashinfer.decode"].fast_decode_plan
    indptr, indices, last = PAGES
    return (
        w,
        lambda: fast(
            w,
            indptr,
            indices,
            last,
            2,
            1,
            128,
            16,
            q_data_type=BF16,
            kv_data_type=BF16,
            data_type=BF16,
            global_override_indptr_cpu=indptr,
        ),
        run,
    )


def cached_module_plan(buffer: torch.Tensor) -> Case:
    """As SGLang does: keep the wrapper's compiled module, and plan with it."""
    w, plan, run = paged_decode(buffer)
    demand, state.floats = state.floats, []
    plan()
    state.floats = demand
    arguments = (i32(0, 4), 1, 2, 1, 16, False, -1, 0.0, 128, 128, query(0), query(0))

    def direct() -> None:
        w._plan_info = w._cached_module.plan(
            w._float_workspace_buffer,
            w._int_workspace_buffer,
            w._pin_memory_int_workspace_buffer,
            *arguments,
        )

    return w, direct, run


def mla(buffer: torch.Tensor) -> Case:
    w = flashinfer.mla.BatchMLAPagedAttentionWrapper(buffer, backend="fa2")
    cache, rope = torch.zeros(4, 1, 512, dtype=BF16), torch.zeros(4, 1, 64, dtype=BF16)
    lengths = (i32(0, 1), i32(0, 4), i32(0, 1, 2, 3), i32(4))
    return (
        w,
        lambda: w.plan(*lengths, 16, 512, 64, 1, False, 0.1, BF16, BF16),
        lambda: w.run(query(1, 16, 512), query(1, 16, 64), cache, rope),
    )


def cascade(buffer: torch.Tensor) -> Case:
    w = flashinfer.MultiLevelCascadeAttentionWrapper(2, buffer, "NHD")
    pages = ([i32(0, 2), i32(0, 2)], [i32(0, 1), i32(2, 3)], [i32(16), i32(16)])
    return (
        w,
        lambda: w.plan([i32(0, 2), i32(0, 2)], *pages, 2, 1, 128, 16, q_data_type=BF16),
        lambda: w.run(query(2), CACHE),
    )


def batch_attention(buffer: torch.Tensor) -> Case:
    w = flashinfer.BatchAttention("NHD", device="cpu")
    w.float_workspace_buffer = buffer
    dtypes = {"q_data_type": BF16, "kv_data_type": BF16}
    lengths = (i32(0, 2), i32(0, 4), i32(0, 1, 2, 3), i32(64))
    return (
        w,
        lambda: w.plan(*lengths, 2, 1, 128, 128, 16, causal=True, **dtypes),
        lambda: w.run(query(2), CACHE),
    )


def block_sparse(buffer: torch.Tensor) -> Case:
    w = flashinfer.BlockSparseAttentionWrapper(buffer, backend="fa2")
    keys = torch.zeros(64, 1, 128, dtype=BF16)
    return (
        w,
        lambda: w.plan(i32(0, 1), i32(0), 64, 64, 64, 64, 2, 1, 128, q_data_type=BF16),
        lambda: w.run(query(64), keys, keys),
    )


def variable_block_sparse(buffer: torch.Tensor) -> Case:
    w = flashinfer.VariableBlockSparseAttentionWrapper(buffer, backend="fa2")
    mask, size = torch.ones(1, 1, 1, dtype=torch.bool), i32(64).view(1, 1)
    keys = torch.zeros(1, 64, 128, dtype=BF16)
    return (
        w,
        lambda: w.plan(mask, size, size, 2, 1, 128, q_data_type=BF16),
        lambda: w.run(torch.zeros(2, 64, 128, dtype=BF16), keys, keys),
    )


def pod(buffer: torch.Tensor) -> Case:
    w = flashinfer.PODWithPagedKVCacheWrapper(buffer, "NHD")
    keys = torch.zeros(8, 1, 128, dtype=BF16)
    return (
        w,
        lambda: w.plan(*PAGES, 2, 1, 128, 16, q_data_type=BF16, data_type=BF16),
        lambda: w.run(query(8), keys, keys, query(1), CACHE),
    )


def batch_pod(buffer: torch.Tensor) -> Case:
    w = flashinfer.BatchPODWithPagedKVCacheWrapper(buffer, "NHD")
    dtypes = {"q_data_type": BF16, "kv_data_type": BF16}
    return (
        w,
        lambda: w.plan(i32(0, 2), *PAGES, i32(0, 1), *PAGES, 2, 1, 128, 16, **dtypes),
        lambda: w.run(query(2), CACHE, query(1), CACHE),
    )


def attention_sinks(buffer: torch.Tensor) -> Case:
    w = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        buffer, backend="fa2", q_data_type=BF16, kv_data_type=BF16, head_dim_qk=128, head_dim_vo=128
    )
    return (
        w,
        lambda: w.plan(i32(0, 2), *PAGES, 2, 1, 128, 16, causal=True, q_data_type=BF16),
        lambda: w.run(query(2), CACHE, torch.zeros(2), 0.1),
    )


CASES = [
    paged_prefill,
    paged_prefill_begin_forward,
    ragged_prefill,
    paged_decode,
    paged_decode_tensor_cores,
    fast_decode_plan,
    cached_module_plan,
    mla,
    cascade,
    batch_attention,
    block_sparse,
    variable_block_sparse,
    pod,
    batch_pod,
    attention_sinks,
]


def attempt(action: Callable[[], Any]) -> str:
    """Return what an action throws, as text; empty if nothing."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def float_overflow(make: Callable[..., Case]) -> dict[str, Any]:
    """Both tmp_v and the tmp_s after it do not fit; and then the same again."""
    state.reset()
    state.floats = [("batch_prefill_tmp_v", 3 * MIB), ("batch_prefill_tmp_s", 3 * MIB)]
    buffer = workspace()
    _, plan, run = make(buffer)
    error = attempt(plan) or attempt(run)
    first = list(state.overflows)
    counted = any(call["function"] == "workspace_size" for call in state.calls)
    state.overflows.clear()
    state.calls.clear()
    error = error or attempt(plan) or attempt(run)
    return {
        "error": error,
        "first": first,
        "counted": counted,
        "again": list(state.overflows),
        "faults": state.faults,
        "calls": list(state.calls),
        "given": buffer.data_ptr(),
    }


def _integer_attributes(owner: Any) -> dict[str, torch.Tensor]:
    """Return the integer workspaces that an object, or the objects in it, refer to."""
    found = {}
    for name, value in vars(owner).items():
        inner = value if isinstance(value, list) else [value]
        for index, item in enumerate(inner):
            if isinstance(item, torch.Tensor) and "int_workspace" in name:
                found[name] = item
            elif "int_workspace_buffer" in str(getattr(item, "__dict__", {}).keys()):
                for key, tensor in _integer_attributes(item).items():
                    found[f"{name}[{index}].{key}"] = tensor
    return found


def integer_overflow(make: Callable[..., Case]) -> dict[str, Any]:
    """A plan does not fit into the wrapper's own integer workspace."""
    state.reset()
    wrapper, plan, run = make(workspace())
    error = attempt(plan)
    before = _integer_attributes(wrapper)
    state.integers = [
        ("batch_prefill_request_indices", 5 * MIB),
        ("batch_prefill_o_indptr", 6 * MIB),
    ]
    error = error or attempt(plan) or attempt(run)
    first = list(state.overflows)
    state.overflows.clear()
    error = error or attempt(plan) or attempt(run)
    after = _integer_attributes(wrapper)
    used = [call["buffers"][1][0] for call in state.calls[-2:] if len(call["buffers"]) > 1]
    return {
        "error": error,
        "first": first,
        "again": list(state.overflows),
        "faults": state.faults,
        "before": {name: upstream.nbytes(tensor) for name, tensor in before.items()},
        "after": {name: upstream.nbytes(tensor) for name, tensor in after.items()},
        "shown": sorted({tensor.data_ptr() for tensor in after.values()} & set(used)),
    }


def sharing() -> dict[str, Any]:
    """Two wrappers of one buffer; two halves of one allocation."""
    from flashinfer.elastic import attention

    state.reset()
    buffer = workspace()
    _, plan_a, run_a = paged_decode(buffer)
    _, plan_b, run_b = paged_prefill(buffer)
    plan_a()
    state.floats = [("batch_prefill_tmp_v", 3 * MIB)]
    plan_b()
    run_b()
    of_b = state.calls[-1]["buffers"][0][0]
    state.floats = [("batch_decode_tmp_v", 1024)]
    plan_a()
    run_a()
    of_a = state.calls[-1]["buffers"][0][0]
    usages = [usage.needed for usage in attention.report() if usage.given == MIB]

    state.reset()
    state.floats = [("batch_prefill_tmp_v", 3 * MIB)]
    _, plan, run = batch_pod(workspace())
    plan()
    run()
    halves = [call["buffers"][0][0] for call in state.calls if call["function"] == "batch_pod"]
    return {
        "shared": of_a == of_b,
        "needed": usages,
        "halves": len(set(halves)),
        "faults": state.faults,
    }


def graph_metadata() -> dict[str, Any]:
    """A graph that was captured before the integer workspace grew reads the plan at its address."""
    state.reset()
    wrapper, plan, run = paged_prefill(workspace())
    plan()
    run()
    captured = wrapper._int_workspace_buffer
    state.integers = [("batch_prefill_request_indices", 9 * MIB)]
    plan()
    state.integers = [("batch_prefill_request_indices", 2048)]
    plan()
    stamp = list(wrapper._plan_info)[2]
    return {
        "moved": wrapper._int_workspace_buffer is not captured,
        "mirrored": bool((captured.view(torch.uint8)[:2048] == stamp).all()),
        "faults": state.faults,
    }


def other_errors() -> dict[str, Any]:
    """An error that is not about a workspace comes through as it is."""
    import traceback

    state.reset()
    _, plan, _ = paged_prefill(workspace())
    state.error = RuntimeError("Failed to plan prefill with error: an illegal memory access")
    caught: BaseException | None = None
    try:
        plan()
    except RuntimeError as error:
        caught = error
    assert caught is not None
    frames = [frame.name for frame in traceback.extract_tb(caught.__traceback__)]
    return {
        "same": caught is state.error,
        "cause": repr(caught.__cause__ or caught.__context__),
        "raised_by": frames[-1],
        "plans": len(state.calls),
    }


def main() -> None:
    """Run the scenarios that are named; some are of every case."""
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name in sys.argv[1].split(","):
        scenario = globals()[name]
        if name in ("float_overflow", "integer_overflow"):
            results[name] = {make.__name__: scenario(make) for make in CASES}
        else:
            results[name] = scenario()
    print(json.dumps(results))


with contextlib.redirect_stdout(sys.stderr):
    flashinfer = upstream.load((9, 0))

if __name__ == "__main__":
    main()
