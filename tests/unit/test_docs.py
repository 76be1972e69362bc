"""The documentation says what is there: commands, links, variables, messages, numbers."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def python_files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def prose(text: str) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)]+)", prose(page.read_text())):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """Return what links into a page can name: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize(
    "page",
    # That page names upstream's files, and has a test of its own.
    [path for path in PAGES if path.name != "attention.md"],
    ids=lambda path: path.name,
)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    pattern = r"(?:flashinfer|scripts|csrc|include|emulation|tests|build_tools)/[\w./{},-]*\w"
    for path in re.findall(rf"(?<![\w/]){pattern}", prose(text)):
        for choice in expand(path):
            assert (ROOT / choice).exists() or (ROOT / f"{choice}.py").exists(), choice


def expand(path: str) -> list[str]:
    """Expand one brace of alternatives."""
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", path)
    return [f"{match[1]}{choice}{match[3]}" for choice in match[2].split(",")] if match else [path]


def test_the_path_of_a_call_names_files_that_exist() -> None:
    drawing = (ROOT / "docs" / "allreduce.md").read_text().split("```")[1]
    names = re.findall(r"[\w/{},…]+\.(?:py|cuh|cu)\b", drawing)
    assert len(names) > 10
    known = {file.relative_to(ROOT).as_posix() for folder in ("flashinfer", "csrc", "include")
             for file in (ROOT / folder).rglob("*")}  # fmt: skip
    for name in names:
        for choice in expand(name.replace("…/", "")):
            assert any(path.endswith(choice) for path in known), choice


def test_the_two_commands_of_the_readme_are_there() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in ("./scripts/build.sh", "./scripts/test.sh"):
        assert command in readme
        script = ROOT / command
        assert script.stat().st_mode & 0o111, f"{command} is not executable"
    assert "scripts/reproduce.py" in (ROOT / "scripts" / "build.sh").read_text()


def read_by_the_code() -> set[str]:
    """Return the FLASHINFER_* variables that the product, its build and its tests name."""
    found = set()
    for file in [*python_files("flashinfer", "build_tools"), ROOT / "tests" / "conftest.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and re.fullmatch(r"FLASHINFER_[A-Z0-9_]+", value):
                found.add(value)
    return found


def test_the_variables_that_are_read_are_documented_and_no_others() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    documented = set(re.findall(r"^\| `(FLASHINFER_\w+)` \|", text, re.MULTILINE))
    assert documented == read_by_the_code()


def test_defaults_are_those_of_the_code() -> None:
    from build_tools import architectures
    from flashinfer.elastic.allreduce import settings, sizing

    text = (ROOT / "docs" / "environment.md").read_text()
    defaults = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]*)`? \|", text, re.MULTILINE))
    read = settings.read({})
    assert defaults[settings.ENGINE] == read.engine
    assert float(defaults[settings.TIMEOUT_S]) == read.timeout_s
    assert float(defaults[settings.ONESHOT_MAX_MB]) * 2**20 == sizing.DEFAULT_ONESHOT_MAX_BYTES
    assert defaults[architectures.VARIABLE] == architectures.DEFAULT


@page
def test_variables_in_prose_are_read(page: Path) -> None:
    mentioned = set(re.findall(r"`(FLASHINFER_[A-Z0-9_]+)", page.read_text()))
    assert mentioned <= read_by_the_code()


@page
def test_examples_run(page: Path) -> None:
    failed, _ = doctest.testfile(str(page), module_relative=False)
    assert failed == 0


def test_there_are_examples() -> None:
    assert doctest.testfile(str(ROOT / "docs" / "sizing.md"), module_relative=False).attempted > 8


def product_text() -> str:
    """Return all strings of the product: literals, joined, with placeholders cut out."""
    parts = []
    for file in python_files("flashinfer"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts.append("".join(
                    value.value if isinstance(value, ast.Constant) else "\0"
                    for value in node.values
                ))  # fmt: skip
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    for file in (ROOT / "include").rglob("*.cuh"):
        parts.append(re.sub(r'"\s*\n\s*"', "", file.read_text()))
    return re.sub(r"%\w+", "\0", "\n".join(parts))


def test_messages_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = text.split("## Errors of this wheel")[1].split("## Public reports")[0]
    headings = re.findall(r"^### (.+)$", section, re.MULTILINE)
    assert len(headings) > 10
    product = product_text()
    for heading in headings:
        for message in re.findall(r"`([^`]+)`", heading):
            for fragment in filter(None, (part.strip() for part in message.split("…"))):
                assert fragment in product, fragment


REPORTS = {
    "vllm": "47284 50932 52023 48071 49041 48075 55973 51986 53377 45917 45448 34412 35772 53000 "
    "48324 45604 50781 40023 40381 25342",
    "flashinfer": "2923 3053 3869 2059 362 4398 1781 4884",
}


def test_every_public_report_is_answered() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Public reports")[1]
    answered: dict[str, set[str]] = {"vllm": set(), "flashinfer": set()}
    for cell in re.findall(r"^\| ((?:vllm|flashinfer) [^|]+) \|", text, re.MULTILINE):
        project = ""
        for word in re.findall(r"\w+", cell):
            project = word if word in answered else project
            if word.isdigit():
                answered[project].add(word)
    assert answered == {project: set(numbers.split()) for project, numbers in REPORTS.items()}


def test_every_answer_names_the_tests_that_guard_it() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Public reports")[1]
    rows = re.findall(r"^\| (?:vllm|flashinfer) .+$", text, re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        guards = row.rstrip(" |").rpartition("|")[2]
        cited = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", guards)
        assert cited, row
        assert len(cited) == guards.count("`") / 2, f"not a test: {guards}"


@page
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        module = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "render_tables", ROOT / "scripts" / "render_tables.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@page
def test_generated_regions_are_up_to_date(tables: ModuleType, page: Path) -> None:
    text = page.read_text()
    assert tables.render(text) == text, "run scripts/render_tables.py"


def test_the_readme_has_the_comparison_and_the_docs_the_rest() -> None:
    assert "<!-- begin: comparison -->" in PAGES[0].read_text()
    assert "<!-- begin: measurements -->" in (ROOT / "docs" / "performance.md").read_text()


def row(tokens: int, method: str, median: float, **other: Any) -> dict[str, Any]:
    setting = {"world_size": 2, "hidden": 7168, "dtype": "bfloat16", "pattern": "fused"}
    times = {"tokens": tokens, "method": method, "median_us": median, "p10_us": 0, "p90_us": 9}
    return {**setting, "mode": "graph", **times, **other}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A repository with one result file of made-up rows."""
    rows = [
        row(1, "native_auto", 3.0),
        row(1, "nccl", 9.0),
        row(1, "trtllm_oneshot", 4.5),
        row(1, "limit", 2.0),
        row(8, "native_auto", 4.04),
        row(8, "nccl", 5.0),
        row(1, "native_auto", 6.0, mode="eager"),
        row(1, "nccl", 12.0, mode="eager"),
        row(1, "native_auto", 3.5, pattern="quantised"),
    ]
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    content = {"machine": "2 x GPU", "versions": {"torch": "2"}, "command": "bench", "rows": rows}
    (results / "gpux2.json").write_text(json.dumps(content))
    return tmp_path


def test_measurements_become_tables(tables: ModuleType, recorded: Path) -> None:
    text = tables.comparison(recorded)
    assert "On 2 x GPU; torch 2. Measured by `bench`." in text
    assert (
        "| tokens | this wheel | FlashInfer trtllm one-shot | NCCL + norm | limit | "
        "times faster than the best other |" in text
    )
    assert "| 1 | 3.0 | 4.5 | 9.0 | 2.0 | 1.50 |" in text
    assert "| 8 | 4.0 | - | 5.0 | - | 1.24 |" in text
    assert "eager" not in text
    assert "quantised" not in text
    everything = tables.measurements(recorded)
    assert "| 1 | 6.0 | 12.0 | 2.00 |" in everything
    assert "| 1 | 3.5 |" in everything


def test_a_plot_beside_the_results_is_shown(tables: ModuleType, recorded: Path) -> None:
    assert "![" not in tables.comparison(recorded)
    (recorded / "benchmarks" / "results" / "gpux2.svg").write_text("<svg/>")
    assert "(benchmarks/results/gpux2.svg)" in tables.comparison(recorded)
    assert "(../benchmarks/results/gpux2.svg)" in tables.measurements(recorded)


@pytest.mark.parametrize("repeats", [True, False])
def test_engines_become_a_table_that_compares_tokens_where_it_can(
    tables: ModuleType, tmp_path: Path, repeats: bool
) -> None:
    folder = tmp_path / "benchmarks" / "results" / "engines"
    folder.mkdir(parents=True)
    outcome = {"repeats_itself": repeats, "prompts_as_off": 7}
    content = {
        "machine": "2 x GPU",
        "versions": {"vllm": "1", "flashinfer-python": "2"},
        "settings": {"layers": 3, "hidden": 256, "prompts": 8, "tokens": 16, "rounds": 3},
        "modes": {
            "off": outcome | {"tokens_per_s": [900, 1000, 1100]},
            "trtllm": outcome | {"tokens_per_s": [1200, 1300, 1250]},
            "mnnvl": outcome | {"tokens_per_s": [1500, 1400, 1600]},
        },
    }
    (folder / "run.json").write_text(json.dumps(content))
    text = tables.engines(tmp_path)
    assert "vLLM 1, FlashInfer 2, 2 x GPU; a Llama of 3 layers of 256, 8 prompts" in text
    same = "7 of 8" if repeats else "-"
    assert f"| 1,500 | 1,420 to 1,580 | 1.50 | 1.20 | {same} |" in text
    assert ("none were compared" in text) is not repeats


def test_without_results_no_number_is_shown(tables: ModuleType, tmp_path: Path) -> None:
    text = "a\n<!-- begin: comparison -->\n| 1 | 3.0 |\n<!-- end: comparison -->\nb\n"
    rendered = tables.render(text, tmp_path)
    assert tables.NOT_MEASURED in rendered
    assert "3.0" not in rendered
    assert rendered.startswith("a\n")
    assert rendered.endswith("\nb\n")
    assert tables.render(rendered, tmp_path) == rendered


def test_the_check_finds_what_is_out_of_date(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "REPOSITORY", tmp_path)
    readme = tmp_path / "README.md"
    stale = "<!-- begin: sizing -->\nstale\n<!-- end: sizing -->\n"
    readme.write_text(stale)
    monkeypatch.setattr(tables, "pages", lambda: [readme])
    assert tables.main(["--check"]) == 1
    assert readme.read_text() == stale
    assert tables.main([]) == 0
    assert "ValueError" in readme.read_text()
    assert tables.main(["--check"]) == 0
