"""Zeroed device memory that belongs to no CUDA graph, whether or not one is being captured.

A workspace that is allocated while a graph is captured would come from the graph's private pool,
which recycles it, and its fill would become a node of the graph. So under capture the memory is
taken and filled on a stream that does not capture, and is ready when the function returns.
The same goes for memory pools that a thread has been given.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_STREAMS_IN_POOL = 32  # torch hands out streams of a priority round robin from this many


def zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a zeroed ``[nbytes]`` uint8 tensor that later work on the current stream may use.

    Raises
    ------
    torch.OutOfMemoryError
        If the device has not that much memory.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    # A thread may have a memory pool of its own: torch.cuda.use_mem_pool, and torch.compile's CUDA
    # graphs already when they warm up, whose pool is then rewound with all that it holds. Another
    # thread allocates as usual, and in inference mode neither.
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(_zeros, nbytes, device, stream).result()


def _zeros(nbytes: int, device: torch.device, stream: torch.cuda.Stream | None) -> torch.Tensor:
    """Allocate and fill for a stream, on another one if that is capturing."""
    if stream is None:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    # For this thread, which is new. Leaving the stream again would otherwise go back to device 0,
    # and make a context there.
    torch.cuda.set_device(device)
    with torch.cuda.stream(stream), _relaxed_capture():
        if not torch.cuda.is_current_stream_capturing():
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)
        outside = _stream_outside_capture(device)
        with torch.cuda.stream(outside):
            data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        # No event may be recorded from here into the capture, hence the host waits.
        outside.synchronize()
        return data


def page_locked(nbytes: int, like: torch.Tensor) -> torch.Tensor:
    """Return a ``[nbytes]`` uint8 tensor in host memory, page-locked if another one is."""
    with _relaxed_capture(), torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=like.is_pinned())


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is capturing a graph."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, cached blocks of torch included; None for the host."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)


def _stream_outside_capture(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that is not capturing; torch may hand out the very stream that is."""
    for _ in range(_STREAMS_IN_POOL):
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
    raise RuntimeError(f"every stream of torch's pool on {device} is capturing")


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Allow allocations while some stream captures; an ordinary capture mode forbids them."""
    exchange = _exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange_capture_mode() -> Callable[..., int] | None:
    """Return the driver's function that exchanges this thread's capture mode, if there is one."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.POINTER(ctypes.c_int)]
    function.restype = ctypes.c_int
    return cast(Callable[..., int], function)
