"""Creation and destruction: memory to the byte, failures on one rank, captures, exit."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allreduce_cases import (
    make_problem,
    meet,
    needs_gpus,
    open_workspace,
    run_norm,
    run_sum,
)
from allreduce_reference import check_bits
from ranks import run_ranks

pytestmark = needs_gpus

CYCLES = 1000
HIDDEN = 2880


def free_bytes() -> int:
    """Return the GPU's free bytes once nothing runs and torch keeps nothing."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def used_bytes_by_nvml() -> int:
    """Return what the driver says is in use on this rank's GPU."""
    import pynvml

    pynvml.nvmlInit()
    try:
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    finally:
        pynvml.nvmlShutdown()


def footprint() -> tuple[int, int, int]:
    """Return free bytes, used bytes and open files, when all ranks are here."""
    free_bytes()
    meet()
    free = free_bytes()
    used, files = used_bytes_by_nvml(), len(os.listdir("/proc/self/fd"))
    meet()
    return free, used, files


def open_small(rank: int, ranks: int) -> Any:
    return open_workspace(rank, ranks, tokens=64, hidden=HIDDEN, dtype=torch.bfloat16)


def check_works(rank: int, ranks: int, workspace: Any, seed: int = 0) -> None:
    problem = make_problem(ranks, 5, HIDDEN, torch.bfloat16, seed)
    expected = problem.expected()
    assert expected.norm is not None
    norm, _ = run_norm(workspace, problem, problem.inputs[rank], pdl=True)
    check_bits("norm", norm, expected.norm)


def warm_up(rank: int, ranks: int) -> None:
    """Do everything once: modules, contexts and libraries stay where they were loaded."""
    workspace = open_small(rank, ranks)
    check_works(rank, ranks, workspace)
    workspace.destroy()


# A thousand cycles


def check_cycles(rank: int, ranks: int) -> tuple[int, float]:
    warm_up(rank, ranks)
    before = footprint()
    start = time.monotonic()
    overlapping: list[Any] = []
    for cycle in range(CYCLES):
        workspace = open_small(rank, ranks)
        if cycle % 10 == 0:
            check_works(rank, ranks, workspace, cycle)
        if cycle % 3 == 0:
            # Destroyed by the garbage collection's __del__, with upstream's warning.
            if cycle % 9 == 0:
                del workspace
                continue
            # Destroyed when others have come, and in another order on each rank.
            overlapping.append(workspace)
            if len(overlapping) == 4:
                for place in range(4):
                    overlapping[(place + rank) % 4].destroy()
                overlapping.clear()
            continue
        workspace.destroy()
        if cycle % 100 == 1:
            workspace.destroy()
    for workspace in overlapping:
        workspace.destroy()
    overlapping.clear()
    workspace = None
    seconds = time.monotonic() - start
    after = footprint()
    assert after == before, f"free bytes, used bytes, open files: {before} before, {after} after"
    return CYCLES, seconds


def test_a_thousand_cycles_leave_nothing() -> None:
    results = run_ranks(check_cycles, timeout_s=240.0)
    print(f"cycles and seconds by rank: {results}")


# One rank fails


def stages() -> dict[str, tuple[ModuleType | type, str]]:
    """What is called on the way to a workspace: the place of each to break."""
    from flashinfer.elastic.allreduce import settings, symmetric, topology
    from flashinfer.elastic.allreduce.driver import Driver
    from flashinfer.elastic.allreduce.engines import library, native

    return {
        "reading the settings": (settings, "read"),
        "loading the library": (library, "load"),
        "identifying the GPU": (symmetric, "identify"),
        "taking the context": (Driver, "retain_primary_context"),
        "reserving addresses": (Driver, "reserve"),
        "allocating": (Driver, "create_memory"),
        "exporting": (Driver, "export_fd"),
        "importing": (Driver, "import_fd"),
        "mapping": (Driver, "map"),
        "allowing access": (Driver, "allow_access"),
        "initialising": (native.NativeEngine, "initialize"),
        "asking NVML": (topology, "query_links"),
        "telling peers' addresses": (torch, "tensor"),
    }


def check_failing_stage(rank: int, ranks: int, failing: int, stage: str) -> None:
    """Break one stage on one rank."""
    owner, name = stages()[stage]
    original = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"broken on purpose: {stage}")

    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == failing:
            patch.setattr(owner, name, broken)
        with pytest.raises(RuntimeError, match=f"broken on purpose: {stage}") as caught:
            open_small(rank, ranks)
    assert f"rank {failing}" in str(caught.value)
    assert time.monotonic() - start < 10
    assert getattr(owner, name) is original


def check_failures(rank: int, ranks: int) -> int:
    warm_up(rank, ranks)
    before = footprint()
    count = 0
    for number, stage in enumerate(stages()):
        failing = number % ranks
        check_failing_stage(rank, ranks, failing, stage)
        after = footprint()
        assert after == before, f"{stage}: {before} before, {after} after"
        count += 1
    # The group is as good as new.
    workspace = open_small(rank, ranks)
    check_works(rank, ranks, workspace)
    workspace.destroy()
    return count


def test_a_rank_that_fails_fails_the_creation_everywhere() -> None:
    results = run_ranks(check_failures, timeout_s=90.0)
    print(f"{results[0]} stages broken, memory and files back each time")


# Captures


def check_captures(rank: int, ranks: int) -> None:
    workspace = open_small(rank, ranks)
    problem = make_problem(ranks, 5, HIDDEN, torch.bfloat16, 1)
    expected = problem.expected()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # On one rank only: it must raise without waiting for the others.
        if rank == 0:
            start = time.monotonic()
            with pytest.raises(RuntimeError, match="captured"):
                open_small(rank, ranks)
            assert time.monotonic() - start < 1
        total = run_sum(workspace, problem.inputs[rank])
    graph.replay()
    check_bits("sum of a capture that went on", total, expected.sum)

    # A graph keeps working while other workspaces come and go.
    for _ in range(3):
        warm_up(rank, ranks)
        total.fill_(float("nan"))
        graph.replay()
        check_bits("sum of an old capture", total, expected.sum)

    # Destroying is refused too, and can be done later.
    other = open_small(rank, ranks)
    before = free_bytes()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        marker = torch.zeros(1, device="cuda")
        with pytest.raises(RuntimeError, match="captured"):
            other.destroy()
    del marker
    check_works(rank, ranks, other)
    other.destroy()
    assert other._destroyed
    assert free_bytes() > before

    torch.cuda.synchronize()
    meet()
    del graph
    workspace.destroy()


def test_capture_refuses_creation_and_goes_on() -> None:
    run_ranks(check_captures, timeout_s=60.0)


# The end of the group and of the process


def check_destroy_late(rank: int, ranks: int) -> None:
    warm_up(rank, ranks)
    before = footprint()
    workspace = open_small(rank, ranks)
    check_works(rank, ranks, workspace)
    torch.cuda.synchronize()
    meet()
    dist.destroy_process_group()
    workspace.destroy()
    # Peers let go of this memory at their own pace.
    deadline = time.monotonic() + 10
    while free_bytes() != before[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert free_bytes() == before[0]


def test_destroy_after_the_process_group() -> None:
    run_ranks(check_destroy_late, timeout_s=60.0)


EXIT = """
import json, runpy, sys
sys.path[:0] = json.loads(sys.argv[1])
runpy.run_path(sys.argv[2])
rank, ranks, store, how = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6]
import torch
import torch.distributed as dist
from test_allreduce_lifetime import check_works, open_small
torch.cuda.set_device(rank)
dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
print("marker: begin", file=sys.stderr, flush=True)
workspace = open_small(rank, ranks)
check_works(rank, ranks, workspace)
torch.cuda.synchronize()
dist.barrier()
if how == "cycle":
    cycle = [workspace]
    cycle.append(cycle)
    del workspace
if how != "group alive":
    dist.destroy_process_group()
if how == "exception":
    raise KeyError("on purpose")
"""


WAYS_OUT = ("group alive", "group destroyed", "cycle", "exception")


def test_exit_with_a_live_workspace_is_quiet(tmp_path: Path) -> None:
    """Nothing on stderr but upstream's ResourceWarning, and no crash."""
    ranks = torch.cuda.device_count()
    outputs = run_scripts(ranks, tmp_path)
    assert len(outputs) == ranks * len(WAYS_OUT)
    for how, code, text in outputs:
        # torch puts the rank before each line of an uncaught exception's traceback.
        said = re.sub(r"^\[rank\d+\]: ", "", text.partition("marker: begin")[2], flags=re.MULTILINE)
        assert code == (1 if how == "exception" else 0), text
        if how == "exception":
            said, raised, last = said.rpartition("KeyError: 'on purpose'")
            assert raised, text
            said = said.partition("Traceback")[0] + last
        assert unexpected(said) == [], text


def unexpected(text: str) -> list[str]:
    """Return the lines that are no ResourceWarning, nor the source line below one."""
    lines = []
    warned = False
    for line in text.splitlines():
        if "ResourceWarning" in line:
            warned = True
        elif not (warned and line.startswith("  ")):
            warned = False
            if line.strip() and "[Gloo]" not in line:
                lines.append(line)
    return lines


def run_scripts(ranks: int, folder: Path) -> list[tuple[str, int, str]]:
    """Run all ways out at once, a process a rank each; return way, exit code and output of each."""
    here = Path(__file__).resolve().parent
    paths = json.dumps([str(here), *[path for path in sys.path if path]])
    python = [sys.executable, "-X", "faulthandler", "-W", "always::ResourceWarning", "-c", EXIT]
    processes = []
    for how in WAYS_OUT:
        for rank in range(ranks):
            place = [paths, str(here.parent / "conftest.py"), str(rank), str(ranks)]
            process = subprocess.Popen(
                [*python, *place, str(folder / how), how],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append((how, process))
    try:
        # Each says a few lines, which pipes hold.
        return [(how, *_finish(process)) for how, process in processes]
    finally:
        for _, process in processes:
            process.kill()
            process.wait()


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    text = process.communicate(timeout=90)[0]
    return process.returncode, text
