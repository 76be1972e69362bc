"""Fused quantisation gives what the written recipes make of the norm's output, to the bit."""

from __future__ import annotations

from itertools import product
from types import ModuleType

import harness
import numpy as np
import pytest
import quantize_reference as recipes
import reference
from harness import DENSE, DTYPES, MISALIGNED, RAGGED, STRATEGIES, Layout, Problem
from quantizing import RECIPES, SCALES, Quantizing, variants


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_strategies_and_chunks(machine: ModuleType, recipe: str, dtype: str) -> None:
    rng = np.random.default_rng([40, RECIPES.index(recipe), DTYPES.index(dtype)])
    block = recipes.BLOCKS.get(recipe, 1)
    widths = [block * n for n in (1, 3, 4, 9)] if block > 1 else [1, 7, 8, 63, 257]
    widths += [block * -(-1240 // block)]
    problems = [
        harness.problem(rng, dtype, 3, tokens, hidden, epsilon=1e-5)
        for tokens, hidden in product((1, 2, 7), widths)
    ]
    group = machine.Group(3, harness.buffer_for(machine, problems))
    for problem in problems:
        runs = [
            (Quantizing(problem, recipe, layout, keeps_norm=keeps), strategy, chunk)
            for layout, keeps, strategy, chunk in product(
                variants(recipe), (True, False), STRATEGIES, (None, 3)
            )
        ]
        group.run([c for run, strategy, chunk in runs for c in run.calls(machine, strategy, chunk)])
        for run, strategy, chunk in runs:
            run.check((strategy, chunk, run.scale_layout, run.keeps_norm, problem.hidden))


@pytest.mark.parametrize("recipe", list(recipes.BLOCKS))
@pytest.mark.parametrize("chunk", [None, 128, 100])
def test_rows_of_several_tiles(machine: ModuleType, recipe: str, chunk: int | None) -> None:
    """Scales of 128 rows by 4 blocks a tile: chunks begin in the middle of tiles too."""
    rng = np.random.default_rng(41)
    problem = harness.problem(rng, "bfloat16", 2, 300, 160, epsilon=1e-5)
    group = machine.Group(2, harness.buffer_for(machine, [problem]))
    for strategy in STRATEGIES:
        run = Quantizing(problem, recipe, "SWIZZLED_128X4")
        group.run(run.calls(machine, strategy, chunk))
        run.check((strategy, chunk))


@pytest.mark.parametrize("layout", [DENSE, MISALIGNED, RAGGED, Layout(gap=24)])
@pytest.mark.parametrize("aliasing", ["none", "both", "residual"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layouts_and_aliasing(
    machine: ModuleType, recipe: str, aliasing: str, layout: Layout
) -> None:
    """Values in rows that start anywhere, as the norm's own."""
    rng = np.random.default_rng(42)
    problem = harness.problem(rng, "float16", 2, 5, 288, epsilon=1e-5)
    group = machine.Group(2, harness.buffer_for(machine, [problem]))
    for strategy, shape in product(STRATEGIES, (None, (1, 1, 32))):
        run = Quantizing(problem, recipe, layout=layout, aliasing=aliasing)
        group.run(run.calls(machine, strategy, shape=shape))
        run.check((strategy, shape))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_launch_shape_changes_no_bit(machine: ModuleType, recipe: str, strategy: str) -> None:
    """Rows shared by blocks, several segments a thread, kernels for any group: the same bits."""
    rng = np.random.default_rng(43)
    problem = harness.problem(rng, "bfloat16", 4, 6, 1248, epsilon=1e-5)
    group = machine.Group(4, harness.buffer_for(machine, [problem]), multiprocessors=2)
    runs = []
    for shape in product((1, 2, 3, 5, 8), (1, 2), (32, 64, 160)):
        for options in ({}, {"specialised": False}, {"whole": False}):
            run = Quantizing(problem, recipe, scale_in_memory=shape[1] == 2)
            runs.append((run, run.calls(machine, strategy, shape=shape, **options), shape, options))
    group.run([call for _, calls, _, _ in runs for call in calls])
    for run, _, shape, options in runs:
        run.check((shape, options))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(4, 1, 64), (8, 1, 64), (8, 1, 32), (3, 1, 96), (1, 2, 160)])
def test_warps_that_lag(machine: ModuleType, shape: tuple[int, int, int], strategy: str) -> None:
    """Two exchanges a row, many rows a cluster, warps without a part, any of which may sleep."""
    rng = np.random.default_rng(44)
    problem = harness.problem(rng, "bfloat16", 3, 12, 1248, epsilon=1e-5)
    size = harness.buffer_for(machine, [problem])
    for seed in range(4):
        group = machine.Group(3, size, seed=seed, max_delay_us=20)
        runs = [Quantizing(problem, recipe) for recipe in ("DYNAMIC_FLOAT8", "NV_FLOAT4") * 2]
        group.run([call for run in runs for call in run.calls(machine, strategy, shape=shape)])
        for run in runs:
            run.check((shape, seed))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_of_every_size(machine: ModuleType, recipe: str, dtype: str, strategy: str) -> None:
    """Blocks of all magnitudes, zeros, infinities and NaN, through the weight that scales them."""
    rng = np.random.default_rng([45, DTYPES.index(dtype)])
    hidden = 32 * 64
    inputs = harness.random_bits(rng, (2, 4, hidden), dtype)
    weight = rng.standard_normal(hidden).astype(np.float32)
    weight *= np.repeat(2.0 ** rng.integers(-140, 127, hidden // 32), 32).astype(np.float32)
    weight[64:128] = 0
    weight[128] = np.nan
    weight[160:192] = np.nan
    weight[200] = np.inf
    weight[256:288] = -np.inf
    norm = reference.Norm(
        harness.random_bits(rng, (4, hidden), dtype),
        weight.view(np.uint32),
        "float32",
        1e-5,
        0.0,
    )
    for scale in (SCALES[recipe], 1e-30, 1e30, 0.0, float("inf"), float("nan")):
        if recipe in ("DYNAMIC_FLOAT8", "MX_FLOAT8") and scale != SCALES[recipe]:
            continue
        problem = Problem(dtype, inputs, norm)
        group = machine.Group(2, harness.buffer_for(machine, [problem]))
        run = Quantizing(problem, recipe)
        run.scale = scale
        group.run(run.calls(machine, strategy))
        run.check(scale)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_row_of_nan_shows(machine: ModuleType, recipe: str) -> None:
    """One NaN makes a whole row NaN, and no recipe turns that into ordinary small numbers."""
    rng = np.random.default_rng(46)
    inputs = harness.random_bits(rng, (2, 2, 64), "bfloat16")
    inputs[0, 1, 5] = reference.NAN["bfloat16"]
    ordinary = harness.problem(rng, "bfloat16", 2, 2, 64, epsilon=1e-5)
    problem = Problem("bfloat16", inputs, ordinary.norm)
    group = machine.Group(2, harness.buffer_for(machine, [problem]))
    run = Quantizing(problem, recipe)
    group.run(run.calls(machine, "ONESHOT"))
    run.check()
    values = run.values[0].rows[1]
    if recipe in ("FLOAT8", "DYNAMIC_FLOAT8"):
        assert (values == 0x7F).all()
    else:
        assert run.scales is not None
        nan_or_largest = 0x7F if recipe == "NV_FLOAT4" else 254
        blocks = 64 // recipes.BLOCKS[recipe]
        assert (run.scales[0].rows[blocks:] == nan_or_largest).all()


# Conversions by themselves


def floats_around(table: np.ndarray) -> np.ndarray:
    """Every number of a table, the middle between neighbours, and the floats next to them."""
    middles = (table[1:] + table[:-1]) / 2
    points = np.concatenate([table, middles, table[-1:] * 1.0625, table[-1:] * 4]).astype(
        np.float32
    )
    around = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]
    values = np.concatenate([*around, [np.inf, np.nan, 2.0**-149]]).astype(np.float32)
    return np.concatenate([values, -values])


@pytest.mark.parametrize("kind", ["e4m3", "e2m1"])
def test_conversions(machine: ModuleType, kind: str) -> None:
    rng = np.random.default_rng(47)
    anywhere = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    usual = (rng.standard_normal(1 << 18) * 2.0 ** rng.integers(-12, 10, 1 << 18)).astype(
        np.float32
    )
    table = recipes.E4M3 if kind == "e4m3" else recipes.E2M1
    values = np.concatenate([floats_around(table), anywhere, usual])
    # A device computes one NaN, without a sign.
    values[np.isnan(values)] = np.uint32(0x7FFFFFFF).view(np.float32)
    got = getattr(machine, f"{kind}_of_float")(values)
    assert np.array_equal(got, getattr(recipes, kind)(values))


def test_e4m3_decodes_what_it_encodes(machine: ModuleType) -> None:
    codes = np.arange(256, dtype=np.uint32)
    got = machine.float_of_e4m3(codes)
    expected = recipes.from_e4m3(codes.astype(np.uint8))
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    assert np.array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.array_equal(recipes.e4m3(got[number]), codes[number])
