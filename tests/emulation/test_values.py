"""Values that break careless kernels: the sentinel's own bits, NaN, infinities, subnormals."""

from __future__ import annotations

from types import ModuleType

import harness
import numpy as np
import pytest
import reference
from harness import DTYPES, STRATEGIES, Prepared, Problem
from reference import EXPONENT, SIGN, Bits

RANKS, TOKENS, HIDDEN = 4, 5, 515


def special_values(dtype: str) -> Bits:
    """NaNs of both signs and kinds, infinities, zeros, subnormals, extremes, outliers."""
    exponent, sign = EXPONENT[dtype], SIGN[dtype]
    unit = exponent & -exponent  # the lowest exponent bit: the smallest normal number
    positive = [
        0,  # and, negative, the sentinel's own float
        1,  # the smallest subnormal
        unit - 1,  # the largest
        unit,
        exponent - 1,  # the largest finite number
        exponent,  # infinity
        exponent | 1,  # a signalling NaN
        exponent | unit >> 1,  # the usual quiet one
        reference.NAN[dtype],
    ]
    bits = reference.bits_dtype(dtype)
    outlier = reference.from_float(np.array([1e5, 3.0, 1e-3], np.float32), dtype)
    values = np.concatenate([np.array(positive, bits), outlier])
    return np.concatenate([values, values | bits(sign)])


def run(machine: ModuleType, problem: Problem) -> None:
    group = machine.Group(problem.ranks, harness.buffer_for(machine, [problem]))
    for strategy in STRATEGIES:
        for shape in (None, (2, 1, 32)):
            prepared = Prepared(problem)
            group.run([prepared.call(machine, strategy, shape=shape)])
            prepared.check((strategy, shape))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mix_of_special_values(machine: ModuleType, dtype: str, normalize: bool) -> None:
    """Each row mixes ordinary numbers with some of the values, so that few rows are all NaN."""
    rng = np.random.default_rng([20, DTYPES.index(dtype)])
    values = special_values(dtype)
    for value in values:
        problem = harness.problem(rng, dtype, RANKS, TOKENS, HIDDEN, normalize=normalize)
        inputs = problem.inputs
        inputs[:, 0] = value  # all ranks, all elements
        inputs[rng.integers(RANKS), 1, ::3] = value
        at = rng.random(inputs[:, 2].shape) < 0.2
        inputs[:, 2][at] = rng.choice(values, int(at.sum()))
        inputs[:, 3] = np.where(rng.random(HIDDEN) < 0.5, value, value ^ SIGN[dtype])
        norm = problem.norm
        if norm is not None:
            norm.residual[0] = value
            norm.residual[4, ::2] = value
        run(machine, Problem(dtype, inputs, norm))


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zero_everywhere(machine: ModuleType, dtype: str) -> None:
    """Every 32-bit word a rank would send is one that means empty, or half of one."""
    shape = (RANKS, TOKENS, HIDDEN)
    inputs = np.full(shape, SIGN[dtype], reference.bits_dtype(dtype))
    inputs[:, 1::2, ::2] = 0
    problem = Problem(dtype, inputs, None)
    assert not problem.expected.output.any()
    run(machine, problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_subnormals(machine: ModuleType, dtype: str) -> None:
    """What a flushing unit would make -0.0 is sent, summed and received as it is."""
    bits = reference.bits_dtype(dtype)
    rng = np.random.default_rng(21)
    inputs = rng.choice(np.array([1, 2, 3], bits), (RANKS, TOKENS, HIDDEN)) | bits(SIGN[dtype])
    inputs[0, 2] = inputs[1, 2] ^ bits(SIGN[dtype])  # and some that cancel
    problem = Problem(dtype, inputs, None)
    assert (problem.expected.output[0] & SIGN[dtype]).all(), "the sums are negative subnormals"
    run(machine, problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outlier_channels(machine: ModuleType, dtype: str) -> None:
    rng = np.random.default_rng(22)
    problem = harness.problem(rng, dtype, RANKS, TOKENS, HIDDEN)
    inputs = problem.inputs
    outlier = 6e4 / RANKS if dtype == "float16" else 1e5
    inputs[:, :, [3, 200, 514]] = reference.from_float(np.array([outlier], np.float32), dtype)
    run(machine, Problem(dtype, inputs, problem.norm))


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros(machine: ModuleType, dtype: str, epsilon: float) -> None:
    """With epsilon 0 the norm is 0 * infinity."""
    rng = np.random.default_rng(23)
    problem = harness.problem(rng, dtype, RANKS, TOKENS, HIDDEN, epsilon=epsilon)
    assert problem.norm is not None
    problem.norm.residual[::2] = 0
    inputs = problem.inputs
    inputs[:, ::2] = 0
    run(machine, Problem(dtype, inputs, problem.norm))
