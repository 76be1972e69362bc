"""Every size that callers ask for: what upstream refuses of it, and that we serve all of it.

Upstream's side is upstream's own code: the module of its wheel is executed, its constructor sizes
the workspace and its entry point makes the check. Only what needs a device is replaced: the
allocation returns as much as it is asked for, and the launcher records that it was reached.
"""

from __future__ import annotations

import ast
import enum
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from flashinfer.elastic.allreduce import sizing
from flashinfer.elastic.allreduce.strategy import Step, Strategy, auto, resolve

MIB = 2**20
DTYPES = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}
HIDDEN = (2880, 4096, 5120, 6144, 7168, 8192, 16384)


class Caller(NamedTuple):
    """One cell of the tables of callers: what an engine reports, and how far it forces one-shot.

    Sizes are in bytes of a rank, ``N * H * e``.
    """

    arch: int
    ranks: int
    reported: int
    oneshot_up_to: int


VLLM_FUSED = [
    Caller(90, 2, 64 * MIB, 32 * MIB),
    Caller(90, 4, 2 * MIB, 2 * MIB),
    Caller(90, 8, MIB // 2, MIB // 2),
    Caller(100, 2, 64 * MIB, 32 * MIB),
    Caller(100, 4, 32 * MIB, 4 * MIB),
    Caller(100, 8, MIB, MIB),
    Caller(100, 16, 64 * MIB, 0),
    Caller(103, 2, 64 * MIB, 32 * MIB),
    Caller(103, 4, 64 * MIB, 4 * MIB),
    Caller(103, 8, 2 * MIB, 2 * MIB),
    Caller(103, 8, 4 * MIB, 2 * MIB),
    Caller(103, 16, 64 * MIB, 0),
]
VLLM_STAND_ALONE = [
    Caller(100, 4, 80 * MIB, 0),
    Caller(100, 8, 128 * MIB, 0),
    Caller(100, 16, 8 * MIB, 0),
]


class Case(NamedTuple):
    """One workspace and one call on it. ``strategy`` None is upstream's AUTO."""

    arch: int
    ranks: int
    reported: int
    hidden_reported: int
    asked: int
    hidden: int
    dtype: torch.dtype
    strategy: Strategy | None


def of_the_tables() -> Iterator[Case]:
    """Cases around every cell: small batches, the maximum, beyond it, a drafter's wider rows."""
    for caller in (*VLLM_FUSED, *VLLM_STAND_ALONE):
        for hidden in HIDDEN:
            for dtype, element in DTYPES.items():
                row = hidden * element
                reported = max(caller.reported // row, 1)
                asked = {1, caller.ranks - 1, caller.ranks, 40, reported // 2, reported}
                asked |= {caller.oneshot_up_to // row, reported + 1, 3 * reported}
                for tokens in sorted(asked - {0}):
                    for strategy in (*Strategy, None):
                        yield Case(
                            caller.arch, caller.ranks, reported, hidden, tokens, hidden, dtype,
                            strategy,
                        )  # fmt: skip
                wider = 2 * hidden + 64
                yield Case(
                    caller.arch, caller.ranks, reported, hidden, reported, wider, dtype,
                    Strategy.ONESHOT,
                )  # fmt: skip


def of_every_size() -> Iterator[Case]:
    """Every number of tokens up to the maximum, one-shot forced, where vLLM forces it."""
    for caller in VLLM_FUSED:
        for hidden in HIDDEN:
            row = hidden * 2
            for tokens in range(1, min(caller.oneshot_up_to // row, 1024) + 1):
                yield Case(
                    caller.arch, caller.ranks, caller.reported // row, hidden, tokens, hidden,
                    torch.bfloat16, Strategy.ONESHOT,
                )  # fmt: skip


def without_limit() -> Iterator[Case]:
    """A user-set maximum on an arch that vLLM's table lacks: one-shot is forced at every size."""
    for ranks in (2, 4, 8, 16, 64):
        for maximum in (1, 8, 64, 256):
            for hidden in HIDDEN:
                reported = max(maximum * MIB // (hidden * 2), 1)
                for asked in (1, reported // 3 + 1, reported, reported + 1, 2 * reported):
                    yield Case(
                        120, ranks, reported, hidden, asked, hidden, torch.bfloat16,
                        Strategy.ONESHOT,
                    )  # fmt: skip


def of_sglang() -> Iterator[Case]:
    """A workspace for ``max_token_num``, one-shot forced on it."""
    for ranks in (2, 4, 8):
        for reported in (128, 2048, 16384):
            for hidden in HIDDEN:
                for asked in (1, 127, reported // 4, reported):
                    for strategy in (Strategy.ONESHOT, None):
                        yield Case(
                            100, ranks, reported, hidden, asked, hidden, torch.bfloat16, strategy
                        )


REPORTED = Case(90, 8, 42, 6144, 40, 6144, torch.bfloat16, Strategy.ONESHOT)
CASES = sorted(
    {REPORTED, *of_the_tables(), *of_every_size(), *without_limit(), *of_sglang()}, key=str
)


class Upstream:
    """Upstream 0.6.13's module, executed apart from its package, with the device taken out."""

    def __init__(self, source: str, file: str) -> None:
        self.launches = 0
        tree = ast.parse(source, file)
        # What it imports from its package comes from _surroundings; standard library and
        # typing_extensions are imported as written.
        tree.body = [node for node in tree.body if not self._is_from_the_package(node)]
        self.names: dict[str, Any] = {"__name__": "upstream_under_test", **self._surroundings()}
        exec(compile(tree, file, "exec"), self.names)
        self.names["get_trtllm_mnnvl_comm_module"] = lambda: types.SimpleNamespace(
            trtllm_mnnvl_allreduce_fusion=self._launch
        )
        self._workspaces: dict[tuple[object, ...], Any] = {}

    @staticmethod
    def _is_from_the_package(node: ast.stmt) -> bool:
        if isinstance(node, ast.Import):
            return any(alias.name == "torch" for alias in node.names)
        return isinstance(node, ast.ImportFrom) and (
            node.level > 0 or str(node.module).startswith("flashinfer")
        )

    def _surroundings(self) -> dict[str, Any]:
        """Return what the module imports: torch without a device, and its own package's names."""

        class Torch(types.ModuleType):
            cuda = types.SimpleNamespace(current_device=lambda: 0, synchronize=lambda: None)

            def device(self, *_: object) -> torch.device:
                return torch.device("cpu")

            def __getattr__(self, name: str) -> Any:
                return getattr(torch, name)

        class Base:
            def __init__(self, world_size: int, rank: int) -> None:
                self.world_size, self.rank = world_size, rank

        def allocate(size: int, ranks: int, *_: object) -> tuple[list[int], torch.Tensor, Any]:
            handle = types.SimpleNamespace(
                buffer_size=size,
                buffer_ptrs=[1] * ranks,
                buffer_ptrs_dev=1,
                multicast_ptr=1,
            )
            return handle.buffer_ptrs, torch.empty(0), handle

        class Backend:
            _group = types.SimpleNamespace(group_name="group")

            def barrier(self) -> None: ...

        return {
            "torch": Torch("torch"),
            "AllReduceFusionWorkspace": Base,
            "TorchDistBackend": Backend,
            "QuantizationSFLayout": enum.IntEnum("QuantizationSFLayout", ["SWIZZLED_128x4"]),
            "_alloc_symm_buffer_bytes": allocate,
            **dict.fromkeys(["Mapping", "CommBackend", "MPIBackend"], object),
        }

    def _launch(self, *_: object) -> None:
        self.launches += 1

    def workspace(self, case: Case) -> Any:
        """Return the workspace that upstream's constructor makes for the case."""
        key = (case.ranks, case.reported, case.hidden_reported, case.dtype)
        if key not in self._workspaces:
            mapping = types.SimpleNamespace(
                world_size=case.ranks, rank=0, tp_size=case.ranks, tp_rank=0
            )
            self._workspaces[key] = self.names["MNNVLAllReduceFusionWorkspace"](
                mapping,
                case.reported,
                case.hidden_reported,
                case.dtype,
                comm_backend=self.names["TorchDistBackend"](),
            )
        return self._workspaces[key]

    def refusal(self, case: Case) -> str:
        """Call upstream's entry point; return the text of its refusal, or nothing."""
        strategies = self.names["MNNVLAllreduceFusionStrategy"]
        before = self.launches
        try:
            self.names["trtllm_mnnvl_allreduce"](
                torch.empty((case.asked, case.hidden), dtype=case.dtype, device="meta"),
                self.workspace(case),
                launch_with_pdl=False,
                strategy=strategies.AUTO
                if case.strategy is None
                else strategies(case.strategy.value),
            )
        except ValueError as error:
            assert self.launches == before
            return str(error)
        assert self.launches == before + 1
        return ""


@pytest.fixture(scope="module")
def upstream(upstream_tree: Callable[[str], Path]) -> Upstream:
    file = upstream_tree("0.6.13") / "flashinfer" / "comm" / "trtllm_mnnvl_ar.py"
    return Upstream(file.read_text(), str(file))


def ours(case: Case) -> tuple[tuple[Step, ...], int]:
    """Return the steps that serve the case, and the size of the buffer they run in."""
    element = DTYPES[case.dtype]
    size = sizing.buffer_bytes(case.reported, case.hidden_reported, element, case.ranks)
    problem = (case.asked, case.hidden, element, case.ranks)
    requested = auto(*problem, case.arch) if case.strategy is None else case.strategy
    return resolve(requested, *problem, size), size


def test_the_reported_case(upstream: Upstream) -> None:
    assert upstream.refusal(REPORTED) == (
        "The buffer size in the given workspace is insufficient for the given problem size. "
        "Buffer: 1179648 bytes, Required: 3932160 bytes."
    )
    assert ours(REPORTED)[0] == (Step(0, 40, Strategy.ONESHOT),)


def test_what_upstream_refuses_is_served(upstream: Upstream) -> None:
    refused = [case for case in CASES if upstream.refusal(case)]
    assert len(CASES) >= 2000
    assert len(refused) >= 1000
    # Each way of falling short is among them.
    assert any(case.asked <= case.reported for case in refused)
    assert any(case.asked > case.reported for case in refused)
    assert any(case.hidden > case.hidden_reported for case in refused)
    assert any(case.arch == 120 for case in refused)
    assert any(case.strategy is not Strategy.ONESHOT for case in refused)

    for case in CASES:
        steps, size = ours(case)
        assert sum(step.count for step in steps) == case.asked
        for step in steps:
            needed = (
                sizing.native_oneshot_bytes
                if step.strategy == Strategy.ONESHOT
                else sizing.native_twoshot_bytes
            )
            assert needed(step.count, case.hidden, DTYPES[case.dtype], case.ranks) <= size


def test_within_what_was_reported_the_call_runs_as_asked() -> None:
    """No fallback up to the reported maximum, within the bound of one-shot's payload."""
    checked = 0
    for case in CASES:
        if case.strategy is None or case.asked > case.reported:
            continue
        problem = (case.asked, case.hidden, DTYPES[case.dtype], case.ranks)
        if case.strategy == Strategy.ONESHOT:
            if sizing.oneshot_bytes(*problem) > sizing.DEFAULT_ONESHOT_MAX_BYTES:
                continue
            if case.hidden > case.hidden_reported:
                continue
        elif sizing.native_twoshot_bytes(*problem) > sizing.MAX_BUFFER_BYTES:
            continue
        checked += 1
        assert ours(case)[0] == (Step(0, case.asked, case.strategy),), case
    assert checked >= 2000


def test_the_formulas_are_upstreams(upstream: Upstream) -> None:
    """``get_required_buffer_size_bytes`` itself, for every case and both strategies."""
    required = upstream.names["MNNVLAllReduceFusionWorkspace"].get_required_buffer_size_bytes
    strategies = upstream.names["MNNVLAllreduceFusionStrategy"]
    for case in CASES:
        problem = (case.asked, case.hidden, DTYPES[case.dtype], case.ranks)
        arguments = (case.ranks, case.asked, case.hidden, case.dtype)
        assert required(*arguments, strategies.ONESHOT) == sizing.oneshot_bytes(*problem)
        assert required(*arguments, strategies.TWOSHOT) == sizing.twoshot_bytes(*problem)
