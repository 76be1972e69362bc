"""The multicast transport: the same algorithms, whose stores to all ranks come back to the sender.

Calls over either transport follow each other on the same buffers, so an echo that is not taken in
is found by the next call, or at the end of the run, as a word that nobody read.
"""

from __future__ import annotations

from itertools import product
from types import ModuleType

import harness
import numpy as np
import pytest
from harness import DTYPES, STRATEGIES, Prepared
from quantizing import RECIPES, Quantizing, variants
from test_rotation import mixed_problems


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
def test_both_transports_give_the_same_bits(
    machine: ModuleType, ranks: int, dtype: str, strategy: str
) -> None:
    rng = np.random.default_rng([60, ranks])
    for tokens, hidden in ((1, 64), (3, 63), (7, 520), (40, 255)):
        problem = harness.problem(rng, dtype, ranks, tokens, hidden)
        group = machine.Group(ranks, harness.buffer_for(machine, [problem]))
        variants = [
            {"multicast": multicast, "specialised": specialised, "shape": shape}
            for multicast in (True, False)
            for specialised in (True, False)
            for shape in (None, (1, 1, 32))
        ]
        prepared = [Prepared(problem) for _ in variants]
        group.run([p.call(machine, strategy, **v) for p, v in zip(prepared, variants, strict=True)])
        for one, variant in zip(prepared, variants, strict=True):
            one.check((tokens, hidden, variant))


@pytest.mark.parametrize("multiprocessors", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_transports_and_strategies_take_turns_with_random_delays(
    machine: ModuleType, ranks: int, multiprocessors: int
) -> None:
    rng = np.random.default_rng([61, ranks])
    problems = mixed_problems(rng, ranks)
    size = harness.buffer_for(machine, problems)
    for seed in range(3):
        group = machine.Group(
            ranks, size, seed=seed, max_delay_us=10, multiprocessors=multiprocessors
        )
        prepared, calls = [], []
        for _ in range(40):
            prepared.append(Prepared(problems[rng.integers(len(problems))]))
            strategy = STRATEGIES[rng.integers(2)]
            calls.append(prepared[-1].call(machine, strategy, multicast=bool(rng.integers(2))))
        group.run(calls)
        for index, one in enumerate(prepared):
            one.check(index)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_quantised_outputs_are_the_same_over_both_transports(
    machine: ModuleType, ranks: int, recipe: str
) -> None:
    """In either strategy, whole and in chunks, with and without the norm's output."""
    rng = np.random.default_rng([62, ranks, RECIPES.index(recipe)])
    for dtype, tokens, hidden in (("bfloat16", 5, 288), ("float16", 3, 32), ("float32", 9, 96)):
        problem = harness.problem(rng, dtype, ranks, tokens, hidden, epsilon=1e-5)
        group = machine.Group(ranks, harness.buffer_for(machine, [problem]))
        runs = [
            (Quantizing(problem, recipe, layout, keeps_norm=keeps), strategy, chunk, multicast)
            for layout, keeps, strategy, chunk, multicast in product(
                variants(recipe), (True, False), STRATEGIES, (None, 2), (True, False)
            )
        ]
        group.run(
            [
                call
                for run, strategy, chunk, multicast in runs
                for call in run.calls(machine, strategy, chunk, multicast=multicast)
            ]
        )
        for run, *how in runs:
            run.check((problem.dtype, how, run.scale_layout, run.keeps_norm))


@pytest.mark.parametrize("ranks", [3, 8])
def test_quantising_calls_take_turns_over_both_transports_with_random_delays(
    machine: ModuleType, ranks: int
) -> None:
    rng = np.random.default_rng([63, ranks])
    problems = [
        harness.problem(rng, "bfloat16", ranks, tokens, hidden, epsilon=1e-5)
        for tokens, hidden in ((1, 1248), (4, 288), (7, 96))
    ]
    size = harness.buffer_for(machine, problems)
    for seed in range(3):
        group = machine.Group(ranks, size, seed=seed, max_delay_us=10, multiprocessors=2)
        runs, calls = [], []
        for _ in range(24):
            recipe = RECIPES[rng.integers(len(RECIPES))]
            runs.append(Quantizing(problems[rng.integers(len(problems))], recipe, "SWIZZLED_128X4"))
            strategy = STRATEGIES[rng.integers(2)]
            calls += runs[-1].calls(machine, strategy, multicast=bool(rng.integers(2)))
        group.run(calls)
        for index, run in enumerate(runs):
            run.check(index)
