"""Quantising calls for the emulated machine, laid out in memory, with what must come out."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import harness
import numpy as np
import quantize_reference as recipes
import reference
from harness import DENSE, Guarded, Layout, Prepared, Problem

RECIPES = tuple(recipes.RECIPES)
LAYOUTS = ("SWIZZLED_128X4", "LINEAR")
SCALES = {"FLOAT8": 0.037, "NV_FLOAT4": 351.7, "DYNAMIC_FLOAT8": 1.0, "MX_FLOAT8": 1.0}


class Quantizing:
    """A norm's problem in memory with quantised outputs, for one call or several chunks."""

    def __init__(
        self,
        problem: Problem,
        recipe: str,
        scale_layout: str = "LINEAR",
        *,
        layout: Layout = DENSE,
        aliasing: str = "none",
        keeps_norm: bool = True,
        scale_in_memory: bool = False,
    ):
        self.problem, self.recipe, self.scale_layout = problem, recipe, scale_layout
        self.layout, self.keeps_norm = layout, keeps_norm
        self.prepared = Prepared(problem, layout=layout, aliasing=aliasing)
        self.scale = SCALES[recipe]
        self.scale_array = np.array([self.scale], np.float32) if scale_in_memory else None
        tokens, hidden = problem.tokens, problem.hidden
        width = hidden // 2 if recipe == "NV_FLOAT4" else hidden
        self.values = [Guarded((tokens, width), np.uint8, layout) for _ in range(problem.ranks)]
        block = recipes.BLOCKS.get(recipe)
        self.places = None
        self.scales: list[Guarded] | None = None
        if block is not None:
            blocks = hidden // block
            if scale_layout == "LINEAR":
                self.places = np.arange(tokens * blocks).reshape(tokens, blocks)
            else:
                self.places = recipes.swizzled_places(tokens, blocks)
            self.scales = [
                Guarded((self.places.size,), np.uint8, DENSE) for _ in range(problem.ranks)
            ]
        elif recipe == "DYNAMIC_FLOAT8":
            self.scales = [Guarded((tokens,), np.uint32, DENSE) for _ in range(problem.ranks)]

    def calls(
        self, module: ModuleType, strategy: str, chunk: int | None = None, **options: Any
    ) -> list[Any]:
        """Give the launches of one call, in chunks of so many tokens."""
        size = chunk or max(self.problem.tokens, 1)
        return [
            self._call(module, strategy, first, size, options)
            for first in range(0, self.problem.tokens, size)
        ]

    def _call(
        self, module: ModuleType, strategy: str, first: int, size: int, options: dict[str, Any]
    ) -> Any:
        rows = slice(first, first + size)
        norm = self.problem.norm
        assert norm is not None
        p = self.prepared
        quantize = module.Quantize(
            getattr(module.Recipe, self.recipe),
            getattr(module.ScaleLayout, self.scale_layout),
            first_row=first,
            values=[x.rows[rows] for x in self.values],
            scales=None if self.scales is None else [x.rows for x in self.scales],
            # What is in memory counts.
            scale=self.scale if self.scale_array is None else 1e30,
            scale_array=self.scale_array,
        )
        return module.Call(
            getattr(module.Strategy, strategy),
            getattr(module.ElementType, self.problem.dtype.upper()),
            input=[x.rows[rows] for x in p._input],
            output=[x.rows[rows] for x in p._output] if self.keeps_norm else None,
            residual_in=[x.rows[rows] for x in p._residual_in],
            residual_out=[x.rows[rows] for x in p._residual_out],
            gamma=[x.rows for x in p._gamma],
            epsilon=norm.epsilon,
            weight_bias=norm.weight_bias,
            quantize=quantize,
            **options,
        )

    def check(self, what: object = "") -> None:
        """Compare all outputs on all ranks, and look for stray stores."""
        expected = self.problem.expected
        if self.keeps_norm:
            self.prepared.check(what)
        x = reference.to_float(expected.output, self.problem.dtype)
        quantized = recipes.quantize(self.recipe, x, self.scale)
        for rank in range(self.problem.ranks):
            where = (what, "rank", rank)
            if not self.keeps_norm:
                harness._same(self.prepared._residual_out[rank].rows, expected.residual, where)
                output = self.prepared._output[rank]
                assert output.is_intact(), where
            harness._same(self.values[rank].rows, quantized.values, (where, "values"))
            assert self.values[rank].is_intact(), (where, "a stray value")
            if self.scales is None:
                continue
            got = self.scales[rank]
            assert got.is_intact(), (where, "a stray scale")
            assert quantized.scales is not None
            if self.places is None:
                assert np.array_equal(got.rows, quantized.scales.view(np.uint32)), (where, "scales")
                continue
            tokens, blocks = quantized.scales.shape
            matrix = got.rows[self.places]
            assert np.array_equal(matrix[:tokens, :blocks], quantized.scales), (where, "scales")
            # Blocks a row has not got are zero where its tile has places for them; rows are left.
            assert (matrix[:tokens, blocks:] == 0).all(), (where, "padding")
            assert (matrix[tokens:] == np.uint8(harness._POISON & 0xFF)).all(), (where, "rows")


def variants(recipe: str) -> list[str]:
    """Give the scale layouts that make a difference."""
    return list(LAYOUTS) if recipe in recipes.BLOCKS else ["LINEAR"]
