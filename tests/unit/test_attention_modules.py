"""The proxies of compiled modules, on modules made for the purpose."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer.elastic.attention import modules, pool, signatures, wrappers

MIB = 2**20
PREFILL = signatures.GENERATORS["gen_batch_prefill_module"]
TRTLLM = signatures.GENERATORS["gen_trtllm_gen_fmha_module"]
FMHA_V2 = signatures.GENERATORS["gen_fmha_v2_module"]


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    pool._slots.clear()
    pool._by_address.clear()
    yield
    pool._slots.clear()
    pool._by_address.clear()


def overflow(name: str, size: int, available: int) -> RuntimeError:
    return RuntimeError(
        f"Buffer overflow when allocating memory for {name} with size {size} and alignment 16, "
        f"but only {available} bytes available in AlignedAllocator. Increase the workspace buffer "
        "size."
    )


def load(module: Any, family: signatures.Family) -> Any:
    spec = SimpleNamespace(build_and_load=lambda: module, name="jit name")
    generate = modules.generator(lambda *args, **kwargs: spec, family)
    return generate("fa2").build_and_load()


def test_specs_and_modules_hand_everything_else_through() -> None:
    module = SimpleNamespace(plan=None, other=lambda: 5, constant=3)
    spec = SimpleNamespace(build_and_load=lambda: module, name="jit name")

    def gen_module(backend: str) -> Any:
        """Generate."""
        return spec

    generate = modules.generator(gen_module, PREFILL)
    assert inspect.signature(generate) == inspect.signature(gen_module)
    assert generate.__doc__ == "Generate."
    wrapped = generate("fa2")
    assert wrapped.name == "jit name"
    loaded = wrapped.build_and_load()
    assert loaded.other is module.other
    assert loaded.constant == 3
    assert not hasattr(loaded, "workspace_size")


def test_a_function_is_not_looked_up_before_it_is_asked_for() -> None:
    """FlashInfer 0.7's modules for several architectures compile what they are asked for."""
    asked = []

    class Module:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            if name == "plan":
                return failing
            raise AssertionError(name)

    def failing(floats: torch.Tensor, *args: Any) -> str:
        if pool.nbytes(floats) < 5 * MIB:
            raise overflow("batch_prefill_tmp_v", 5 * MIB, pool.nbytes(floats))
        return "planned"

    loaded = load(Module(), PREFILL)
    assert asked == []
    buffers = [torch.zeros(MIB, dtype=torch.uint8) for _ in range(3)]
    assert loaded.plan(*buffers) == "planned"
    assert asked == ["plan"]


def test_an_overflow_that_growing_does_not_help_comes_through() -> None:
    error = overflow("batch_prefill_tmp_v", 100, 10 * MIB)

    def plan(*args: Any) -> None:
        raise error

    buffers = [torch.zeros(16 * MIB, dtype=torch.uint8) for _ in range(3)]
    with pytest.raises(RuntimeError) as caught:
        load(SimpleNamespace(plan=plan), PREFILL).plan(*buffers)
    assert caught.value is error
    assert pool.report() == []


def test_an_error_on_the_second_try_is_not_chained_to_the_overflow() -> None:
    other = RuntimeError("an illegal memory access")

    def plan(floats: torch.Tensor, *args: Any) -> None:
        if pool.nbytes(floats) < 5 * MIB:
            raise overflow("batch_prefill_tmp_v", 5 * MIB, pool.nbytes(floats))
        raise other

    buffers = [torch.zeros(MIB, dtype=torch.uint8) for _ in range(3)]
    with pytest.raises(RuntimeError) as caught:
        load(SimpleNamespace(plan=plan), PREFILL).plan(*buffers)
    assert caught.value is other
    assert caught.value.__context__ is None


def test_upstreams_count_is_asked_where_there_is_one() -> None:
    plans = []

    def plan(floats: torch.Tensor, ints: torch.Tensor, locked: torch.Tensor, *args: Any) -> str:
        plans.append((pool.nbytes(floats), pool.nbytes(ints), pool.nbytes(locked)))
        if pool.nbytes(ints) < 9 * MIB:
            raise overflow("batch_prefill_o_indptr", 9 * MIB, pool.nbytes(ints))
        if pool.nbytes(floats) < 50 * MIB:
            raise overflow("batch_prefill_tmp_v", 50 * MIB, pool.nbytes(floats))
        return "planned"

    def workspace_size(buffer: torch.Tensor, *args: Any) -> list[int]:
        assert args == ("the", "rest")
        return [50 * MIB, 9 * MIB]

    buffers = [torch.zeros(MIB, dtype=torch.uint8) for _ in range(3)]
    loaded = load(SimpleNamespace(plan=plan, workspace_size=workspace_size), PREFILL)
    assert loaded.plan(*buffers, "the", "rest") == "planned"
    assert len(plans) == 2
    assert plans[1][0] >= 50 * MIB
    assert plans[1][1] == plans[1][2] >= 9 * MIB


def test_a_launch_with_unknown_arguments_is_left_alone() -> None:
    seen = []
    module = SimpleNamespace(trtllm_paged_attention_decode=lambda *args: seen.append(args))
    load(module, TRTLLM).trtllm_paged_attention_decode(1, 2, 3)
    assert seen == [(1, 2, 3)]


def test_arguments_of_another_kind_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """As many as we know, but others: no release that was tested."""
    seen = []
    module = SimpleNamespace(
        trtllm_paged_attention_decode=lambda *args: seen.append(args),
        plan=lambda *args: (_ for _ in ()).throw(overflow("batch_prefill_tmp_v", 5 * MIB, 0)),
        run=lambda *args: seen.append(args),
    )
    launch = load(module, TRTLLM).trtllm_paged_attention_decode
    launch(*range(30))
    launch(*range(30))
    assert seen == [tuple(range(30))] * 2
    assert len(caplog.records) == 1
    planned = load(module, PREFILL)
    with pytest.raises(RuntimeError, match="AlignedAllocator"):
        planned.plan(1, 2, 3, 4)
    pool.grow(
        torch.zeros(MIB, dtype=torch.uint8), 5 * MIB, kind="float", call="t", allocation_name="part"
    )
    planned.run(1, 2, 3)
    assert seen[-1] == (1, 2, 3)


def test_fmha_v2_grows_when_it_says_so() -> None:
    sizes = []

    def run(*args: Any) -> str:
        sizes.append(args[5])
        assert args[5] == pool.nbytes(args[4])
        if args[5] < 20 * MIB:
            raise overflow("o_scratch_d", 20 * MIB, args[5] - 64)
        return "done"

    args: list[Any] = [None] * 26
    args[4], args[5] = torch.zeros(MIB, dtype=torch.uint8), MIB
    loaded = load(SimpleNamespace(run=run), FMHA_V2)
    assert loaded.run(*args) == "done"
    assert loaded.run(*args) == "done"
    assert len(sizes) == 3


def test_a_launch_that_growing_does_not_help_fails_once() -> None:
    launches = []

    def run(*args: Any) -> None:
        launches.append(args)
        raise overflow("o_scratch_d", MIB, args[5])

    args: list[Any] = [None] * 26
    args[4], args[5] = torch.zeros(8 * MIB, dtype=torch.uint8), 8 * MIB
    with pytest.raises(RuntimeError, match="o_scratch_d"):
        load(SimpleNamespace(run=run), FMHA_V2).run(*args)
    assert len(launches) == 1
    assert pool.report() == []


def test_counters_that_are_large_enough_do_not_grow() -> None:
    """Whatever the launcher says of them."""
    launches = []

    def decode(*args: Any) -> None:
        launches.append(args)
        raise RuntimeError("counter buffer is too small: got 0 bytes, need 4096 bytes")

    args: list[Any] = [None] * 36
    args[2] = torch.zeros(4, 8, 128)
    args[5], args[21] = torch.zeros(128 * MIB, dtype=torch.uint8), 128 * MIB
    args[6] = torch.zeros(4096, dtype=torch.uint8)
    args[9], args[16], args[19] = 1, 4, 132
    module = SimpleNamespace(trtllm_paged_attention_decode=decode)
    with pytest.raises(RuntimeError, match="counter buffer"):
        load(module, TRTLLM).trtllm_paged_attention_decode(*args)
    assert len(launches) == 1
    assert pool.report() == []


def test_a_function_asked_for_by_index_grows_workspaces_too() -> None:
    def plan(floats: torch.Tensor, *_: Any) -> str:
        if pool.nbytes(floats) < 5 * MIB:
            raise overflow("batch_prefill_tmp_v", 5 * MIB, pool.nbytes(floats))
        return "planned"

    loaded = load({"plan": plan, "other": len}, PREFILL)
    buffers = [torch.zeros(MIB, dtype=torch.uint8) for _ in range(3)]
    assert loaded["plan"](*buffers) == "planned"
    assert loaded["other"] is len


def test_specs_and_modules_can_be_copied() -> None:
    module = SimpleNamespace(constant=3)
    spec = SimpleNamespace(build_and_load=lambda: module, name="jit name")
    wrapped = copy.copy(modules.generator(lambda: spec, PREFILL)())
    assert wrapped.name == "jit name"
    assert copy.copy(wrapped.build_and_load()).constant == 3


def test_wrappers_show_the_grown_integer_workspace_and_keep_the_old_one() -> None:
    class Wrapper:
        def __init__(self) -> None:
            self._int_workspace_buffer = torch.zeros(MIB, dtype=torch.uint8)

    wrappers.observe(Wrapper)
    wrapper, bystander = Wrapper(), Wrapper()
    old, new = wrapper._int_workspace_buffer, torch.zeros(2 * MIB, dtype=torch.uint8)
    before = bystander._int_workspace_buffer
    wrappers.exchange(old, new)
    assert wrapper._int_workspace_buffer is new
    assert bystander._int_workspace_buffer is before
    assert any(value is old for value in vars(wrapper)[wrappers._RETIRED])


@pytest.mark.parametrize("through", ["the attribute", "the buffer"])
def test_wrappers_of_one_integer_workspace_plan_in_buffers_of_their_own(through: str) -> None:
    """``reset_workspace_buffer`` may give a wrapper what another one has, and outgrows."""

    class Wrapper:
        def __init__(self, workspace: torch.Tensor) -> None:
            self._int_workspace_buffer = workspace
            self._pin_memory_int_workspace_buffer = torch.zeros(MIB, dtype=torch.uint8)

    wrappers.observe(Wrapper)
    written = []

    def plan(floats: torch.Tensor, integers: torch.Tensor, locked: torch.Tensor) -> None:
        if pool.nbytes(integers) < 5 * MIB:
            raise overflow("batch_prefill_request_indices", 5 * MIB, pool.nbytes(integers))
        assert pool.nbytes(locked) >= pool.nbytes(integers), "the plan is written past its end"
        written.append((integers, locked))

    loaded = load(SimpleNamespace(plan=plan), PREFILL)
    floats, shared = torch.zeros(MIB, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    first, second = Wrapper(shared), Wrapper(shared)

    def integers_of(wrapper: Wrapper) -> torch.Tensor:
        return wrapper._int_workspace_buffer if through == "the attribute" else shared

    for wrapper in (first, second):
        loaded.plan(floats, integers_of(wrapper), wrapper._pin_memory_int_workspace_buffer)
        integers, locked = written[-1]
        assert wrapper._int_workspace_buffer is integers
        assert wrapper._pin_memory_int_workspace_buffer is locked
    assert written[0][1].data_ptr() != written[1][1].data_ptr()


def _calls(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Return how many functions, of Python and of C, a call goes through."""
    function(*args)  # Whatever is looked up once has been.
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count - 1  # The end of the profile is a call too.


def test_a_call_that_fits_goes_through_few_functions() -> None:
    """So that its host time does not show; ``benchmarks/attention_overhead.py`` measures that."""

    def function(*args: Any) -> None:
        pass

    module = SimpleNamespace(plan=function, run=function, trtllm_paged_attention_decode=function)
    buffers = tuple(torch.zeros(MIB, dtype=torch.uint8) for _ in range(3))
    large = torch.zeros(128 * MIB, dtype=torch.uint8)
    launch: list[Any] = [None] * 30
    launch[2], launch[5], launch[18], launch[20] = torch.zeros(4, 8, 128), large, 132, 128 * MIB
    launch[8], launch[15] = 1, 4
    attention, trtllm = load(module, PREFILL), load(module, TRTLLM)
    assert _calls(function, buffers) == 1
    assert _calls(attention.plan, buffers) <= 4
    assert _calls(attention.run, buffers) <= 4
    assert _calls(trtllm.trtllm_paged_attention_decode, tuple(launch)) <= 15
    other = torch.zeros(MIB, dtype=torch.uint8)
    pool.grow(other, 5 * MIB, kind="float", call="test", allocation_name="part")
    assert _calls(attention.run, buffers) <= 13
