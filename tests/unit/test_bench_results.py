"""Figures, the result file, what is concluded from it, and the picture."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.elastic.doctor.bench import judge, plot
from flashinfer.elastic.doctor.bench.figures import Figures, slowest, summarise
from flashinfer.elastic.doctor.bench.results import Results, Row, Skip, merge, read

FIELDS = ["dtype", "hidden", "median_us", "method", "mode", "p10_us", "p90_us", "pattern"]
FIELDS += ["tokens", "world_size"]


def row(method: str, tokens: int, median: float, mode: str = "graph", hidden: int = 4096) -> Row:
    return Row.of(2, hidden, tokens, mode, method, Figures(median, median - 0.1, median + 0.1))


def results(rows: list[Row]) -> Results:
    return Results("2 x GPU", "scripts/bench.py", {"torch": "2"}, rows)


@given(st.lists(st.floats(0.1, 1e6), min_size=1))
def test_percentiles_enclose_the_median(times: list[float]) -> None:
    figures = summarise(times)
    assert min(times) <= figures.p10_us <= figures.median_us <= figures.p90_us <= max(times)


def test_percentiles_are_interpolated() -> None:
    assert summarise([4.0, 0.0, 1.0, 3.0, 2.0]) == pytest.approx((2.0, 0.4, 3.6))


def test_no_times_are_an_error() -> None:
    with pytest.raises(ValueError, match="no time"):
        summarise([])


def test_the_slowest_rank_of_each_repetition() -> None:
    assert slowest([[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]]) == [2.0, 5.0, 3.0]
    with pytest.raises(ValueError, match="zip"):
        slowest([[1.0], [1.0, 2.0]])


def test_the_file_has_the_fields_that_readers_expect(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "gpux2.json"
    results([row("native_auto", 1, 3.14159)]).write(file)
    content = json.loads(file.read_text())
    assert {"machine", "versions", "command", "rows", "skipped"} <= set(content)
    (entry,) = content["rows"]
    assert sorted(entry) == FIELDS
    assert entry["median_us"] == 3.142
    assert read(file)[1] == [row("native_auto", 1, 3.14159)]
    assert [path.name for path in file.parent.iterdir()] == ["gpux2.json"]


def test_an_empty_run_is_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    results([]).write(file)
    assert json.loads(file.read_text())["rows"] == []


def test_the_tables_of_the_documentation_take_the_file(tmp_path: Path, repository: Path) -> None:
    file = tmp_path / "benchmarks" / "results" / "gpux2.json"
    results([row("native_auto", 8, 4.0), row("nccl", 8, 12.0), row("limit", 8, 2.0)]).write(file)
    rendered = runpy.run_path(str(repository / "scripts" / "render_tables.py"))["comparison"]
    assert "| 8 | 4.0 | 12.0 | 2.0 | 3.00 |" in rendered(tmp_path)


def test_skips_that_share_a_reason_are_one_entry() -> None:
    skips = [Skip("a", "no", 64, 1), Skip("a", "no", 64, 2), Skip("b", "none")]
    assert merge(skips) == [
        {"method": "a", "hidden": 64, "tokens": [1, 2], "reason": "no"},
        {"method": "b", "hidden": None, "tokens": "all", "reason": "none"},
    ]


def times(tokens: int, one: float, two: float, auto: float) -> list[Row]:
    return [
        row("native_oneshot", tokens, one),
        row("native_twoshot", tokens, two),
        row("native_auto", tokens, auto),
    ]


def test_auto_is_judged_by_the_faster_strategy() -> None:
    rows = times(1, 3.0, 9.0, 3.05) + times(4096, 200.0, 100.0, 110.0)
    small, large = judge.choices(rows)
    assert (small.better, small.good) == ("one-shot", True)
    assert (large.better, large.good) == ("two-shot", False)
    assert large.ratio == pytest.approx(1.1)
    assert "AUTO loses 10.0%" in judge.report(rows)


def test_a_problem_without_all_three_is_not_judged() -> None:
    assert judge.choices(times(1, 3.0, 9.0, 3.0)[:2]) == []


def test_the_best_other_is_neither_ours_nor_the_limit() -> None:
    rows = [*times(8, 4.0, 3.0, 4.0), row("nccl", 8, 12.0), row("trtllm_oneshot", 8, 6.0)]
    rows += [row("limit", 8, 2.0), row("nccl", 8, 0.1, mode="eager")]
    (standing,) = judge.standings(rows)
    assert standing.best == "trtllm_oneshot"
    assert standing.speedup == pytest.approx(1.5)
    assert standing.over_limit == pytest.approx(2.0)
    assert "geometric mean 1.50x, smallest 1.50x" in judge.report(rows)


def test_without_others_there_is_no_speedup() -> None:
    (standing,) = judge.standings(times(8, 4.0, 3.0, 4.0))
    assert standing.best == ""
    assert math.isnan(standing.speedup)
    assert "geometric" not in judge.report(times(8, 4.0, 3.0, 4.0))


def test_a_picture_is_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row(method, n, n + 1.0, hidden=h)
        for method in plot.STYLES
        for n in (1, 8)
        for h in (64, 96)
    ]
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        plot.draw(rows, "title", file)
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert first.startswith(b"<?xml")


def test_eager_times_are_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no graph replays"):
        plot.draw([row("nccl", 1, 1.0, mode="eager")], "title", tmp_path / "a.svg")
