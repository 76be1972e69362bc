"""Where a caller's arrays lie, and which of them are the same, changes no bit."""

from __future__ import annotations

from types import ModuleType

import harness
import numpy as np
import pytest
from harness import DENSE, DTYPES, MISALIGNED, RAGGED, STRATEGIES, STRIDED, Layout, Prepared

LAYOUTS = {"dense": DENSE, "misaligned": MISALIGNED, "strided": STRIDED, "ragged": RAGGED}


@pytest.mark.parametrize("aliasing", ["none", "both", "residual"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_aliasing(machine: ModuleType, dtype: str, layout: str, aliasing: str) -> None:
    rng = np.random.default_rng(30)
    problems = [
        harness.problem(rng, dtype, 3, tokens, hidden, normalize=normalize)
        for tokens, hidden in ((1, 8), (5, 96), (4, 777))
        for normalize in (True, False)
    ]
    group = machine.Group(3, harness.buffer_for(machine, problems))
    for problem in problems:
        for strategy in STRATEGIES:
            # One segment a thread, and several: then rows are read again after outputs are written.
            for shape in (None, (1, 1, 32)):
                prepared = Prepared(problem, layout=LAYOUTS[layout], aliasing=aliasing)
                group.run([prepared.call(machine, strategy, shape=shape)])
                prepared.check((strategy, shape, problem.hidden))


@pytest.mark.parametrize("layout", [DENSE, MISALIGNED])
@pytest.mark.parametrize("weight_bias", [0.0, 1.0])
@pytest.mark.parametrize("gamma_dtype", ["own", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gamma(
    machine: ModuleType, dtype: str, gamma_dtype: str, weight_bias: float, layout: Layout
) -> None:
    rng = np.random.default_rng(31)
    kind = dtype if gamma_dtype == "own" else gamma_dtype
    problem = harness.problem(
        rng, dtype, 2, 3, 1000, gamma_dtype=kind, weight_bias=weight_bias, epsilon=1e-5
    )
    group = machine.Group(2, harness.buffer_for(machine, [problem]))
    for strategy in STRATEGIES:
        for shape in (None, (1, 1, 64)):
            prepared = Prepared(problem, layout=layout)
            group.run([prepared.call(machine, strategy, shape=shape)])
            prepared.check((strategy, shape))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_lay_out_their_rows_differently(machine: ModuleType, strategy: str) -> None:
    """Alignment and strides are each rank's own affair: only its loads and stores may change."""
    rng = np.random.default_rng(32)
    problem = harness.problem(rng, "bfloat16", 4, 6, 264)
    group = machine.Group(4, harness.buffer_for(machine, [problem]))
    layouts = list(LAYOUTS.values())
    prepared = Prepared(problem, layout=layouts)
    group.run([prepared.call(machine, strategy)])
    prepared.check()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_call_feeds_the_next(machine: ModuleType, strategy: str) -> None:
    """Layers: each call's output and residual, in place, are the next one's input and residual."""
    rng = np.random.default_rng(33)
    first = harness.problem(rng, "bfloat16", 4, 6, 264)
    assert first.norm is not None
    group = machine.Group(
        4, harness.buffer_for(machine, [first]), multiprocessors=2, max_delay_us=50, seed=33
    )
    layers = 12
    prepared = Prepared(first, aliasing="both")
    call = prepared.call(machine, strategy, shape=(1, 2, 64))
    group.run([call] * layers)
    problem = first
    for _ in range(layers - 1):
        problem = harness.next_layer(problem)
    prepared.check_against(problem.expected)
