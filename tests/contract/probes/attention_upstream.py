"""Import an upstream's attention on a machine without a GPU, over recorded compiled modules.

Upstream's Python runs as it is, wrappers, getters and generators included. What a GPU would be
asked is answered here, and ``JitSpec.build_and_load`` gives a :class:`Compiled` in place of a
library: an object that carves the workspaces it is given as upstream's C++ does, with upstream's
words when they are too small, and that checks what it is given.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import cudart
import torch

MULTIPROCESSORS = 148
SLAB = 8 << 20


class Carver:
    """``AlignedAllocator``: hands out parts of a buffer, in order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def take(self, name: str, size: int, alignment: int = 16) -> int:
        """Return the offset of a part, or throw as upstream does."""
        start = -(-self.used // alignment) * alignment
        if start + size > self.capacity:
            state.overflows.append(name)
            raise RuntimeError(
                "Error in function 'aligned_alloc' at include/flashinfer/allocator.h:49: Buffer "
                f"overflow when allocating memory for {name} with size {size} and alignment "
                f"{alignment}, but only {self.capacity - self.used} bytes available in "
                "AlignedAllocator. Increase the workspace buffer size."
            )
        self.used = start + size
        return start


class State:
    """What the compiled modules are asked for, and what they saw."""

    def __init__(self) -> None:
        self.signatures: dict[str, list[str]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget what was seen, and ask for little."""
        self.floats: list[tuple[str, int]] = [("batch_prefill_tmp_v", 1024)]
        self.integers: list[tuple[str, int]] = [("batch_prefill_request_indices", 1024)]
        self.calls: list[dict[str, Any]] = []
        self.overflows: list[str] = []
        self.faults: list[str] = []
        self.error: Exception | None = None


state = State()


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


class Compiled:
    """Stands in for a compiled module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts = 0
        if name.startswith("batch_mla") and (VERSION >= (0, 7)):
            self.plan_with_staged_workspace_bytes = lambda *args: (
                self.plan(*args),
                sum(size for _, size in state.integers),
            )
        if VERSION >= (0, 7) and name.startswith(("batch_prefill", "batch_decode")):
            self.workspace_size = self._workspace_size

    def plan(self, *args: Any) -> list[int]:
        """Carve the integer workspace, then the float one, and store a plan in the former."""
        floats, integers, locked = args[:3]
        state.calls.append(_seen("plan", self.name, [floats, integers], len(args)))
        if state.error is not None:
            raise state.error
        carver = Carver(nbytes(integers))
        for name, size in state.integers:
            carver.take(name, size)
        stamp = 1 + len(state.calls) % 200
        if nbytes(locked) < carver.used:
            state.faults.append("the page-locked twin is too small")
        locked.view(torch.uint8)[: carver.used] = stamp
        scratch = Carver(nbytes(floats))
        for name, size in state.floats:
            scratch.take(name, size)
        integers.view(torch.uint8)[: carver.used] = locked.view(torch.uint8)[: carver.used]
        return [scratch.used, carver.used, stamp, *([0] * 12)]

    def _workspace_size(self, buffer: torch.Tensor, *args: Any) -> list[int]:
        """Count what ``plan`` takes."""
        self.counts += 1
        state.calls.append(_seen("workspace_size", self.name, [buffer], len(args) + 1))
        carvers = []
        for wanted in (state.floats, state.integers):
            carvers.append(Carver(1 << 60))
            for name, size in wanted:
                carvers[-1].take(name, size)
        return [carver.used for carver in carvers]

    def _run(self, name: str, pairs: Sequence[tuple[Any, Any, Any]], count: int) -> None:
        """Use what a plan carved."""
        for floats, integers, plan in pairs:
            state.calls.append(_seen(name, self.name, [floats, integers], count))
            float_end, integer_end, stamp = list(plan)[:3]
            if nbytes(floats) < float_end:
                state.faults.append(f"{name} writes past the float workspace")
            if not bool((integers.view(torch.uint8)[:integer_end] == stamp).all()):
                state.faults.append(f"{name} does not find its plan")
            floats.view(torch.uint8)[:float_end] = 255

    def run(self, *args: Any) -> None:
        """Run a plan; or ``trtllm_fmha_v2``'s launcher, which carves and launches at once."""
        if self.name.startswith("trtllm_fmha_v2") or "fmha_v2" in self.name:
            state.calls.append(_seen("run", self.name, [args[4]], len(args)))
            carver = Carver(args[5])
            for name, size in state.floats:
                carver.take(name, size)
            args[4].view(torch.uint8)[: carver.used] = 255
            return
        self._run("run", [args[:3]], len(args))

    def ragged_run(self, *args: Any) -> None:
        """Run a plan over ragged keys."""
        self._run("ragged_run", [args[:3]], len(args))

    def paged_run(self, *args: Any) -> None:
        """Run a plan over paged keys."""
        self._run("paged_run", [args[:3]], len(args))

    def pod_with_kv_cache_tensor(self, *args: Any) -> None:
        """Run a plan of decode beside a prefill without one."""
        self._run("pod", [args[15:18]], len(args))

    def batch_pod_with_kv_cache_tensor(self, *args: Any) -> None:
        """Run a plan of prefill and one of decode together."""
        self._run("batch_pod", [args[:3], args[22:25]], len(args))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in state.signatures:
            return lambda *args: _launch(name, dict(zip(state.signatures[name], args, strict=True)))
        if name.startswith("merge_state"):
            return lambda *args: None
        raise AttributeError(name)


def _launch(name: str, args: dict[str, Any]) -> None:
    """Carve a trtllm-gen workspace as the launcher of that name does, and write it all."""
    workspace, size = args["workspace_buffer"], args["workspace_size"]
    state.calls.append(_seen(name, "trtllm_gen", [workspace], len(args)) | {"size": size})
    heads = args["query"].shape[1]
    counters = args.get("multi_ctas_kv_counter_buffer")
    splits = "context" not in name and not (name == "trtllm_ragged_attention" and VERSION >= (0, 7))
    carver = Carver(size)
    if VERSION < (0, 7) and splits:
        carver.take("trtllm_gen_counter_workspace", SLAB)
        if bool(workspace.view(torch.uint8)[:SLAB].any()):
            state.faults.append("the counters are not zero")
    if splits and "multi_ctas_kv_counter_buffer" in args:
        need = -(-max(args["batch_size"] * heads, args["sm_count"]) // 8) * 8 * 4
        if nbytes(counters) < need:
            raise RuntimeError(
                f"trtllm-gen multi-CTA KV counter buffer is too small: got {nbytes(counters)} "
                f"bytes, need {need} bytes"
            )
        if bool(counters.view(torch.uint8)[:need].any()):
            state.faults.append("the counters are not zero")
    if args.get("lse") is not None:
        slots = heads * args["batch_size"] * (-(-args["max_q_len"] // 256) * 256)
        start = carver.take("trtllm_gen_softmax_workspace", 8 * slots + (1 << 20))
        state.calls[-1]["statistics"] = carver.used - start
        if carver.used > nbytes(workspace):
            state.faults.append("statistics are written past the end of the workspace")
        workspace.view(torch.uint8)[start : carver.used] = 255
    if splits:
        scratch = args["sm_count"] * 128 * (8 + 2 * args["out"].shape[-1] * 2)
        if carver.used + scratch > nbytes(workspace):
            state.faults.append("scratch is written past the end of the workspace")
        else:
            workspace.view(torch.uint8)[carver.used : carver.used + scratch] = 255


def _seen(function: str, module: str, buffers: list[torch.Tensor], count: int) -> dict[str, Any]:
    return {
        "function": function,
        "module": module,
        "buffers": [[buffer.data_ptr(), nbytes(buffer)] for buffer in buffers],
        "arguments": count,
    }


def _answer_for_the_gpu(capability: tuple[int, int]) -> None:
    """Answer what torch would ask a GPU."""
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    torch.version.cuda = "13.0"
    properties = SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS,
        name="GPU",
        major=capability[0],
        minor=capability[1],
        total_memory=1 << 37,
        shared_memory_per_multiprocessor=228 << 10,
        shared_memory_per_block_optin=227 << 10,
    )
    for name, answer in {
        "synchronize": None,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
    }.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.cuda.device = contextlib.nullcontext


def load(capability: tuple[int, int]) -> Any:
    """Import upstream for a GPU of a compute capability, and return ``flashinfer``."""
    global VERSION
    cudart.load()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a 10.0a")
    _answer_for_the_gpu(capability)
    import flashinfer

    VERSION = tuple(int(part) for part in re.findall(r"\d+", flashinfer.__version__)[:3])
    for name in ("cascade", "decode", "mla", "pod", "prefill", "sparse", "jit.core"):
        __import__(f"flashinfer.{name}")
    sys.modules["flashinfer.jit.core"].JitSpec.build_and_load = lambda self: Compiled(self.name)
    answers = {
        "device_support_pdl": lambda device: False,
        "get_compute_capability": lambda device: capability,
        "get_device_sm_count": lambda device: MULTIPROCESSORS,
        "setup_cubin_loader": lambda path: None,
        "get_artifact": lambda *args: b"what trtllm-gen would download",
        "get_meta_hash": lambda *args: "hash",
    }
    for module in [value for key, value in sys.modules.items() if key.startswith("flashinfer.")]:
        for name, answer in answers.items():
            if name in vars(module) and not module.__name__.startswith("flashinfer.elastic"):
                setattr(module, name, answer)
    return flashinfer


VERSION: tuple[int, ...] = ()
