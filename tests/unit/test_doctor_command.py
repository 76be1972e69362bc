"""``flashinfer-doctor`` as it is started: without FlashInfer, and looking at installations."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from flashinfer.elastic.doctor import cli  # noqa: E402
from flashinfer.elastic.doctor.check import installation  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

Run = subprocess.CompletedProcess[str]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages with this wheel's Python files and nothing else."""
    directory = tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "flashinfer", directory / "flashinfer", ignore=ignored)
    shutil.copy(ROOT / "flashinfer_doctor.py", directory)
    metadata(directory, "flashinfer", "0.1.0", "nvidia-no-such-package>=3")
    return directory


def metadata(directory: Path, name: str, version: str, *requires: str) -> None:
    """Make a distribution known."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def upstream(directory: Path, version: str = "0.6.13", init: str = "") -> None:
    """Install something that has FlashInfer's modules, and none of their contents."""
    metadata(directory, "flashinfer-python", version)
    package = directory / "flashinfer"
    package.mkdir(exist_ok=True)
    for name in installation.SHADOWED:
        file = package.joinpath(*name.split(".")[1:]).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("LEFT_ALONE = True\n")
        for parent in file.relative_to(package).parents:
            (package / parent / "__init__.py").touch()
    (package / "__init__.py").write_text(init)


def without_flashinfer(entry: Path, mirrors: Path) -> Path:
    """Return a directory of modules, or links to all it has but FlashInfer and this wheel."""
    if not entry.is_dir() or not any(entry.glob("flashinfer*")):
        return entry
    mirror = mirrors / entry.as_posix().strip("/").replace("/", "-")
    if not mirror.exists():
        mirror.mkdir(parents=True)
        for item in entry.iterdir():
            if not item.name.startswith("flashinfer"):
                (mirror / item.name).symlink_to(item)
    return mirror


def start(site: Path, *arguments: str, path: tuple[Path, ...] = (), python: str = "") -> Run:
    """Run the launcher of a site-packages; ``python`` replaces its own main.

    Not with a virtual environment's interpreter, which brings its own site-packages along, in every
    process that it starts.
    """
    others = [Path(entry) for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    mirrored = [without_flashinfer(entry, site.parent / "mirrors") for entry in others]
    entries = map(str, (*path, site, *mirrored))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entries), "COLUMNS": "100"}
    code = python or "import flashinfer_doctor; flashinfer_doctor.main()"
    command = [sys._base_executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=site, env=environment, capture_output=True, text=True, timeout=120
    )


def check(site: Path, path: tuple[Path, ...] = ()) -> dict[str, Any]:
    done = start(site, "check", "--json", path=path)
    assert done.returncode == 1, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fates(found: dict[str, Any]) -> set[str]:
    return {module["applied"] for module in found["facts"]["installation"]["modules"]}


def test_the_modules_that_are_looked_at_are_the_shadows() -> None:
    shadows = {
        ".".join(file.relative_to(ROOT).parent.parts)
        for file in (ROOT / "flashinfer").rglob("__init__.py")
        if "shadow.load(" in file.read_text() and "elastic" not in file.parts
    }
    assert set(installation.SHADOWED) == shadows


def test_help_imports_neither_torch_nor_flashinfer(site: Path) -> None:
    upstream(site, init="raise SystemExit('flashinfer was imported')")
    code = (
        "import sys, flashinfer_doctor\n"
        "try: flashinfer_doctor.main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'numpy', 'tvm_ffi', 'pynvml'} & set(sys.modules)\n"
    )
    for arguments in (
        ("--help",),
        ("check", "--help"),
        ("plan", "--tp", "8", "--hidden", "64", "--max-tokens", "8"),
    ):
        done = start(site, *arguments, python=code)
        assert done.returncode == 0, done.stderr
        assert "Usage: flashinfer-doctor" in done.stdout or arguments[0] == "plan"


def test_the_version(site: Path) -> None:
    from flashinfer.elastic import __version__

    assert start(site, "--version").stdout.strip() == f"flashinfer-doctor, version {__version__}"


def test_modules_that_lack_what_a_patch_needs(site: Path) -> None:
    upstream(site)
    found = check(site)
    assert fates(found) == {"stepped aside"}
    modules = {module["name"]: module for module in found["facts"]["installation"]["modules"]}
    assert "has no" in modules["flashinfer.decode"]["reason"]
    assert found["facts"]["installation"]["upstream"]["version"] == "0.6.13"
    assert found["facts"]["installation"]["crashed"] == ""


def test_no_upstream(site: Path) -> None:
    found = check(site)
    assert fates(found) == {"failed"}
    assert found["facts"]["installation"]["upstream"]["version"] is None
    assert not found["ok"]


def test_two_directories(site: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    upstream(elsewhere)
    found = check(site, path=(elsewhere,))
    assert fates(found) == {"untouched"}
    facts = found["facts"]["installation"]
    assert facts["upstream"]["directory"] == str(elsewhere)
    assert facts["ours"]["directory"] == facts["our_directory"] == str(site)
    assert facts["flashinfer_file"] == str(elsewhere / "flashinfer" / "__init__.py")
    assert any("different directories" in one["text"] for one in found["findings"])


@pytest.mark.parametrize(
    ("init", "ending"),
    [
        ("import os; os._exit(3)", "exited with 3, importing flashinfer"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "was killed by signal 9, importing flashinfer",
        ),
    ],
)
def test_an_import_that_takes_the_process_along(site: Path, init: str, ending: str) -> None:
    upstream(site, init=init)
    found = check(site)
    assert found["facts"]["installation"]["crashed"] == ending
    assert fates(found) == {"failed"}


@pytest.mark.parametrize(
    ("init", "reason", "missing"),
    [
        ("import no_such_module", "No module named 'no_such_module'", "no_such_module"),
        ("raise OSError('no libcudart\\nsecond line')", "OSError: no libcudart", None),
        ("raise SystemExit(0)", "SystemExit: 0", None),
        (
            "try: import no_such_module\n"
            "except ImportError as error: raise RuntimeError('sorry') from error",
            "RuntimeError: sorry",
            "no_such_module",
        ),
    ],
)
def test_an_import_that_fails(site: Path, init: str, reason: str, missing: str | None) -> None:
    upstream(site, init=init)
    modules = check(site)["facts"]["installation"]["modules"]
    assert {module["applied"] for module in modules} == {"failed"}
    assert {module["missing"] for module in modules} == {missing}
    assert all(reason in module["reason"] for module in modules)


def test_what_an_import_prints_is_not_in_the_way(site: Path) -> None:
    upstream(site, init="print('{')")
    assert fates(check(site)) == {"stepped aside"}


def test_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_TIMEOUT_S", 0.01)
    assert "did not end within" in installation.run_probe()["crashed"]


def test_requirements(site: Path) -> None:
    (requirement,) = check(site)["facts"]["installation"]["requirements"]
    assert requirement == {
        "requirement": "nvidia-no-such-package>=3",
        "installed": None,
        "satisfied": False,
    }


def test_kernels_that_are_missing(site: Path) -> None:
    kernels = check(site)["facts"]["installation"]["kernels"]
    assert not kernels["loads"] and "missing" in kernels["reason"]
    assert kernels["file"] == str(site / "flashinfer/elastic/lib/libflashinfer_elastic.so")


def test_without_click_the_launcher_says_so(site: Path) -> None:
    code = "import sys; sys.modules['click'] = None; import flashinfer_doctor as d; d.main()"
    done = start(site, python=code)
    assert done.returncode == 1 and "pip install click rich" in done.stderr


@pytest.mark.parametrize("command", ["reproduce", "bench"])
def test_commands_that_need_flashinfer_point_to_check(site: Path, command: str) -> None:
    upstream(site, init="raise OSError('no libcudart')")
    done = start(site, command)
    assert done.returncode == 1
    assert "OSError: no libcudart" in done.stderr and "flashinfer-doctor check" in done.stderr
    assert "Traceback" not in done.stderr


def test_modules_that_are_missing_later_point_to_check_too(site: Path) -> None:
    pytest.importorskip("torch")
    upstream(site)
    late = site / "flashinfer" / "comm" / "trtllm_mnnvl_ar.py"
    late.write_text("import no_such_module")
    done = start(site, "reproduce")
    assert done.returncode == 1
    assert "pip install no_such_module" in done.stderr and "flashinfer-doctor check" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are started, none of which runs."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (["reproduce"], "sys.exit(reproduce())"),
        (["bench"], "sys.exit(bench([]))"),
        (["bench", "--quick", "--hidden", "64"], "sys.exit(bench(['--quick', '--hidden', '64']))"),
        (["bench", "--help"], "sys.exit(bench(['--help']))"),
    ],
)
def test_what_is_started(started: list[list[str]], arguments: list[str], call: str) -> None:
    assert testing.CliRunner().invoke(cli.main, arguments).exit_code == 7
    ((python, _, program),) = started
    assert python == sys.executable
    assert call in program
    compile(program, "program", "exec")


def test_the_bar_counts_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from rich.console import Console
    from rich.progress import Progress

    from flashinfer.elastic.doctor import progress
    from flashinfer.elastic.doctor.bench import cli as bench_cli
    from flashinfer.elastic.doctor.bench import launch
    from flashinfer.elastic.doctor.bench.results import Results, Row, Skip

    console = Console(force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    bars: list[Progress] = []

    def make(*columns: Any) -> Progress:
        bars.append(Progress(*columns, console=console))
        return bars[-1]

    row = Row(2, 64, 1, "graph", "nccl", 1.0, 1.0, 1.0)
    found = [row, Skip("trtllm_oneshot", "no", 64, 2), Skip("limit", "no")]

    def run(job: Any, work: Any, command: str, *, progress: Callable[[Row | Skip], None]) -> Any:
        assert command.startswith("flashinfer-doctor bench --ranks 2")
        for one in found:
            progress(one)
        return Results("", command, {}), "", []

    monkeypatch.setattr(progress, "Progress", make)
    monkeypatch.setattr(bench_cli, "_gpus", lambda: 2)
    monkeypatch.setattr(launch, "run", run)
    shown: list[Row | Skip] = []
    monkeypatch.setattr(bench_cli, "show", shown.append)
    sizes = ["--ranks", "2", "--hidden", "64", "--tokens", "1", "2"]
    what = ["--methods", "nccl", "limit", "--modes", "graph", "eager"]
    # No rank said which machine it is on: nothing to write.
    assert progress.bench([*sizes, *what]) == 1
    assert shown == found
    (task,) = bars[0].tasks
    # A row; a problem in two modes; a method for two problems in two modes.
    assert (task.completed, task.total) == (1 + 2 + 4, 2 * 2 * 2)
