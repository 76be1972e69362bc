"""Our kernels on memory that all ranks of the group have mapped."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from .. import interrupts, trial
from ..agreement import Agreement
from ..memory import GroupMemory
from ..settings import MULTICAST
from ..size_classes import LAST_CLASS, SizeClasses
from ..sizing import ALIGNMENT, LAMPORT_BUFFERS_NATIVE
from ..strategy import Strategy
from ..symmetric import SymmetricMemory
from . import Call, Quantization, library

_SENTINEL = -(2**31)
"""As int32, the word that marks an empty place of a buffer: fp32 -0.0 (``words.h``)."""

_ROTATION_BYTES = ALIGNMENT
"""Behind the buffers: which of them is in use (``arguments.h``, ``Rotation``)."""

_ALL_CLASSES = (1 << LAST_CLASS + 1) - 1


def memory_bytes(buffer_bytes: int) -> int:
    """Return the bytes that an engine needs on each rank."""
    return LAMPORT_BUFFERS_NATIVE * buffer_bytes + _ROTATION_BYTES


class NativeEngine:
    """Two buffers for messages and the state that says whose turn it is, on every rank.

    Creation, ``detach`` and ``attach`` are collective; everything else is local.

    Parameters
    ----------
    agreement : Agreement
        Of the group.
    device : torch.device
        This rank's GPU.
    buffer_bytes : int
        Of each buffer; a multiple of ``sizing.ALIGNMENT`` and the same on all ranks.
    timeout_s : float
        How long a kernel waits for a peer; 0 waits for ever.
    multiprocessors : int
        The smallest count in the group, on which the launch shape depends.
    memory : GroupMemory, optional
        Of :func:`memory_bytes` on each rank, from now on the engine's own; taken by the driver's
        virtual memory calls if not given.

    Attributes
    ----------
    memory : GroupMemory
        Where the buffers are.
    multicast : SizeClasses
        Launches that go by multicast; none at first.

    Raises
    ------
    CollectiveError
        On every rank, if creation fails on any. Nothing is left behind.
    """

    name = "native"

    def __init__(
        self,
        agreement: Agreement,
        device: torch.device,
        buffer_bytes: int,
        timeout_s: float,
        multiprocessors: int,
        memory: GroupMemory | None = None,
    ) -> None:
        self._device = device
        self._state_offset = LAMPORT_BUFFERS_NATIVE * buffer_bytes
        self._context: int | None = None
        self._trial_context: int | None = None
        self.multicast = SizeClasses()
        self._agreement = agreement
        # Whether there is memory behind the addresses; the same on all ranks. None once a failure
        # may have left them different.
        self._attached: bool | None = True
        self.memory: GroupMemory = memory or SymmetricMemory.create(
            agreement, device.index, memory_bytes(buffer_bytes)
        )
        try:
            self._initialize(agreement)
            addresses = self.memory.addresses
            local = addresses[agreement.rank]
            functions = agreement.attempt("loading the kernels", library.load)
            self._allreduce = functions.allreduce
            self._allreduce_quantized = functions.allreduce_quantized
            self._destroy = functions.context_destroy
            self._choose_multicast = functions.context_choose_multicast
            self._expired_waits = functions.context_expired_waits

            create = functools.partial(
                functions.context_create,
                agreement.rank,
                list(addresses),
                self.memory.multicast_address,
                buffer_bytes,
                local + self._state_offset,
            )

            def create_context() -> None:
                # Kept at once, to be released here if another rank cannot make its own.
                self._context = create(timeout_s, False, multiprocessors, device.index)

            self._create_trial_context = functools.partial(
                create, trial.TIMEOUT_S, True, multiprocessors, device.index
            )
            agreement.attempt("creating the launch context", create_context)
        except BaseException:
            self.close()
            raise

    @property
    def local_address(self) -> int:
        """Where this rank's buffers lie."""
        return self.memory.addresses[self.memory.rank]

    def buffers(self) -> torch.Tensor:
        """Return this rank's buffers as a flat float32 tensor that owns nothing."""
        return self._view(0, self._state_offset, "<f4")

    def launch(self, call: Call, first: int, count: int, strategy: Strategy) -> None:
        """Launch the tokens ``[first, first + count)`` of a call on the current stream.

        Raises
        ------
        ValueError
            If a tensor has the wrong dtype, shape, device or layout, naming it; nothing has been
            launched then.
        RuntimeError
            If the memory is detached.
        """
        if not self.memory.mapped:
            raise RuntimeError("MNNVL handles are not attached")
        if call.quantization is not None:
            self._launch_quantized(call, call.quantization, first, count, strategy)
            return
        self._allreduce(
            self._context,
            int(strategy),
            first,
            count,
            call.dependent_launch,
            call.input,
            call.output,
            call.residual_in,
            call.residual_out,
            call.gamma,
            call.epsilon,
            call.weight_bias,
        )

    def _launch_quantized(
        self, call: Call, quantization: Quantization, first: int, count: int, strategy: Strategy
    ) -> None:
        self._allreduce_quantized(
            self._context,
            int(strategy),
            first,
            count,
            call.dependent_launch,
            call.input,
            call.output,
            call.residual_in,
            call.residual_out,
            call.gamma,
            call.epsilon,
            call.weight_bias,
            *quantization.arguments(),
        )

    @contextlib.contextmanager
    def trying_multicast(self) -> Iterator[None]:
        """Within this, ``launch_trial`` works; to be entered and left on all ranks."""
        agreement = self._agreement

        def open_trial() -> None:
            context = self._trial_context = self._create_trial_context()
            self._choose_multicast(context, _ALL_CLASSES, _ALL_CLASSES)

        try:
            agreement.attempt("creating a launch context for a trial", open_trial)
            yield
        finally:
            if self._trial_context is not None:
                self._destroy(self._trial_context)
                self._trial_context = None

    def launch_trial(self, call: Call, first: int, count: int, strategy: Strategy) -> None:
        """Launch a plain all-reduce over multicast, with waits that end without a trap.

        Parameters and errors as of :meth:`launch`.
        """
        self._allreduce(
            self._trial_context,
            int(strategy),
            first,
            count,
            call.dependent_launch,
            call.input,
            call.output,
            None,
            None,
            None,
            0.0,
            0.0,
        )

    def expired_waits(self) -> int:
        """Return how many waits have timed out on this rank since its buffers were initialised."""
        assert self._context is not None
        return self._expired_waits(self._context)

    def choose_multicast(self, classes: SizeClasses) -> None:
        """Send launches of these size classes by multicast from now on; local, alike on all ranks.

        Raises
        ------
        ValueError
            If there are any and the memory has no multicast address.
        """
        assert self._context is not None
        self._choose_multicast(self._context, *classes)
        self.multicast = classes

    def detach(self) -> None:
        """Give the memory back and keep its addresses, for a checkpoint; free when this returns.

        Does nothing when all ranks have done so.

        Raises
        ------
        NotImplementedError
            On every rank, if the memory has a multicast address, which could not come back.
        CollectiveError
            On every rank, if a rank cannot. Those that could have no memory now; call it again.
        """
        if self._attached is False:
            return
        if not self.memory.detachable:
            raise NotImplementedError(
                "A workspace that uses NVLink multicast cannot be detached for a checkpoint: its "
                f"multicast address could not be brought back. Create it with {MULTICAST}=0."
            )
        self._attached = None
        with interrupts.held():
            self._agreement.attempt("detaching the workspace", self.memory.detach)
            self._attached = False

    def attach(self, agreement: Agreement) -> None:
        """Take memory again at the same addresses, with empty buffers.

        Does nothing when all ranks have it. Parameters as at creation; the process that made the
        workspace may have had another backend, so this one serves from now on.

        Raises
        ------
        CollectiveError
            On every rank, if a rank cannot, or has memory while others have none.
        """
        if self._attached:
            return
        self._attached = None
        missing = not self.memory.mapped
        with interrupts.held():
            self.memory.attach(agreement)
            if missing:
                try:
                    self._initialize(agreement)
                except BaseException:
                    self.memory.detach()
                    raise
            self._agreement = agreement
            self._attached = True

    def initialize(self) -> None:
        """Empty this rank's buffers and start the rotation again; local.

        Only safe while no rank has a call under way.
        """
        # Plain integers, since float fills may canonicalise; inference mode, because the memory
        # may be initialised inside and outside of it.
        with torch.inference_mode():
            self._view(0, self._state_offset, "<i4").fill_(_SENTINEL)
            self._view(self._state_offset, _ROTATION_BYTES, "<i4").zero_()
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Release everything; local, idempotent, safe on a half-built object.

        Raises
        ------
        RuntimeError
            A CUDA graph is being captured; nothing has been released.
        """
        self.memory.close()
        if self._context is not None:
            self._destroy(self._context)
            self._context = None

    def _initialize(self, agreement: Agreement) -> None:
        agreement.attempt("initialising the buffers", self.initialize)

    def _view(self, offset: int, size_bytes: int, typestr: str) -> torch.Tensor:
        return torch.as_tensor(
            _DeviceArray(self.local_address + offset, size_bytes // 4, typestr),
            device=self._device,
        )


class _DeviceArray:
    """A flat run of 4-byte elements of device memory, as CUDA array interface version 3."""

    def __init__(self, address: int, length: int, typestr: str) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (length,),
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
        }
