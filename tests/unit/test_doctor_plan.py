"""``flashinfer-doctor plan``: its numbers, and how it shows them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from flashinfer.elastic.allreduce import sizing  # noqa: E402
from flashinfer.elastic.allreduce.strategy import Strategy  # noqa: E402
from flashinfer.elastic.doctor import cli  # noqa: E402
from flashinfer.elastic.doctor.plan import chart, outcomes  # noqa: E402
from flashinfer.elastic.doctor.plan.callers import Ask, Caller, Problem, callers  # noqa: E402

REPORTED = Problem(8, 6144, 2)
MIB = 2**20


def run(*arguments: str, width: int = 100, **environment: str) -> Any:
    given = {"COLUMNS": str(width), "FLASHINFER_MNNVL_ONESHOT_MAX_MB": "", **environment}
    return testing.CliRunner().invoke(cli.main, ["plan", *arguments], env=given)


def cases(problem: Problem, max_tokens: int, arch: int) -> dict[str, outcomes.Case]:
    return {
        caller.name: outcomes.case(problem, arch, caller, sizing.DEFAULT_ONESHOT_MAX_BYTES)
        for caller in callers(problem, max_tokens, arch)
    }


def test_the_reported_failure() -> None:
    case = cases(REPORTED, 8192, 90)["vLLM 0.24, fused"]
    assert (case.caller.reports, case.upstream_buffer, case.our_buffer) == (42, 1179648, 4128768)
    first, second = case.ranges
    assert (first.first, first.last, first.outcome.raises) == (1, 12, False)
    assert (second.first, second.last, second.outcome.raises) == (13, 42, True)
    assert second.outcome.ours == (Strategy.ONESHOT, 1)
    at_40 = outcomes.outcome(REPORTED, 90, Ask.ONESHOT, 40, case.upstream_buffer, case.our_buffer)
    assert at_40.upstream_bytes == 3932160 and at_40.raises


@pytest.mark.parametrize(
    ("arch", "ranks", "fused", "oneshot", "fused_later"),
    [
        (90, 2, 64, 32, 64),
        (90, 4, 2, 2, 2),
        (90, 8, 0.5, 0.5, 0.5),
        (90, 16, 0, 0, 0),
        (100, 4, 32, 4, 32),
        (100, 8, 1, 1, 1),
        (100, 16, 0, 0, 64),
        (103, 4, 64, 4, 64),
        (103, 8, 2, 2, 4),
    ],
)
def test_what_vllm_reports(
    arch: int, ranks: int, fused: float, oneshot: float, fused_later: float
) -> None:
    problem = Problem(ranks, 4096, 2)
    first, later, *_ = callers(problem, 10**6, arch)
    assert first.reports == fused * MIB // problem.row_bytes
    assert first.oneshot_up_to == oneshot * MIB // problem.row_bytes
    assert later.reports == fused_later * MIB // problem.row_bytes
    assert later.ask(1) is Ask.AUTO


def test_nobody_reports_more_than_a_pass_has() -> None:
    assert {caller.reports for caller in callers(Problem(2, 4096, 2), 100, 90)} == {100, 0}


def test_vllms_unfused_all_reduce_is_on_blackwell_only() -> None:
    def unfused(arch: int, ranks: int) -> int:
        return callers(Problem(ranks, 4096, 2), 10**6, arch)[2].reports * 8192

    assert unfused(90, 8) == 0
    assert (unfused(100, 4), unfused(103, 8), unfused(100, 16)) == (80 * MIB, 128 * MIB, 8 * MIB)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.sampled_from([2, 3, 4, 6, 8, 16]),
    hidden=st.integers(1, 9000),
    element_bytes=st.sampled_from([2, 4]),
    reports=st.integers(1, 700),
    forced=st.integers(0, 700),
    beyond=st.sampled_from(list(Ask)),
    arch=st.sampled_from([90, 100, 103]),
    oneshot_max=st.sampled_from([0, MIB, 64 * MIB]),
)
def test_ranges_are_what_asking_for_every_number_of_tokens_gives(
    ranks: int,
    hidden: int,
    element_bytes: int,
    reports: int,
    forced: int,
    beyond: Ask,
    arch: int,
    oneshot_max: int,
) -> None:
    problem = Problem(ranks, hidden, element_bytes)
    caller = Caller("someone", reports, forced, beyond)
    case = outcomes.case(problem, arch, caller, oneshot_max)
    expected = [
        outcomes.outcome(
            problem, arch, caller.ask(tokens), tokens, case.upstream_buffer, case.our_buffer
        )
        for tokens in range(1, reports + 1)
    ]
    found = [part.outcome.kind for part in case.ranges for _ in range(part.first, part.last + 1)]
    assert found == [one.kind for one in expected]
    assert [part.outcome for part in case.ranges] == [expected[p.last - 1] for p in case.ranges]
    neighbours = zip(case.ranges, case.ranges[1:])  # noqa: B905 (one shorter)
    assert all(one.outcome.kind != next_.outcome.kind for one, next_ in neighbours)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.sampled_from([2, 4, 8]),
    hidden=st.integers(8, 9000),
    reports=st.integers(1, 5000),
)
def test_a_call_that_upstream_chooses_itself_always_fits(
    ranks: int, hidden: int, reports: int
) -> None:
    # Whole vectors of 16 bytes; below that, 0.6.x rounds its buffer down and may fall short.
    problem = Problem(ranks, hidden // 8 * 8, 2)
    case = outcomes.case(problem, 90, Caller("someone", reports), sizing.DEFAULT_ONESHOT_MAX_BYTES)
    assert case.raises_from is None


def test_memory_is_in_granules() -> None:
    # Two buffers of exactly 1 MiB leave no room for the rotation's state in one granule.
    assert outcomes.our_memory_bytes(MIB) == 4 * MIB
    assert outcomes.our_memory_bytes(MIB - 256) == 2 * MIB


@pytest.mark.parametrize("width", [80, 100, 120])
def test_it_fits_the_terminal(width: int) -> None:
    result = run("--tp", "8", "--hidden", "6144", "--max-tokens", "8192", width=width)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= width
    line = next(line for line in lines if "13-42" in line)
    assert "ValueError" in line and "4,128,768" in line
    assert "…" not in result.output


def test_there_is_no_colour_where_there_is_no_terminal() -> None:
    result = run("--tp", "8", "--hidden", "6144", "--max-tokens", "8192", TERM="xterm-256color")
    assert "\x1b" not in result.output


def test_chunks_are_counted() -> None:
    # 2 GiB hold two-shot for 2**18 rows of 4 KiB; four times as many take four chunks and a rest.
    result = run("--tp", "8", "--hidden", "2048", "--max-tokens", "1048576")
    assert "two-shot, 5 chunks" in result.output


def test_where_upstream_never_raises() -> None:
    case = cases(Problem(2, 4096, 2), 16, 90)
    assert all(one.raises_from is None for one in case.values())
    assert "raises for none" in run("--tp", "2", "--hidden", "4096", "--max-tokens", "16").output


def test_the_environment_counts() -> None:
    arguments = ("--tp", "8", "--hidden", "6144", "--max-tokens", "42")
    result = run(*arguments, FLASHINFER_MNNVL_ONESHOT_MAX_MB="0")
    lines = [line for line in result.output.splitlines() if "ValueError" in line]
    assert len(lines) == 2 and all("13-42" in line and "two-shot" in line for line in lines)
    result = run(*arguments, FLASHINFER_MNNVL_ONESHOT_MAX_MB="lots")
    assert result.exit_code == 2 and "FLASHINFER_MNNVL_ONESHOT_MAX_MB" in result.output


def test_settings_that_a_plan_does_not_use_do_not_stop_it() -> None:
    result = run(
        *("--tp", "8", "--hidden", "6144", "--max-tokens", "42"), FLASHINFER_MNNVL_ENGINE="fastest"
    )
    assert result.exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tp", "1", "--hidden", "8", "--max-tokens", "1"),
        ("--tp", "8", "--hidden", "0", "--max-tokens", "1"),
        ("--tp", "8", "--hidden", "8"),
        ("--tp", "8", "--hidden", "8", "--max-tokens", "1", "--sm", "89"),
        ("--tp", "8", "--hidden", "8", "--max-tokens", "1", "--dtype", "int8"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_rows_of_which_no_buffer_holds_one() -> None:
    arguments = ("--tp", "64", "--hidden", "16777216", "--max-tokens", "9", "--dtype", "float32")
    result = run(*arguments)
    assert result.exit_code == 2 and not isinstance(result.exception, ValueError)
    said = " ".join(result.output.split())
    assert "--hidden 16777216" in said and "Not even one row of 16777216 elements" in said


def test_json() -> None:
    result = run("--tp", "8", "--hidden", "6144", "--max-tokens", "8192", "--json")
    document = json.loads(result.output)
    assert document["format"] == 1
    assert document["group"] == {
        "ranks": 8,
        "hidden": 6144,
        "dtype": "bfloat16",
        "max_tokens": 8192,
        "arch": 90,
    }
    expected = cases(REPORTED, 8192, 90)
    assert [caller["name"] for caller in document["callers"]] == list(expected)
    fused = document["callers"][0]
    assert fused["name"] == "vLLM 0.24, fused"
    assert fused["buffer_bytes"] == {"upstream": 1_179_648, "ours": 4_128_768}
    assert fused["raises_from_tokens"] == 13
    assert fused["calls"][-1] == {
        "tokens": [13, 42],
        "asks": "one-shot",
        "upstream": {"strategy": "oneshot", "most_bytes": 4_128_768, "raises": True},
        "ours": {"strategy": "oneshot", "launches": 1},
    }
    unused = [caller for caller in document["callers"] if not caller["reports_tokens"]]
    assert unused and all(caller["calls"] == [] for caller in unused)


def test_json_beside_a_picture_is_json_alone(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    arguments = ("--tp", "2", "--hidden", "64", "--max-tokens", "8", "--json", "--svg", str(file))
    result = run(*arguments)
    assert result.exit_code == 0 and file.exists()
    json.loads(result.stdout)


def points(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in text.split())]


@pytest.mark.parametrize("tokens", ["1", "8192"])
def test_svg(tmp_path: Path, tokens: str) -> None:
    file = tmp_path / "plan.svg"
    result = run("--tp", "8", "--hidden", "6144", "--max-tokens", tokens, "--svg", str(file))
    assert result.exit_code == 0 and str(file) in result.output.replace("\n", "")
    svg = ElementTree.parse(file).getroot()
    space = {"s": "http://www.w3.org/2000/svg"}
    texts = {element.text for element in svg.iterfind(".//s:text", space)}
    assert {"one-shot", "two-shot", "tokens"} <= texts
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    for line in svg.iterfind(".//s:polyline", space):
        places = points(line.attrib["points"])
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
        assert places == sorted(places, key=lambda place: (place[0], -place[1]))
    assert ("upstream raises" in texts) == (tokens == "8192")


def test_svg_that_cannot_be_written(tmp_path: Path) -> None:
    result = run(
        *("--tp", "8", "--hidden", "8", "--max-tokens", "8"),
        *("--svg", str(tmp_path / "no" / "such" / "folder.svg")),
    )
    assert result.exit_code == 1
    (line,) = result.output.splitlines()  # said before anything is shown
    assert "--svg" in line and "folder.svg" in line


def test_bars_grow_with_the_bytes() -> None:
    from rich.console import Console

    case = cases(REPORTED, 8192, 90)["vLLM 0.24, fused"]
    made = chart.make(REPORTED, case, outcomes.samples(case))
    lines = [text.plain for text in chart.draw(made, Console(width=100))]
    bars = [line.count("█") for line in lines if " one " in line]
    assert bars == sorted(bars) and len(set(bars)) > 4
    assert all("│" in line and "┃" in line for line in lines[1:])
