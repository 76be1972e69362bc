"""The pool, on host memory: it knows no device but asks the allocator."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashinfer.elastic.attention import allocation, pool, settings

MIB = 2**20


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    pool._slots.clear()
    pool._by_address.clear()
    yield
    pool._slots.clear()
    pool._by_address.clear()


def buffer(nbytes: int = MIB, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8).view(dtype)


def grow(given: torch.Tensor, needed: int, kind: str = "float", **options: object) -> pool.Grown:
    return pool.grow(given, needed, kind=kind, call="test", allocation_name="part", **options)  # type: ignore[arg-type]


def capturing(monkeypatch: pytest.MonkeyPatch, value: bool = True) -> None:
    monkeypatch.setattr(allocation, "is_capturing", lambda device: value)


def test_nothing_has_grown_at_first() -> None:
    given = buffer()
    assert not pool.grown
    assert pool.replacement(given) is given
    assert pool.report() == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float32, torch.bfloat16])
def test_a_replacement_is_large_enough_zero_and_of_the_callers_type(dtype: torch.dtype) -> None:
    given = buffer(MIB, dtype)
    larger = grow(given, 5 * MIB).data
    assert larger.dtype == dtype
    assert larger.dim() == 1
    assert pool.nbytes(larger) >= 5 * MIB
    assert not larger.any()
    assert pool.replacement(given) is larger


def test_views_of_the_start_share_and_other_parts_do_not() -> None:
    given = buffer(2 * MIB)
    first, second = torch.chunk(given, 2)
    larger = grow(given, 5 * MIB).data
    assert pool.replacement(first.view(torch.int32)).data_ptr() == larger.data_ptr()
    assert pool.replacement(second) is second
    other = grow(second, 5 * MIB).data
    assert other.data_ptr() != larger.data_ptr()


def test_a_replacement_that_is_not_larger_is_not_used() -> None:
    given = buffer(64 * MIB)
    grow(given[:MIB], 5 * MIB)
    assert pool.replacement(given) is given


def test_growing_again_replaces_and_growing_less_does_not() -> None:
    given = buffer()
    first = grow(given, 5 * MIB).data
    assert grow(given, 4 * MIB).data is first
    second = grow(given, 50 * MIB).data
    assert second is not first
    assert pool.replacement(given) is second
    assert [usage.growths for usage in pool.report()] == [2]


def test_a_replacement_passed_in_place_of_the_buffer_belongs_to_the_same_slot() -> None:
    given = buffer()
    first = grow(given, 5 * MIB, "integer").data
    second = grow(first, 50 * MIB, "integer").data
    assert pool.replacement(given) is second
    assert pool.replacement(first) is second
    assert pool.replacement(second) is second
    assert len(pool.report()) == 1


def test_what_a_graph_captured_is_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    given = buffer()
    first = grow(given, 5 * MIB).data
    address = first.data_ptr()
    capturing(monkeypatch)
    assert pool.replacement(given) is first
    capturing(monkeypatch, False)
    first.fill_(7)
    second = grow(given, 50 * MIB).data
    assert second.data_ptr() != address
    slot = pool.find(given)
    assert slot is not None
    assert slot.generations[0].data.data_ptr() == address
    assert bool((slot.generations[0].data == 7).all())
    assert pool.report()[0].kept >= 5 * MIB
    del given, first
    gc.collect()
    grow(buffer(), 5 * MIB)
    assert slot in pool._slots[torch.device("cpu")]


def test_what_no_graph_captured_is_dropped() -> None:
    given = buffer()
    grow(given, 5 * MIB)
    grow(given, 50 * MIB)
    slot = pool.find(given)
    assert slot is not None
    assert len(slot.generations) == 1
    assert pool.report()[0].kept == 0


def test_what_was_dropped_is_not_taken_for_a_workspace() -> None:
    """Its address, and its storage's identity, may go to another allocation."""
    given = buffer()
    first = grow(given, 5 * MIB).data
    second = grow(given, 50 * MIB).data
    assert set(pool.grown) == {given.data_ptr(), second.data_ptr()}
    assert pool.find(first) is None


def test_only_what_a_graph_captured_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = buffer()
    first = grow(given, 5 * MIB).data
    capturing(monkeypatch)
    assert pool.replacement(given) is first
    capturing(monkeypatch, False)
    grow(given, 50 * MIB)
    third = grow(given, 500 * MIB).data
    slot = pool.find(given)
    assert slot is not None
    places = [generation.data.data_ptr() for generation in slot.generations]
    assert places == [first.data_ptr(), third.data_ptr()]


def test_nothing_is_dropped_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    given = buffer()
    grow(given, 5 * MIB)
    capturing(monkeypatch)
    grow(given, 50 * MIB)
    slot = pool.find(given)
    assert slot is not None
    assert len(slot.generations) == 2


def test_the_memory_of_a_buffer_that_is_gone_is_returned() -> None:
    given = buffer()
    grow(given, 5 * MIB)
    assert len(pool.report()) == 1
    del given
    gc.collect()
    other = buffer()
    grow(other, 5 * MIB)
    assert len(pool.report()) == 1
    assert len(pool.grown) == 2


def test_an_address_that_went_to_another_allocation_is_not_mistaken() -> None:
    given = buffer(64 * MIB)
    address = given.data_ptr()
    grow(given, 65 * MIB)
    del given
    gc.collect()
    for _ in range(20):
        other = buffer(64 * MIB)
        if other.data_ptr() == address:
            break
    else:
        pytest.skip("the allocator gives no address twice")
    assert pool.replacement(other) is other


def test_integer_workspaces_have_a_twin_and_mirror_their_plan() -> None:
    given, locked = buffer(), buffer()
    larger, twin = grow(given, 5 * MIB, "integer", page_locked=locked)
    assert twin is not None
    assert twin.numel() == larger.numel()
    assert pool.twin(given, locked) is twin
    assert pool.twin(buffer(), locked) is locked
    larger[:100] = 9
    pool.mirror(larger)
    assert bool((given[:100] == 9).all())
    given[:100] = 3
    pool.mirror(given)  # not where the plan was written to
    assert bool((given[:100] == 3).all())


def test_each_page_locked_buffer_has_a_twin_of_its_own() -> None:
    """Two wrappers may share an integer workspace; one writes its plan while the other's copies."""
    given, locked, other = buffer(), buffer(), buffer()
    larger, twin = grow(given, 5 * MIB, "integer", page_locked=locked)
    assert twin is not None
    others = pool.twin(given, other)
    assert others.numel() >= larger.numel()
    assert others.data_ptr() not in (twin.data_ptr(), other.data_ptr())
    assert pool.twin(given, other) is others
    assert pool.twin(given, locked) is twin


def test_a_plan_into_what_trtllm_gen_let_grow_has_a_twin_and_is_mirrored() -> None:
    """0.6's prefill wrapper passes its integer workspace to trtllm-gen, which has no twin."""
    given, locked = buffer(), buffer()
    larger = grow(given, 5 * MIB, "float").data
    twin = pool.twin(given, locked)
    assert twin.numel() >= larger.numel()
    larger[:100] = 9
    pool.mirror(larger)
    assert bool((given[:100] == 9).all())


def test_a_plan_reaches_every_earlier_integer_workspace() -> None:
    """Graphs may have been captured before either growth."""
    given = buffer()
    first = grow(given, 5 * MIB, "integer").data
    second = grow(given, 50 * MIB, "integer").data
    second[:100] = 9
    pool.mirror(second)
    assert bool((given[:100] == 9).all())
    assert bool((first[:100] == 9).all())


def test_what_is_no_plan_is_not_mirrored() -> None:
    given = buffer()
    larger = grow(given, 5 * MIB, "float").data
    larger[:100] = 9
    pool.mirror(larger)
    assert not given.any()


def test_a_twin_is_as_large_as_a_workspace_that_outdoes_its_replacement() -> None:
    """A plan is written to the same offsets of both."""
    given = buffer(64 * MIB)
    grow(given[:MIB], 5 * MIB, "integer")
    assert pool.replacement(given) is given
    assert pool.twin(given, buffer()).numel() >= 64 * MIB


def test_a_twin_is_not_given_up_when_the_workspace_grows_again() -> None:
    """The copy of an earlier plan may still be reading it."""
    given, locked = buffer(), buffer()
    first = grow(given, 5 * MIB, "integer", page_locked=locked).twin
    assert first is not None
    alive = weakref.ref(first)
    del first
    second = grow(given, 50 * MIB, "integer", page_locked=locked).twin
    assert second is not None
    assert second.numel() >= 50 * MIB
    gc.collect()
    assert alive() is not None


def test_the_twins_of_page_locked_buffers_that_are_gone_are_returned() -> None:
    given, locked = buffer(), buffer()
    grow(given, 5 * MIB, "integer", page_locked=locked)
    slot = pool.find(given)
    assert slot is not None
    for _ in range(5):
        pool.twin(given, buffer())
    assert len(slot.twins) <= 2


def test_growing_what_outlived_the_callers_buffer_keeps_track_of_it() -> None:
    """A wrapper's grown workspace may have been handed on, and the wrapper be gone."""
    given = buffer()
    inherited = grow(given, 5 * MIB, "integer").data
    del given
    gc.collect()
    larger = grow(inherited, 50 * MIB, "integer").data
    assert pool.nbytes(larger) >= 50 * MIB
    assert pool.replacement(inherited) is larger
    del inherited, larger
    gc.collect()
    grow(buffer(), 5 * MIB)
    assert len(pool.report()) == 1
    assert len(pool.grown) == 2


def test_growth_in_inference_mode_serves_outside_of_it_too() -> None:
    with torch.inference_mode():
        given, locked = buffer(), buffer()
        larger, twin = grow(given, 5 * MIB, "integer", page_locked=locked)
    assert twin is not None
    for each in (larger, twin):
        each.fill_(9)
    pool.mirror(larger)
    assert bool((given[:100] == 9).all())


def test_a_replacement_is_allocated_out_of_reach_of_what_is_set_for_the_thread() -> None:
    """``torch.cuda.use_mem_pool`` and torch.compile's graphs give a thread a pool of its own.

    The pool of a compiled graph is rewound with all that it holds. Neither can be had without a
    GPU; a dispatch mode is a thread's own in the same way.
    """
    seen: list[str] = []

    class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Recorded():  # type: ignore[no-untyped-call]
        torch.zeros(1)
        assert seen
        seen.clear()
        data = allocation.zeros(MIB, torch.device("cpu"))
    assert seen == []
    assert data.numel() == MIB
    assert not data.any()


def test_the_cap_names_asked_given_cap_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CAP, "8")
    given = buffer()
    with pytest.raises(pool.WorkspaceError) as caught:
        grow(given, 9 * MIB)
    text = str(caught.value)
    assert str(9 * MIB) in text
    assert str(MIB) in text
    assert f"the cap is {8 * MIB} bytes" in text
    assert "free" in text
    assert pool.replacement(given) is given
    assert pool.report() == []


def test_the_cap_is_for_all_buffers_together_and_bends_the_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(settings.CAP, "10")
    first, second = buffer(), buffer()
    assert pool.nbytes(grow(first, 6 * MIB).data) == 7 * MIB
    assert pool.nbytes(grow(second, 3 * MIB).data) == 3 * MIB
    with pytest.raises(pool.WorkspaceError, match="hold 10485760 bytes already"):
        grow(buffer(), 3 * MIB)


def test_the_cap_counts_what_graphs_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CAP, "16")
    given = buffer()
    for needed in (5 * MIB, 11 * MIB):
        assert pool.nbytes(grow(given, needed).data) >= needed
    capturing(monkeypatch)
    pool.replacement(given)
    capturing(monkeypatch, False)
    with pytest.raises(pool.WorkspaceError, match="the cap is"):
        grow(given, 16 * MIB)


@pytest.mark.parametrize("text", ["-1", "much", "nan", "inf"])
def test_a_cap_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(settings.CAP, text)
    with pytest.raises(ValueError, match=settings.CAP):
        grow(buffer(), 5 * MIB)


def test_short_of_memory_less_is_tried_and_then_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []
    zeros = allocation.zeros

    def short(nbytes: int, device: torch.device) -> torch.Tensor:
        tried.append(nbytes)
        if nbytes > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(nbytes, device)

    monkeypatch.setattr(allocation, "zeros", short)
    limit = 5 * MIB
    assert pool.nbytes(grow(buffer(), 5 * MIB).data) == 5 * MIB
    assert len(tried) == 2
    limit = 0
    with pytest.raises(pool.WorkspaceError, match=r"there is no cap") as caught:
        grow(buffer(), 5 * MIB)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_growth_is_logged_once_with_both_sizes(caplog: pytest.LogCaptureFixture) -> None:
    given = buffer()
    with caplog.at_level(logging.WARNING, "flashinfer.elastic"):
        larger = grow(given, 5 * MIB).data
        grow(given, 5 * MIB)
        pool.replacement(given)
    (record,) = caplog.records
    assert str(MIB) in record.getMessage()
    assert str(pool.nbytes(larger)) in record.getMessage()


def test_threads_that_grow_one_buffer_agree() -> None:
    given = buffer()
    start = threading.Barrier(8)
    results: list[int] = []

    def work(index: int) -> None:
        start.wait()
        for step in range(20):
            data = grow(given, (5 + (index + step) % 8) * MIB).data
            assert pool.nbytes(data) >= (5 + (index + step) % 8) * MIB
        results.append(pool.replacement(given).data_ptr())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(pool.report()) == 1
    assert pool.report()[0].growths <= 4


def test_a_call_gets_what_it_would_do_well_to_have_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pool.nbytes(grow(buffer(), 5 * MIB, comfortable=20 * MIB).data) >= 20 * MIB
    assert pool.report()[0].needed == 5 * MIB
    monkeypatch.setenv(settings.CAP, "32")
    assert pool.nbytes(grow(buffer(), 5 * MIB, comfortable=20 * MIB).data) >= 5 * MIB


def test_the_report_begins_with_the_largest() -> None:
    given = [buffer() for _ in range(3)]
    for each, needed in zip(given, (5, 50, 20), strict=True):
        grow(each, needed * MIB)
    assert [usage.needed for usage in pool.report()] == [50 * MIB, 20 * MIB, 5 * MIB]


def test_the_report_says_who_needed_what() -> None:
    given = buffer()
    grow(given, 5 * MIB)
    pool.grow(given, 6 * MIB, kind="float", call="batch_prefill.plan", allocation_name="tmp_v")
    grow(given, 2 * MIB)
    (usage,) = pool.report()
    assert (usage.given, usage.needed, usage.call) == (MIB, 6 * MIB, "batch_prefill.plan")
    assert (usage.device, usage.kind, usage.allocation) == ("cpu", "float", "tmp_v")
