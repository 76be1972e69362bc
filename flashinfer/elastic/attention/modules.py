"""Compiled attention modules whose functions find their workspaces large enough.

Upstream's getters obtain a compiled module with ``gen_…(…).build_and_load()``. :func:`generator`
wraps the generator, so that the module arrives in a proxy, :class:`ElasticModule`. The proxy hands
everything through, except that the functions described in :mod:`.signatures` are replaced by
functions of the same arguments which

* pass the replacement of a workspace that has grown in place of the caller's, to ``plan`` and to
  ``run`` alike, because a plan consists of offsets into the workspace; and
* where a workspace turns out too small, let it grow and try again.

A call that fits, while nothing has grown, costs one more Python call and one test of an empty
dictionary; trtllm-gen's also some integer arithmetic. An error that does not speak of a workspace
passes through as it is.
"""

from __future__ import annotations

import functools
import logging
import numbers
from collections.abc import Callable
from typing import Any

import torch

from . import overflow, pool, sizing, wrappers
from .signatures import Family, Launch

_logger = logging.getLogger("flashinfer.elastic")

Function = Callable[..., Any]

_FLOAT, _INTEGER, _PAGE_LOCKED = 0, 1, 2  # positions in the arguments of a plan
_WIDEST_HEAD = 576  # elements of a query row of MLA, more than any output row


def generator(original: Function, family: Family) -> Function:
    """Wrap one of upstream's ``gen_…`` functions.

    Parameters
    ----------
    original : callable
        It returns a ``JitSpec``.
    family : Family
        What its modules have.
    """

    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> ElasticSpec:
        return ElasticSpec(original(*args, **kwargs), family)

    return generate


class ElasticSpec:
    """A ``JitSpec`` whose module is loaded into an :class:`ElasticModule`."""

    def __init__(self, spec: Any, family: Family) -> None:
        self._spec = spec
        self._family = family

    def build_and_load(self) -> ElasticModule:
        """Build and load the module as upstream does."""
        return ElasticModule(self._spec.build_and_load(), self._family)

    def __getattr__(self, name: str) -> Any:
        if name == "_spec":  # an instance that was never initialised, as copying makes
            raise AttributeError(name)
        return getattr(self._spec, name)

    def __repr__(self) -> str:
        return f"ElasticSpec({self._spec!r})"


class ElasticModule:
    """A compiled module, with the functions of its family replaced."""

    def __init__(self, module: Any, family: Family) -> None:
        self._module = module
        self._family = family

    def __getattr__(self, name: str) -> Any:
        if name in ("_module", "_family"):  # never initialised, as copying makes
            raise AttributeError(name)
        # Only what is asked for is looked up: a module of several architectures compiles another
        # one when it is asked for a function that it lacks.
        value = getattr(self._module, name)
        function = _wrap(value, name, self._module, self._family)
        if function is not None:
            setattr(self, name, function)
            return function
        return value

    def __getitem__(self, name: str) -> Any:
        value = self._module[name]
        return _wrap(value, name, self._module, self._family) or value

    def __repr__(self) -> str:
        return f"ElasticModule({self._module!r})"


def _wrap(function: Function, name: str, module: Any, family: Family) -> Function | None:
    """Return the replacement of a function of a module, or None if it has none."""
    call = f"{family.label}.{name}"
    if name in family.plans:
        return _plan(function, module, call)
    if name in family.runs:
        return _run(function, family.runs[name])
    if name in family.launches:
        return _launch(function, family.launches[name], call)
    return None


# --- plan and run -----------------------------------------------------------------------------


def _run(function: Function, positions: tuple[int, ...]) -> Function:
    """Wrap a function that uses what a plan carved."""
    grown = pool.grown

    def run(*args: Any) -> Any:
        if grown:
            args = _redirect(args, positions)
        return function(*args)

    return run


def _redirect(args: tuple[Any, ...], positions: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the arguments with the replacements of the buffers at some positions."""
    changed: list[Any] | None = None
    for position in positions:
        buffer = args[position]
        if not _has_grown(buffer):
            continue
        larger = pool.replacement(buffer)
        if larger is not buffer:
            changed = list(args) if changed is None else changed
            changed[position] = larger
    return args if changed is None else tuple(changed)


def _has_grown(buffer: Any) -> bool:
    """Whether an argument may have a replacement; where others stand than we think, it has none."""
    return isinstance(buffer, torch.Tensor) and buffer.data_ptr() in pool.grown


def _plan(function: Function, module: Any, call: str) -> Function:
    """Wrap a function that carves a float and an integer workspace."""
    grown = pool.grown

    def plan(*args: Any) -> Any:
        if grown and (_has_grown(args[_FLOAT]) or _has_grown(args[_INTEGER])):
            return _plan_in_replacements(function, module, call, args)
        try:
            return function(*args)
        except Exception as error:
            shortage = overflow.parse(error)
            if shortage is None or not _grow_for_plan(shortage, module, call, args):
                raise
        return _plan_in_replacements(function, module, call, args)

    return plan


def _plan_in_replacements(
    function: Function, module: Any, call: str, given: tuple[Any, ...]
) -> Any:
    """Call a plan on the replacements, and let them grow until it fits."""
    while True:
        args = _redirect(given, (_FLOAT, _INTEGER))
        # After the replacement: where another thread lets it grow meanwhile, the twin is too large.
        locked = pool.twin(given[_INTEGER], given[_PAGE_LOCKED])
        args = (*args[:_PAGE_LOCKED], locked, *args[_PAGE_LOCKED + 1 :])
        try:
            result = function(*args)
        except Exception as error:
            shortage = overflow.parse(error)
            # An overflow of a buffer that was large enough is none that growing can help.
            if shortage is None or not _grow_for_plan(shortage, module, call, args):
                raise
            continue
        pool.mirror(args[_INTEGER])
        for position in (_INTEGER, _PAGE_LOCKED):
            if args[position] is not given[position]:
                wrappers.exchange(given[position], args[position])
        return result


def _grow_for_plan(
    shortage: overflow.Overflow, module: Any, call: str, args: tuple[Any, ...]
) -> bool:
    """Let the workspaces of a plan grow by what it reported, or as upstream counts it.

    Returns
    -------
    bool
        Whether any of them is larger than what the plan was given.
    """
    if not all(isinstance(buffer, torch.Tensor) for buffer in args[: _PAGE_LOCKED + 1]):
        return False
    buffer = args[_FLOAT if shortage.is_float else _INTEGER]
    needed = {True: 0, False: 0}
    needed[shortage.is_float] = shortage.needed(pool.nbytes(buffer))
    counted = _counted(module, args)
    if counted is not None:
        needed = {True: max(needed[True], counted[0]), False: max(needed[False], counted[1])}
    progress = False
    for is_float, size in needed.items():
        progress |= _grow_workspace(args, is_float, size, call, shortage.allocation)
    return progress


def _grow_workspace(
    args: tuple[Any, ...], is_float: bool, needed: int, call: str, allocation: str
) -> bool:
    """Let the float or the integer workspace of a plan grow, if it has to."""
    buffer = args[_FLOAT if is_float else _INTEGER]
    if needed <= pool.nbytes(buffer):
        return False
    if is_float:
        pool.grow(buffer, needed, kind="float", call=call, allocation_name=allocation)
        return True
    locked = args[_PAGE_LOCKED]
    pool.grow(
        buffer,
        needed,
        kind="integer",
        call=call,
        allocation_name=allocation,
        page_locked=locked,
    )
    return True


def _counted(module: Any, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Ask upstream how many bytes a plan takes of either workspace, where it can tell.

    FlashInfer 0.7's modules have ``workspace_size``, of the arguments of ``plan`` with one buffer
    in place of three; it plans without storing anything.
    """
    if not _implements(module, "workspace_size"):
        return None
    try:
        sizes = module.workspace_size(args[_FLOAT], *args[_PAGE_LOCKED + 1 :])
        return int(sizes[0]) + sizing.SLACK_BYTES, int(sizes[1]) + sizing.SLACK_BYTES
    except Exception:
        # Only a shortcut: the loop gets there without it.
        return None


def _implements(module: Any, name: str) -> bool:
    """Whether a module has a function, without making it look for one that it lacks."""
    implements = getattr(type(module), "implements_function", None)
    if implements is not None:
        return bool(implements(module, name))
    return name in getattr(module, "__dict__", {}) or hasattr(type(module), name)


# --- launches that carve their workspace themselves -------------------------------------------


def _launch(function: Function, layouts: dict[int, Launch], call: str) -> Function:
    """Wrap a function that is given a workspace and its size."""
    grown = pool.grown
    known: dict[int, Launch | None] = {}  # by number of arguments, once the first call has matched

    def launch(*args: Any) -> Any:
        try:
            layout = known[len(args)]
        except KeyError:
            layout = known[len(args)] = _matching(args, layouts, call)
        if layout is None:
            return function(*args)
        if grown:
            args = _redirect_launch(args, layout)
        if _may_be_short(args, layout):
            args = _with_room(args, layout, call)
        try:
            return function(*args)
        except Exception as error:
            enlarged = _after_shortage(error, args, layout, call)
            if enlarged is None:
                raise
            args = enlarged
        return launch(*args)

    return launch


def _matching(args: tuple[Any, ...], layouts: dict[int, Launch], call: str) -> Launch | None:
    """Return the layout of a call, or None if its arguments are not those of any tested version."""
    layout = layouts.get(len(args))
    if layout is not None:
        tensors = [layout.workspace, layout.counters, layout.query]
        integers = [layout.size]
        if layout.query is not None:
            integers += [layout.max_query, layout.batch, layout.multiprocessors]
        if all(isinstance(args[i], torch.Tensor) for i in tensors if i is not None) and all(
            isinstance(args[i], numbers.Integral) for i in integers
        ):
            return layout
    _logger.warning(
        "%s takes other arguments than in the FlashInfer releases that were tested: its workspace "
        "does not grow",
        call,
    )
    return None


def _redirect_launch(args: tuple[Any, ...], layout: Launch) -> tuple[Any, ...]:
    """Return the arguments with the replacements of workspace and counters, if they have any."""
    workspace = args[layout.workspace]
    if _has_grown(workspace):
        larger = pool.replacement(workspace)
        if larger is not workspace:
            args = _with_workspace(args, layout, larger)
    return args if layout.counters is None else _redirect(args, (layout.counters,))


def _may_be_short(args: tuple[Any, ...], layout: Launch) -> bool:
    """Whether a launch has to be sized: without LSE most need no look at a tensor."""
    if layout.query is None:
        return False
    if layout.lse is not None and args[layout.lse] is not None:
        return True
    if not layout.splits:
        return False
    bound = sizing.SLACK_BYTES + sizing.COUNTER_SLAB_BYTES * layout.counter_slab
    bound += sizing.scratch_bytes(args[layout.multiprocessors], _WIDEST_HEAD)
    return bound > _capacity(args, layout)


def _capacity(args: tuple[Any, ...], layout: Launch) -> int:
    """Return the bytes that a launch may use.

    The size is not always the buffer's: FlashInfer's prefill wrapper passes the size of its float
    workspace to trtllm-gen, and with it the integer one.
    """
    return min(int(args[layout.size]), pool.nbytes(args[layout.workspace]))


def _with_room(args: tuple[Any, ...], layout: Launch, call: str) -> tuple[Any, ...]:
    """Return the arguments with a workspace that holds all that the launch writes."""
    assert layout.query is not None
    query = args[layout.query]
    heads, head_dim = query.shape[-2:]
    slab = sizing.COUNTER_SLAB_BYTES
    need = sizing.SLACK_BYTES + slab * (layout.counter_slab or layout.tramples)
    if layout.lse is not None and args[layout.lse] is not None:
        need += sizing.statistics_bytes(heads, args[layout.batch], args[layout.max_query])
    spare = 0
    if layout.splits:
        # A query row is as wide as an output row or wider. FP4 has two elements a byte.
        head_dim *= 2 if query.dtype == torch.uint8 else 1
        scratch = sizing.scratch_bytes(args[layout.multiprocessors], head_dim)
        need += scratch
        spare = max(sizing.SCRATCH_RESERVE_BYTES - scratch, 0)
    if need > _capacity(args, layout):
        args = _enlarge(args, layout, need, call, "trtllm_gen_workspace", spare)
    if layout.tramples:
        # Context attention of 0.6.x has no counters and puts its statistics at the start, where
        # the next decode on this workspace, or a captured one, relies on counters that are zero.
        beyond = args[layout.workspace].view(torch.uint8)[slab:]
        args = _with_workspace(args, layout, beyond)
    return args


def _enlarge(
    args: tuple[Any, ...], layout: Launch, need: int, call: str, allocation: str, spare: int = 0
) -> tuple[Any, ...]:
    """Return the arguments with a workspace that holds a number of bytes."""
    workspace = args[layout.workspace]
    if need > pool.nbytes(workspace):
        workspace = pool.grow(
            workspace,
            need,
            kind="float",
            call=call,
            allocation_name=allocation,
            comfortable=need + spare,
        ).data
    return _with_workspace(args, layout, workspace)


def _with_workspace(
    args: tuple[Any, ...], layout: Launch, workspace: torch.Tensor
) -> tuple[Any, ...]:
    changed = list(args)
    changed[layout.workspace] = workspace
    changed[layout.size] = pool.nbytes(workspace)
    return tuple(changed)


def _after_shortage(
    error: Exception, args: tuple[Any, ...], layout: Launch, call: str
) -> tuple[Any, ...] | None:
    """Return the arguments to try again with, or None if more bytes are not the answer."""
    shortage = overflow.parse(error)
    if shortage is not None:
        need = shortage.needed(args[layout.size])
        if need <= args[layout.size]:
            return None
        return _enlarge(args, layout, need, call, shortage.allocation)
    counters = overflow.counter_bytes(error)
    if counters is None or layout.counters is None:
        return None
    buffer = args[layout.counters]
    if counters <= pool.nbytes(buffer):
        return None
    changed = list(args)
    changed[layout.counters] = pool.grow(
        buffer, counters, kind="counters", call=call, allocation_name="trtllm_gen_counters"
    ).data
    return tuple(changed)
