"""How calls are served: steps, fallbacks and what is logged; with upstream's kernels too."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.elastic.allreduce import install, settings
from flashinfer.elastic.allreduce.agreement import CollectiveError
from flashinfer.elastic.allreduce.strategy import Strategy, resolve
from flashinfer.elastic.shadow import TESTED_VERSIONS

sys.path.insert(0, str(Path(__file__).parent))
from upstream_on_cpu import WRITTEN, Echo, FakeLibrary, Loaded, Threads, without_gpu

RANKS = 8
HIDDEN = 6144
DTYPE = torch.bfloat16


@pytest.fixture(scope="module", params=TESTED_VERSIONS)
def loaded(request: pytest.FixtureRequest, upstream_tree: Callable[[str], Path]) -> Loaded:
    loaded = Loaded(upstream_tree(request.param))
    install(loaded.module)
    return loaded


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    monkeypatch.delenv(settings.ENGINE, raising=False)
    return without_gpu(monkeypatch)


@pytest.fixture
def upstream_engine(monkeypatch: pytest.MonkeyPatch, loaded: Loaded) -> FakeLibrary:
    monkeypatch.setenv(settings.ENGINE, "upstream")
    loaded.launches.clear()
    return without_gpu(monkeypatch)


def create(loaded: Loaded, **more: Any) -> Any:
    arguments: dict[str, Any] = {
        "max_num_tokens": 42,
        "hidden_dim": HIDDEN,
        "dtype": DTYPE,
        "comm_backend": loaded.torch_backend(Echo(RANKS)),
    }
    mapping = loaded.mapping(3, RANKS)
    return loaded.module.MNNVLAllReduceFusionWorkspace(mapping, **(arguments | more))


def fused(loaded: Loaded, workspace: Any, rows: torch.Tensor, strategy: str, **more: Any) -> Any:
    return loaded.module.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
        rows,
        rows.clone(),
        torch.ones(rows.shape[1], dtype=rows.dtype),
        workspace,
        1e-6,
        strategy=loaded.module.MNNVLAllreduceFusionStrategy[strategy],
        **more,
    )


SERVED = [
    # tokens, asked, (strategy, steps)
    (40, "ONESHOT", Strategy.ONESHOT, 1),
    (42, "ONESHOT", Strategy.ONESHOT, 1),
    (100, "ONESHOT", Strategy.TWOSHOT, 1),
    (42, "TWOSHOT", Strategy.TWOSHOT, 1),
    (169, "TWOSHOT", Strategy.TWOSHOT, 2),
    (1000, "ONESHOT", Strategy.TWOSHOT, 6),
    (1, "AUTO", Strategy.ONESHOT, 1),
    (150, "AUTO", Strategy.TWOSHOT, 1),
]


@pytest.mark.parametrize(("tokens", "asked", "strategy", "steps"), SERVED)
def test_native_steps(
    loaded: Loaded, fake: FakeLibrary, tokens: int, asked: str, strategy: Strategy, steps: int
) -> None:
    workspace = create(loaded)
    fused(loaded, workspace, torch.zeros(tokens, HIDDEN, dtype=DTYPE), asked)
    assert len(fake.calls) == steps
    assert {call[1] for call in fake.calls} == {strategy.value}
    # The rows, in order, each once; the whole tensors, of which the kernel takes its rows.
    ends = [0]
    for call in fake.calls:
        assert call[2] == ends[-1]
        ends.append(call[2] + call[3])
        assert all(tensor.shape[0] == tokens for tensor in call[5:9])
    assert ends[-1] == tokens
    workspace.destroy()


@pytest.mark.parametrize(
    ("arch", "strategy"), [((9, 0), Strategy.TWOSHOT), ((10, 3), Strategy.ONESHOT)]
)
def test_the_gpu_decides_where_nothing_is_asked_for(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, arch: tuple[int, int], strategy: Strategy
) -> None:
    """Some 1.2 MB a rank, between the points up to which one-shot is faster on either."""
    monkeypatch.delenv(settings.ENGINE, raising=False)
    fake = without_gpu(monkeypatch, arch=arch)
    workspace = create(loaded, max_num_tokens=200)
    fused(loaded, workspace, torch.zeros(100, HIDDEN, dtype=DTYPE), "AUTO")
    assert [call[1] for call in fake.calls] == [strategy.value]
    workspace.destroy()


@pytest.mark.parametrize(("tokens", "steps"), [(15, 1), (42, 1), (56, 1), (63, 2), (168, 3)])
def test_rows_wider_than_what_was_reported(
    loaded: Loaded, fake: FakeLibrary, tokens: int, steps: int
) -> None:
    """As a draft model's on its target's workspace."""
    wider = 16384
    workspace = create(loaded)
    fused(loaded, workspace, torch.zeros(tokens, wider, dtype=DTYPE), "ONESHOT")
    assert len(fake.calls) == steps
    assert sum(call[3] for call in fake.calls) == tokens
    workspace.destroy()


def test_one_row_that_does_not_fit(loaded: Loaded, fake: FakeLibrary) -> None:
    workspace = create(loaded, buffer_size_in_bytes=4096)
    rows = torch.zeros(5, HIDDEN, dtype=DTYPE)
    with pytest.raises(
        ValueError,
        match="^The buffer size in the given workspace is insufficient for the given problem size. "
        f"Buffer: 4096 bytes, Required: {RANKS * HIDDEN * 2} bytes. .* hidden_dim={HIDDEN} ",
    ):
        fused(loaded, workspace, rows, "ONESHOT")
    assert fake.calls == []
    fused(loaded, workspace, torch.zeros(5, 64, dtype=DTYPE), "ONESHOT")
    assert fake.calls
    workspace.destroy()


def test_dtypes(loaded: Loaded, fake: FakeLibrary) -> None:
    workspace = create(loaded)
    for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn, torch.bool):
        with pytest.raises(ValueError, match="float16, bfloat16 and float32 are supported"):
            loaded.module.trtllm_mnnvl_allreduce(torch.zeros(2, 64).to(dtype), workspace, False)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        loaded.module.trtllm_mnnvl_allreduce(torch.zeros(2, 64, dtype=dtype), workspace, False)
    assert len(fake.calls) == 3
    workspace.destroy()


def test_each_kind_of_fallback_is_logged_once(
    loaded: Loaded, fake: FakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashinfer.elastic")
    workspace = create(loaded)

    def said_by(tokens: int, asked: str) -> list[str]:
        caplog.clear()
        fused(loaded, workspace, torch.zeros(tokens, HIDDEN, dtype=DTYPE), asked)
        return [record.getMessage() for record in caplog.records]

    assert said_by(40, "ONESHOT") == []
    (text,) = said_by(100, "ONESHOT")
    assert f"needs {100 * HIDDEN * 2 * RANKS} bytes of a buffer of 4128768" in text
    assert "oneshot" in text
    assert "twoshot in 1 step" in text
    assert said_by(101, "ONESHOT") == []
    (text,) = said_by(1000, "ONESHOT")
    assert "twoshot in 6 step" in text
    (text,) = said_by(1000, "TWOSHOT")
    assert f"needs {2 * 1000 * HIDDEN * 2} bytes" in text
    assert said_by(1001, "ONESHOT") == said_by(2000, "TWOSHOT") == said_by(42, "TWOSHOT") == []
    assert {record.levelno for record in caplog.records} <= {logging.INFO}

    # Of each workspace.
    other = create(loaded)
    caplog.clear()
    fused(loaded, other, torch.zeros(100, HIDDEN, dtype=DTYPE), "ONESHOT")
    assert len(caplog.records) == 1
    workspace.destroy()
    other.destroy()


# Upstream's kernels


@pytest.mark.parametrize(("tokens", "asked", "strategy", "steps"), SERVED)
def test_upstreams_launches(
    loaded: Loaded,
    upstream_engine: FakeLibrary,
    tokens: int,
    asked: str,
    strategy: Strategy,
    steps: int,
) -> None:
    workspace = create(loaded)
    size = workspace.buffer_size_bytes
    assert size >= 4_128_768
    requested = Strategy.TWOSHOT if asked == "TWOSHOT" else Strategy.ONESHOT
    if asked == "AUTO":
        requested = strategy
    expected = resolve(requested, tokens, HIDDEN, 2, RANKS, size)
    rows = torch.zeros(tokens, HIDDEN, dtype=DTYPE)
    norm, stream = fused(loaded, workspace, rows, asked, launch_with_pdl=True, weight_bias=1.0)
    assert upstream_engine.created == []
    assert len(loaded.launches) == len(expected)
    for launch, step in zip(loaded.launches, expected, strict=True):
        assert launch[1:5] == (
            workspace.mc_ptr,
            workspace.uc_ptrs_dev,
            workspace.uc_ptr_local,
            workspace.buffer_flags,
        )
        # ranks, rank, norm, PDL, one-shot
        one_shot = step.strategy == Strategy.ONESHOT
        assert launch[5:10] == (RANKS, 3, True, True, one_shot)
        begin = step.first * HIDDEN * 2
        for got, whole in ((launch[0], rows), (launch[10], norm), (launch[11], stream)):
            assert got.shape == (step.count, HIDDEN)
            assert got.is_contiguous()
            assert got.data_ptr() == whole.data_ptr() + begin
        assert launch[12].shape == (step.count, HIDDEN)
        assert launch[13].shape == (HIDDEN,)
        assert launch[14:16] == (1e-6, 1.0)
    workspace.destroy()


def test_upstreams_plain_all_reduce(loaded: Loaded, upstream_engine: FakeLibrary) -> None:
    workspace = create(loaded)
    rows = torch.zeros(4, HIDDEN, dtype=DTYPE)
    output = loaded.module.trtllm_mnnvl_allreduce(rows, workspace, False)
    (launch,) = loaded.launches
    assert launch[7:10] == (False, False, True)
    assert launch[10].data_ptr() == output.data_ptr()
    assert launch[11:15] == (None,) * 4
    assert loaded.module.trtllm_mnnvl_allreduce(rows[:0], workspace, False).shape == (0, HIDDEN)
    assert len(loaded.launches) == 1
    workspace.destroy()


@pytest.mark.parametrize("explicit", [1 << 20, 1_000_000, 12345, 3_000_000])
def test_upstreams_buffers_are_aligned(
    loaded: Loaded, upstream_engine: FakeLibrary, explicit: int
) -> None:
    """In every version, and the kernels are told."""
    workspace = create(loaded, buffer_size_in_bytes=explicit)
    size = workspace.buffer_size_bytes
    assert size % 256 == 0
    assert size >= explicit
    assert workspace.workspace_size_bytes == 3 * size
    assert workspace.NUM_LAMPORT_BUFFERS == 3
    assert workspace.buffer_flags.tolist() == [0, 2, size, 0, 0, 0, 0, 0, 0]
    workspace.destroy()
    assert workspace._destroyed
    assert not hasattr(workspace, "buffer_flags")
    workspace.destroy()


def test_upstream_reads_no_strides_so_it_gets_none(
    loaded: Loaded, upstream_engine: FakeLibrary
) -> None:
    """Slices of wider matrices as inputs and as outputs; the outputs get what was written."""
    workspace = create(loaded)

    def wide() -> torch.Tensor:
        return torch.full((6, 3 * HIDDEN), 7.0, dtype=DTYPE)

    whole = [wide() for _ in range(4)]
    rows, residual, norm, stream = (each[:, HIDDEN : 2 * HIDDEN] for each in whole)
    rows.fill_(2)
    residual.fill_(3)
    loaded.module.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
        rows,
        residual,
        torch.ones(HIDDEN, dtype=DTYPE),
        workspace,
        1e-6,
        norm,
        stream,
    )
    (launch,) = loaded.launches
    tensors = {"input": launch[0], "residual_in": launch[12]}
    tensors |= {"output": launch[10], "residual_out": launch[11]}
    assert [name for name, tensor in tensors.items() if not tensor.is_contiguous()] == []
    assert bool((launch[0] == 2).all())
    assert bool((launch[12] == 3).all())
    assert bool((norm == WRITTEN).all())
    assert bool((stream == WRITTEN + 1).all())
    for each in whole:
        assert bool((each[:, :HIDDEN] == 7).all())
        assert bool((each[:, 2 * HIDDEN :] == 7).all())
    workspace.destroy()


def test_upstream_reads_the_weight_in_the_inputs_dtype(
    loaded: Loaded, upstream_engine: FakeLibrary
) -> None:
    workspace = create(loaded)
    rows = torch.zeros(4, HIDDEN, dtype=DTYPE)
    gamma = torch.full((HIDDEN,), 1.5, dtype=torch.float32)
    loaded.module.trtllm_mnnvl_fused_allreduce_add_rmsnorm(rows, rows.clone(), gamma, workspace)
    (launch,) = loaded.launches
    assert launch[13].dtype == DTYPE
    assert bool((launch[13] == 1.5).all())
    workspace.destroy()


def spoilt(rows: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """Arguments that upstream's launcher would take, and read or write beyond their end."""
    return {
        "output": {"output": rows[:-1].clone()},
        "residual_out": {"residual_out": rows[:, :-8].clone()},
        "dtype of the output": {"output": rows.float()},
        "dtype of residual_out": {"residual_out": rows.half()},
        "device of the output": {"output": rows.to("meta")},
    }


@pytest.mark.parametrize("what", list(spoilt(torch.zeros(2, 16))))
def test_wrong_tensors_are_refused_before_any_launch(
    loaded: Loaded, upstream_engine: FakeLibrary, what: str
) -> None:
    """In chunks too: nothing is launched of a call that cannot be finished."""
    workspace = create(loaded, buffer_size_in_bytes=1 << 20)
    rows = torch.zeros(300, HIDDEN, dtype=DTYPE)
    with pytest.raises(ValueError, match=r"shape|dtype|must be on cpu"):
        fused(loaded, workspace, rows, "TWOSHOT", **spoilt(rows)[what])
    assert loaded.launches == []
    workspace.destroy()


def test_upstream_reads_no_strides_of_a_weight_either(
    loaded: Loaded, upstream_engine: FakeLibrary
) -> None:
    workspace = create(loaded)
    rows = torch.zeros(4, HIDDEN, dtype=DTYPE)
    gamma = torch.ones(2 * HIDDEN, dtype=DTYPE)[::2]
    with pytest.raises(ValueError, match="gamma must be dense"):
        loaded.module.trtllm_mnnvl_fused_allreduce_add_rmsnorm(rows, rows.clone(), gamma, workspace)
    assert loaded.launches == []
    workspace.destroy()


def test_no_multicast_is_said(loaded: Loaded, upstream_engine: FakeLibrary) -> None:
    loaded.multicast = 0
    try:
        with pytest.raises(CollectiveError, match=r"[Mm]ulticast pointer"):
            create(loaded)
    finally:
        loaded.multicast = 0x5000


def test_a_failing_constructor_fails_on_all_ranks(
    loaded: Loaded, upstream_engine: FakeLibrary
) -> None:
    threads = Threads(2)

    def one(rank: int) -> Any:
        return loaded.module.MNNVLAllReduceFusionWorkspace(
            loaded.mapping(rank, 2),
            42,
            HIDDEN,
            DTYPE,
            comm_backend=loaded.torch_backend(threads.backend(rank)),
        )

    loaded.broken = "broken on purpose"
    try:
        errors = threads.run(one)
    finally:
        loaded.broken = ""
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    assert all("ranks 0-1: RuntimeError: broken on purpose" in str(error) for error in errors)
