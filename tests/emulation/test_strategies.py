"""Every strategy, group size, element type and launch shape gives the model's bits."""

from __future__ import annotations

from itertools import product
from types import ModuleType
from typing import Any

import harness
import numpy as np
import pytest
from harness import DTYPES, STRATEGIES, Prepared, Problem

RANKS = (2, 3, 4, 5, 8, 16)
HIDDEN = (1, 7, 8, 63, 64, 255, 257)
TOKENS = (1, 2, 3, 7, 40)


def chunks(problem: Problem, size: int) -> list[Problem]:
    return [problem.part(slice(i, i + size)) for i in range(0, problem.tokens, size)]


def run_all_ways(machine: ModuleType, problem: Problem, group: Any, **options: Any) -> None:
    """Run one-shot, two-shot and chunks of both in a single sequence, and compare the bits."""
    runs = [(strategy, [problem]) for strategy in STRATEGIES]
    if problem.tokens > 1:
        half = problem.tokens // 2
        runs += [(strategy, chunks(problem, max(half, 1))) for strategy in STRATEGIES]
    prepared = [(strategy, Prepared(p)) for strategy, parts in runs for p in parts]
    group.run([p.call(machine, strategy, **options) for strategy, p in prepared])
    for strategy, p in prepared:
        p.check((strategy, p.problem.tokens, "of", problem.tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_all_sizes(machine: ModuleType, ranks: int, dtype: str) -> None:
    rng = np.random.default_rng([ranks, DTYPES.index(dtype)])
    problems = [
        harness.problem(rng, dtype, ranks, tokens, hidden, normalize=normalize)
        for tokens, hidden, normalize in product(TOKENS, HIDDEN, (True, False))
        if tokens < 40 or hidden in (7, 257)
    ]
    group = machine.Group(ranks, harness.buffer_for(machine, problems))
    for problem in problems:
        run_all_ways(machine, problem, group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("hidden", [2880, 7168])
def test_model_sized_rows(machine: ModuleType, ranks: int, hidden: int, dtype: str) -> None:
    rng = np.random.default_rng([ranks, hidden, DTYPES.index(dtype)])
    problem = harness.problem(rng, dtype, ranks, 3, hidden)
    group = machine.Group(ranks, harness.buffer_for(machine, [problem]))
    run_all_ways(machine, problem, group)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_alone_is_row_in_batch(machine: ModuleType, dtype: str, strategy: str) -> None:
    """Without the model: the kernel's own output for a batch against that for each of its rows."""
    rng = np.random.default_rng(5)
    batch = harness.problem(rng, dtype, 4, 7, 257)
    alone = chunks(batch, 1)
    group = machine.Group(4, harness.buffer_for(machine, [batch]), multiprocessors=2)
    prepared = [Prepared(p) for p in [batch, *alone]]
    group.run([p.call(machine, strategy) for p in prepared])
    for rank in range(4):
        whole = prepared[0].outputs(rank)
        parts = [p.outputs(rank) for p in prepared[1:]]
        for index, name in enumerate(("output", "residual")):
            rows = np.concatenate([part[index] for part in parts])
            assert np.array_equal(whole[index], rows), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1237, 1240])  # ragged rows, and whole vectors
def test_launch_shape_changes_no_bit(
    machine: ModuleType, hidden: int, dtype: str, strategy: str
) -> None:
    rng = np.random.default_rng(6)
    tokens, ranks = 9, 4
    units = tokens if strategy == "ONESHOT" else -(-tokens // ranks)
    shapes = [
        (cluster, clusters, threads)
        for cluster in (1, 2, 3, 4, 8)
        for clusters in {1, 2, units}
        for threads in (32, 64, 96, 256)
        if cluster * threads <= 512
    ]
    problem = harness.problem(rng, dtype, ranks, tokens, hidden)
    group = machine.Group(ranks, harness.buffer_for(machine, [problem]), multiprocessors=2)
    variants = [
        {"shape": shape, "specialised": specialised, "whole": whole}
        for shape in shapes
        for specialised in (True, False)
        for whole in ((True, False) if hidden % 8 == 0 else (False,))
    ]
    prepared = [Prepared(problem) for _ in variants]
    group.run([p.call(machine, strategy, **v) for p, v in zip(prepared, variants, strict=True)])
    for one, variant in zip(prepared, variants, strict=True):
        one.check(variant)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(4, 1, 64), (8, 1, 64), (8, 1, 32), (3, 1, 96), (2, 2, 160)])
@pytest.mark.parametrize("hidden", [1240, 2880])
def test_warps_that_lag(
    machine: ModuleType, hidden: int, shape: tuple[int, int, int], strategy: str
) -> None:
    """Many rows a cluster, where some warps and blocks have no part in a row, and any may sleep."""
    rng = np.random.default_rng([10, hidden])
    problem = harness.problem(rng, "bfloat16", 3, 12, hidden)
    size = harness.buffer_for(machine, [problem])
    for seed in range(4):
        group = machine.Group(3, size, seed=seed, max_delay_us=20)
        prepared = [Prepared(problem) for _ in range(2)]
        group.run([p.call(machine, strategy, shape=shape) for p in prepared])
        for one in prepared:
            one.check()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_as_many_multiprocessors_as_a_device(machine: ModuleType, strategy: str) -> None:
    """The launch shape of a device with 132 multiprocessors, on two."""
    rng = np.random.default_rng(7)
    kind = getattr(machine.Strategy, strategy)
    for tokens, hidden in ((1, 7168), (5, 2880), (40, 257)):
        problem = harness.problem(rng, "bfloat16", 4, tokens, hidden)
        group = machine.Group(4, harness.buffer_for(machine, [problem]), multiprocessors=2)
        prepared = Prepared(problem)
        shape = machine.launch_shape(kind, tokens, hidden, 4, 132)
        group.run([prepared.call(machine, strategy, shape=shape)])
        prepared.check(shape)


@pytest.mark.parametrize("multiprocessors", [78, 114, 132, 148])
def test_all_clusters_of_a_grid_fit_on_a_device_at_once(
    machine: ModuleType, multiprocessors: int
) -> None:
    """However its pairs of multiprocessors are split into up to eight groups."""
    shapes = {
        machine.launch_shape(getattr(machine.Strategy, strategy), tokens, hidden, 2, count)
        for strategy, tokens, hidden, count in product(
            STRATEGIES, (1, 5, 33, 99, 4096), range(64, 36000, 64), [multiprocessors]
        )
    }
    rng = np.random.default_rng(multiprocessors)
    pairs = multiprocessors // 2
    splits = [np.diff([0, *sorted(rng.integers(0, pairs + 1, 7)), pairs]) * 2 for _ in range(100)]
    for cluster, clusters, threads in shapes:
        per_multiprocessor = 1024 // threads  # at 64 registers a thread
        fitting = min(int((split * per_multiprocessor // cluster).sum()) for split in splits)
        assert clusters <= fitting, (cluster, clusters, threads, fitting)


def test_no_tokens_is_no_launch(machine: ModuleType) -> None:
    rng = np.random.default_rng(8)
    group = machine.Group(2, 4096)
    empty, full = (harness.problem(rng, "bfloat16", 2, n, 64) for n in (0, 2))
    prepared = [Prepared(p) for p in (empty, full, empty)]
    group.run([p.call(machine, "ONESHOT") for p in prepared])
    prepared[1].check()
    assert group.epoch(0) == 1


def test_call_that_does_not_fit_is_refused(machine: ModuleType) -> None:
    rng = np.random.default_rng(9)
    group = machine.Group(2, 256)
    fits, too_large = (harness.problem(rng, "bfloat16", 2, n, 64) for n in (1, 2))
    with pytest.raises(ValueError, match="the call needs 512 bytes and the buffer has 256"):
        group.run([Prepared(too_large).call(machine, "ONESHOT")])
    prepared = Prepared(fits)
    group.run([prepared.call(machine, "ONESHOT")])
    prepared.check()
