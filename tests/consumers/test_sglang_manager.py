"""SGLang's workspace manager creates, checks, replaces and calls our workspace, without a GPU."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashinfer.elastic.allreduce import install, settings
from flashinfer.elastic.allreduce.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parent))
from sglang_on_cpu import driver, load
from sglang_server import RELEASES, Group, module_file
from upstream_on_cpu import FakeLibrary, FakeMemory, Loaded, without_gpu

RANKS, RANK = 8, 3
HIDDEN = 6144
DTYPE = torch.bfloat16

Make = Callable[..., types.ModuleType]


@pytest.fixture(scope="module", autouse=True)
def one_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group for SGLang's votes: of this process, whose answer is everybody's."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each SGLang release in turn."""
    return str(request.param)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    for name in (settings.ENGINE, settings.ONESHOT_MAX_MB):
        monkeypatch.delenv(name, raising=False)
    return without_gpu(monkeypatch)


@pytest.fixture
def make(
    release: str, upstream_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Give a function that returns SGLang's module over its FlashInfer, patched or not."""
    made: list[types.ModuleType] = []

    def make(*, patched: bool, multicast: bool = True) -> types.ModuleType:
        tree = upstream_tree(RELEASES[release])
        loaded = Loaded(tree)
        loaded.multicast = 0
        if patched:
            install(loaded.module)
        group = Group(RANKS, RANK, dist.group.WORLD, dist.group.WORLD)
        module = load(
            monkeypatch, module_file(release), loaded, tree, group, driver(multicast=multicast)
        )
        vars(module)["upstream"] = loaded
        made.append(module)
        return module

    yield make
    for module in made:
        module.cleanup_flashinfer_workspace()


def norm(sglang: types.ModuleType, tokens: int, hidden: int = HIDDEN, **more: Any) -> Any:
    """Call the operator that SGLang's layers call; return its outputs."""
    rows = torch.ones(tokens, hidden, dtype=DTYPE)
    weight = torch.ones(hidden, dtype=DTYPE)
    return sglang.flashinfer_allreduce_residual_rmsnorm(rows, rows.clone(), weight, **more)


def manager_of(sglang: types.ModuleType) -> Any:
    return sglang._get_workspace_manager(True)


def test_it_creates_our_workspace_before_capture_and_calls_it(
    make: Make, fake: FakeLibrary
) -> None:
    sglang = make(patched=True)
    sglang.pre_initialize_workspaces(max_token_num=42, hidden_dim=HIDDEN, dtype=DTYPE)
    assert FakeMemory.live == 2, "one for attention, one for experts"
    manager = manager_of(sglang)
    ours = manager.workspace
    assert (manager.initialized, ours.backend, ours.rank) == (True, "mnnvl", RANK)
    assert ours.buffer_size_bytes == 4_128_768
    residual_out = norm(sglang, 40, max_token_num=42)[1]
    assert residual_out.shape == (40, HIDDEN)
    (call,) = fake.calls
    assert call[1:4] == (Strategy.ONESHOT.value, 0, 40)
    assert manager.workspace is ours, "it did for this size"
    sglang.cleanup_flashinfer_workspace()
    assert FakeMemory.live == 0


def test_it_replaces_a_workspace_that_a_larger_model_outgrows(
    make: Make, fake: FakeLibrary
) -> None:
    sglang = make(patched=True)
    norm(sglang, 42, max_token_num=42)
    manager = manager_of(sglang)
    first = manager.workspace
    norm(sglang, 2048, 2 * HIDDEN, max_token_num=2048)
    second = manager.workspace
    assert second is not first
    assert first._destroyed
    assert FakeMemory.live == 1
    assert (manager.max_token_num, manager.hidden_dim) == (2048, 2 * HIDDEN)
    # The larger one serves the smaller model too, and is not created a third time.
    norm(sglang, 42, max_token_num=42)
    assert manager.workspace is second
    assert len(fake.created) == 2


@pytest.mark.parametrize("forced", [True, False, None])
def test_its_size_check_has_upstreams_answer(
    make: Make, fake: FakeLibrary, forced: bool | None
) -> None:
    """SGLang's releases ask in three ways; those that ask by strategy get the layout's answer."""
    sglang = make(patched=True)
    norm(sglang, 42, max_token_num=42)
    manager = manager_of(sglang)
    ours = manager.workspace
    by_strategy = getattr(manager, "_workspace_size_check_kwarg", None) == "strategy"
    strategies = sglang.upstream.module.MNNVLAllreduceFusionStrategy
    strategy = {True: strategies.ONESHOT, False: strategies.TWOSHOT, None: strategies.AUTO}[forced]
    for tokens in (1, 42, 43, 100, 1000):
        answer = manager.is_buffer_size_sufficient(tokens, HIDDEN, DTYPE, use_oneshot=forced)
        layout = ours.is_buffer_size_sufficient(RANKS, tokens, HIDDEN, DTYPE, strategy)
        # 0.5.15 asks with a keyword that this class does not have, and then compares tokens.
        assert answer is (layout if by_strategy else tokens <= 42), tokens


def test_one_shot_forced_on_a_workspace_made_without_is_served(
    make: Make, fake: FakeLibrary
) -> None:
    """What upstream's smaller buffers need a second creation for, in the middle of serving."""
    sglang = make(patched=True)
    norm(sglang, 42, max_token_num=42)
    first = manager_of(sglang).workspace
    norm(sglang, 40, max_token_num=42, use_oneshot=True)
    assert manager_of(sglang).workspace is first
    assert [call[1] for call in fake.calls] == [Strategy.ONESHOT.value] * 2


def test_a_failed_creation_turns_fusion_off_and_leaves_no_memory(
    make: Make, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(FakeMemory, "create", no_memory)
    sglang = make(patched=True)
    with caplog.at_level(logging.WARNING):
        assert norm(sglang, 40, max_token_num=42) == (None, None)
    assert "out of memory" in caplog.text
    assert sglang.is_flashinfer_allreduce_unavailable()
    assert FakeMemory.live == 0


def test_it_gives_up_by_itself_where_the_driver_knows_no_multicast(
    make: Make, fake: FakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's own check comes first, so no workspace of anybody's is asked for."""
    sglang = make(patched=True, multicast=False)
    with caplog.at_level(logging.WARNING):
        assert norm(sglang, 40, max_token_num=42) == (None, None)
    assert "cuMulticastGetGranularity failed" in caplog.text
    assert not fake.created


def test_without_the_wheel_multicast_that_is_off_ends_fusion_or_leaves_a_null_pointer(
    make: Make, release: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Upstream's own constructor, on memory without a multicast address. Nothing is launched."""
    sglang = make(patched=False)
    with caplog.at_level(logging.WARNING):
        created = sglang.ensure_workspace_initialized(
            max_token_num=42, hidden_dim=HIDDEN, dtype=DTYPE
        )
    manager = manager_of(sglang)
    if RELEASES[release].startswith("0.6."):
        assert created
        assert manager.workspace.mc_ptr == 0, "the first fused call stores to it"
        manager.workspace._destroyed = True  # Its memory is nowhere; there is nothing to release.
    else:
        assert not created
        assert manager.workspace is None
        assert "Multicast pointer is null after rendezvous" in caplog.text
        assert sglang.is_flashinfer_allreduce_unavailable()
    assert not sglang.upstream.launches
