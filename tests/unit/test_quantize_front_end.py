"""The quantising entry point: upstream's checks in every version, and what reaches the launch."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from flashinfer.elastic.allreduce import install
from flashinfer.elastic.allreduce.engines import Call, Quantization
from flashinfer.elastic.allreduce.engines.upstream import UpstreamEngine
from flashinfer.elastic.allreduce.strategy import Strategy
from flashinfer.elastic.shadow import TESTED_VERSIONS

sys.path.insert(0, str(Path(__file__).parent))
from upstream_on_cpu import Echo, FakeLibrary, Loaded, without_gpu

NAME = "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant"
RANKS, TOKENS, HIDDEN = 8, 4, 64
FP8, NVFP4, DYNAMIC_FP8, MXFP8 = 1, 2, 3, 4
SWIZZLED, LINEAR = 0, 2
F8 = torch.float8_e4m3fn

ROWS = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)


class Pair(NamedTuple):
    """Upstream's module as it is, and with our patch."""

    version: str
    upstream: Loaded
    patched: Loaded

    def recipes(self) -> list[int]:
        """Give the quantisations that this version has."""
        kinds = self.upstream.module.MNNVLQuantType
        names = ("FP8", "NVFP4", "DYNAMIC_FP8", "MXFP8")
        return [getattr(kinds, name) for name in names if hasattr(kinds, name)]


@pytest.fixture(scope="module", params=[v for v in TESTED_VERSIONS if v != "0.6.12"])
def pair(request: pytest.FixtureRequest, upstream_tree: Callable[[str], Path]) -> Pair:
    tree = upstream_tree(request.param)
    loaded = Pair(request.param, Loaded(tree), Loaded(tree))
    for side in loaded[1:]:
        # Ours has to stay the one that the module's names lead to.
        side.module._compute_swizzled_layout_sf_size = lambda rows, columns: (
            -(-rows // 128) * 128 * (-(-columns // 4) * 4)
        )
    install(loaded.patched.module)
    return loaded


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return without_gpu(monkeypatch)


@pytest.fixture
def workspace(pair: Pair, fake: FakeLibrary) -> Iterator[Any]:
    made = pair.patched.module.MNNVLAllReduceFusionWorkspace(
        pair.patched.mapping(3, RANKS), 64, HIDDEN, torch.bfloat16, comm_backend=Echo(RANKS)
    )
    yield made
    made.destroy()


def right(recipe: int) -> dict[str, Any]:
    arguments = {
        "input": ROWS.clone(),
        "residual_in": ROWS.clone(),
        "gamma": ROWS[0].clone(),
        "workspace": object(),
        "quant_type": recipe,
        "output": ROWS.clone(),
        "residual_out": ROWS.clone(),
        "quant_out": torch.zeros(TOKENS, HIDDEN, dtype=F8),
    }
    if recipe == NVFP4:
        arguments["quant_out"] = torch.zeros(TOKENS, HIDDEN // 2, dtype=torch.uint8)
        arguments["scale_out"] = torch.zeros(512, dtype=F8)
    elif recipe == DYNAMIC_FP8:
        arguments["scale_out"] = torch.zeros(TOKENS, 1)
    elif recipe == MXFP8:
        arguments["scale_out"] = torch.zeros(512, dtype=torch.uint8)
    return arguments


FLAT = ROWS.flatten()
WRONG: dict[str, tuple[Any, ...]] = {
    "input": (FLAT, ROWS[:, :-8].clone(), ROWS.int()),
    "residual_in": (FLAT, ROWS[:-1]),
    "gamma": (ROWS[0, :-1], ROWS),
    "output": (ROWS[:-1],),
    "residual_out": (ROWS[:-1],),
    "quant_out": (torch.zeros(TOKENS, 3, dtype=F8), torch.zeros(TOKENS, HIDDEN)),
    "scale_out": (torch.zeros(1, dtype=F8), torch.zeros(512, dtype=torch.int32)),
    "output_scale": (torch.zeros(0), "large", []),
    "layout_code": (1,),
    "quant_type": (0, 17),
}


def outcome(module: types.ModuleType, arguments: dict[str, Any]) -> str:
    """Say what a call raises."""
    try:
        getattr(module, NAME)(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def past_the_checks(text: str) -> bool:
    """Whether a call with no workspace got as far as using it."""
    return "object' object has no attribute" in text or text.startswith("TypeError: workspace must")


@pytest.mark.parametrize("recipe", [FP8, NVFP4, DYNAMIC_FP8, MXFP8])
def test_wrong_arguments_get_upstreams_answer(pair: Pair, recipe: int, fake: FakeLibrary) -> None:
    """Each wrong argument, and each two: refused in upstream's words, or accepted as there."""
    wrong = [{argument: value} for argument, values in WRONG.items() for value in values]
    cases = wrong + [a | b for a, b in itertools.combinations(wrong, 2) if a.keys() != b.keys()]
    refused = 0
    for case in cases:
        arguments = right(recipe) | case
        expected = outcome(pair.upstream.module, arguments)
        got = outcome(pair.patched.module, arguments)
        if past_the_checks(expected):
            assert past_the_checks(got), (case.keys(), got)
        else:
            assert got == expected, case.keys()
            refused += 1
    assert refused > len(cases) // 2
    assert fake.calls == []
    assert pair.patched.launches == []


def test_what_is_no_workspace_of_ours_is_refused(pair: Pair) -> None:
    for thing in (object(), None, 7):
        text = outcome(pair.patched.module, right(FP8) | {"workspace": thing})
        kind = type(thing).__name__
        assert text == f"TypeError: workspace must be a MNNVLAllReduceFusionWorkspace, got {kind}"


def test_strategies(pair: Pair, workspace: Any, fake: FakeLibrary) -> None:
    module = pair.patched.module
    arguments = right(FP8) | {"workspace": workspace}
    for strategy, used in ((s, s.value) for s in list(module.MNNVLAllreduceFusionStrategy)[:2]):
        assert outcome(module, arguments | {"strategy": strategy}) == "accepted"
        assert fake.calls[-1][1] == used
    text = outcome(module, arguments | {"strategy": "ONESHOT"})
    assert text.startswith("ValueError: strategy must be a MNNVLAllreduceFusionStrategy, got")


def test_arguments_reach_the_launch(pair: Pair, workspace: Any, fake: FakeLibrary) -> None:
    module = pair.patched.module
    one_shot = module.MNNVLAllreduceFusionStrategy.ONESHOT
    function = getattr(module, NAME)
    for recipe in pair.recipes():
        given = right(recipe) | {
            "workspace": workspace,
            "epsilon": 1e-5,
            "layout_code": LINEAR,
            "launch_with_pdl": True,
            "weight_bias": 1.0,
            "strategy": one_shot,
            "output_scale": 0.25,
        }
        got = function(**given)
        scales = None if recipe == FP8 else given["scale_out"]
        assert got[0] is given["quant_out"]
        assert got[1] is scales
        assert got[2] is given["residual_out"]
        assert got[3] is given["output"]
        call = fake.calls.pop()
        names = ("input", "output", "residual_in", "residual_out", "gamma")
        assert call[:5] == (1, 0, 0, TOKENS, True)
        assert all(a is given[name] for a, name in zip(call[5:10], names, strict=True))
        assert call[10:14] == (1e-5, 1.0, recipe, LINEAR)
        assert call[14] is given["quant_out"]
        assert call[15] is scales
        # The number itself: no tensor is made of it.
        assert call[16:] == (1.0 if recipe in (DYNAMIC_FP8, MXFP8) else 0.25, None)


def test_what_is_left_out(pair: Pair, workspace: Any, fake: FakeLibrary) -> None:
    function = getattr(pair.patched.module, NAME)
    shapes = {
        FP8: None,
        NVFP4: ((512,), F8),
        DYNAMIC_FP8: ((TOKENS, 1), torch.float32),
        MXFP8: ((512,), torch.uint8),
    }
    for recipe in pair.recipes():
        values, scales, stream, output = function(ROWS, ROWS, ROWS[0], workspace, quant_type=recipe)
        assert output is None
        assert stream.shape == ROWS.shape
        width, dtype = (HIDDEN // 2, torch.uint8) if recipe == NVFP4 else (HIDDEN, F8)
        assert (values.shape, values.dtype) == ((TOKENS, width), dtype)
        expected = shapes[recipe]
        assert (scales is None) == (expected is None)
        if expected is not None:
            assert (tuple(scales.shape), scales.dtype) == expected
        call = fake.calls.pop()
        assert call[6] is None
        assert call[10:14] == (torch.finfo(torch.bfloat16).eps, 0.0, recipe, SWIZZLED)
        assert call[16:] == (1.0, None)


def test_a_scale_in_memory_is_handed_on(pair: Pair, workspace: Any, fake: FakeLibrary) -> None:
    function = getattr(pair.patched.module, NAME)
    scale = torch.tensor([0.5, 7.0])
    function(ROWS, ROWS, ROWS[0], workspace, quant_type=FP8, output_scale=scale)
    assert fake.calls[-1][17] is scale
    double = torch.tensor(0.5, dtype=torch.float64)
    function(ROWS, ROWS, ROWS[0], workspace, quant_type=FP8, output_scale=double)
    assert fake.calls[-1][17].dtype == torch.float32


def test_what_does_not_fit_runs_in_chunks(pair: Pair, fake: FakeLibrary) -> None:
    """Upstream refuses it. Steps share the whole call's tensors and know where they are in it."""
    module = pair.patched.module
    workspace = module.MNNVLAllReduceFusionWorkspace(
        pair.patched.mapping(0, RANKS), buffer_size_in_bytes=8192, comm_backend=Echo(RANKS)
    )
    rows = torch.zeros(100, HIDDEN, dtype=torch.bfloat16)
    values, scales, *_ = getattr(module, NAME)(rows, rows, ROWS[0], workspace, quant_type=NVFP4)
    assert len(fake.calls) > 1
    assert sum(call[3] for call in fake.calls) == 100
    expected = 0
    for call in fake.calls:
        assert call[2] == expected
        expected += call[3]
        assert call[14] is values
        assert call[15] is scales
    workspace.destroy()


def test_nothing_is_launched_on_memory_that_a_checkpoint_has_taken(
    pair: Pair, workspace: Any, fake: FakeLibrary
) -> None:
    if not hasattr(workspace, "checkpoint_prepare"):
        pytest.skip("this upstream has no checkpoints")
    recipe = pair.recipes()[0]
    workspace.checkpoint_prepare()
    text = outcome(pair.patched.module, right(recipe) | {"workspace": workspace})
    assert text == "RuntimeError: MNNVL handles are not attached"
    assert fake.calls == []
    workspace.checkpoint_restore(Echo(RANKS))


def test_no_tokens_launch_nothing(pair: Pair, workspace: Any, fake: FakeLibrary) -> None:
    values, *_ = getattr(pair.patched.module, NAME)(
        ROWS[:0], ROWS[:0], ROWS[0], workspace, quant_type=FP8
    )
    assert values.shape == (0, HIDDEN)
    assert fake.calls == []


# Upstream's engine


class Recorder:
    """Upstream's launcher, which writes what it was told into its outputs."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def get_trtllm_mnnvl_comm_module(self) -> Any:
        return types.SimpleNamespace(trtllm_mnnvl_allreduce_fusion=self.launch)

    def launch(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        rows, values, scales, layout = arguments[0], *arguments[17:19], arguments[20]
        values.view(torch.uint8).copy_(rows[:, :1].to(torch.uint8).expand(values.shape))
        if scales is None:
            return
        if scales.dtype == torch.float32:
            scales.view(-1)[: rows.shape[0]] = rows[:, 0].float()
            return
        blocks = rows.shape[1] // (16 if arguments[16] == NVFP4 else 32)
        for row in range(rows.shape[0]):
            for block in range(blocks):
                place = row * blocks + block
                if layout == SWIZZLED:
                    place = swizzled(row, block, blocks)
                scales.view(-1).view(torch.uint8)[place] = int(rows[row, 0]) + block


def swizzled(row: int, block: int, blocks: int) -> int:
    tile = row // 128 * -(-blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@pytest.mark.parametrize("layout", [SWIZZLED, LINEAR])
@pytest.mark.parametrize("recipe", [FP8, NVFP4, DYNAMIC_FP8, MXFP8])
@pytest.mark.parametrize("steps", [(150,), (128, 22), (64, 64, 22), (100, 50)])
def test_upstreams_engine_puts_every_step_in_its_place(
    steps: tuple[int, ...], recipe: int, layout: int
) -> None:
    """Its kernels take a step's first row for row 0, and know dense rows alone."""
    recorder = Recorder()
    tokens, hidden = sum(steps), 96
    flags = torch.zeros(9, dtype=torch.int64)
    known = types.SimpleNamespace(
        mc_ptr=1, uc_ptrs_dev=2, uc_ptr_local=3, buffer_flags=flags, tp_size=2, rank=0,
        buffer_size_bytes=1024, NUM_LAMPORT_BUFFERS=3,
    )  # fmt: skip
    engine = UpstreamEngine(recorder, known)  # type: ignore[arg-type]
    rows = torch.arange(tokens).remainder(200)[:, None].expand(tokens, hidden).bfloat16()
    block = {NVFP4: 16, MXFP8: 32}.get(recipe)
    width = hidden // 2 if recipe == NVFP4 else hidden
    values = torch.zeros(tokens, width + 8, dtype=torch.uint8)[:, :width]
    scales = None
    if block is not None:
        columns = -(-(hidden // block) // 4) * 4
        size = tokens * (hidden // block) if layout == LINEAR else 256 * columns
        scales = torch.full((size,), 0xEE, dtype=torch.uint8)
        if recipe == NVFP4:
            scales = scales.view(F8)
    elif recipe == DYNAMIC_FP8:
        scales = torch.zeros(tokens, 1)
    call = Call(
        rows, None, rows.clone(), rows.clone(), rows[0].clone(), 1e-5,
        quantization=Quantization(recipe, layout, values, scales, 0.5),
    )  # fmt: skip
    first = 0
    for count in steps:
        engine.launch(call, first, count, Strategy.TWOSHOT)
        first += count
    assert torch.equal(values, rows[:, :1].to(torch.uint8).expand(tokens, width))
    if recipe == DYNAMIC_FP8:
        assert scales is not None
        assert torch.equal(scales, rows[:, :1].float())
    if block is not None:
        assert scales is not None
        blocks = hidden // block
        flat = scales.view(torch.uint8)
        for row in range(tokens):
            for b in range(blocks):
                place = row * blocks + b if layout == LINEAR else swizzled(row, b, blocks)
                assert int(flat[place]) == row % 200 + b, (row, b)
        if layout == SWIZZLED:
            unused = [swizzled(row, 0, blocks) for row in range(tokens, 256)]
            assert (flat[unused] == 0xEE).all()
    # One tensor for all steps and calls of one number.
    assert len({id(call[19]) for call in recorder.calls}) == 1
    assert recorder.calls[0][19].tolist() == [0.5]
