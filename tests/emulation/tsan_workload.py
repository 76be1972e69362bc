"""What test_threads.py runs under ThreadSanitizer.

``tsan_workload.py LIBRARY WHAT``, where WHAT is ``kernels``, or ``race`` for two threads that
share a number without a barrier, or ``barrier`` for the same with one.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
for directory in (HERE.parent.parent / "emulation", HERE):
    sys.path.insert(0, str(directory))

import harness  # noqa: E402
from harness import STRATEGIES, Prepared, Problem  # noqa: E402
from quantizing import RECIPES, Quantizing  # noqa: E402

import emulator  # noqa: E402

SHAPES = (None, (1, 2, 32), (2, 1, 32), (3, 1, 32), (2, 2, 64))


def run_kernels(machine: ModuleType) -> int:
    """Mixed calls, some in place on the arrays of the call before; give how many."""
    count = 0
    for ranks, multiprocessors, delay in ((2, 3, 0), (4, 2, 0), (4, 2, 50), (5, 1, 0), (8, 1, 50)):
        rng = np.random.default_rng(ranks)
        problems = [
            harness.problem(rng, dtype, ranks, tokens, hidden, normalize=normalize)
            for dtype, normalize in (("bfloat16", True), ("float32", True), ("float16", False))
            for tokens, hidden in ((1, 520), (3, 264), (7, 63))
        ]
        group = machine.Group(
            ranks,
            harness.buffer_for(machine, problems),
            seed=ranks,
            max_delay_us=delay,
            multiprocessors=multiprocessors,
        )
        for strategy in STRATEGIES:
            prepared = []
            calls = []
            for problem in problems:
                for shape in SHAPES:
                    if shape is not None and shape[1] > units(problem, strategy):
                        continue
                    prepared.append(Prepared(problem))
                    calls.append(prepared[-1].call(machine, strategy, shape=shape))
            group.run(calls)
            for one in prepared:
                one.check()
            count += len(calls)
            layers = Prepared(problems[1], aliasing="both")
            group.run([layers.call(machine, strategy, shape=(1, 1, 64))] * 6)
            count += 6
            count += run_quantizing(machine, group, ranks, strategy)
    return count


def run_quantizing(machine: ModuleType, group: Any, ranks: int, strategy: str) -> int:
    """Quantise with all recipes over either transport, whole rows and shared ones; give how many.

    Dynamic FP8's largest value of a row goes through the blocks that share it, after the norm's
    sum has.
    """
    rng = np.random.default_rng([1, ranks])
    problem = harness.problem(rng, "bfloat16", ranks, 3, 288)
    runs, calls = [], []
    for recipe, shape in product(RECIPES, (None, (2, 1, 32), (1, 2, 32))):
        if shape is not None and shape[1] > units(problem, strategy):
            continue
        for multicast in (False, True):
            runs.append(Quantizing(problem, recipe, "SWIZZLED_128X4", keeps_norm=multicast))
            calls += runs[-1].calls(machine, strategy, shape=shape, multicast=multicast)
    chunks = Quantizing(problem, "NV_FLOAT4", "SWIZZLED_128X4")
    runs.append(chunks)
    calls += chunks.calls(machine, strategy, 2)
    group.run(calls)
    for run in runs:
        run.check((strategy, run.recipe))
    return len(calls)


def units(problem: Problem, strategy: str) -> int:
    """Clusters that have something to do."""
    return problem.tokens if strategy == "ONESHOT" else -(-problem.tokens // problem.ranks)


def main() -> None:
    """Run what the command line names."""
    machine = emulator.load(Path(sys.argv[1]))
    if sys.argv[2] == "kernels":
        print("calls:", run_kernels(machine))
    else:
        group = machine.Group(2, 256)
        print("got:", group.run_planted_race(with_barrier=sys.argv[2] == "barrier"))


if __name__ == "__main__":
    main()
