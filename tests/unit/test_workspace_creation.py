"""Creating and destroying workspaces: sizes, engines, agreement between ranks, failures."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.elastic.allreduce import install, settings, sizing
from flashinfer.elastic.allreduce import workspace as our_workspace
from flashinfer.elastic.allreduce.agreement import Agreement, CollectiveError
from flashinfer.elastic.allreduce.engines import library, native
from flashinfer.elastic.shadow import TESTED_VERSIONS

sys.path.insert(0, str(Path(__file__).parent))
from upstream_on_cpu import (
    Echo,
    FakeLibrary,
    FakeMemory,
    Loaded,
    Threads,
    without_gpu,
)

RANKS = 8

# Replaced where there is no GPU.
_initialize = native.NativeEngine.initialize


@pytest.fixture(scope="module", params=TESTED_VERSIONS)
def loaded(request: pytest.FixtureRequest, upstream_tree: Callable[[str], Path]) -> Loaded:
    loaded = Loaded(upstream_tree(request.param))
    install(loaded.module)
    return loaded


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    for name in settings.NAMES:
        monkeypatch.delenv(name, raising=False)
    return without_gpu(monkeypatch)


def create(loaded: Loaded, rank: int = 3, ranks: int = RANKS, **more: Any) -> Any:
    """Create the workspace of the reported case."""
    arguments: dict[str, Any] = {
        "max_num_tokens": 42,
        "hidden_dim": 6144,
        "dtype": torch.bfloat16,
        "comm_backend": loaded.torch_backend(Echo(ranks)),
    }
    mapping = loaded.mapping(rank, ranks)
    return loaded.module.MNNVLAllReduceFusionWorkspace(mapping, **(arguments | more))


# What there is


def test_attributes(loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.TIMEOUT_S, "7")
    workspace = create(loaded)
    assert (workspace.rank, workspace.tp_size, workspace.world_size) == (3, RANKS, RANKS)
    assert workspace.backend == "mnnvl"
    assert workspace.buffer_size_bytes == 4_128_768
    assert workspace.workspace_size_bytes == 2 * 4_128_768
    assert workspace.NUM_LAMPORT_BUFFERS == 2
    assert workspace.ptrs == list(workspace.handle.addresses)
    assert workspace.uc_ptr_local == workspace.ptrs[3]
    assert workspace.mc_ptr
    assert our_workspace.find_by_pointer_table(workspace.uc_ptrs_dev) is workspace
    assert our_workspace.find_by_pointer_table(12345) is None
    assert not workspace._destroyed
    # No flags: `hasattr` says so, and a caller may set them.
    assert not hasattr(workspace, "buffer_flags")
    workspace.buffer_flags = 1
    assert workspace.buffer_flags == 1
    # Two buffers and the rotation behind them.
    (created,) = fake.created
    addresses = list(workspace.ptrs)
    state = addresses[3] + 2 * 4_128_768
    assert created == (3, addresses, 0, 4_128_768, state, 7.0, False, 132, None)
    assert workspace.handle.size_bytes == 2 * 4_128_768 + 256
    workspace.destroy()


def test_one_of_several_tensor_parallel_groups(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is that within the group, the world is all ranks, with either engine."""
    mapping = loaded.module.Mapping(world_size=8, rank=5, gpus_per_node=8, tp_size=4, pp_size=2)
    places = []
    for engine in ("native", "upstream"):
        monkeypatch.setenv(settings.ENGINE, engine)
        workspace = loaded.module.MNNVLAllReduceFusionWorkspace(
            mapping, 42, 6144, torch.bfloat16, comm_backend=loaded.torch_backend(Echo(4))
        )
        places.append((workspace.rank, workspace.tp_size, workspace.world_size))
        workspace.destroy()
    assert places == [(1, 4, 8)] * 2


def test_empty_places_and_the_rotation(fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers hold nothing but -0.0, which says that a word has not come; rotations begin at 0."""
    engine = native.NativeEngine(Agreement(Echo(2), 0, 2), torch.device("cuda", 0), 256, 1.0, 132)
    memory = torch.full((engine.memory.size_bytes // 4,), 7, dtype=torch.int32)
    waited: list[object] = []

    def view(array: Any, device: torch.device) -> torch.Tensor:
        place = array.__cuda_array_interface__
        assert place["typestr"] == "<i4"
        first = (place["data"][0] - engine.local_address) // 4
        return memory[first : first + place["shape"][0]]

    monkeypatch.setattr(torch, "as_tensor", view)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    _initialize(engine)
    buffers = memory[: 2 * 256 // 4].view(torch.float32)
    assert bool((buffers == 0).all())
    assert bool(buffers.signbit().all())
    assert memory[2 * 256 // 4 :].tolist() == [0] * 64
    # A peer may write as soon as this rank says that it is done.
    assert waited == [torch.device("cuda", 0)]
    with torch.inference_mode():
        memory = torch.full_like(memory, 7)
    _initialize(engine)
    assert bool(memory[: 2 * 256 // 4].view(torch.float32).signbit().all())


def test_the_class_keeps_upstreams_own_figures(loaded: Loaded, fake: FakeLibrary) -> None:
    owner = loaded.module.MNNVLAllReduceFusionWorkspace
    assert owner.NUM_LAMPORT_BUFFERS == 3
    required = owner.get_required_buffer_size_bytes
    strategies = loaded.module.MNNVLAllreduceFusionStrategy
    assert required(8, 40, 6144, torch.bfloat16, strategies.ONESHOT) == 3_932_160
    assert required(8, 42, 6144, torch.bfloat16, strategies.TWOSHOT) == 1_179_648


def test_sufficient_means_what_upstream_means(loaded: Loaded, fake: FakeLibrary) -> None:
    """Asked of our workspace, upstream's own method and ours give the same answers."""
    workspace = create(loaded)
    from flashinfer.elastic.allreduce import upstream_original

    theirs = upstream_original("MNNVLAllReduceFusionWorkspace").is_buffer_size_sufficient
    strategies = list(loaded.module.MNNVLAllreduceFusionStrategy)
    answers = {True: 0, False: 0}
    for ranks, tokens, hidden, dtype, strategy in itertools.product(
        (2, 8),
        (0, 1, 8, 40, 42, 43, 64, 168, 169, 1000),
        (64, 6144, 7168),
        (torch.bfloat16, torch.float32),
        strategies,
    ):
        answer = workspace.is_buffer_size_sufficient(ranks, tokens, hidden, dtype, strategy)
        assert answer is theirs(workspace, ranks, tokens, hidden, dtype, strategy)
        answers[answer] += 1
    assert min(answers.values()) > 20
    problem = (8, 42, 6144, torch.bfloat16)
    assert workspace.is_buffer_size_sufficient(*problem) is True
    assert workspace.is_buffer_size_sufficient(*problem, strategy=strategies[0]) is True
    workspace.destroy()


@pytest.mark.parametrize(
    ("explicit", "size"), [(0, 256), (1, 256), (256, 256), (1000, 1024), (2**32 - 256, 2**32 - 256)]
)
def test_an_explicit_size_is_honoured_whole(
    loaded: Loaded, fake: FakeLibrary, explicit: int, size: int
) -> None:
    workspace = create(loaded, buffer_size_in_bytes=explicit)
    assert workspace.buffer_size_bytes == size
    workspace.destroy()


def test_one_shot_limit(loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ONESHOT_MAX_MB, "0")
    workspace = create(loaded)
    assert workspace.buffer_size_bytes == sizing.round_up(1_179_648, 256)
    workspace.destroy()


# Engines


def plan_of(engine: str, built: tuple[int, ...], arch: int) -> Any:
    plan = our_workspace._Plan.__new__(our_workspace._Plan)
    plan.options = settings.read({settings.ENGINE: engine})
    plan.built_archs, plan.arch = built, arch
    return plan


@pytest.mark.parametrize(
    ("engine", "built", "arch", "chosen"),
    [
        ("auto", (90, 100), 90, "native"),
        ("auto", (90, 100), 100, "native"),
        ("auto", (90, 100), 103, "native"),
        ("auto", (90, 100), 120, "upstream"),
        ("auto", (90,), 100, "upstream"),
        ("native", (90, 100), 103, "native"),
        ("upstream", (90, 100), 90, "upstream"),
        ("upstream", (90,), 120, "upstream"),
    ],
)
def test_choice_of_engine(engine: str, built: tuple[int, ...], arch: int, chosen: str) -> None:
    assert plan_of(engine, built, arch).engine() == chosen


def test_native_without_machine_code_says_what_to_install() -> None:
    with pytest.raises(RuntimeError, match="install a wheel whose name has sm120") as caught:
        plan_of("native", (90, 100), 120).engine()
    assert "sm90, sm100" in str(caught.value)
    assert 'FLASHINFER_CUDA_ARCH_LIST="12.0"' in str(caught.value)


def test_upstreams_kernels_stand_in_where_ours_have_no_machine_code(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(settings.ENGINE, raising=False)
    without_gpu(monkeypatch, arch=(12, 0))
    workspace = create(loaded)
    assert workspace._engine.name == "upstream"
    assert "kernels for sm90, sm100, and the GPU is sm120" in caplog.text
    workspace.destroy()


def test_minor_versions_count(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code for sm103 does not run on sm100."""
    monkeypatch.delenv(settings.ENGINE, raising=False)
    for minor, engine in ((0, "upstream"), (3, "native")):
        without_gpu(monkeypatch, arch=(10, minor), built=(103,))
        workspace = create(loaded)
        assert workspace._engine.name == engine
        workspace.destroy()


def test_upstreams_kernels_do_without_ours(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> library.Library:
        raise RuntimeError("libflashinfer_elastic.so is missing")

    monkeypatch.setattr(library, "load", missing)
    monkeypatch.setenv(settings.ENGINE, "upstream")
    create(loaded).destroy()


# Wrong arguments


def test_wrong_arguments_raise_what_upstream_raises(
    loaded: Loaded, fake: FakeLibrary, upstream_tree: Callable[[str], Path]
) -> None:
    plain = Loaded(Path(loaded.module.__file__ or "").parents[2])
    wrong: list[dict[str, Any]] = [
        {"max_num_tokens": None},
        {"hidden_dim": None},
        {"dtype": None},
        {"buffer_size_in_bytes": 2**32},
        {"buffer_size_in_bytes": 10**12},
        {"comm_backend": None},
    ]
    for arguments in wrong:
        texts = []
        for each in (plain, loaded):
            with pytest.raises((AssertionError, ValueError, RuntimeError)) as caught:
                create(each, **arguments)
            text = str(caught.value).splitlines()[0]
            texts.append((type(caught.value).__name__, text))
        assert texts[0] == texts[1]
    assert FakeMemory.live == 0


def test_a_backend_of_another_group(loaded: Loaded, fake: FakeLibrary) -> None:
    for ranks in (2, 4, 16):
        with pytest.raises(CollectiveError, match="belongs to another group"):
            create(loaded, comm_backend=Echo(ranks))
    assert FakeMemory.live == 0


@pytest.mark.parametrize("name", settings.NAMES)
def test_a_wrong_setting_is_named(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "wrong")
    with pytest.raises(ValueError, match=name):
        create(loaded)


def test_nothing_is_created_during_a_capture(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and without a word to the other ranks."""
    cuda = types.SimpleNamespace(
        is_available=lambda: True, is_current_stream_capturing=lambda: True
    )
    monkeypatch.setattr(our_workspace.torch, "cuda", cuda)
    backend = Echo(RANKS)
    with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
        create(loaded, comm_backend=backend)
    assert backend.gathers == 0


# Agreement


def on_all_ranks(loaded: Loaded, ranks: int = 3, **by_rank: Callable[[int], Any]) -> list[Any]:
    """Create a workspace on threads; arguments are functions of the rank."""
    threads = Threads(ranks)

    def one(rank: int) -> Any:
        more = {name: value(rank) for name, value in by_rank.items()}
        return create(loaded, rank, ranks, comm_backend=threads.backend(rank), **more)

    return threads.run(one)


def test_all_ranks_create(loaded: Loaded, fake: FakeLibrary) -> None:
    made = on_all_ranks(loaded)
    assert [workspace.rank for workspace in made] == [0, 1, 2]
    assert FakeMemory.live == 3
    for workspace in made:
        workspace.destroy()
    assert FakeMemory.live == 0


def test_ranks_that_ask_for_different_sizes(loaded: Loaded, fake: FakeLibrary) -> None:
    errors = on_all_ranks(loaded, max_num_tokens=lambda rank: 42 + 1000 * (rank == 1))
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "settings of the workspace: ranks disagree: ranks 0, 2: [" in str(errors[0])
    assert FakeMemory.live == 0


def test_ranks_with_different_gpus(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strategy of a call follows from the architecture, so it has to be the same."""
    minors = iter((0, 3, 0))

    def properties(_: object) -> Any:
        return types.SimpleNamespace(major=10, minor=next(minors), multi_processor_count=132)

    monkeypatch.setattr(our_workspace.torch.cuda, "get_device_properties", properties)
    errors = on_all_ranks(loaded)
    assert all("workspace: ranks disagree" in str(error) for error in errors), errors


def test_ranks_with_different_wheels(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may have kernels of its own where another runs upstream's."""
    built = iter(((90, 100), (100,), (90, 100)))
    monkeypatch.setattr(library, "load", lambda: fake.functions._replace(archs=next(built)))
    errors = on_all_ranks(loaded)
    assert all("workspace: ranks disagree" in str(error) for error in errors), errors


def test_ranks_whose_versions_misunderstand_each_other(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = our_workspace._Plan.shared
    numbers = itertools.count()

    def of_another_version(plan: Any) -> list[object]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(our_workspace, "PROTOCOL", next(numbers))
            return shared(plan)

    monkeypatch.setattr(our_workspace._Plan, "shared", of_another_version)
    errors = on_all_ranks(loaded)
    assert all("workspace: ranks disagree" in str(error) for error in errors), errors


def test_one_rank_with_wrong_arguments(loaded: Loaded, fake: FakeLibrary) -> None:
    """It gets its ValueError; the others learn of it."""
    errors = on_all_ranks(loaded, buffer_size_in_bytes=lambda r: -1 if r == 2 else 1024)
    assert [type(error) for error in errors] == [CollectiveError, CollectiveError, ValueError]
    assert "rank 2: ValueError: The buffer size in bytes must not be negative" in str(errors[0])
    assert FakeMemory.live == 0


def test_the_smallest_gpu_decides_the_launch_shape(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((132, 114, 120))

    def properties(_: object) -> Any:
        return types.SimpleNamespace(major=9, minor=0, multi_processor_count=next(counts))

    monkeypatch.setattr(our_workspace.torch.cuda, "get_device_properties", properties)
    made = on_all_ranks(loaded)
    assert [created[7] for created in fake.created] == [114] * 3
    for workspace in made:
        workspace.destroy()


def break_on(rank_to_fail: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in that fails on one rank, which it tells by its first argument."""

    def broken(first: Any, *rest: Any) -> Any:
        rank = getattr(first, "rank", first)
        if rank == rank_to_fail:
            raise RuntimeError("broken on purpose")
        return original(first, *rest)

    return broken


def test_one_rank_fails_while_memory_is_made(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeMemory, "__init__", lambda *_: 1 / 0)
    errors = on_all_ranks(loaded)
    assert all("ZeroDivisionError" in str(error) for error in errors)
    assert all(isinstance(error, CollectiveError) for error in errors)


def test_one_rank_fails_while_the_context_is_made(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = fake.functions._replace(context_create=break_on(1, fake.functions.context_create))
    monkeypatch.setattr(library, "load", lambda: broken)
    errors = on_all_ranks(loaded)
    assert all("rank 1: RuntimeError: broken on purpose" in str(error) for error in errors)
    assert FakeMemory.live == 0
    assert sorted(fake.destroyed) == [1, 2]


def test_one_rank_fails_after_the_engine_is_made(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even the last steps are agreed on: all fail, and nothing is left."""

    class Broken(native.NativeEngine):
        @property
        def local_address(self) -> int:
            if self.memory.rank == 1:
                raise RuntimeError("broken on purpose")
            return super().local_address

    monkeypatch.setattr(our_workspace, "NativeEngine", Broken)
    errors = on_all_ranks(loaded)
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    assert all("rank 1: RuntimeError: broken on purpose" in str(error) for error in errors)
    errors.clear()
    gc.collect()
    assert FakeMemory.live == 0


# The end


def test_destroy(loaded: Loaded, fake: FakeLibrary) -> None:
    workspace = create(loaded)
    table = workspace.uc_ptrs_dev
    workspace.destroy()
    workspace.destroy()
    assert workspace._destroyed
    assert FakeMemory.live == 0
    assert fake.destroyed == [1]
    for name in ("mc_ptr", "uc_ptrs_dev", "uc_ptr_local", "handle", "ptrs", "buffer_flags"):
        assert not hasattr(workspace, name)
        with pytest.raises(AttributeError, match=f"has been destroyed; it has no '{name}'"):
            getattr(workspace, name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        workspace.no_such_thing  # noqa: B018 (it raises)
    rows = torch.zeros(1, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="The workspace has been destroyed"):
        loaded.module.trtllm_mnnvl_allreduce(rows, workspace, False)
    # What upstream keeps stays readable.
    assert workspace.buffer_size_bytes == 4_128_768
    assert (workspace.rank, workspace.tp_size) == (3, RANKS)
    del workspace
    gc.collect()
    assert our_workspace.find_by_pointer_table(table) is None


def test_a_refused_destroy_can_be_repeated(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory cannot be released during a capture; until then the workspace is whole."""

    def refuse(_: FakeMemory) -> None:
        raise RuntimeError("cannot close symmetric memory while a CUDA graph is being captured")

    workspace = create(loaded)
    with monkeypatch.context() as patch:
        patch.setattr(FakeMemory, "close", refuse)
        with pytest.raises(RuntimeError, match="captured"):
            workspace.destroy()
    assert not workspace._destroyed
    assert workspace.ptrs
    rows = torch.zeros(1, 64, dtype=torch.bfloat16)
    loaded.module.trtllm_mnnvl_allreduce(rows, workspace, False)
    assert fake.destroyed == []
    workspace.destroy()
    assert FakeMemory.live == 0
    assert fake.destroyed == [1]


def test_an_engine_releases_its_context_once(loaded: Loaded, fake: FakeLibrary) -> None:
    workspace = create(loaded)
    workspace._engine.close()
    workspace.destroy()
    assert fake.destroyed == [1]


def test_a_forgotten_workspace_warns_as_upstreams_does(loaded: Loaded, fake: FakeLibrary) -> None:
    alive = [create(loaded)]
    with pytest.warns(
        ResourceWarning, match="MNNVLAllReduceFusionWorkspace was not explicitly destroyed"
    ):
        alive.clear()
    assert FakeMemory.live == 0


@pytest.mark.parametrize("engine", ["native", "upstream"])
def test_a_failed_creation_leaves_nothing_to_warn_of(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setenv(settings.ENGINE, engine)
    monkeypatch.setattr(native.NativeEngine, "buffers", broken)
    monkeypatch.setattr(native.NativeEngine, "local_address", property(broken))
    monkeypatch.setattr(our_workspace, "UpstreamEngine", broken)
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(CollectiveError, match="broken on purpose"):
            create(loaded)
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_a_failed_creation_is_forgotten_with_its_error(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: upstream's memory does not wait for a collection of garbage."""
    failures: list[weakref.ref[BaseException]] = []

    class OnPurposeError(RuntimeError):
        pass

    def broken(*_: object) -> None:
        error = OnPurposeError()
        failures.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    monkeypatch.setenv(settings.ENGINE, "upstream")
    monkeypatch.setattr(our_workspace, "UpstreamEngine", broken)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(CollectiveError):
            create(loaded)
        assert [failure() for failure in failures] == [None]
    finally:
        gc.enable()


def test_checkpoints_where_upstream_has_them(loaded: Loaded, fake: FakeLibrary) -> None:
    workspace = create(loaded)
    if not hasattr(workspace, "checkpoint_prepare"):
        assert not hasattr(workspace, "_require_handles_attached")
        workspace.destroy()
        return
    rows = torch.zeros(1, 64, dtype=torch.bfloat16)
    addresses = workspace.ptrs
    workspace._require_handles_attached()
    for _ in range(2):
        workspace.checkpoint_prepare()
    with pytest.raises(RuntimeError, match="MNNVL handles are not attached"):
        workspace._require_handles_attached()
    with pytest.raises(RuntimeError, match="MNNVL handles are not attached"):
        loaded.module.trtllm_mnnvl_allreduce(rows, workspace, False)
    assert fake.calls == []
    for _ in range(2):
        workspace.checkpoint_restore(Echo(RANKS))
    assert workspace.ptrs == addresses
    loaded.module.trtllm_mnnvl_allreduce(rows, workspace, False)
    assert len(fake.calls) == 1
    workspace.destroy()


@pytest.fixture
def checkpoints(loaded: Loaded) -> None:
    if not hasattr(loaded.module.MNNVLAllReduceFusionWorkspace, "checkpoint_prepare"):
        pytest.skip("this upstream has no checkpoints")


def create_all(loaded: Loaded, group: Threads) -> list[Any]:
    workspaces = group.run(
        lambda rank: create(loaded, rank, group.ranks, comm_backend=group.backend(rank))
    )
    assert not any(isinstance(workspace, BaseException) for workspace in workspaces), workspaces
    return workspaces


@pytest.mark.usefixtures("checkpoints")
def test_a_checkpoint_that_fails_on_one_rank_fails_on_all(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Threads(3)
    workspaces = create_all(loaded, group)

    def prepare() -> list[Any]:
        return group.run(lambda rank: workspaces[rank].checkpoint_prepare())

    def restore() -> list[Any]:
        return group.run(lambda rank: workspaces[rank].checkpoint_restore(group.backend(rank)))

    def refuse() -> None:
        raise RuntimeError("captures")

    with monkeypatch.context() as patch:
        patch.setattr(workspaces[1].handle, "detach", refuse)
        errors = prepare()
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    assert all("rank 1: RuntimeError: captures" in str(error) for error in errors)
    # Rank 1 still has its memory, the others have not: nothing to go back to, but no hang either.
    errors = restore()
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    assert prepare() == [None] * 3
    assert not any(workspace.handle.mapped for workspace in workspaces)
    assert restore() == [None] * 3
    assert all(workspace.handle.mapped for workspace in workspaces)
    for workspace in workspaces:
        workspace.destroy()


@pytest.mark.usefixtures("checkpoints")
def test_a_repeated_checkpoint_call_does_nothing(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a collective: the others need not repeat it."""
    emptied: list[int] = []
    monkeypatch.setattr(native.NativeEngine, "initialize", lambda _: emptied.append(1))
    backend = Echo(RANKS)
    workspace = create(loaded, comm_backend=backend)
    for call in (
        lambda: workspace.checkpoint_restore(backend),
        workspace.checkpoint_prepare,
        lambda: workspace.checkpoint_restore(backend),
    ):
        call()
        before = backend.gathers, len(emptied)
        call()
        assert (backend.gathers, len(emptied)) == before
    assert len(emptied) == 2
    workspace._initialize_protocol()
    assert len(emptied) == 3
    workspace.destroy()


@pytest.mark.usefixtures("checkpoints")
def test_a_checkpoint_that_no_rank_could_prepare_leaves_the_buffers_alone(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold what is under way: a rank that empties its own again loses what peers sent."""
    group = Threads(2)
    workspaces = create_all(loaded, group)

    def refuse() -> None:
        raise RuntimeError("captures")

    with monkeypatch.context() as patch:
        for workspace in workspaces:
            patch.setattr(workspace.handle, "detach", refuse)
        errors = group.run(lambda rank: workspaces[rank].checkpoint_prepare())
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    emptied: list[int] = []
    monkeypatch.setattr(native.NativeEngine, "initialize", lambda _: emptied.append(1))
    restored = group.run(lambda rank: workspaces[rank].checkpoint_restore(group.backend(rank)))
    assert restored == [None] * 2
    assert emptied == []
    for workspace in workspaces:
        workspace.destroy()


@pytest.mark.usefixtures("checkpoints")
def test_memory_that_could_not_be_emptied_is_not_used(
    loaded: Loaded, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Threads(2)
    workspaces = create_all(loaded, group)
    emptied: list[int] = []

    def initialize(engine: native.NativeEngine) -> None:
        if engine.memory.rank == 1 and not emptied:
            emptied.append(1)
            raise RuntimeError("no such luck")

    monkeypatch.setattr(native.NativeEngine, "initialize", initialize)
    assert group.run(lambda rank: workspaces[rank].checkpoint_prepare()) == [None] * 2
    errors = group.run(lambda rank: workspaces[rank].checkpoint_restore(group.backend(rank)))
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    rows = torch.zeros(1, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="MNNVL handles are not attached"):
        loaded.module.trtllm_mnnvl_allreduce(rows, workspaces[0], False)
    errors = group.run(lambda rank: workspaces[rank].checkpoint_restore(group.backend(rank)))
    assert errors == [None] * 2
    loaded.module.trtllm_mnnvl_allreduce(rows, workspaces[0], False)
    for workspace in workspaces:
        workspace.destroy()


@pytest.mark.usefixtures("checkpoints")
def test_the_backend_of_a_restore_serves_from_then_on(loaded: Loaded, fake: FakeLibrary) -> None:
    """A restored process has a backend of its own: that of the creation may be gone."""
    backends = [Echo(RANKS), Echo(RANKS)]
    workspace = create(loaded, comm_backend=backends[0])
    workspace.checkpoint_prepare()
    workspace.checkpoint_restore(backends[1])
    before = [backend.gathers for backend in backends]
    workspace.checkpoint_prepare()
    assert backends[0].gathers == before[0]
    assert backends[1].gathers > before[1]
    workspace.destroy()


def test_numbers_of_other_libraries(loaded: Loaded, fake: FakeLibrary) -> None:
    workspace = create(loaded, max_num_tokens=torch.tensor(42), hidden_dim=Index(6144))
    assert workspace.buffer_size_bytes == 4_128_768
    workspace.destroy()
    workspace = create(loaded, buffer_size_in_bytes=Index(2**20))
    assert type(workspace.buffer_size_bytes) is int
    workspace.destroy()


class Index:
    """As NumPy's integers are: no `int`, but as good as one."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value
