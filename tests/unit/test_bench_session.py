"""A rank's part of the benchmark, with stand-ins for GPUs and methods that compute on the CPU."""

from __future__ import annotations

import enum
import types
from typing import Any

import pytest
import torch
from bench_doubles import CPU, Notebook, Pair, Times, add_norm, peer_contribution

from flashinfer.elastic.doctor.bench.group import Deadline, UnavailableError, attempt
from flashinfer.elastic.doctor.bench.limit import pushes
from flashinfer.elastic.doctor.bench.methods import NAMES, Runnable, fused, unfused
from flashinfer.elastic.doctor.bench.methods.addnorm import AddNorm
from flashinfer.elastic.doctor.bench.problem import Data, Problem, deviation, expect, make_data
from flashinfer.elastic.doctor.bench.session import OUT_OF_TIME, Plan, Session
from flashinfer.elastic.doctor.bench.stopwatch import Effort

PLAN = Plan((64, 48), (1, 3), methods=("nccl",), quick=True)
REPETITIONS = [3.0, 1.0, 2.0, 5.0, 4.0]


def session(
    notebook: Notebook, plan: Plan = PLAN, stopwatch: Times | None = None, seconds: float = 60.0
) -> Session:
    group = Pair()
    watch = stopwatch or Times(lambda _: REPETITIONS)
    return Session(group, watch, notebook, plan, Deadline(group, seconds))


def in_place(error: float = 0.0) -> unfused.Unfused:
    """An all-reduce in place that is off by a factor, and the norm."""

    def all_reduce(problem: Problem) -> unfused.Reduction:
        rows = torch.empty(problem.tokens, problem.hidden, dtype=torch.bfloat16)
        other = peer_contribution(problem)
        return unfused.Reduction(rows, rows, lambda: rows.add_(other).mul_(1 + error))

    rig: Any = types.SimpleNamespace(addnorm=AddNorm("torch", add_norm))
    return unfused.Unfused(rig, all_reduce)


class FakePattern(enum.IntEnum):
    kARResidualRMSNorm = 1  # noqa: N815 - upstream's name


class FakeComm:
    """Upstream's front end on the CPU; ``wrong`` leaves a row unwritten."""

    AllReduceFusionPattern = FakePattern

    def __init__(self, wrong: bool = False) -> None:
        self._wrong = wrong
        self.strategies: list[bool | None] = []

    def allreduce_fusion(self, **arguments: Any) -> None:
        self.strategies.append(arguments["use_oneshot"])
        rows = arguments["input"]
        total = rows + peer_contribution(Problem(rows.shape[1], rows.shape[0]))
        residual = arguments["residual_in"].clone()
        add_norm(total, residual, arguments["rms_gamma"])
        written = len(rows) - self._wrong
        arguments["norm_out"][:written] = total[:written]
        arguments["residual_out"][:] = residual


def test_rows_hold_the_slowest_rank_of_every_repetition() -> None:
    notebook = Notebook()
    session(notebook).measure_methods({"nccl": in_place()})
    assert not notebook.skips
    cells = [(row.hidden, row.tokens, row.mode) for row in notebook.rows]
    assert cells == [
        (hidden, tokens, mode)
        for hidden in (64, 48)
        for tokens in (1, 3)
        for mode in ("graph", "eager")
    ]
    first = notebook.rows[0]
    assert (first.world_size, first.method, first.dtype) == (2, "nccl", "bfloat16")
    assert (first.median_us, first.p10_us, first.p90_us) == (3.0, 1.4, 4.6)


def test_the_slower_rank_counts() -> None:
    def other(value: Any) -> Any:
        return [time + 10 for time in value] if value == REPETITIONS else value

    group, notebook = Pair(other), Notebook()
    watch = Times(lambda _: REPETITIONS)
    Session(group, watch, notebook, PLAN, Deadline(group, 60)).measure_methods({"nccl": in_place()})
    assert {row.median_us for row in notebook.rows} == {13.0}


def test_a_wrong_result_is_not_timed() -> None:
    notebook, watch = Notebook(), Times(lambda _: REPETITIONS)
    session(notebook, stopwatch=watch).measure_methods({"nccl": in_place(error=0.2)})
    assert not notebook.rows
    assert not watch.efforts
    assert len(notebook.skips) == len(PLAN.problems)
    assert "wrong" in notebook.skips[0].reason


def test_an_element_that_is_not_written_is_noticed() -> None:
    method = fused.Fused(FakeComm(wrong=True), object(), True, {"": {}})
    notebook = Notebook()
    session(notebook).measure_methods({"trtllm_oneshot": method})
    assert not notebook.rows
    assert all("wrong norm: an element is off by nan" in skip.reason for skip in notebook.skips)


def test_the_fastest_variant_is_the_methods_time_and_all_are_kept() -> None:
    comm = FakeComm()
    method = fused.Fused(comm, object(), False, {"slow": {}, "fast": {"trigger": False}})
    times = Times(lambda call: [1.0] if "trigger" in call.keywords else [2.0])
    notebook = Notebook()
    session(notebook, stopwatch=times).measure_methods({"trtllm_twoshot": method})
    assert {row.median_us for row in notebook.rows} == {1.0}
    variants = {(entry["variant"], entry["median_us"]) for entry in notebook.components}
    assert variants == {
        ("graph, slow", 2.0),
        ("graph, fast", 1.0),
        ("eager, slow", 2.0),
        ("eager, fast", 1.0),
    }
    assert set(comm.strategies) == {False}


def test_a_method_that_refuses_a_problem_does_the_others() -> None:
    class Picky:
        def prepare(self, problem: Problem, data: Data) -> Runnable:
            if problem.tokens == 1:
                raise AssertionError("sequence length should be larger than tp_size")
            return in_place().prepare(problem, data)

    notebook = Notebook()
    session(notebook).measure_methods({"trtllm_twoshot": Picky()})
    assert {row.tokens for row in notebook.rows} == {3}
    reasons = {(skip.tokens, skip.reason) for skip in notebook.skips}
    assert reasons == {(1, "AssertionError: sequence length should be larger than tp_size")}


def test_what_is_not_available_is_reported_for_all_problems() -> None:
    def make() -> unfused.Unfused:
        raise ImportError("there is no such thing\nand more")

    notebook = Notebook()
    assert session(notebook).open("nccl_symm", make) is None
    (skip,) = notebook.skips
    assert (skip.method, skip.hidden, skip.tokens) == ("nccl_symm", None, None)
    assert skip.reason == "ImportError: there is no such thing"


def test_nothing_is_begun_after_the_deadline() -> None:
    notebook = Notebook()
    session(notebook, seconds=-1.0).measure_methods({"nccl": in_place()})
    assert not notebook.rows
    assert [skip.reason for skip in notebook.skips] == [OUT_OF_TIME] * len(PLAN.problems)


def test_a_failure_of_the_other_rank_is_everyones() -> None:
    def other(value: Any) -> Any:
        return "RuntimeError: no" if value is None else value

    with pytest.raises(UnavailableError, match="rank 1: RuntimeError: no"):
        attempt(Pair(other), lambda: 1)


class FakeLimit:
    """Knows the time of a flag, and of a push by its strategy."""

    def flag_us(self) -> float:
        return 0.5

    def launch_calls(self) -> dict[str, Any]:
        return {"plain": lambda: "launch"}

    def push_calls(self, push: Any) -> dict[str, Any]:
        return {"narrow": lambda: "narrow", "wide": lambda: "wide"}

    def check(self, push: Any, call: Any) -> None:
        assert call() in ("narrow", "wide")


def test_the_limit_is_the_fastest_push_and_a_flag() -> None:
    fake: Any = FakeLimit()
    times = {"launch": [0.25], "narrow": [7.0], "wide": [6.0]}
    notebook = Notebook()
    session(notebook, stopwatch=Times(lambda call: times[call()])).measure_limit(lambda: fake)
    assert {row.median_us for row in notebook.rows} == {6.5}
    assert {(row.method, row.mode) for row in notebook.rows} == {("limit", "graph")}
    assert notebook.notes == {"flag_one_way_us": 0.5}
    kinds = {(entry["name"], entry["variant"]) for entry in notebook.components}
    assert kinds == {("launch interval", "plain"), ("push", "narrow"), ("push", "wide")}


@pytest.mark.parametrize("ranks", [4, 8])
def test_what_the_strategies_push(ranks: int) -> None:
    problem = Problem(4096, 64)
    words = problem.payload_bytes // 16
    one_shot, two_shot = pushes(problem, ranks)
    assert (one_shot.words, one_shot.hops) == (words, 1)
    assert (two_shot.words, two_shot.hops) == (2 * words * (ranks - 1) // ranks, 2)


def test_two_ranks_push_the_payload_once() -> None:
    (push,) = pushes(Problem(7, 1), 2)
    assert (push.words, push.hops) == (1, 1)


def test_the_reference_is_that_of_torch() -> None:
    problem = Problem(96, 5)
    data = make_data(problem, 0, CPU)
    expected = expect(problem, 2, CPU)
    total = data.contribution.double() + peer_contribution(problem).double()
    total += data.residual.double()
    norm = torch.nn.functional.rms_norm(total, (96,), data.gamma.double(), 1e-6)
    torch.testing.assert_close(expected.residual, total)
    torch.testing.assert_close(expected.norm, norm)


def test_ranks_contribute_different_rows_to_one_residual() -> None:
    problem = Problem(64, 2)
    a, b = make_data(problem, 0, CPU), make_data(problem, 1, CPU)
    assert not torch.equal(a.contribution, b.contribution)
    assert torch.equal(a.residual, b.residual)
    assert torch.equal(a.gamma, b.gamma)
    assert torch.equal(a.contribution, make_data(problem, 0, CPU).contribution)


def test_deviation_sees_one_element() -> None:
    expected = torch.ones(4, 4, dtype=torch.float64)
    actual = expected.clone()
    actual[2, 3] = 2.0
    assert deviation(actual, expected) == pytest.approx(0.5)


def test_every_name_has_a_maker() -> None:
    assert set(NAMES) == {*fused.MAKERS, *unfused.MAKERS}


def test_short_calls_are_made_more_often() -> None:
    efforts = [Effort.for_problem(Problem(7168, 2**i), quick=False) for i in range(13)]
    calls = [effort.calls for effort in efforts]
    assert calls == sorted(calls, reverse=True)
    assert calls[0] >= 100 and calls[-1] >= 10
    assert all(effort.repetitions >= 20 and effort.lead > 0 for effort in efforts)
