"""The entry points refuse what upstream refuses, in its order and words, in every version."""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from flashinfer.elastic.allreduce import ENTRY_POINTS, install, ops, settings
from flashinfer.elastic.shadow import TESTED_VERSIONS

sys.path.insert(0, str(Path(__file__).parent))
from upstream_on_cpu import Echo, FakeLibrary, Loaded, without_gpu

RANKS = 8
TOKENS, HIDDEN = 4, 64


class Pair(NamedTuple):
    """Upstream's module as it is, and with our patch."""

    upstream: Loaded
    patched: Loaded


@pytest.fixture(scope="module", params=TESTED_VERSIONS)
def pair(request: pytest.FixtureRequest, upstream_tree: Callable[[str], Path]) -> Pair:
    tree = upstream_tree(request.param)
    loaded = Pair(Loaded(tree), Loaded(tree))
    install(loaded.patched.module)
    return loaded


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return without_gpu(monkeypatch)


def outcome(module: types.ModuleType, name: str, arguments: dict[str, Any]) -> str:
    """Say what a call raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            getattr(module, name)(**arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"


ROWS = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)

RIGHT: dict[str, dict[str, Any]] = {
    "trtllm_mnnvl_allreduce": {
        "input": ROWS,
        "workspace": object(),
        "launch_with_pdl": False,
        "output": ROWS.clone(),
    },
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm": {
        "input": ROWS,
        "residual_in": ROWS.clone(),
        "gamma": ROWS[0].clone(),
        "workspace": object(),
        "epsilon": None,
        "output": ROWS.clone(),
        "residual_out": ROWS.clone(),
    },
    "trtllm_mnnvl_all_reduce": {
        "inp": ROWS,
        "multicast_buffer_ptr": 1,
        "buffer_ptrs_dev": 1,
        "buffer_M": TOKENS,
        "buffer_flags_mnnvl": torch.zeros(9),
        "nranks": RANKS,
        "rank": 0,
        "wait_for_results": True,
        "launch_with_pdl": False,
        "out": ROWS.clone(),
    },
    "trtllm_mnnvl_fused_allreduce_rmsnorm": {
        "prenorm_output": ROWS.clone(),
        "normed_output": ROWS.clone(),
        "shard_input": ROWS,
        "multicast_buffer_ptr": 1,
        "buffer_ptrs_dev": 1,
        "unicast_ptr": 1,
        "buffer_M": TOKENS,
        "buffer_flags_mnnvl": torch.zeros(9),
        "nranks": RANKS,
        "rank": 0,
        "gamma": ROWS[0].clone(),
        "epsilon": 1e-6,
        "residual": ROWS.clone(),
        "launch_with_pdl": False,
    },
}

FLAT, DEEP, EMPTY = ROWS.flatten(), ROWS[None], torch.zeros(())
SHORT = ROWS[0, :-4].clone()

WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "trtllm_mnnvl_allreduce": {"input": (FLAT, DEEP, EMPTY), "output": (FLAT, DEEP)},
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm": {
        "input": (FLAT, DEEP, ROWS.int(), ROWS[:, :-1].clone()),
        "residual_in": (FLAT, DEEP),
        "gamma": (SHORT, ROWS),
        "output": (FLAT, DEEP),
        "residual_out": (FLAT, DEEP),
    },
    "trtllm_mnnvl_all_reduce": {
        "inp": (FLAT, DEEP),
        "buffer_M": (TOKENS - 1, 0),
        "wait_for_results": (False,),
        "out": (None,),
    },
    "trtllm_mnnvl_fused_allreduce_rmsnorm": {
        "shard_input": (FLAT, DEEP),
        "buffer_M": (TOKENS - 1,),
        "residual": (FLAT,),
        "gamma": (SHORT,),
        "normed_output": (FLAT, DEEP),
        "prenorm_output": (FLAT, DEEP),
    },
}


@pytest.mark.parametrize("name", list(WRONG))
def test_one_wrong_argument(pair: Pair, name: str) -> None:
    for argument, values in WRONG[name].items():
        for value in values:
            arguments = RIGHT[name] | {argument: value}
            expected = outcome(pair.upstream.module, name, arguments)
            assert expected != "accepted"
            assert outcome(pair.patched.module, name, arguments) == expected
    assert pair.patched.launches == []


@pytest.mark.parametrize("name", list(WRONG))
def test_of_two_wrong_arguments_the_same_one_is_named(pair: Pair, name: str) -> None:
    wrong = [(argument, value) for argument, values in WRONG[name].items() for value in values]
    for first, second in ((a, b) for a in wrong for b in wrong if a[0] != b[0]):
        arguments = RIGHT[name] | dict((first, second))
        expected = outcome(pair.upstream.module, name, arguments)
        assert expected != "accepted"
        assert outcome(pair.patched.module, name, arguments) == expected


@pytest.mark.parametrize("name", list(RIGHT)[:2])
def test_what_is_no_workspace_of_ours_is_refused(pair: Pair, name: str) -> None:
    for thing in (object(), None, 7, types.SimpleNamespace(tp_size=8)):
        text = outcome(pair.patched.module, name, RIGHT[name] | {"workspace": thing})
        kind = type(thing).__name__
        assert text == f"TypeError: workspace must be a MNNVLAllReduceFusionWorkspace, got {kind}"


@pytest.mark.parametrize("name", list(RIGHT)[:2])
def test_strategies(pair: Pair, name: str, fake: FakeLibrary) -> None:
    module = pair.patched.module
    workspace = module.MNNVLAllReduceFusionWorkspace(
        pair.patched.mapping(0, RANKS), 64, HIDDEN, torch.bfloat16, comm_backend=Echo(RANKS)
    )
    arguments = RIGHT[name] | {"workspace": workspace}
    for strategy, used in ((s, s.value) for s in list(module.MNNVLAllreduceFusionStrategy)[:2]):
        assert outcome(module, name, arguments | {"strategy": strategy}) == "accepted"
        assert fake.calls[-1][1] == used
    for strategy in ("ONESHOT", 0, None, []):
        text = outcome(module, name, arguments | {"strategy": strategy})
        assert text.startswith("ValueError: strategy must be a MNNVLAllreduceFusionStrategy, got")
    workspace.destroy()


def test_arguments_reach_the_launch(pair: Pair, fake: FakeLibrary) -> None:
    module = pair.patched.module
    workspace = module.MNNVLAllReduceFusionWorkspace(
        pair.patched.mapping(3, RANKS), 64, HIDDEN, torch.bfloat16, comm_backend=Echo(RANKS)
    )
    one_shot = module.MNNVLAllreduceFusionStrategy.ONESHOT
    rows, residual, gamma = ROWS.clone(), ROWS.clone(), ROWS[0].float()
    output, stream = ROWS.clone(), ROWS.clone()

    got = module.trtllm_mnnvl_allreduce(rows, workspace, True, output, one_shot)
    assert got is output
    assert fake.calls[-1] == (1, 0, 0, TOKENS, True, rows, output, None, None, None, 0.0, 0.0)

    fused = module.trtllm_mnnvl_fused_allreduce_add_rmsnorm
    got = fused(rows, residual, gamma, workspace, 1e-5, output, stream, True, one_shot, 1.0)
    assert got[0] is output
    assert got[1] is stream
    call = fake.calls[-1]
    assert call == (1, 0, 0, TOKENS, True, rows, output, residual, stream, gamma, 1e-5, 1.0)
    # Tensors, not copies of them.
    assert all(
        a is b for a, b in zip(call[5:10], (rows, output, residual, stream, gamma), strict=True)
    )

    # What is left out.
    wide = torch.zeros(TOKENS, 2 * HIDDEN, dtype=torch.bfloat16)[:, ::2]
    got = fused(wide, wide, gamma, workspace)
    call = fake.calls[-1]
    assert call[4] is False
    assert (call[6], call[8]) == got
    assert all(tensor.is_contiguous() and tensor.shape == wide.shape for tensor in got)
    assert call[10:] == (torch.finfo(torch.bfloat16).eps, 0.0)
    got = module.trtllm_mnnvl_allreduce(wide, workspace, False)
    assert got.is_contiguous()
    workspace.destroy()


def test_no_tokens_launch_nothing(pair: Pair, fake: FakeLibrary) -> None:
    module = pair.patched.module
    workspace = module.MNNVLAllReduceFusionWorkspace(
        pair.patched.mapping(0, RANKS), 64, HIDDEN, torch.bfloat16, comm_backend=Echo(RANKS)
    )
    assert module.trtllm_mnnvl_allreduce(ROWS[:0], workspace, False).shape == (0, HIDDEN)
    norm, stream = module.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
        ROWS[:0], ROWS[:0], ROWS[0], workspace
    )
    assert norm.shape == stream.shape == (0, HIDDEN)
    assert fake.calls == []
    workspace.destroy()


# The deprecated functions


def test_pointers_of_a_workspace_lead_back_to_it(pair: Pair, fake: FakeLibrary) -> None:
    module = pair.patched.module
    with pytest.warns(DeprecationWarning, match="get_allreduce_mnnvl_workspace is deprecated"):
        workspace, flags, elements = module.get_allreduce_mnnvl_workspace(
            pair.patched.mapping(3, RANKS), torch.bfloat16, Echo(RANKS), 12 * 7168 * 64
        )
    assert isinstance(workspace, module.MNNVLAllReduceFusionWorkspace)
    # Upstream's arithmetic: a multiple of 286720 elements of 12 bytes.
    assert workspace.buffer_size_bytes == 2 * 286720 * 12
    assert elements == workspace.buffer_size_bytes // 12
    assert flags is workspace.buffer_flags

    pointers = {
        "multicast_buffer_ptr": workspace.mc_ptr,
        "buffer_ptrs_dev": workspace.uc_ptrs_dev,
        "rank": 3,
    }
    name = "trtllm_mnnvl_all_reduce"
    arguments = RIGHT[name] | pointers
    assert outcome(module, name, arguments) == "accepted"
    assert fake.calls[-1][1:7] == (1, 0, TOKENS, False, arguments["inp"], arguments["out"])
    for wrong in ({"nranks": 2}, {"rank": 0}, {"nranks": 16, "rank": 3}):
        assert outcome(module, name, arguments | wrong).startswith(
            "ValueError: The workspace belongs to rank 3 of 8, got "
        )

    name = "trtllm_mnnvl_fused_allreduce_rmsnorm"
    arguments = RIGHT[name] | pointers | {"unicast_ptr": workspace.uc_ptr_local}
    assert outcome(module, name, arguments) == "accepted"
    assert fake.calls[-1][5:] == (
        arguments["shard_input"],
        arguments["normed_output"],
        arguments["residual"],
        arguments["prenorm_output"],
        arguments["gamma"],
        1e-6,
        0.0,
    )
    assert len(fake.calls) == 2
    assert pair.patched.launches == []

    table = workspace.uc_ptrs_dev
    workspace.destroy()
    arguments = RIGHT[name] | {"buffer_ptrs_dev": table, "rank": 3}
    assert "destroyed" in outcome(module, name, arguments)
    assert not hasattr(workspace, "buffer_flags")


def test_upstreams_kernels_get_the_flags_that_upstream_made(
    pair: Pair, fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold the size of the buffers and whose turn it is."""
    monkeypatch.setenv(settings.ENGINE, "upstream")
    module = pair.patched.module
    backend = pair.patched.torch_backend(Echo(RANKS))
    with pytest.warns(DeprecationWarning, match="get_allreduce_mnnvl_workspace is deprecated"):
        workspace, flags, _ = module.get_allreduce_mnnvl_workspace(
            pair.patched.mapping(3, RANKS), torch.bfloat16, backend, 12 * 7168 * 64
        )
    assert flags is workspace.buffer_flags
    assert flags.tolist() == [0, 2, workspace.buffer_size_bytes, 0, 0, 0, 0, 0, 0]
    workspace.destroy()


@pytest.mark.parametrize("name", list(RIGHT)[2:])
def test_pointers_that_are_not_ours_go_to_upstreams_kernels(pair: Pair, name: str) -> None:
    launches = []
    for loaded in pair:
        loaded.launches.clear()
        assert outcome(loaded.module, name, RIGHT[name]) == "accepted"
        launches.append(loaded.launches.pop())
    assert all(a is b or a == b for a, b in zip(*launches, strict=True))


# The machinery


def test_functions_look_like_upstreams(pair: Pair) -> None:
    for name in ENTRY_POINTS:
        if not hasattr(pair.upstream.module, name):
            assert not hasattr(pair.patched.module, name)
            continue
        theirs, ours = getattr(pair.upstream.module, name), getattr(pair.patched.module, name)
        assert ours is not theirs
        assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__deprecated__"):
            assert getattr(ours, attribute, None) == getattr(theirs, attribute, None), name


def made_module() -> types.ModuleType:
    module = types.ModuleType("made")
    source = """
import functools

base = 10

def add(value, *, more=5):
    return base + helper(value) + more + len([value])

def helper(value):
    return value

def closing(offset):
    def inner(value):
        return base + offset + value
    return inner

inner = closing(100)

def unknown():
    return no_such_name

@functools.wraps(add)
def decorated(*arguments, **named):
    return -add(*arguments, **named)
"""
    exec(source, module.__dict__)
    return module


def test_a_copy_sees_its_own_names_and_else_its_modules() -> None:
    module = made_module()
    copy = ops._with_names(module, module.add, helper=lambda value: 1000 * value)
    assert copy(1) == 1016
    assert module.add(1) == 17
    assert copy(1, more=0) == 1011
    # Names are looked up when they are used: monkeypatching the module works.
    module.base = 20
    assert copy(1) == 1026
    assert module.add(1) == 27


def test_a_copy_keeps_closures_defaults_and_builtins() -> None:
    module = made_module()
    assert ops._with_names(module, module.inner)(1) == 111
    with pytest.raises(NameError, match="no_such_name"):
        ops._with_names(module, module.unknown)()
    # Of a decorated function, the function itself.
    assert ops._with_names(module, module.decorated)(1) == 17


def test_names_leave_the_module_alone() -> None:
    module = made_module()
    names = ops._Names(module, {"base": 1})
    assert names["base"] == 1
    assert names["helper"] is module.helper
    with pytest.raises(KeyError):
        names["no_such_name"]
    assert "helper" not in names
    assert module.base == 10
