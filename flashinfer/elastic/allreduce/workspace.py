"""The workspace class that takes the place of upstream's ``MNNVLAllReduceFusionWorkspace``."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import compiled, interrupts, multicast, settings, sizing, strategy, topology
from .agreement import Agreement, CollectiveError
from .engines import Call, Engine, library
from .engines.native import NativeEngine
from .engines.upstream import UpstreamEngine
from .memory import GroupMemory

PROTOCOL = 2
"""What ranks send each other; raised when a change makes two versions misunderstand."""

_logger = logging.getLogger("flashinfer.elastic")

_ELEMENT_BYTES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}

_by_pointer_table: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Live workspaces by ``uc_ptrs_dev``, which callers of the deprecated functions pass around."""


def find_by_pointer_table(address: int) -> Any | None:
    """Return the live workspace whose ``uc_ptrs_dev`` this is, or None."""
    return _by_pointer_table.get(address)


def make_workspace_class(module: ModuleType) -> type:
    """Return the subclass of an upstream module's workspace class that allocates what is asked.

    Parameters
    ----------
    module : types.ModuleType
        Upstream's ``flashinfer.comm.trtllm_mnnvl_ar``.
    """
    upstream: Any = module.MNNVLAllReduceFusionWorkspace
    auto = module.MNNVLAllreduceFusionStrategy.AUTO
    # 0.6.x keeps the local memory as a tensor, 0.7.x does not.
    has_tensor = hasattr(module, "_alloc_symm_buffer_bytes")

    class Workspace(upstream):  # type: ignore[misc]
        """Memory for all-reduce over the GPUs of a tensor-parallel group, on every rank.

        Sized for every call that the reported maximum lets a caller make, one-shot included, and
        usable for any other: what does not fit runs with two-shot or in chunks of tokens.

        Creation is collective over the ranks of ``comm_backend``: it succeeds on all, or raises on
        all within seconds and leaves nothing behind.

        Parameters
        ----------
        mapping : flashinfer.comm.Mapping
            ``tp_size`` and ``tp_rank`` place this rank in the group.
        max_num_tokens, hidden_dim : int, optional
            The largest problem the caller foresees; not a limit.
        dtype : torch.dtype, optional
            Of that problem; calls may use another.
        buffer_size_in_bytes : int, optional
            Bytes of each Lamport buffer, instead of the size that follows from the problem.
        comm_backend : CommBackend, optional
            Anything with ``allgather(bytes)`` and ``barrier()`` over exactly this group; MPI if
            not given, as upstream.

        Raises
        ------
        AssertionError
            If neither a problem nor a size is given (upstream's check).
        ValueError
            If ``buffer_size_in_bytes`` exceeds UINT32_MAX (upstream's check).
        RuntimeError
            If the group cannot communicate this way; the text says which rank and why.
        KeyboardInterrupt
            On an interrupted rank, when its peers know; theirs is the RuntimeError.
        """

        # Until all is in place there is nothing to destroy and nothing to warn of.
        _destroyed = True
        _engine: Engine | None = None

        def __init__(
            self,
            mapping: Any,
            max_num_tokens: int | None = None,
            hidden_dim: int | None = None,
            dtype: torch.dtype | None = None,
            buffer_size_in_bytes: int | None = None,
            comm_backend: Any | None = None,
        ) -> None:
            try:
                # An interrupt that came too late for the others to be told is raised at the end.
                with interrupts.held():
                    self._create(
                        mapping,
                        max_num_tokens,
                        hidden_dim,
                        dtype,
                        buffer_size_in_bytes,
                        comm_backend,
                    )
            except BaseException:
                self.destroy()
                raise

        def _create(
            self,
            mapping: Any,
            max_num_tokens: int | None,
            hidden_dim: int | None,
            dtype: torch.dtype | None,
            buffer_size_in_bytes: int | None,
            comm_backend: Any | None,
        ) -> None:
            self._noted_fallbacks: set[str] = set()
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "An all-reduce workspace cannot be created while a CUDA graph is being "
                    "captured; create it before."
                )
            if buffer_size_in_bytes is None and None in (max_num_tokens, hidden_dim, dtype):
                raise AssertionError(
                    "max_num_tokens, hidden_dim, and dtype must be provided if "
                    "buffer_size_in_bytes is not provided."
                )
            if comm_backend is None:
                comm_backend = module.MPIBackend()
            agreement = Agreement(comm_backend, mapping.tp_rank, mapping.tp_size)
            plan = _agree_on_plan(
                agreement,
                lambda: _Plan(
                    mapping.tp_size, max_num_tokens, hidden_dim, dtype, buffer_size_in_bytes
                ),
            )
            self._arch = plan.arch
            if plan.engine() == "native":
                self._open_native(mapping, agreement, plan, comm_backend)
            else:
                self._open_upstream(mapping, agreement, plan.buffer_bytes, comm_backend)
            _by_pointer_table[int(self.uc_ptrs_dev)] = self
            self._number = compiled.enroll(self)

        def _open_native(
            self, mapping: Any, agreement: Agreement, plan: _Plan, comm_backend: Any
        ) -> None:
            topology.require_nvlink(agreement, plan.device.index)

            def make(memory: GroupMemory | None) -> NativeEngine:
                return NativeEngine(
                    agreement,
                    plan.device,
                    plan.buffer_bytes,
                    plan.options.timeout_s,
                    plan.multiprocessors,
                    memory,
                )

            setting = plan.options.multicast
            group_name = multicast.find_group(
                agreement,
                setting,
                comm_backend,
                plan.device,
                detachable=hasattr(upstream, "checkpoint_prepare"),
            )
            engine = multicast.open_engine(
                agreement,
                plan.device,
                plan.buffer_bytes,
                make,
                setting=setting,
                group_name=group_name,
            )
            try:
                agreement.attempt(
                    "describing the workspace", lambda: self._adopt(engine, mapping, plan)
                )
            except BaseException:
                engine.close()
                self._forget()
                raise
            self._engine = engine
            self._destroyed = False

        def _adopt(self, engine: NativeEngine, mapping: Any, plan: _Plan) -> None:
            """Set what upstream's constructor sets."""
            self.world_size = mapping.world_size
            self.rank = mapping.tp_rank
            self.tp_size = mapping.tp_size
            self.NUM_LAMPORT_BUFFERS = sizing.LAMPORT_BUFFERS_NATIVE
            self.buffer_size_bytes = plan.buffer_bytes
            self.workspace_size_bytes = plan.buffer_bytes * sizing.LAMPORT_BUFFERS_NATIVE
            self.handle = engine.memory
            self.ptrs = list(engine.memory.addresses)
            if has_tensor:
                self.tensor = engine.buffers()
            self._pointer_table = torch.tensor(
                engine.memory.addresses, dtype=torch.int64, device=plan.device
            )
            self.uc_ptrs_dev = self._pointer_table.data_ptr()
            self.uc_ptr_local = engine.local_address
            # Never the multicast address: others' kernels would run on it. But callers take a null
            # one for a workspace that does not work.
            self.mc_ptr = engine.local_address

        def _forget(self) -> None:
            """Drop what upstream deletes on ``destroy``, as far as it was set."""
            for name in _OPEN_ATTRIBUTES:
                self.__dict__.pop(name, None)
            self._destroyed = True

        def _open_upstream(
            self, mapping: Any, agreement: Agreement, size: int, comm_backend: Any
        ) -> None:
            error: BaseException | None = None
            try:
                try:
                    super().__init__(mapping, buffer_size_in_bytes=size, comm_backend=comm_backend)
                    if not self.mc_ptr:
                        raise RuntimeError(
                            "The upstream engine needs NVLink multicast, and the multicast pointer "
                            "is null. The native engine does without: it is the default where this "
                            f"wheel has kernels for the GPU (sm{self._arch})."
                        )
                    self._engine = UpstreamEngine(module, self)
                    interrupts.deliver()
                except BaseException as raised:
                    error = raised
                agreement.agree("creating upstream's workspace", error)
            except BaseException:
                self._engine = None
                self._forget()
                raise
            finally:
                error = None  # breaks the cycle error -> traceback -> this frame -> error

        def __getattr__(self, name: str) -> Any:
            # Called only for what is not there. `buffer_flags` belongs to upstream's kernels.
            if self.__dict__.get("_engine") is None and name in _OPEN_ATTRIBUTES:
                raise AttributeError(f"The workspace has been destroyed; it has no {name!r}.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def is_buffer_size_sufficient(
            self,
            tp_size: int,
            num_tokens: int,
            hidden_dim: int,
            dtype: torch.dtype,
            strategy: Any = auto,
        ) -> bool:
            """Return whether the buffers hold a problem with a strategy's layout.

            As upstream: others act on the answer, launching kernels of their own. A call that does
            not fit this way is served another way.
            """
            required = self.get_required_buffer_size_bytes(
                tp_size, num_tokens, hidden_dim, dtype, strategy
            )
            return bool(required <= self.buffer_size_bytes)

        def _run(self, requested: strategy.Strategy | None, call: Call) -> None:
            """Launch a call in as many steps as it takes.

            Parameters
            ----------
            requested : Strategy or None
                None lets us choose.
            call : Call
                Checked by the engine, before anything is launched.

            Raises
            ------
            ValueError
                If an argument is wrong or not even one row fits.
            RuntimeError
                If the workspace has been destroyed or detached.
            """
            engine = self._engine
            if engine is None:
                raise RuntimeError("The workspace has been destroyed.")
            tokens, hidden = call.input.shape
            element_bytes = _ELEMENT_BYTES.get(call.input.dtype)
            if element_bytes is None:
                raise ValueError(
                    f"input has dtype {call.input.dtype}; float16, bfloat16 and float32 are "
                    "supported"
                )
            if requested is None:
                requested = strategy.auto(tokens, hidden, element_bytes, self.tp_size, self._arch)
            steps = strategy.resolve(
                requested, tokens, hidden, element_bytes, self.tp_size, self.buffer_size_bytes
            )
            if len(steps) > 1 or (steps and steps[0].strategy is not requested):
                self._note_fallback(requested, steps, call, element_bytes)
            for step in steps:
                engine.launch(call, *step)

        def _note_fallback(
            self,
            requested: strategy.Strategy,
            steps: tuple[strategy.Step, ...],
            call: Call,
            element_bytes: int,
        ) -> None:
            served = steps[0].strategy.name.lower()
            kind = f"{requested.name} -> {served}{' in chunks' if len(steps) > 1 else ''}"
            if kind in self._noted_fallbacks:
                return
            self._noted_fallbacks.add(kind)
            tokens, hidden = call.input.shape
            size = (
                sizing.native_oneshot_bytes
                if requested == strategy.Strategy.ONESHOT
                else sizing.native_twoshot_bytes
            )
            _logger.info(
                "All-reduce of %d x %d: %s needs %d bytes of a buffer of %d; it runs as %s in %d "
                "step(s), with the same result. Said once for each kind.",
                tokens,
                hidden,
                requested.name.lower(),
                size(tokens, hidden, element_bytes, self.tp_size),
                self.buffer_size_bytes,
                served,
                len(steps),
            )

        def destroy(self) -> None:
            """Release everything; local, idempotent, safe at interpreter exit.

            Raises
            ------
            RuntimeError
                A CUDA graph is being captured; the workspace is as it was.
            """
            with interrupts.held():
                if self._engine is None:
                    return
                self._engine.close()
                self._engine = None
                self._forget()

    for name, method in _checkpoint_methods(upstream).items():
        setattr(Workspace, name, method)
    return Workspace


_OPEN_ATTRIBUTES = (
    "buffer_flags",
    "uc_ptrs_dev",
    "uc_ptr_local",
    "mc_ptr",
    "tensor",
    "handle",
    "ptrs",
    "_pointer_table",
)
"""What upstream deletes on ``destroy``, and so do we."""


class _Plan:
    """What this rank would create, worked out without any collective."""

    def __init__(
        self,
        ranks: int,
        max_num_tokens: int | None,
        hidden_dim: int | None,
        dtype: torch.dtype | None,
        explicit: int | None,
    ) -> None:
        self.options = settings.read()
        # Plain ints of what may be NumPy's: ranks tell each other the size as JSON.
        self.buffer_bytes = sizing.buffer_bytes(
            operator.index(max_num_tokens or 0),
            operator.index(hidden_dim or 0),
            dtype.itemsize if dtype is not None else 0,
            ranks,
            oneshot_max_bytes=self.options.oneshot_max_bytes,
            explicit=None if explicit is None else operator.index(explicit),
        )
        native = self.options.engine != "upstream"
        self.built_archs = library.load().archs if native else ()
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.arch = 10 * properties.major + properties.minor
        self.multiprocessors = properties.multi_processor_count

    def shared(self) -> list[object]:
        """What must be the same on all ranks."""
        return [PROTOCOL, self.buffer_bytes, *self.options, self.arch, *self.built_archs]

    def engine(self) -> str:
        """Return ``native`` or ``upstream``; a pure function of what the ranks share.

        Raises
        ------
        RuntimeError
            If the native engine is asked for and has no machine code for this GPU.
        """
        if self.options.engine == "upstream":
            return "upstream"
        if library.runs_on(self.built_archs, self.arch):
            return "native"
        if self.options.engine == "native":
            raise RuntimeError(_no_machine_code(self.arch, self.built_archs))
        _logger.warning(
            "%s Upstream's kernels are used instead.",
            _no_machine_code(self.arch, self.built_archs),
        )
        return "upstream"


def _agree_on_plan(agreement: Agreement, make: Callable[[], _Plan]) -> _Plan:
    """Return this rank's plan, once all ranks have one and none differs.

    Launches depend on the number of multiprocessors, so all take the smallest.
    """
    try:
        plan = agreement.attempt("planning the workspace", make)
    except CollectiveError as error:
        # Wrong arguments are wrong on every rank; upstream's callers expect its ValueError.
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise
    agreement.same("settings of the workspace", plan.shared())
    plan.multiprocessors = min(agreement.gather("multiprocessors", plan.multiprocessors))
    return plan


def _no_machine_code(arch: int, built: tuple[int, ...]) -> str:
    return (
        f"This flashinfer wheel has kernels for {', '.join(f'sm{a}' for a in built)}, and the GPU "
        f"is sm{arch}: install a wheel whose name has sm{arch}, or build one with "
        f'FLASHINFER_CUDA_ARCH_LIST="{arch // 10}.{arch % 10}".'
    )


def _checkpoint_methods(upstream: Any) -> dict[str, Any]:
    """Return our versions of the checkpoint methods that this upstream has."""

    def _require_handles_attached(self: Any) -> None:
        if isinstance(self._engine, NativeEngine):
            if not self._engine.memory.mapped:
                raise RuntimeError("MNNVL handles are not attached")
        else:
            upstream._require_handles_attached(self)

    def _initialize_protocol(self: Any) -> None:
        if isinstance(self._engine, NativeEngine):
            self._engine.initialize()
        else:
            upstream._initialize_protocol(self)

    def checkpoint_prepare(self: Any) -> None:
        """Give the memory back and keep its addresses; collective. Repeated calls do nothing."""
        if not isinstance(self._engine, NativeEngine):
            upstream.checkpoint_prepare(self)
        else:
            self._engine.detach()

    def checkpoint_restore(self: Any, comm_backend: Any) -> None:
        """Take memory again at the same addresses; collective. Repeated calls do nothing.

        Parameters
        ----------
        comm_backend : CommBackend
            Of the same ranks in the same order as at creation.
        """
        if not isinstance(self._engine, NativeEngine):
            upstream.checkpoint_restore(self, comm_backend)
        else:
            self._engine.attach(Agreement(comm_backend, self.rank, self.tp_size))

    ours = (
        _require_handles_attached,
        _initialize_protocol,
        checkpoint_prepare,
        checkpoint_restore,
    )
    return {method.__name__: method for method in ours if hasattr(upstream, method.__name__)}
