"""Who may try multicast, what is opened then, and that any failure leaves unicast on all ranks."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.elastic.allreduce import install, multicast, settings, torch_symmetric, trial
from flashinfer.elastic.allreduce.agreement import CollectiveError
from flashinfer.elastic.allreduce.engines import native
from flashinfer.elastic.allreduce.size_classes import LAST_CLASS, SizeClasses
from flashinfer.elastic.shadow import TESTED_VERSIONS

sys.path.insert(0, str(Path(__file__).parent))
import multicast_doubles
import upstream_on_cpu
from multicast_doubles import (
    MULTICAST_ADDRESS,
    TorchMemory,
    agreement_of,
    backend_of,
    current_rank,
    on_ranks,
)
from upstream_on_cpu import FakeLibrary, FakeMemory, Loaded, Threads

RANKS = 3
CPU = torch.device("cpu")
CHOSEN = SizeClasses(0b1111, 0b11)


@pytest.fixture
def group() -> Threads:
    return Threads(RANKS)


@pytest.fixture
def memory(group: Threads, monkeypatch: pytest.MonkeyPatch) -> TorchMemory:
    for name in settings.NAMES:
        monkeypatch.delenv(name, raising=False)
    return multicast_doubles.without_gpu(monkeypatch, group)


# May it be tried?


def find(
    group: Threads,
    setting: str = "auto",
    *,
    detachable: bool = False,
    backend: Callable[[int], Any] | None = None,
) -> list[Any]:
    return on_ranks(
        group,
        lambda rank: multicast.find_group(
            agreement_of(group, rank),
            setting,
            (backend or (lambda rank: backend_of(group, rank)))(rank),
            CPU,
            detachable=detachable,
        ),
    )


@pytest.mark.parametrize("setting", ["auto", "1"])
def test_torchs_group_is_found(group: Threads, memory: TorchMemory, setting: str) -> None:
    assert find(group, setting) == ["tp"] * RANKS


def test_the_default_group_is_found(
    group: Threads, memory: TorchMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that was given no group is over torch's default one."""
    distributed: Any = multicast.torch.distributed
    monkeypatch.setattr(distributed, "get_rank", lambda _: current_rank())
    monkeypatch.setattr(distributed, "get_world_size", lambda _: RANKS)
    world = types.SimpleNamespace(group_name="world")
    monkeypatch.setattr(distributed, "group", types.SimpleNamespace(WORLD=world), raising=False)

    def backend(rank: int) -> Any:
        made = group.backend(rank)
        made._group = None
        return made

    assert find(group, backend=backend) == ["world"] * RANKS


def test_a_group_of_one_goes_without(memory: TorchMemory) -> None:
    assert find(Threads(1)) == [None]


def test_no_means_no(group: Threads, memory: TorchMemory) -> None:
    """Neither torch nor the other ranks are asked."""
    assert (
        on_ranks(
            group,
            lambda rank: multicast.find_group(None, "0", None, CPU, detachable=False),  # type: ignore[arg-type]
        )
        == [None] * RANKS
    )
    assert memory.touched == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "true"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("NCCL_NVLS_ENABLE", " Off "),
        ("NVSHMEM_DISABLE_NVLS", "1"),
    ],
)
def test_what_switches_multicast_off_elsewhere_does_so_here(
    group: Threads,
    memory: TorchMemory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    """Torch's symmetric memory is not so much as imported."""
    monkeypatch.setenv(name, value)
    assert find(group) == [None] * RANKS
    errors = find(group, "1")
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    assert f"FLASHINFER_MNNVL_MULTICAST=1: ranks 0-2: RuntimeError: {name}={value} is set" == str(
        errors[0]
    )
    assert memory.touched == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", ""),
        ("NCCL_NVLS_ENABLE", "1"),
        ("NCCL_NVLS_ENABLE", "2"),
        ("NVSHMEM_DISABLE_NVLS", "0"),
    ],
)
def test_what_does_not_switch_it_off_does_not(
    group: Threads,
    memory: TorchMemory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert find(group) == ["tp"] * RANKS


def test_a_workspace_that_may_be_detached_goes_without_unless_insisted_on(
    group: Threads, memory: TorchMemory
) -> None:
    assert find(group, detachable=True) == [None] * RANKS
    assert memory.touched == 0
    assert find(group, "1", detachable=True) == ["tp"] * RANKS


def without_group(group: Threads) -> Callable[[int], Any]:
    def backend(rank: int) -> Any:
        made = backend_of(group, rank)
        del made._group
        return made

    return backend


def with_group(group: Threads, **changes: Any) -> Callable[[int], Any]:
    def backend(rank: int) -> Any:
        made = backend_of(group, rank)
        if rank == 1:
            vars(made._group).update(changes)
        return made

    return backend


def test_backends_without_this_very_group_go_without(group: Threads, memory: TorchMemory) -> None:
    for backend, reason in (
        (without_group(group), "ranks 0-2: RuntimeError: the communication backend has no group"),
        (with_group(group, size=2), "rank 1: RuntimeError: the backend's group has rank 1 of 2"),
        (with_group(group, rank=0), "for rank 1 of 3"),
    ):
        assert find(group, backend=backend) == [None] * RANKS
        errors = find(group, "1", backend=backend)
        assert all(reason in str(error) for error in errors), errors


def test_a_backend_over_all_ranks_names_no_group(
    group: Threads, memory: TorchMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's backend has None for the default group."""

    def backend(rank: int) -> Any:
        made = backend_of(group, rank)
        made._group = None
        return made

    distributed: Any = multicast.torch.distributed
    distributed.group = type("group", (), {"WORLD": backend_of(group, 0)._group})
    monkeypatch.setattr(distributed, "get_rank", lambda group: current_rank())
    monkeypatch.setattr(distributed, "get_world_size", lambda group: RANKS)
    assert find(group, backend=backend) == ["tp"] * RANKS


def test_gpus_on_which_torch_finds_none_go_without(group: Threads, memory: TorchMemory) -> None:
    memory.supported = False
    assert find(group) == [None] * RANKS
    assert "torch finds no multicast on this GPU" in str(find(group, "1")[0])


@pytest.mark.parametrize("backend", ["NVSHMEM", "NCCL"])
def test_other_allocators_of_torch_go_without(
    group: Threads, memory: TorchMemory, backend: str
) -> None:
    memory.backend = backend
    assert find(group) == [None] * RANKS
    assert f"set to its backend {backend}" in str(find(group, "1")[0])


def test_a_torch_without_symmetric_memory_goes_without(
    group: Threads, memory: TorchMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(multicast, "symmetric_memory", missing)
    assert find(group) == [None] * RANKS


# Workspaces


@pytest.fixture(scope="module", params=[TESTED_VERSIONS[0], TESTED_VERSIONS[-1]])
def loaded(request: pytest.FixtureRequest, upstream_tree: Callable[[str], Path]) -> Loaded:
    loaded = Loaded(upstream_tree(request.param))
    install(loaded.module)
    return loaded


@pytest.fixture
def fake(memory: TorchMemory, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    monkeypatch.setattr(trial, "run", lambda *_: CHOSEN)
    return upstream_on_cpu.without_gpu(monkeypatch)


def detachable(loaded: Loaded) -> bool:
    return hasattr(loaded.module.MNNVLAllReduceFusionWorkspace, "checkpoint_prepare")


def create(loaded: Loaded, group: Threads) -> list[Any]:
    def one(rank: int) -> Any:
        return loaded.module.MNNVLAllReduceFusionWorkspace(
            loaded.mapping(rank, group.ranks),
            max_num_tokens=42,
            hidden_dim=6144,
            dtype=torch.bfloat16,
            comm_backend=backend_of(group, rank),
        )

    return on_ranks(group, one)


def require_unicast(made: list[Any], memory: TorchMemory) -> None:
    """All ranks have a workspace on our own memory, and torch's is gone."""
    assert not any(isinstance(each, BaseException) for each in made), made
    assert all(isinstance(each.handle, FakeMemory) for each in made)
    assert all(each._engine.multicast == (0, 0) for each in made)
    gc.collect()
    assert memory.live == 0
    assert FakeMemory.live == RANKS
    for each in made:
        each.destroy()
    assert FakeMemory.live == 0


@pytest.fixture
def insisted(memory: TorchMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.MULTICAST, "1")


@pytest.fixture
def by_default(loaded: Loaded) -> None:
    if detachable(loaded):
        pytest.skip("multicast is not tried by default with this upstream")


def test_by_default_where_nothing_is_given_up_for_it(
    loaded: Loaded, fake: FakeLibrary, group: Threads, memory: TorchMemory
) -> None:
    made = create(loaded, group)
    if detachable(loaded):
        require_unicast(made, memory)
        return
    assert [each._engine.multicast for each in made] == [CHOSEN] * RANKS
    for each in made:
        each.destroy()


@pytest.mark.usefixtures("insisted")
def test_a_workspace_over_multicast(
    loaded: Loaded, fake: FakeLibrary, group: Threads, memory: TorchMemory
) -> None:
    made = create(loaded, group)
    assert not any(isinstance(each, BaseException) for each in made), made
    assert memory.live == RANKS
    assert FakeMemory.live == 0
    # For each rank a context to keep and one that gives up, for the trial.
    by_rank = {rank: [one for one in fake.created if one[0] == rank] for rank in range(RANKS)}
    for rank, (kept, tried) in by_rank.items():
        assert kept[1] == list(made[rank].handle.addresses)
        assert kept[1][rank] == 0x900000 + 0x1000 * rank
        assert kept[2] == tried[2] == MULTICAST_ADDRESS
        assert kept[4] == made[rank].ptrs[rank] + made[rank].workspace_size_bytes
        assert (kept[5], kept[6]) == (600.0, False)
        assert (tried[5], tried[6]) == (trial.TIMEOUT_S, True)
        assert tried[1:5] == kept[1:5]
        # Others' kernels would run on a multicast address.
        assert made[rank].mc_ptr == made[rank].uc_ptr_local == made[rank].ptrs[rank]
    assert len(fake.destroyed) == RANKS
    everything = (1 << LAST_CLASS + 1) - 1
    assert (
        sorted(choice[1:] for choice in fake.chosen)
        == [CHOSEN] * RANKS + [(everything, everything)] * RANKS
    )
    tried_contexts = {choice[0] for choice in fake.chosen if choice[1] == everything}
    assert set(fake.destroyed) == tried_contexts
    # A call says nothing of transports: the launch looks its size up.
    rows = torch.zeros(1, 64, dtype=torch.bfloat16)
    loaded.module.trtllm_mnnvl_allreduce(rows, made[0], False)
    (call,) = fake.calls
    assert call[0] not in tried_contexts
    assert len(call) == 12
    # What a trial asks.
    fake.expired[call[0]] = 3
    assert made[0]._engine.expired_waits() == 3
    for each in made:
        each.destroy()
    made.clear()
    gc.collect()
    assert memory.live == 0
    assert len(fake.destroyed) == 2 * RANKS


@pytest.mark.usefixtures("insisted")
def test_a_workspace_over_multicast_refuses_checkpoints(
    loaded: Loaded, fake: FakeLibrary, group: Threads, memory: TorchMemory
) -> None:
    if not detachable(loaded):
        pytest.skip("this upstream has no checkpoints")
    made = create(loaded, group)
    for each in made:
        each._require_handles_attached()
        with pytest.raises(NotImplementedError, match=r"with FLASHINFER_MNNVL_MULTICAST=0"):
            each.checkpoint_prepare()
        # It goes on as if it had not been asked.
        each._require_handles_attached()
    assert (
        on_ranks(group, lambda rank: made[rank].checkpoint_restore(backend_of(group, rank)))
        == [None] * RANKS
    )
    loaded.module.trtllm_mnnvl_allreduce(torch.zeros(1, 64).bfloat16(), made[0], False)
    for each in made:
        each.destroy()


def fail_on_rank(rank: int, what: Callable[..., Any]) -> Callable[..., Any]:
    def failing(*arguments: Any) -> Any:
        if current_rank() == rank:
            raise RuntimeError("broken on purpose")
        return what(*arguments)

    return failing


def break_allocation(memory: TorchMemory, fake: FakeLibrary, patch: pytest.MonkeyPatch) -> None:
    memory.broken["allocate"] = 1


def break_rendezvous(memory: TorchMemory, fake: FakeLibrary, patch: pytest.MonkeyPatch) -> None:
    memory.broken["rendezvous"] = 1


def break_address(memory: TorchMemory, fake: FakeLibrary, patch: pytest.MonkeyPatch) -> None:
    memory.multicast = 0


def break_creation(fake: FakeLibrary, patch: pytest.MonkeyPatch, argument: int) -> None:
    """Make rank 1 unable to create the contexts for which an argument is true."""
    original = fake.functions.context_create

    def create(*arguments: Any) -> int:
        if arguments[argument] and current_rank() == 1:
            raise RuntimeError("broken on purpose")
        return int(original(*arguments))

    patch.setattr(native.library, "load", lambda: fake.functions._replace(context_create=create))


def break_context(memory: TorchMemory, fake: FakeLibrary, patch: pytest.MonkeyPatch) -> None:
    """Where the context has a multicast address."""
    break_creation(fake, patch, 2)


def break_trial_context(memory: TorchMemory, fake: FakeLibrary, patch: pytest.MonkeyPatch) -> None:
    break_creation(fake, patch, 6)


def break_trial(memory: TorchMemory, fake: FakeLibrary, patch: pytest.MonkeyPatch) -> None:
    def run(agreement: Any, *_: Any) -> SizeClasses:
        return agreement.attempt("trial of multicast", fail_on_rank(1, lambda: CHOSEN))

    patch.setattr(trial, "run", run)


def break_choice(memory: TorchMemory, fake: FakeLibrary, patch: pytest.MonkeyPatch) -> None:
    def choose(engine: Any, classes: SizeClasses) -> None:
        if current_rank() == 1:
            raise RuntimeError("broken on purpose")

    patch.setattr(native.NativeEngine, "choose_multicast", choose)


BREAKS = [
    break_allocation,
    break_rendezvous,
    break_address,
    break_context,
    break_trial_context,
    break_trial,
    break_choice,
]


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("damage", BREAKS)
def test_whatever_fails_on_one_rank_leaves_unicast_on_all(
    loaded: Loaded,
    fake: FakeLibrary,
    group: Threads,
    memory: TorchMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[..., None],
) -> None:
    caplog.set_level("INFO", logger="flashinfer.elastic")
    damage(memory, fake, monkeypatch)
    made = create(loaded, group)
    assert caplog.text.count("All-reduce without NVLink multicast: ") == RANKS
    require_unicast(made, memory)
    # What was made has been released: the contexts over multicast, and those that replaced them.
    assert sorted(fake.destroyed) == list(range(1, len(fake.created) + 1))


@pytest.mark.usefixtures("insisted")
@pytest.mark.parametrize("damage", BREAKS)
def test_whatever_fails_on_one_rank_fails_all_where_multicast_is_insisted_on(
    loaded: Loaded,
    fake: FakeLibrary,
    group: Threads,
    memory: TorchMemory,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[..., None],
) -> None:
    damage(memory, fake, monkeypatch)
    errors = create(loaded, group)
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    # Even while the errors live.
    assert memory.live == 0
    assert FakeMemory.live == 0
    assert sorted(fake.destroyed) == list(range(1, len(fake.created) + 1))


def test_multicast_that_is_nowhere_faster_is_given_up(
    loaded: Loaded,
    fake: FakeLibrary,
    group: Threads,
    memory: TorchMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory of ours is as good, and can be detached."""
    monkeypatch.setattr(trial, "run", lambda *_: SizeClasses())
    require_unicast(create(loaded, group), memory)
    # Of either kind, and those that replaced them.
    assert sorted(fake.destroyed) == list(range(1, len(fake.created) + 1))


@pytest.mark.usefixtures("by_default")
def test_multicast_that_is_faster_for_one_strategy_stays(
    loaded: Loaded,
    fake: FakeLibrary,
    group: Threads,
    memory: TorchMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="flashinfer.elastic")
    chosen = SizeClasses(0, 0b11)
    monkeypatch.setattr(trial, "run", lambda *_: chosen)
    made = create(loaded, group)
    assert [each._engine.multicast for each in made] == [chosen] * RANKS
    assert caplog.text.count("All-reduce by NVLink multicast") == 1
    for each in made:
        each.destroy()


@pytest.mark.usefixtures("insisted")
def test_multicast_that_is_insisted_on_stays_where_it_is_nowhere_faster(
    loaded: Loaded,
    fake: FakeLibrary,
    group: Threads,
    memory: TorchMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "run", lambda *_: SizeClasses())
    made = create(loaded, group)
    assert all(each._engine.memory.multicast_address for each in made)
    for each in made:
        each.destroy()


def test_ranks_with_different_settings(
    loaded: Loaded,
    fake: FakeLibrary,
    group: Threads,
    memory: TorchMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = settings.read
    monkeypatch.setattr(
        settings,
        "read",
        lambda: original({settings.MULTICAST: "1" if current_rank() == 0 else "auto"}),
    )
    errors = create(loaded, group)
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    assert "settings of the workspace: ranks disagree" in str(errors[0])
    assert memory.touched == 0


# Torch's memory


def make(group: Threads) -> list[Any]:
    return on_ranks(
        group,
        lambda rank: torch_symmetric.TorchSymmetricMemory.create(
            agreement_of(group, rank), CPU, 1024, "tp"
        ),
    )


def test_older_torch_is_told_of_the_group_first(
    group: Threads, memory: TorchMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled: Any = torch_symmetric.torch
    for version, enabled in (("2.10.0+cu130", 3), ("2.11.0", 0), ("2.14.0a0+git", 0)):
        memory.enabled.clear()
        doubled.__version__ = version
        made = make(group)
        assert len(memory.enabled) == enabled
        for each in made:
            each.close()


def test_a_handle_of_other_memory_is_refused(
    group: Threads, memory: TorchMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that begins elsewhere in its block has addresses that are not those of the handle."""
    original = memory.rendezvous

    def shifted(tensor: Any, name: str) -> Any:
        handle = original(tensor, name)
        handle.buffer_ptrs[current_rank()] -= 512 * (current_rank() == 2)
        return handle

    def shortened(tensor: Any, name: str) -> Any:
        handle = original(tensor, name)
        handle.buffer_size -= current_rank() == 2
        return handle

    for other in (shifted, shortened):
        monkeypatch.setattr(memory, "rendezvous", other)
        errors = make(group)
        assert all("rank 2: RuntimeError: torch's handle is not of" in str(e) for e in errors)
        assert memory.live == 0


def test_a_handle_in_another_order_is_refused(
    group: Threads, memory: TorchMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = memory.rendezvous

    def reordered(tensor: Any, name: str) -> Any:
        handle = original(tensor, name)
        handle.rank = RANKS - 1 - handle.rank
        return handle

    monkeypatch.setattr(memory, "rendezvous", reordered)
    assert "rank 0 of 3 is rank 2 of 3 to torch" in str(make(group)[0])


def test_closing_is_idempotent_and_gives_everything_back(
    group: Threads, memory: TorchMemory
) -> None:
    made = make(group)
    assert memory.live == RANKS
    for each in made:
        assert each.mapped
        each.close()
        each.close()
        assert (each.addresses, each.multicast_address, each.mapped) == ((), 0, False)
    assert memory.live == 0


def test_forgotten_memory_is_given_back(group: Threads, memory: TorchMemory) -> None:
    made = make(group)
    made.clear()
    gc.collect()
    assert memory.live == 0


@pytest.fixture
def kept() -> Any:
    yield torch_symmetric._kept
    torch_symmetric._kept.clear()


def test_nothing_is_freed_on_a_device_that_has_failed(
    group: Threads, memory: TorchMemory, monkeypatch: pytest.MonkeyPatch, kept: list[Any]
) -> None:
    """Torch waits for the device when it frees, and an error there would end the process."""
    made = make(group)

    def fail(*_: object) -> None:
        raise RuntimeError("an illegal instruction was encountered")

    cuda: Any = torch_symmetric.torch.cuda
    monkeypatch.setattr(cuda, "synchronize", fail)
    for each in made:
        each.close()
        assert not each.mapped
    made.clear()
    gc.collect()
    assert memory.live == RANKS == len(kept)


def test_nothing_is_allocated_during_a_capture(
    group: Threads, memory: TorchMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(what: str) -> None:
        raise RuntimeError(f"cannot {what} while a CUDA graph is being captured")

    monkeypatch.setattr(torch_symmetric, "refuse_capture", refuse)
    errors = make(group)
    assert all("cannot create symmetric memory while" in str(error) for error in errors), errors
    assert memory.touched == 0


def test_memory_that_is_left_at_the_exit_is_not_freed(
    group: Threads, memory: TorchMemory, monkeypatch: pytest.MonkeyPatch, kept: list[Any]
) -> None:
    """The process is about to do so, and torch may have been taken apart already."""
    made = make(group)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)
        made.clear()
        gc.collect()
    assert memory.live == RANKS == len(kept)


def test_memory_forgotten_during_a_capture_outlives_it(
    group: Threads, memory: TorchMemory, monkeypatch: pytest.MonkeyPatch, kept: list[Any]
) -> None:
    made = make(group)

    def refuse(what: str) -> None:
        raise RuntimeError(f"cannot {what} while a CUDA graph is being captured")

    monkeypatch.setattr(torch_symmetric, "refuse_capture", refuse)
    with pytest.raises(RuntimeError, match="captured"):
        made[0].close()
    assert made[0].mapped
    made.clear()
    gc.collect()
    assert memory.live == RANKS == len(kept)
