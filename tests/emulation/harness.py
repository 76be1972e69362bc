"""Problems for the emulated machine, laid out in memory as a caller might, with what must come out.

Every array stands in a larger one full of poison, which must still be there afterwards: a store
outside the caller's rows is as wrong as a wrong value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import reference
from numpy.typing import NDArray
from reference import Bits

DTYPES = ("float16", "bfloat16", "float32")
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_POISON = 0x3FD2D2D2  # an ordinary number as any type


@dataclass(frozen=True)
class Layout:
    """Where rows lie. Both counts are in elements."""

    offset: int = 0  # of the first row from a 64-byte boundary
    gap: int = 0  # between rows


DENSE = Layout()
MISALIGNED = Layout(offset=1)
STRIDED = Layout(gap=24)
RAGGED = Layout(offset=3, gap=5)


class Guarded:
    """An array of rows amid poison."""

    def __init__(self, shape: tuple[int, ...], bits: type[np.unsignedinteger], layout: Layout):
        rows = shape[0] if len(shape) == 2 else 1
        stride = shape[-1] + layout.gap
        itemsize = np.dtype(bits).itemsize
        margin = 64 // itemsize
        count = margin * 3 + layout.offset + rows * stride
        self._poison = bits(_POISON & np.iinfo(bits).max)
        raw = np.full(count, self._poison, bits)
        start = (-raw.ctypes.data // itemsize) % margin + margin + layout.offset
        flat = raw[start : start + rows * stride].reshape(rows, stride)[:, : shape[-1]]
        self.rows: NDArray[Any] = flat if len(shape) == 2 else flat[0]
        self._raw = raw
        self._outside = np.ones(count, bool)
        inside = self._outside[start : start + rows * stride].reshape(rows, stride)
        inside[:, : shape[-1]] = False

    def fill(self, values: Bits) -> Guarded:
        """Put values into the rows."""
        self.rows[...] = values
        return self

    def is_intact(self) -> bool:
        """Whether nothing was stored outside the rows."""
        return bool((self._raw[self._outside] == self._poison).all())


@dataclass
class Problem:
    """One call's values and its expected result; ``inputs[ranks, tokens, hidden]``."""

    dtype: str
    inputs: Bits
    norm: reference.Norm | None
    expected: reference.Result = field(init=False)

    def __post_init__(self) -> None:
        self.expected = reference.bit_exact(self.inputs, self.dtype, self.norm)

    @property
    def ranks(self) -> int:
        return int(self.inputs.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.inputs.shape[1])

    @property
    def hidden(self) -> int:
        return int(self.inputs.shape[2])

    def part(self, tokens: slice) -> Problem:
        """The same problem for some of its tokens, with what they gave in the whole."""
        part: Problem = object.__new__(Problem)
        part.dtype = self.dtype
        part.inputs = self.inputs[:, tokens]
        norm = self.norm
        if norm is not None:
            norm = replace(norm, residual=norm.residual[tokens])
        part.norm = norm
        residual = self.expected.residual
        part.expected = reference.Result(
            self.expected.output[tokens], None if residual is None else residual[tokens]
        )
        return part


class Prepared:
    """A problem in memory. ``aliasing`` is what vLLM does with a norm's arrays:

    * ``"none"``: outputs of their own;
    * ``"both"``: the norm's output replaces the input, the new residual the old one;
    * ``"residual"``: the new residual replaces the input.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        layout: Layout | Sequence[Layout] = DENSE,  # of all ranks, or of each
        aliasing: str = "none",
    ):
        self.problem = problem
        layouts = [layout] * problem.ranks if isinstance(layout, Layout) else layout
        bits = reference.bits_dtype(problem.dtype)
        shape = (problem.tokens, problem.hidden)
        self._guarded: list[Guarded] = []

        def poisoned() -> list[Guarded]:
            arrays = [Guarded(shape, bits, layout) for layout in layouts]
            self._guarded += arrays
            return arrays

        def filled(values: Sequence[Bits]) -> list[Guarded]:
            return [a.fill(v) for a, v in zip(poisoned(), values, strict=True)]

        norm = problem.norm
        self._input = filled(list(problem.inputs))
        in_place = aliasing == "both" or (aliasing == "residual" and norm is None)
        self._output = self._input if in_place else poisoned()
        if norm is None:
            return
        self._residual_in = filled([norm.residual] * problem.ranks)
        if aliasing == "both":
            self._residual_out = self._residual_in
        else:
            self._residual_out = self._input if aliasing == "residual" else poisoned()
        kind = reference.bits_dtype(norm.gamma_dtype)
        self._gamma = [Guarded(norm.gamma.shape, kind, x).fill(norm.gamma) for x in layouts]

    def call(self, module: ModuleType, strategy: str, **options: Any) -> Any:
        """Give the emulated machine's call; see the module for ``options``."""
        norm = self.problem.norm
        if norm is not None:
            options |= {
                "residual_in": [x.rows for x in self._residual_in],
                "residual_out": [x.rows for x in self._residual_out],
                "gamma": [x.rows for x in self._gamma],
                "epsilon": norm.epsilon,
                "weight_bias": norm.weight_bias,
            }
        return module.Call(
            getattr(module.Strategy, strategy),
            getattr(module.ElementType, self.problem.dtype.upper()),
            input=[x.rows for x in self._input],
            output=[x.rows for x in self._output],
            **options,
        )

    def outputs(self, rank: int) -> list[Bits]:
        """Give a rank's output and, with a norm, its new residual."""
        arrays = [self._output] if self.problem.norm is None else [self._output, self._residual_out]
        return [array[rank].rows for array in arrays]

    def check(self, what: object = "") -> None:
        """Compare every rank's outputs, bit for bit, and look for stray stores."""
        self.check_against(self.problem.expected, what)

    def check_against(self, expected: reference.Result, what: object = "") -> None:
        """Compare as :meth:`check` does, with what several calls in place have left."""
        for rank in range(self.problem.ranks):
            output, *residual = self.outputs(rank)
            _same(output, expected.output, (what, "output", "rank", rank))
            if expected.residual is not None:
                _same(residual[0], expected.residual, (what, "residual", "rank", rank))
        assert all(guarded.is_intact() for guarded in self._guarded), (what, "stray store")


def _same(got: Bits, expected: Bits, what: object) -> None:
    if np.array_equal(got, expected):
        return
    token, element = np.argwhere(got != expected)[0]
    wrong = int((got != expected).sum())
    raise AssertionError(
        f"{what}: {wrong} of {got.size} elements differ, first at token {token}, element "
        f"{element}: {got[token, element]:#x} instead of {expected[token, element]:#x}"
    )


def random_bits(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0
) -> Bits:
    """Draw normally distributed elements."""
    return reference.from_float((rng.standard_normal(shape) * scale).astype(np.float32), dtype)


def problem(
    rng: np.random.Generator,
    dtype: str,
    ranks: int,
    tokens: int,
    hidden: int,
    *,
    normalize: bool = True,
    gamma_dtype: str | None = None,
    weight_bias: float = 0.0,
    epsilon: float = 1e-6,
) -> Problem:
    """Draw a problem with ordinary values."""
    norm = None
    if normalize:
        kind = gamma_dtype or dtype
        norm = reference.Norm(
            random_bits(rng, (tokens, hidden), dtype),
            random_bits(rng, (hidden,), kind),
            kind,
            epsilon,
            weight_bias,
        )
    return Problem(dtype, random_bits(rng, (ranks, tokens, hidden), dtype), norm)


def next_layer(problem: Problem) -> Problem:
    """Give the problem whose input and residual are this one's results on every rank."""
    norm, result = problem.norm, problem.expected
    assert norm is not None and result.residual is not None
    inputs = np.stack([result.output] * problem.ranks)
    return Problem(problem.dtype, inputs, replace(norm, residual=result.residual))


def buffer_for(module: ModuleType, problems: Sequence[Problem]) -> int:
    """Bytes of a buffer that holds each of the problems whole, with either strategy."""
    need = max(
        module.required_bytes(
            strategy, getattr(module.ElementType, p.dtype.upper()), p.tokens, p.hidden, p.ranks
        )
        for p in problems
        for strategy in (module.Strategy.ONESHOT, module.Strategy.TWOSHOT)
    )
    return int(-(-need // 256) * 256)


STRATEGIES = ("ONESHOT", "TWOSHOT")
