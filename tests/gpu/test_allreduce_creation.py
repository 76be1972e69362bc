"""Creations that fail or are interrupted, on real GPUs: all ranks learn of it, all comes back."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from allreduce_cases import PlainBackend, meet, needs_gpus, open_workspace
from interrupted_backend import InterruptedBackend
from ranks import run_ranks
from test_allreduce_lifetime import check_works, footprint, free_bytes, open_small, stages, warm_up

pytestmark = needs_gpus

SECONDS = 10.0


def check_raises(
    rank: int, culprit: int, own: type[BaseException], text: str, create: Callable[[], Any]
) -> None:
    """Create; the culprit raises ``own``, the others a RuntimeError that says ``text``, in time."""
    kind = own if rank == culprit else RuntimeError
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        create()
    assert time.monotonic() - start < SECONDS
    assert (own is KeyboardInterrupt and rank == culprit) or text in str(caught.value), caught.value


@contextmanager
def group_stays_usable(rank: int, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Give the footprint before the block; it is the same after, and the group works."""
    # Interrupts are raised also where the tests run in the background, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warm_up(rank, ranks)
    before = footprint()
    yield before
    workspace = open_small(rank, ranks)
    check_works(rank, ranks, workspace)
    workspace.destroy()
    del workspace
    after = footprint()
    assert after == before, f"free bytes, used bytes, open files: {before} before, {after} after"


# Interrupts


class Interrupted(InterruptedBackend, PlainBackend):
    """Interrupts this process around one of its collectives."""


def open_with(backend: Any, rank: int, ranks: int) -> Any:
    return open_workspace(rank, ranks, backend, tokens=64, hidden=2880, dtype=torch.bfloat16)


def check_interrupted_stages(rank: int, ranks: int) -> int:
    with group_stays_usable(rank, ranks) as before:
        for number, (stage, (owner, name)) in enumerate(stages().items()):
            culprit = number % ranks
            original = getattr(owner, name)

            def interrupted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                os.kill(os.getpid(), signal.SIGINT)
                return original(*args, **kwargs)

            with pytest.MonkeyPatch.context() as patch:
                if rank == culprit:
                    patch.setattr(owner, name, interrupted)
                check_raises(
                    rank,
                    culprit,
                    KeyboardInterrupt,
                    f"rank {culprit}: KeyboardInterrupt",
                    lambda: open_small(rank, ranks),
                )
            after = footprint()
            assert after == before, f"{stage}: {before} before, {after} after"
    return len(stages())


def test_a_rank_interrupted_at_any_stage_tells_the_others() -> None:
    results = run_ranks(check_interrupted_stages, timeout_s=60.0)
    print(f"{results[0]} stages interrupted, memory and files back each time")


def check_interrupted_collectives(rank: int, ranks: int) -> int:
    with group_stays_usable(rank, ranks) as before:
        counting = Interrupted(0, after=False)
        open_with(counting, rank, ranks).destroy()
        collectives = -counting.left
        cases = list(itertools.product(range(1, collectives), (False, True)))
        for at, after in cases:
            culprit = at % ranks
            backend = Interrupted(at, after=after) if rank == culprit else PlainBackend()
            check_raises(
                rank,
                culprit,
                KeyboardInterrupt,
                f"rank {culprit}: KeyboardInterrupt",
                lambda backend=backend: open_with(backend, rank, ranks),
            )
        assert footprint() == before
        # After the last, the others have their workspace: the interrupt is this rank's alone.
        if rank == 0:
            with pytest.raises(KeyboardInterrupt):
                open_with(Interrupted(collectives, after=True), rank, ranks)
        else:
            open_with(PlainBackend(), rank, ranks).destroy()
    return len(cases)


def test_a_rank_interrupted_around_any_collective_tells_the_others() -> None:
    results = run_ranks(check_interrupted_collectives, timeout_s=60.0)
    print(f"{results[0]} interrupts around collectives")


# What the machine refuses


def check_refusals(rank: int, ranks: int) -> None:
    from flashinfer.elastic.allreduce import topology
    from flashinfer.elastic.allreduce.driver import Driver

    culprit = ranks - 1
    with group_stays_usable(rank, ranks) as before:
        # A second creation after a failed one fails as clearly, and is as harmless.
        for _ in range(2):
            with pytest.MonkeyPatch.context() as patch:
                if rank == culprit:
                    patch.setattr(Driver, "can_access_peer", lambda *_: False)
                text = f"rank {culprit}: RuntimeError: GPU"
                check_raises(rank, culprit, RuntimeError, text, lambda: open_small(rank, ranks))
            assert footprint() == before
            with pytest.MonkeyPatch.context() as patch:
                if rank == culprit:
                    patch.setattr(topology, "query_links", lambda *_: [topology.NO_NVLINK] * ranks)
                else:
                    patch.setattr(topology, "query_links", lambda *_: [topology.UNKNOWN] * ranks)
                text = "no NVLink between ranks"
                check_raises(rank, culprit, RuntimeError, text, lambda: open_small(rank, ranks))
            assert footprint() == before


def test_no_peer_access_and_no_nvlink_are_refused_by_all_each_time() -> None:
    run_ranks(check_refusals, timeout_s=60.0)


def check_out_of_memory(rank: int, ranks: int) -> None:
    culprit = ranks - 1
    with group_stays_usable(rank, ranks):
        # The last rank has no room for what all the others could hold: 2 buffers of 1 GiB.
        hog = None
        if rank == culprit:
            hog = torch.empty(free_bytes() - (1 << 30), dtype=torch.uint8, device="cuda")
        meet()
        before = footprint_while_held()
        for _ in range(2):
            check_raises(
                rank,
                culprit,
                RuntimeError,
                f"rank {culprit}: DriverError: cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY",
                lambda: open_workspace(rank, ranks, buffer_bytes=1 << 30),
            )
            assert footprint_while_held() == before
        # What does fit is created beside it.
        workspace = open_small(rank, ranks)
        check_works(rank, ranks, workspace)
        workspace.destroy()
        del workspace, hog


def footprint_while_held() -> int:
    """Return this GPU's free bytes when all ranks are here."""
    meet()
    free = free_bytes()
    meet()
    return free


def test_one_rank_out_of_memory_fails_the_creation_everywhere() -> None:
    run_ranks(check_out_of_memory, timeout_s=60.0)


# Torch's allocator


def capture_and_replay() -> None:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    meet()
    with torch.cuda.graph(graph):
        check = torch.ones(8, device="cuda") * 2
    graph.replay()
    torch.cuda.synchronize()
    assert bool((check == 2).all())
    meet()


def check_expandable_segments(rank: int, ranks: int) -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    kept = [torch.ones(1 << 20, device="cuda") for _ in range(8)]
    capture_and_replay()  # a process's first graph takes memory that it keeps
    with group_stays_usable(rank, ranks):
        for seed in range(3):
            workspace = open_small(rank, ranks)
            check_works(rank, ranks, workspace, seed)
            capture_and_replay()
            workspace.destroy()
            del workspace
    assert all(bool((tensor == 1).all()) for tensor in kept)


def test_expandable_segments_of_torch_do_not_matter() -> None:
    run_ranks(check_expandable_segments, timeout_s=60.0)
