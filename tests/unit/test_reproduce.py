"""The reproduction: that it tells right from wrong, and that it says so in its exit code."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashinfer.elastic.allreduce import settings
from flashinfer.elastic.allreduce.strategy import Step, Strategy
from flashinfer.elastic.doctor.reproduce import gpus, report, upstream
from flashinfer.elastic.doctor.reproduce.case import EPSILON, Case, Data, Run, make_data
from flashinfer.elastic.doctor.reproduce.judge import judge

SMALL = Case(ranks=3, hidden=72, reported=7, asked=5)


def compute(case: Case, data: Data, buffers: Sequence[int]) -> list[Run]:
    """Make the call with torch: every rank gets the rounded result of the definition."""
    total = torch.stack(data.inputs).float().sum(0).bfloat16()
    residual = (total.float() + data.residual.float()).bfloat16()
    rows = residual.float()
    norm = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPSILON) * data.gamma.float()
    outputs = norm.bfloat16()
    return [
        Run(
            size,
            [outputs.clone() for _ in range(case.ranks)],
            [residual.clone() for _ in range(case.ranks)],
        )
        for size in buffers
    ]


@pytest.fixture
def data() -> Data:
    return make_data(SMALL, 0)


@pytest.fixture
def runs(data: Data) -> list[Run]:
    return compute(SMALL, data, SMALL.buffers())


def test_the_case_is_the_reported_one() -> None:
    case = Case()
    assert (case.ranks, case.hidden, case.reported, case.asked) == (8, 6144, 42, 40)
    assert case.buffers() == (4_128_768, 1_179_648, 196_608)
    assert case.steps(4_128_768) == (Step(0, 40, Strategy.ONESHOT),)
    assert case.steps(1_179_648) == (Step(0, 40, Strategy.TWOSHOT),)
    assert len(case.steps(196_608)) == 5


def test_a_right_result_is_right(data: Data, runs: list[Run]) -> None:
    verdicts = judge(data, runs)
    assert len(verdicts) == 3
    for verdict in verdicts:
        assert verdict.right
        assert 0 < verdict.residual_ulp <= 1.01
        assert 0 < verdict.norm_ulp <= 0.51


def add_units(tensor: torch.Tensor, units: int) -> None:
    """Move one element by units in the last place."""
    tensor.view(torch.int16)[2, 11] += units


def test_two_units_off_on_all_ranks_is_wrong(data: Data, runs: list[Run]) -> None:
    for run in runs:
        for norm in run.norm:
            add_units(norm, 2)
    for verdict in judge(data, runs):
        assert verdict.ranks_equal
        assert verdict.same_bits
        assert 1.4 < verdict.norm_ulp < 2.6
        assert not verdict.right


def test_one_rank_one_unit_off_is_wrong(data: Data, runs: list[Run]) -> None:
    add_units(runs[0].residual[2], 1)
    first, *others = judge(data, runs)
    assert not first.ranks_equal
    assert not first.right
    assert all(verdict.right for verdict in others)


def test_other_bits_another_way_are_wrong(data: Data, runs: list[Run]) -> None:
    for norm in runs[1].norm:
        add_units(norm, 1)
    first, second, third = judge(data, runs)
    assert first.right
    assert third.right
    assert second.ranks_equal
    assert not second.same_bits
    assert not second.right


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_what_was_not_written_is_wrong(data: Data, runs: list[Run], value: float) -> None:
    for run in runs:
        for residual in run.residual:
            residual[4, 71] = value
    assert not any(verdict.right for verdict in judge(data, runs))


REFUSED = upstream.Refusal(
    "0.6.13",
    1_179_648,
    3_932_160,
    "The buffer size in the given workspace is insufficient for the given problem size. "
    "Buffer: 1179648 bytes, Required: 3932160 bytes.",
    True,
)


@pytest.fixture
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[upstream.Refusal], None]:
    """Return a function that sets how upstream refuses; there are no GPUs."""
    monkeypatch.setattr(gpus, "count", lambda: 0)

    def refuse(refusal: upstream.Refusal) -> None:
        monkeypatch.setattr(upstream, "refusal", lambda _: refusal)

    return refuse


def test_success_is_short_and_says_it(
    on_this_machine: Callable[[upstream.Refusal], None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_this_machine(REFUSED)
    assert report.reproduce(compute) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 30
    assert max(map(len, text.splitlines())) <= 100
    for expected in ("1,179,648", "3,932,160", "4,128,768", "ValueError", "two-shot, 5 launches"):
        assert expected in text
    assert "OK: upstream raises" in text


@pytest.mark.parametrize(
    "refusal",
    [
        REFUSED._replace(error=None),
        REFUSED._replace(error="something else"),
        REFUSED._replace(buffer_bytes=4_000_000, error=None, ran=False),
    ],
)
def test_an_upstream_that_does_not_fail_is_a_failure(
    on_this_machine: Callable[[upstream.Refusal], None],
    capsys: pytest.CaptureFixture[str],
    refusal: upstream.Refusal,
) -> None:
    on_this_machine(refusal)
    assert report.reproduce(compute) == 1
    assert "FAILED: upstream did not fail as reported." in capsys.readouterr().out


def test_later_upstreams_are_asked_for_arithmetic_only(
    on_this_machine: Callable[[upstream.Refusal], None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_this_machine(REFUSED._replace(version="0.7.4", error=None, ran=False))
    assert report.reproduce(compute) == 0
    text = capsys.readouterr().out
    assert "not run here" in text
    assert "shown with 0.6.x" in text


def test_a_wrong_result_is_a_failure(
    on_this_machine: Callable[[upstream.Refusal], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(case: Case, data: Data, buffers: Sequence[int]) -> list[Run]:
        runs = compute(case, data, buffers)
        add_units(runs[2].norm[7], 1)
        return runs

    on_this_machine(REFUSED)
    assert report.reproduce(wrong) == 1
    assert "FAILED: the result is wrong." in capsys.readouterr().out


def test_without_gpus_and_emulation_it_says_what_it_lacks(
    on_this_machine: Callable[[upstream.Refusal], None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_this_machine(REFUSED)
    assert report.reproduce(None) == 1
    assert "GPUs that torch sees: 0. The CPU emulation" in capsys.readouterr().out
    assert report.reproduce(compute, on="gpus") == 1


@pytest.mark.parametrize(
    ("capability", "peers", "without_nvlink", "expected"),
    [
        ((9, 0), True, [], ""),
        ((10, 3), True, [], ""),
        ((12, 0), True, [], "the wheel has no kernels for sm120, GPU 0"),
        ((9, 0), False, [], "GPU 0 has no peer access to GPU 1"),
        ((9, 0), True, [(0, 1)], "no NVLink between GPUs 0 and 1"),
    ],
)
def test_gpus_that_cannot_serve_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    peers: bool,
    without_nvlink: list[tuple[int, int]],
    expected: str,
) -> None:
    monkeypatch.setattr(gpus, "count", lambda: 2)
    monkeypatch.setattr(gpus.library, "load", lambda: SimpleNamespace(archs=(90, 100)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: peers)
    monkeypatch.setattr(gpus, "_pairs_without_nvlink", lambda: without_nvlink)
    assert gpus.why_not() == expected


def installed() -> bool:
    """Return whether the package that is imported is FlashInfer's, with the wheel's files in it.

    Metadata would not do: building leaves some of the wheel's in the repository.
    """
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return False
    package = Path(spec.origin).parent
    return (package / "elastic").is_dir() and (package / "comm" / "trtllm_mnnvl_ar.py").is_file()


@pytest.mark.skipif(not installed(), reason="the wheel is not installed beside FlashInfer")
@pytest.mark.skipif(importlib.util.find_spec("pybind11") is None, reason="needs pybind11")
def test_the_script(repository: Path) -> None:
    """The whole of it: upstream's installed code, the emulated kernels, eight ranks."""
    done = subprocess.run(
        [sys.executable, str(repository / "scripts" / "reproduce.py"), "--on", "emulation"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "insufficient for the given problem size" in done.stdout
    assert "4,128,768    one-shot, 1 launch" in done.stdout


def test_ranks_on_gpus_leave_multicast_alone_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``scripts/build.sh`` ends with such a run, on whatever machine it is."""

    def stop(_: int) -> None:
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "set_device", stop)
    for given, expected in ((None, "0"), ("1", "1")):
        with monkeypatch.context() as patch:
            # Set first, so that what the rank sets is undone.
            patch.setenv(settings.TIMEOUT_S, "60")
            patch.setenv(settings.MULTICAST, given or "")
            if given is None:
                patch.delenv(settings.MULTICAST)
            with pytest.raises(InterruptedError):
                gpus._rank_main(0, SMALL, (), "")
            assert os.environ[settings.MULTICAST] == expected
