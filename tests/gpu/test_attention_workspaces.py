"""Attention on workspaces that are too small, on a GPU, against upstream with an ample one.

Upstream alone runs in a process of its own, with ``FLASHINFER_ELASTIC_WORKSPACE=0``; its outputs
are compared bit for bit. Four modules are compiled just in time, which takes minutes the first
time; ``python tests/gpu/test_attention_workspaces.py build`` does it side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 2**20
AMPLE = 2048
SIZES = (1, 16, 128)
BF16 = torch.bfloat16
DEVICE = "cuda"
HEADS, KV_HEADS, DIM, PAGE = 64, 8, 128, 16
REPORTED = 536_346_624  # batch_prefill_tmp_v, of the public report


class Case(NamedTuple):
    """A wrapper on a workspace: what to call, and the object."""

    wrapper: Any
    plan: Callable[[], None]
    run: Callable[[], list[torch.Tensor]]


def workspace(mebibytes: int) -> torch.Tensor:
    """Return a workspace as callers make them."""
    return torch.zeros(mebibytes * MIB, dtype=torch.uint8, device=DEVICE)


def steps(count: int, step: int) -> torch.Tensor:
    """Return ``[0, step, ..., count * step]``."""
    return torch.arange(0, count * step + 1, step, dtype=torch.int32, device=DEVICE)


_tensors: dict[Any, torch.Tensor] = {}


def normal(*shape: int) -> torch.Tensor:
    """Return random numbers that depend on the shape only, the same in every process."""
    if shape not in _tensors:
        generator = torch.Generator(DEVICE).manual_seed(sum(shape))
        _tensors[shape] = torch.randn(shape, dtype=BF16, device=DEVICE, generator=generator)
    return _tensors[shape]


def pages(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return indptr, indices and the last pages' lengths of requests of one length."""
    count = length // PAGE
    indices = torch.arange(batch * count, dtype=torch.int32, device=DEVICE)
    return (
        steps(batch, count),
        indices,
        torch.full((batch,), PAGE, dtype=torch.int32, device=DEVICE),
    )


def paged_prefill(buffer: torch.Tensor, batch: int = 8, query: int = 16) -> Case:
    import flashinfer

    length = 4096
    cache = normal(batch * length // PAGE, 2, PAGE, KV_HEADS, DIM)
    w = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend="fa2")
    bounds, table = steps(batch, query), pages(batch, length)
    tokens = normal(batch * query, HEADS, DIM)
    return Case(
        w,
        lambda: w.plan(bounds, *table, HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=BF16),
        lambda: list(w.run(tokens, cache, return_lse=True)),
    )


def ragged_prefill(buffer: torch.Tensor) -> Case:
    import flashinfer

    batch, query, length = 4, 64, 4096
    keys, values = normal(batch * length, KV_HEADS, DIM), normal(batch * length, KV_HEADS, DIM)
    w = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(buffer, "NHD", backend="fa2")
    tokens = normal(batch * query, HEADS, DIM)
    bounds = (steps(batch, query), steps(batch, length))
    return Case(
        w,
        lambda: w.plan(*bounds, HEADS, KV_HEADS, DIM, causal=True, q_data_type=BF16),
        lambda: list(w.run(tokens, keys, values, return_lse=True)),
    )


def paged_decode(buffer: torch.Tensor) -> Case:
    import flashinfer

    batch, length = 32, 8192
    cache = normal(batch * length // PAGE, 2, PAGE, KV_HEADS, DIM)
    w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD")
    table, tokens = pages(batch, length), normal(batch, HEADS, DIM)
    types = {"q_data_type": BF16, "data_type": BF16}
    return Case(
        w,
        lambda: w.plan(*table, HEADS, KV_HEADS, DIM, PAGE, **types),
        lambda: list(w.run(tokens, cache, return_lse=True)),
    )


def mla(buffer: torch.Tensor) -> Case:
    import flashinfer

    batch, length, heads = 64, 4096, 128
    w = flashinfer.mla.BatchMLAPagedAttentionWrapper(buffer, backend="fa2")
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    indices = torch.arange(batch * length, dtype=torch.int32, device=DEVICE)
    bounds = (steps(batch, 1), steps(batch, length), indices, lengths)
    inputs = (normal(batch, heads, 512), normal(batch, heads, 64))
    caches = (normal(batch * length, 1, 512), normal(batch * length, 1, 64))
    return Case(
        w,
        lambda: w.plan(*bounds, heads, 512, 64, 1, False, 0.1, BF16, BF16),
        lambda: list(w.run(*inputs, *caches, return_lse=True)),
    )


def cascade(buffer: torch.Tensor) -> Case:
    import flashinfer

    batch, shared, length = 32, 4096, 2048
    cache = normal((shared + batch * length) // PAGE, 2, PAGE, KV_HEADS, DIM)
    w = flashinfer.MultiLevelCascadeAttentionWrapper(2, buffer, "NHD")
    for level in w._batch_prefill_wrappers:
        level._backend = "fa2"
    common, (indptr, indices, last) = pages(1, shared), pages(batch, length)
    tables = zip(common, (indptr, indices + shared // PAGE, last), strict=True)
    indptrs, tables_, lasts = (list(level) for level in tables)
    bounds = [steps(1, batch), steps(batch, 1)]
    tokens = normal(batch, HEADS, DIM)
    return Case(
        w,
        lambda: w.plan(
            bounds, indptrs, tables_, lasts, HEADS, KV_HEADS, DIM, PAGE, q_data_type=BF16
        ),
        lambda: [w.run(tokens, cache)],
    )


def reported(buffer: torch.Tensor) -> Case:
    """CUDA graph mode, 512 requests of one token, 64/4 heads: the size of the public report."""
    import flashinfer

    batch, length, kv_heads = 512, 256, 4
    cache = normal(batch * length // PAGE, 2, PAGE, kv_heads, DIM)
    indptr, indices, last = pages(batch, length)
    w = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        buffer,
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=torch.empty_like(indptr),
        paged_kv_indptr_buf=torch.empty_like(indptr),
        paged_kv_indices_buf=torch.empty_like(indices),
        paged_kv_last_page_len_buf=torch.empty_like(last),
        backend="fa2",
    )
    bounds, tokens = steps(batch, 1), normal(batch, HEADS, DIM)
    table = (indptr, indices, last)
    return Case(
        w,
        lambda: w.plan(bounds, *table, HEADS, kv_heads, DIM, PAGE, causal=True, q_data_type=BF16),
        lambda: list(w.run(tokens, cache, return_lse=True)),
    )


CASES = {
    case.__name__: case
    for case in (paged_prefill, ragged_prefill, paged_decode, mla, cascade, reported)
}


# --- upstream alone, in a process of its own ---------------------------------------------------


def build() -> None:
    """Compile the modules of all cases side by side."""
    from concurrent.futures import ThreadPoolExecutor

    import flashinfer

    flashinfer.__version__  # noqa: B018 (imports everything before the threads do)

    def run(case: Callable[[torch.Tensor], Case]) -> None:
        made = case(workspace(AMPLE))
        made.plan()
        made.run()

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, (paged_prefill, paged_decode, mla, cascade)))


def upstream_alone(place: Path) -> None:
    """Write what upstream computes with an ample workspace, and where it overflows."""
    outputs, overflows = {}, {}
    for name, case in CASES.items():
        made = case(workspace(AMPLE))
        made.plan()
        outputs[name] = [output.cpu() for output in made.run()]
        for size in SIZES:
            try:
                case(workspace(size)).plan()
                overflows[f"{name}, {size}"] = ""
            except RuntimeError as error:
                overflows[f"{name}, {size}"] = str(error)
    torch.save(outputs, place / "outputs.pt")
    (place / "overflows.json").write_text(json.dumps(overflows))


def alone(*arguments: str, switch: str = "0") -> str:
    """Run this file in a process of its own, and return what it prints."""
    environment = os.environ | {"FLASHINFER_ELASTIC_WORKSPACE": switch}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    """What upstream alone computes, and where it overflows."""
    place = tmp_path_factory.mktemp("upstream")
    alone("build")
    alone("reference", str(place))
    outputs = torch.load(place / "outputs.pt")
    return outputs, json.loads((place / "overflows.json").read_text())


@pytest.fixture(autouse=True)
def return_memory() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def same(outputs: list[torch.Tensor], reference: list[torch.Tensor]) -> bool:
    """Whether all outputs are equal to the last bit."""
    return len(outputs) == len(reference) and all(
        torch.equal(output.cpu().view(torch.uint8), expected.view(torch.uint8))
        for output, expected in zip(outputs, reference, strict=True)
    )


# --- ours --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_upstream_alone_overflows(name: str, upstream: Any) -> None:
    _, overflows = upstream
    assert "AlignedAllocator" in overflows[f"{name}, 1"]
    if name == "reported":
        assert f"batch_prefill_tmp_v with size {REPORTED} " in overflows["reported, 128"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_eager(name: str, size: int, upstream: Any) -> None:
    outputs, overflows = upstream
    buffer = workspace(size)
    made = CASES[name](buffer)
    made.plan()
    assert same(made.run(), outputs[name])
    made.plan()
    assert same(made.run(), outputs[name])
    from flashinfer.elastic.attention import pool

    assert (pool.find(buffer) is not None) == bool(overflows[f"{name}, {size}"])


@pytest.mark.parametrize("name", CASES)
def test_captured_then_replayed_after_growth(name: str, upstream: Any) -> None:
    outputs, _ = upstream
    buffer = workspace(1)
    made = CASES[name](buffer)
    made.plan()
    made.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = made.run()
    graph.replay()
    assert same(results, outputs[name])

    # Others on the same buffer need more, twice, and memory that was freed is overwritten.
    for queries in (32, 64):
        larger = paged_prefill(buffer, query=queries)
        larger.plan()
        larger.run()
    if name != "reported":
        larger = reported(buffer)
        larger.plan()
        larger.run()
    torch.cuda.synchronize()
    junk = [torch.full((64 * MIB,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(32)]
    for result in results:
        result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same(results, outputs[name])
    assert all(bool((block == 255).all()) for block in junk), "the graph wrote to freed memory"

    made.plan()
    for result in results:
        result.zero_()
    graph.replay()
    assert same(results, outputs[name])


def test_the_reported_allocation_is_what_grew(upstream: Any) -> None:
    from flashinfer.elastic import attention

    buffer = workspace(394)  # 413,138,944 bytes
    made = reported(buffer)
    made.plan()
    assert same(made.run(), upstream[0]["reported"])
    usage = next(usage for usage in attention.report() if usage.given == 394 * MIB)
    assert usage.allocation in ("batch_prefill_tmp_v", "batch_prefill_tmp_s")
    assert usage.needed >= REPORTED
    assert usage.call == "batch_prefill.plan"


@pytest.mark.parametrize("name", ["paged_prefill", "ragged_prefill", "paged_decode", "mla"])
def test_an_integer_workspace_grows_and_shows(name: str, upstream: Any) -> None:
    buffer = workspace(AMPLE)
    made = CASES[name](buffer)
    small = torch.empty(256, dtype=torch.uint8, device=DEVICE)
    if hasattr(made.wrapper, "reset_workspace_buffer"):
        made.wrapper.reset_workspace_buffer(buffer, small)
    else:
        made.wrapper._int_workspace_buffer = small
        made.wrapper._pin_memory_int_workspace_buffer = torch.empty(
            256, dtype=torch.uint8, pin_memory=True
        )
    made.plan()
    assert same(made.run(), upstream[0][name])
    assert made.wrapper._int_workspace_buffer.numel() > 256
    twin = made.wrapper._pin_memory_int_workspace_buffer
    assert twin.numel() == made.wrapper._int_workspace_buffer.numel()
    assert twin.is_pinned()


def test_growth_under_capture_belongs_to_no_graph() -> None:
    from flashinfer.elastic.attention import pool

    buffer = workspace(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        larger = pool.grow(buffer, 64 * MIB, kind="float", call="test", allocation_name="part").data
        assert pool.replacement(buffer) is larger
        larger.add_(1)
    assert int(larger.count_nonzero()) == 0, "filled outside, not yet used"
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((larger == 2).all()), "the fill was recorded in the graph"
    assert _pool_of(larger) == (0, 0)
    assert pool.report()
    slot = pool.find(buffer)
    assert slot is not None
    assert slot.captured


def _pool_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the memory pool of a tensor; (0, 0) is the ordinary one."""
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return tuple(segment.get("segment_pool_id", (0, 0)))
    raise AssertionError("not torch's memory")


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build()
    else:
        upstream_alone(Path(sys.argv[2]))
