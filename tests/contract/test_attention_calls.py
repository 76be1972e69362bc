"""Upstream's attention entry points, of every version, have the workspaces that they write to.

Upstream's Python runs as it is, without a GPU, over compiled modules that are recorded ones: they
carve, throw and write as upstream's C++ does. See ``probes/attention_upstream.py``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashinfer.elastic.attention import signatures

Run = Callable[..., Any]
MIB = 2**20
SOURCES = "flashinfer/data/csrc/"
LAUNCHER = SOURCES + "trtllm_fmha_kernel_launcher.cu"
PROBES = Path(__file__).parent / "probes"
REPORTED = 135_266_304  # trtllm_gen_softmax_workspace, of the public report
REPLANS_AFRESH = "mla"
"""0.7.x makes a new integer workspace for every plan of it, so it overflows every time. (Natively
it cannot: it holds a bounded number of work items.)"""

PLANS = ("float_overflow", "integer_overflow", "sharing", "graph_metadata", "other_errors")
LAUNCHES = ("sizes", "one_buffer", "counters")


def parameters(source: str, function: str) -> list[str]:
    """Return the parameter names of a C++ function."""
    match = re.search(rf"void {function}\((.*?)\) \{{", source, re.S)
    assert match, function
    text = match[1]
    while "<" in text:
        text = re.sub(r"<[^<>]*>", "", text)
    return [parameter.split("=")[0].split()[-1] for parameter in text.split(",")]


@pytest.fixture
def launchers(version: str, upstream_wheel: Callable[[str], Path]) -> dict[str, list[str]]:
    """The parameter names of trtllm-gen's launchers, read off their source."""
    with zipfile.ZipFile(upstream_wheel(version)) as archive:
        source = archive.read(LAUNCHER).decode()
    exported = re.findall(r"TVM_FFI_DLL_EXPORT_TYPED_FUNC\(\s*(trtllm_\w*attention\w*)", source)
    names = [name for name in exported if "quantize" not in name]
    return {name: parameters(source, name) for name in names}


@pytest.fixture(scope="session")
def tree_with_sources(
    merged_tree: Callable[[str], Path], upstream_wheel: Callable[[str], Path]
) -> Callable[[str], Path]:
    """Return a function that gives a merged tree that has what upstream's generators read."""

    def complete(version: str) -> Path:
        tree = merged_tree(version)
        with zipfile.ZipFile(upstream_wheel(version)) as archive:
            names = [name for name in archive.namelist() if name.startswith(SOURCES)]
            here = [name for name in names if name.count("/") == SOURCES.count("/")]
            archive.extractall(tree, [name for name in here if not (tree / name).exists()])
        return tree

    return complete


@pytest.fixture(scope="session")
def run_probe(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs scenarios of a probe in a process of its own, once each."""
    scratch = tmp_path_factory.mktemp("attention")

    @functools.cache
    def run(script: str, tree: Path, arguments: tuple[str, ...], setting: tuple[str, str]) -> Any:
        path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {
            "PYTHONPATH": path,
            "PYTHONPYCACHEPREFIX": str(scratch / "bytecode"),
            "FLASHINFER_WORKSPACE_BASE": str(scratch / "workspace"),
            setting[0]: setting[1],
        }
        done = subprocess.run(
            [sys.executable, str(PROBES / script), *arguments],
            env=environment,
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{script} over {tree}:\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def plans(version: str, tree_with_sources: Callable[[str], Path], run_probe: Run) -> Run:
    """Return a function that gives the result of a scenario of ``attention_plans.py``."""
    tree = tree_with_sources(version)

    def result(scenario: str, name: str = "", value: str = "") -> Any:
        scenarios = ",".join(PLANS) if not name else scenario
        setting = (name or "FLASHINFER_ELASTIC_WORKSPACE", value or "1" if not name else value)
        return run_probe("attention_plans.py", tree, (scenarios,), setting)[scenario]

    return result


@pytest.fixture
def launches(
    version: str,
    tree_with_sources: Callable[[str], Path],
    launchers: dict[str, list[str]],
    run_probe: Run,
) -> Run:
    """Return a function that gives the result of a scenario of ``attention_launches.py``."""
    tree = tree_with_sources(version)

    def result(scenario: str, switch: str = "1") -> Any:
        scenarios = ",".join(LAUNCHES) if switch == "1" else scenario
        arguments = (scenarios, json.dumps(launchers))
        setting = ("FLASHINFER_ELASTIC_WORKSPACE", switch)
        return run_probe("attention_launches.py", tree, arguments, setting)[scenario]

    return result


def test_float_workspaces_grow_until_everything_fits(plans: Run, version: str) -> None:
    results = plans("float_overflow")
    assert len(results) == 15
    for name, result in results.items():
        assert result["error"] == "", name
        assert result["faults"] == [], name
        assert result["again"] == [], f"{name}: an exception on the path after the first growth"
        for call in result["calls"]:
            address, nbytes = call["buffers"][0]
            if call["function"] != "workspace_size":
                assert nbytes >= 6 * MIB, (name, call)
                assert address != result["given"], (name, call)
        functions = {call["function"] for call in result["calls"]}
        assert "plan" in functions, name
        assert len(functions - {"workspace_size"}) == 2, f"{name} has not run: {functions}"
        if result["counted"]:  # 0.7.x tells what else it needs
            assert set(result["first"]) == {"batch_prefill_tmp_v"}, name
        elif result["first"]:
            assert result["first"][:2] == ["batch_prefill_tmp_v", "batch_prefill_tmp_s"], name
        else:
            assert (name, version) == ("mla", "0.7.4"), "only that is judged before it plans"


def test_integer_workspaces_grow_and_show_on_the_wrappers(plans: Run, version: str) -> None:
    for name, result in plans("integer_overflow").items():
        assert result["error"] == "", name
        assert result["faults"] == [], name
        if not (name == REPLANS_AFRESH and version.startswith("0.7")):
            assert result["again"] == [], name
        assert result["first"], name
        assert result["before"], name
        assert set(result["before"].values()) == {8 * MIB}, name
        assert result["after"].keys() == result["before"].keys(), name
        assert all(nbytes >= 11 * MIB for nbytes in result["after"].values()), name
        assert result["shown"], f"{name}: the attribute is not what the plan was written to"


def test_one_buffer_has_one_replacement_and_two_halves_have_two(plans: Run) -> None:
    result = plans("sharing")
    assert result["shared"]
    assert result["halves"] == 2
    assert result["faults"] == []


def test_a_plan_reaches_the_workspace_that_a_graph_has_captured(plans: Run) -> None:
    assert plans("graph_metadata") == {"moved": True, "mirrored": True, "faults": []}


def test_another_error_passes_through_untouched(plans: Run) -> None:
    result = plans("other_errors")
    assert result == {"same": True, "cause": "None", "raised_by": "plan", "plans": 1}


def test_the_switch_leaves_upstream_as_it_is(plans: Run) -> None:
    for name, result in plans("float_overflow", "FLASHINFER_ELASTIC_WORKSPACE", "0").items():
        assert "workspace" in result["error"], name
        assert len(result["first"]) == 1 or name == "mla", name


def test_the_cap_stops_growth_with_an_error_that_says_so(plans: Run) -> None:
    results = plans("float_overflow", "FLASHINFER_ELASTIC_WORKSPACE_MAX_MB", "2")
    for name, result in results.items():
        assert f"the cap is {2 * MIB} bytes" in result["error"], name


def test_the_launchers_are_described(version: str, launchers: dict[str, list[str]]) -> None:
    assert launchers.keys() == signatures.TRTLLM_GEN.keys()
    for name, names in launchers.items():
        layout = signatures.TRTLLM_GEN[name].get(len(names))
        assert layout is not None, f"{name} of {len(names)} arguments"
        described = {
            "workspace_buffer": layout.workspace,
            "workspace_size": layout.size,
            "query": layout.query,
            "max_q_len": layout.max_query,
            "batch_size": layout.batch,
            "sm_count": layout.multiprocessors,
            "multi_ctas_kv_counter_buffer": layout.counters,
            "lse": layout.lse,
        }
        actual = {name: names.index(name) if name in names else None for name in described}
        assert described == actual, name
        assert names[0] == "out"
        if version.startswith("0.7"):
            assert not layout.counter_slab
            assert not layout.tramples
        else:
            assert layout.counters is None


def test_every_call_has_room_for_all_that_it_writes(launches: Run) -> None:
    results = launches("sizes")
    assert len(results) >= 45
    for name, result in results.items():
        assert result["error"] == "", name
        assert result["faults"] == [], name
        assert result["overflows"] == [], f"{name}: sized only after it failed"
        assert len(result["used"]) == 1, name
        if "128 MiB" in name and "LSE" not in name and "prefill_wrapper" not in name:
            # Large enough: the caller's own.
            assert result["used"][0][0] == result["given"], name
        if "decode, LSE" in name or "context, LSE" in name:
            assert result["statistics"] == [REPORTED], name


def test_the_reported_sequence_works_with_128_mib(launches: Run) -> None:
    """One buffer of all layers; a small batch, then LSE with a large one, then anything."""
    steps = launches("one_buffer")
    for step in steps:
        assert step["error"] == ""
        assert step["faults"] == []
        assert step["overflows"] == []
    assert steps[0]["used"][0][0] == steps[0]["given"]
    assert steps[2]["statistics"] == [REPORTED]
    grown = steps[2]["used"][0]
    assert grown[0] != steps[2]["given"]
    assert steps[3]["used"][0] == grown, "the layers share one replacement"


def test_a_counter_buffer_that_is_too_small_grows(launches: Run, version: str) -> None:
    results = launches("counters")
    if not version.startswith("0.7"):
        assert results is None
        return
    for result in results:
        assert result["error"] == ""
        assert result["faults"] == []


def test_without_us_the_same_calls_fail_or_corrupt(launches: Run) -> None:
    """That the recorded launchers find the faults that the tests above say are not there."""
    results = launches("sizes", switch="0")
    assert "trtllm_gen_softmax_workspace" in results["decode, LSE, 128 MiB"]["error"]
    assert results["mla, 16 MiB"]["error"] == ""
    assert results["mla, 16 MiB"]["faults"] == ["scratch is written past the end of the workspace"]
