"""The benchmark's processes and its command line, without GPUs."""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from flashinfer.elastic.doctor.bench import cli, kernels, launch
from flashinfer.elastic.doctor.bench.figures import Figures
from flashinfer.elastic.doctor.bench.launch import Job, QueueReporter, guarded
from flashinfer.elastic.doctor.bench.methods import NAMES
from flashinfer.elastic.doctor.bench.results import Results, Row, Skip
from flashinfer.elastic.doctor.bench.session import LIMIT, MODES, Plan

ROW = Row.of(2, 64, 1, "graph", "nccl", Figures(1.0, 0.5, 2.0))
SKIP = Skip("nccl_symm", "no")
COST = {"backend": "native", "layer": "all", "median_us": 9.0}


def report(rank: int, job: Job, rendezvous: str, end: float, messages: Any) -> None:
    """A rank that reports one of everything."""
    guarded(rank, messages, functools.partial(_report, rank, messages))


def _report(rank: int, messages: Any) -> None:
    if rank:
        return
    reporter = QueueReporter(messages)
    reporter.send("machine", "gpux2", "2 x GPU", {"torch": "2"})
    reporter.row(ROW)
    reporter.skip(SKIP)
    reporter.component({"name": "push"})
    reporter.note("flag", 0.7)
    reporter.send("host cost", COST)


def fail(rank: int, job: Job, rendezvous: str, end: float, messages: Any) -> None:
    """Ranks of which one fails after a row, and the other waits for it."""
    guarded(rank, messages, functools.partial(_fail, rank, messages))


def _fail(rank: int, messages: Any) -> None:
    if rank == 0:
        QueueReporter(messages).row(ROW)
        time.sleep(600)
    raise RuntimeError("out of luck")


def hang(rank: int, job: Job, rendezvous: str, end: float, messages: Any) -> None:
    """A rank that reports a row and never ends."""
    if rank == 0:
        QueueReporter(messages).row(ROW)
    time.sleep(600)


def die(rank: int, job: Job, rendezvous: str, end: float, messages: Any) -> None:
    """A rank that ends without a word."""
    os._exit(3 * rank)


def run(worker: launch.Worker, seconds: float = 60.0) -> tuple[Results, str, list[str], list[Any]]:
    seen: list[Any] = []
    found = launch.run(Job(Plan((64,), (1,)), 2, seconds), worker, "command", progress=seen.append)
    return (*found, seen)


def test_all_that_rank_0_reports_arrives() -> None:
    results, name, failures, seen = run(report)
    assert not failures
    assert name == "gpux2"
    assert (results.machine, results.command, results.versions) == (
        "2 x GPU",
        "command",
        {"torch": "2"},
    )
    assert (results.rows, results.skipped) == ([ROW], [SKIP])
    assert (results.components, results.notes) == ([{"name": "push"}], {"flag": 0.7})
    assert results.host_cost == [COST]
    assert seen == [ROW, SKIP]


def test_a_rank_that_fails_ends_the_run_and_keeps_the_rows(monkeypatch: Any) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.5)
    start = time.monotonic()
    results, _, failures, _ = run(fail)
    assert time.monotonic() - start < 45
    assert results.rows == [ROW]
    assert "rank 1" in failures[0] and "out of luck" in failures[0]
    assert failures[1] == "ranks [0] did not finish in time and were killed"


def test_the_time_limit_ends_ranks_that_hang() -> None:
    results, name, failures, _ = run(hang, seconds=15.0)
    assert results.rows == [ROW]
    assert name == ""
    assert failures == ["ranks [0, 1] did not finish in time and were killed"]


def test_a_rank_that_dies_is_named() -> None:
    assert run(die)[2] == ["rank 1 exited with code 3"]


def test_the_default_is_everything() -> None:
    options = cli.parse([])
    assert list(options.hidden) == [7168, 4096]
    assert list(options.tokens) == [2**i for i in range(13)]
    assert tuple(options.methods) == (*NAMES, LIMIT)
    assert tuple(options.modes) == MODES


def test_quick_takes_fewer_sizes_unless_they_are_given() -> None:
    assert len(cli.parse(["--quick"]).tokens) < 13
    assert cli.parse(["--quick", "--tokens", "3", "5"]).tokens == [3, 5]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (["--methods", "magic"], "argument --methods: invalid choice: 'magic'"),
        (["--modes", "x"], "argument --modes: invalid choice: 'x'"),
        (["--tokens", "0"], "argument --tokens: must be positive, got 0"),
        (["--tokens", "x"], "argument --tokens: must be a whole number, got 'x'"),
        (["--out", "/"], "argument --out: must name a file, got the folder /"),
        (["--out", "/dev/null/x"], "argument --out: cannot write to /dev/null, where"),
        (["--ranks", "0"], "argument --ranks: must be positive, got 0"),
        (["--from", "/nowhere"], "argument --from: cannot read /nowhere: No such file"),
        (["--from", "/"], "argument --from: cannot read /: Is a directory"),
        (["--from", "/dev/null"], "argument --from: /dev/null is not a result file: JSON"),
    ],
)
def test_wrong_options_are_refused(
    wrong: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.parse(wrong)
    assert exit_.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "{}", '{"machine": "m", "rows": [{"tokens": 1}]}'])
def test_what_is_judged_again_has_to_be_a_result_file(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(SystemExit):
        cli.main(["--from", str(file)])
    assert f"{file} is not a result file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "gpus", "text"),
    [
        ([], 1, "one for each of 1 rank(s); found 1"),
        (["--ranks", "1"], 2, "one for each of 1 rank(s); found 2"),
        (["--ranks", "3"], 2, "one for each of 3 rank(s); found 2"),
    ],
)
def test_too_few_gpus_or_ranks_start_nothing(
    arguments: list[str],
    gpus: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "_gpus", lambda: gpus)
    monkeypatch.delattr(launch, "run")
    assert cli.main(arguments) == 1
    assert text in capsys.readouterr().err


def canned(name: str, failures: list[str]) -> Any:
    """A ``launch.run`` that starts no process."""

    def run(job: Job, worker: Any, command: str, *, progress: Any) -> Any:
        progress(ROW)
        progress(SKIP)
        results = Results("2 x GPU", command, {"torch": "2"}, [ROW], [SKIP], host_cost=[COST])
        return results, name, failures

    return run


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_gpus", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_a_run_writes_its_file_and_judges_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run", canned("gpux2", []))
    file = tmp_path / "out.json"
    arguments = ["--ranks", "2", "--quick", "--out", str(file), "--time-limit", "60"]
    assert cli.main(arguments) == 0
    content = json.loads(file.read_text())
    assert content["command"] == "scripts/bench.py --ranks 2 --quick --time-limit 60"
    assert content["skipped"][0]["method"] == "nccl_symm"
    printed = capsys.readouterr().out
    assert "skipped nccl_symm, all problems: no" in printed
    assert "native      9.00  all" in printed
    assert cli.main(["--from", str(file)]) == 0


@pytest.mark.usefixtures("two_gpus")
def test_the_default_file_is_named_after_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run", canned("gpux2", []))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--ranks", "2", "--quick"]) == 0
    assert (tmp_path / "benchmarks" / "results" / "gpux2.json").exists()


@pytest.mark.usefixtures("two_gpus")
def test_what_a_failed_run_has_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run", canned("gpux2", ["rank 1 exited with code 3"]))
    file = tmp_path / "out.json"
    assert cli.main(["--ranks", "2", "--out", str(file)]) == 1
    assert len(json.loads(file.read_text())["rows"]) == 1
    assert "FAILED: rank 1 exited with code 3" in capsys.readouterr().err


@pytest.mark.usefixtures("two_gpus")
def test_a_run_that_tells_nothing_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run", canned("", ["rank 1 exited with code 3"]))
    file = tmp_path / "out.json"
    assert cli.main(["--ranks", "2", "--out", str(file)]) == 1
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "host_cost", "planned"),
    [([], (7168,), True), (["--quick"], (), True), (["--quick", "--host-cost"], (7168,), False)],
)
def test_when_the_hosts_cost_is_measured(
    arguments: list[str], host_cost: tuple[int, ...], planned: bool
) -> None:
    job = cli._job(cli.parse(arguments), 2)
    assert job.host_cost == host_cost
    assert (job.plan is not None) == planned


@pytest.mark.parametrize("arch", [90, 100])
def test_the_limits_compile(arch: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    source = Path(kernels.__file__).with_name("limits.cu").read_text()
    try:
        cubin = kernels.compile_cubin(source, arch)
    except RuntimeError as error:
        if "libnvrtc" in str(error):
            pytest.skip("NVRTC is not installed")
        raise
    for name in (b"push_to_all", b"push_shares", b"do_nothing", b"pass_flag"):
        assert name in cubin
